"""The keyword arguments of :class:`Engine` by name and type, for functions that pass them on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict, cast

from mlx.nn.layers.base import Module

from mlx_paged.config import DEFAULT_KV, DEFAULT_NUM_DRAFT_TOKENS, SchedulerConfig
from mlx_paged.engine.disk_tier_options import DiskTierOptions
from mlx_paged.foreign_arguments import argument_names
from mlx_paged.models.language_model import LanguageModel, model_type_of
from mlx_paged.request import TokenRules


class SchedulerOptions(TypedDict, total=False):
    """Fields of :class:`SchedulerConfig` that a user may set."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_mixed_tokens: int
    enable_prefix_caching: bool
    watermark: float
    priority_steps: int
    num_history_tokens: int
    num_draft_tokens: int | None


class LoadedCacheOptions(TypedDict, total=False):
    """The keyword arguments of :func:`make_kv_cache` that are no models."""

    block_size: int
    kv_cache_bytes: str | int | None
    kv_format: str | int | None
    backend: str
    window: int | None
    num_sink_tokens: int | None


class CacheOptions(LoadedCacheOptions, total=False):
    """The keyword arguments of :func:`make_kv_cache`."""

    draft_model: Module | None


class CacheDirOptions(TypedDict, total=False):
    """The arguments of :meth:`DiskTierOptions.read`."""

    cache_dir: str | Path | None
    cache_dir_size: str | int | None
    cache_dir_ttl: str | float | None


class PassedOnOptions(CacheOptions, SchedulerOptions, CacheDirOptions, total=False):
    """What :class:`Engine` hands on to its cache, its scheduler and its tier on disk."""

    kv: str  # the kind of the cache


class LoadedEngineOptions(LoadedCacheOptions, SchedulerOptions, CacheDirOptions, total=False):
    """The keyword arguments of :class:`Engine` that are no models."""

    kv: str
    swap_bytes: str | int | None
    seed: int | None
    max_model_len: int | None
    run_ahead: bool | None
    wired_limit: str | int | None


class EngineOptions(LoadedEngineOptions, total=False):
    """The keyword arguments of :class:`Engine`."""

    draft_model: Module | None


class RequestOptions(TypedDict, total=False):
    """The keyword arguments of :meth:`Engine.add_request`."""

    priority: int
    cache_salt: str | None
    no_store: bool
    token_rules: TokenRules | None


def passed_on_names() -> frozenset[str]:
    """The names of what :class:`Engine` hands on."""
    return frozenset(PassedOnOptions.__annotations__) | argument_names(SchedulerConfig)


def split_options(
    options: PassedOnOptions, max_model_len: int | None
) -> tuple[CacheOptions, SchedulerConfig]:
    """Those of the cache, but for its kind, and those of the scheduler.

    A ``num_draft_tokens`` of ``None`` is ``DEFAULT_NUM_DRAFT_TOKENS`` with a draft model, and 0
    without one.
    """
    cache, scheduler = (
        {name: value for name, value in options.items() if name in kind.__annotations__}
        for kind in (CacheOptions, SchedulerOptions)
    )
    if scheduler.get("num_draft_tokens") is None:
        has_model = options.get("draft_model") is not None
        scheduler["num_draft_tokens"] = DEFAULT_NUM_DRAFT_TOKENS if has_model else 0
    config = SchedulerConfig(max_model_len=max_model_len, **cast(Any, scheduler))
    return cast(CacheOptions, cache), config


def disk_tier_options(
    options: PassedOnOptions, config: SchedulerConfig, model: LanguageModel
) -> DiskTierOptions | None:
    """The options of the tier on disk, if there is to be one.

    Raises:
        ArgumentError: a value that can't be, or an engine that can't have such a tier.
    """
    given = {name: options.get(name) for name in CacheDirOptions.__annotations__}
    tier = DiskTierOptions.read(**cast(Any, given))
    if tier is not None:
        num_ranks = 1 if model.group is None else model.group.size()
        tier.check_engine(options.get("kv", DEFAULT_KV), config, num_ranks)
        tier.check_state(model.state_nbytes, model_type_of(model))
    return tier
