"""How an engine checks its options and hands them on: to its cache, its scheduler and its tier on
disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypedDict, cast

from mlx_paged.block_store import Fingerprint
from mlx_paged.config import DEFAULT_KV, DEFAULT_NUM_DRAFT_TOKENS, SchedulerConfig
from mlx_paged.core.tier import Tier
from mlx_paged.engine.disk_tier_options import DiskTierOptions, check_engine
from mlx_paged.engine_options import ENGINE_OPTIONS, CacheOptions, EngineOptions
from mlx_paged.errors import ArgumentError
from mlx_paged.models.language_model import LanguageModel, model_type_of
from mlx_paged.request import TokenRules


class RequestOptions(TypedDict, total=False):
    """The keyword arguments of :meth:`Engine.add_request`."""

    priority: int
    cache_salt: str | None
    no_store: bool
    token_rules: TokenRules | None


def passed_on_names() -> frozenset[str]:
    """The names of an engine's options."""
    return frozenset(ENGINE_OPTIONS)


def checked_options(part: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as they are used.

    Args:
        part: of the package, for the error.

    Raises:
        ArgumentError: a value that is not what the declaration says.
    """
    return {
        name: ENGINE_OPTIONS[name].domain.check(part, name, value)
        for name, value in options.items()
    }


def split_options(
    options: EngineOptions, max_model_len: int | None, has_draft_model: bool
) -> tuple[CacheOptions, SchedulerConfig]:
    """Those of the cache, but for its kind, and those of the scheduler.

    A ``num_draft_tokens`` of ``None`` is ``DEFAULT_NUM_DRAFT_TOKENS`` with a draft model, and 0
    without one.

    Raises:
        ArgumentError: one of the scheduler is out of its range, or they don't go together.
    """
    given: dict[str, Any] = {**options, "max_model_len": max_model_len}
    cache = {name: given[name] for name in CacheOptions.__annotations__ if name in given}
    if given.get("num_draft_tokens") is None:
        given["num_draft_tokens"] = DEFAULT_NUM_DRAFT_TOKENS if has_draft_model else 0
    names = [each.name for each in fields(SchedulerConfig) if each.name in given]
    scheduler = checked_options("scheduler", {name: given[name] for name in names})
    return cast(CacheOptions, cache), SchedulerConfig(**scheduler)


def tier_of(
    options: EngineOptions, config: SchedulerConfig, model: LanguageModel
) -> Callable[[Fingerprint], Tier] | None:
    """What makes the tier of full blocks, if there is to be one: :class:`DiskTierOptions`, or what
    the caller gave.

    Raises:
        ArgumentError: a value that can't be, or an engine that can't have such a tier.
    """
    own = options.get("tier")
    if own is not None:
        checked_options("engine", {"tier": own})
    disk = DiskTierOptions.read(
        options.get("cache_dir"), options.get("cache_dir_size"), options.get("cache_dir_ttl")
    )
    if own is not None and disk is not None:
        raise ArgumentError("[engine] tier takes the place of cache_dir; leave one out", "tier")
    made: Callable[[Fingerprint], Tier] | None = own or disk
    if made is not None:
        num_ranks = 1 if model.group is None else model.group.size()
        check_engine(
            "cache_dir" if own is None else "tier",
            options.get("kv", DEFAULT_KV),
            config,
            num_ranks,
            model_type_of(model) if model.state_nbytes else None,
        )
    return made
