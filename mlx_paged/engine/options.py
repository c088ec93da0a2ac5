"""How an engine hands on its options: to its cache, its scheduler and its tier on disk."""

from __future__ import annotations

from typing import Any, TypedDict, cast

from mlx_paged.config import DEFAULT_KV, DEFAULT_NUM_DRAFT_TOKENS, SchedulerConfig
from mlx_paged.engine.disk_tier_options import DiskTierOptions
from mlx_paged.engine_options import (
    ENGINE_OPTIONS,
    CacheDirOptions,
    CacheOptions,
    EngineOptions,
    LoadedEngineOptions,
)
from mlx_paged.foreign_arguments import argument_names
from mlx_paged.models.language_model import LanguageModel, model_type_of
from mlx_paged.request import TokenRules

__all__ = [
    "CacheOptions",
    "EngineOptions",
    "LoadedEngineOptions",
    "RequestOptions",
    "disk_tier_options",
    "passed_on_names",
    "split_options",
]


class RequestOptions(TypedDict, total=False):
    """The keyword arguments of :meth:`Engine.add_request`."""

    priority: int
    cache_salt: str | None
    no_store: bool
    token_rules: TokenRules | None


def passed_on_names() -> frozenset[str]:
    """The names of an engine's options."""
    return frozenset(ENGINE_OPTIONS)


def split_options(
    options: EngineOptions, max_model_len: int | None
) -> tuple[CacheOptions, SchedulerConfig]:
    """Those of the cache, but for its kind, and those of the scheduler.

    A ``num_draft_tokens`` of ``None`` is ``DEFAULT_NUM_DRAFT_TOKENS`` with a draft model, and 0
    without one.
    """
    scheduler_names = argument_names(SchedulerConfig) - {"max_model_len"}
    cache, scheduler = (
        {name: value for name, value in options.items() if name in names}
        for names in (CacheOptions.__annotations__, scheduler_names)
    )
    if scheduler.get("num_draft_tokens") is None:
        has_model = options.get("draft_model") is not None
        scheduler["num_draft_tokens"] = DEFAULT_NUM_DRAFT_TOKENS if has_model else 0
    config = SchedulerConfig(max_model_len=max_model_len, **cast(Any, scheduler))
    return cast(CacheOptions, cache), config


def disk_tier_options(
    options: EngineOptions, config: SchedulerConfig, model: LanguageModel
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
