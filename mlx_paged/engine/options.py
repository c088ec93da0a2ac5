"""The keyword arguments of :class:`Engine` by name and type, for functions that pass them on."""

from __future__ import annotations

from typing import TypedDict


class SchedulerOptions(TypedDict, total=False):
    """Fields of :class:`SchedulerConfig` that a user may set."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_mixed_tokens: int
    enable_prefix_caching: bool
    watermark: float
    priority_steps: int


class EngineOptions(SchedulerOptions, total=False):
    """The keyword arguments of :class:`Engine`."""

    kv: str
    block_size: int
    kv_cache_bytes: str | int | None
    backend: str
    swap_bytes: str | int | None
    seed: int | None
    max_model_len: int | None
    run_ahead: bool | None
    num_draft_tokens: int


class RequestOptions(TypedDict, total=False):
    """The keyword arguments of :meth:`Engine.add_request`."""

    priority: int
    cache_salt: str | None
