"""The keyword arguments of :class:`Engine` by name and type, for functions that pass them on."""

from __future__ import annotations

from typing import TypedDict, cast


class SchedulerOptions(TypedDict, total=False):
    """Fields of :class:`SchedulerConfig` that a user may set."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_mixed_tokens: int
    enable_prefix_caching: bool
    watermark: float
    priority_steps: int


class CacheOptions(TypedDict, total=False):
    """The keyword arguments of :func:`make_kv_cache`."""

    block_size: int
    kv_cache_bytes: str | int | None
    kv_format: str | int | None
    backend: str
    window: int | None
    num_sink_tokens: int | None


class PassedOnOptions(CacheOptions, SchedulerOptions, total=False):
    """What :class:`Engine` hands on to its cache and its scheduler."""

    kv: str  # the kind of the cache


class EngineOptions(PassedOnOptions, total=False):
    """The keyword arguments of :class:`Engine`."""

    swap_bytes: str | int | None
    seed: int | None
    max_model_len: int | None
    run_ahead: bool | None


class RequestOptions(TypedDict, total=False):
    """The keyword arguments of :meth:`Engine.add_request`."""

    priority: int
    cache_salt: str | None


def split_options(options: PassedOnOptions) -> tuple[CacheOptions, SchedulerOptions]:
    """Those of the cache, but for its kind, and those of the scheduler."""
    cache, scheduler = (
        {name: value for name, value in options.items() if name in kind.__annotations__}
        for kind in (CacheOptions, SchedulerOptions)
    )
    return cast(CacheOptions, cache), cast(SchedulerOptions, scheduler)
