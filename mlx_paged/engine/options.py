"""Checks an engine's options and splits them for its cache, its scheduler and its disk tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple, TypedDict, cast

from mlx_paged.block_store import Fingerprint
from mlx_paged.config import (
    DEFAULT_KV,
    DEFAULT_MIXED_STEP_SECONDS,
    DEFAULT_NUM_DRAFT_TOKENS,
    DEFAULT_PREFILL_STEP_SECONDS,
    SchedulerConfig,
)
from mlx_paged.core.tier import Tier
from mlx_paged.engine.disk_tier_options import DiskTierOptions, check_engine
from mlx_paged.engine.request import TokenRules
from mlx_paged.engine.step_budget import (
    Budgets,
    ChosenBudgets,
    ClockedBudgets,
    TokenBudgets,
)
from mlx_paged.engine_options import ENGINE_OPTIONS, CacheOptions, EngineOptions
from mlx_paged.errors import ArgumentError
from mlx_paged.models.language_model import LanguageModel

_BUDGET_OPTIONS = ("prefill_step_seconds", "mixed_step_seconds", "token_budgets")


class RequestOptions(TypedDict, total=False):
    """The keyword arguments of :meth:`Engine.add_request`."""

    priority: int
    cache_salt: str | None
    no_store: bool
    user: str | None
    token_rules: TokenRules | None


def checked_options(part: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with checked and normalised values.

    Args:
        part: the part of the package, for the error.

    Raises:
        ArgumentError: a value is not in the domain of its declaration.
    """
    return {
        name: ENGINE_OPTIONS[name].domain.check(part, name, value)
        for name, value in options.items()
    }


class OwnOptions(NamedTuple):
    """Options that may differ between ranks.

    Attributes:
        make_budgets: makes the object that chooses the budgets of steps, from their limits.
    """

    seed: int | None
    run_ahead: bool | None
    wired_limit: str | int | None
    make_budgets: Callable[[TokenBudgets], Budgets]


def split_own_options(options: EngineOptions) -> tuple[OwnOptions, EngineOptions]:
    """The options of this rank, and those that must be equal on all ranks.

    Raises:
        ArgumentError: an option of this rank is out of its range, or conflicts with another one.
    """
    given: dict[str, Any] = {**options}
    wired_limit = given.pop("wired_limit", None)
    names = ("seed", "run_ahead", *_BUDGET_OPTIONS)
    own = checked_options("engine", {name: given.pop(name, None) for name in names})
    clocked = [name for name in _BUDGET_OPTIONS[:2] if own[name]]
    if clocked and own["token_budgets"] is not None:
        raise ArgumentError(
            f"[engine] token_budgets can't be combined with {clocked[0]}, which chooses budgets; "
            "leave one out",
            "token_budgets",
        )
    make_budgets = partial(_make_budgets, *(own[name] for name in _BUDGET_OPTIONS))
    return (
        OwnOptions(own["seed"], own["run_ahead"], wired_limit, make_budgets),
        cast(EngineOptions, given),
    )


def split_options(
    options: EngineOptions, max_model_len: int | None, has_draft_model: bool
) -> tuple[CacheOptions, SchedulerConfig]:
    """The options of the cache, except its kind, and those of the scheduler.

    A ``num_draft_tokens`` of ``None`` is ``DEFAULT_NUM_DRAFT_TOKENS`` with a draft model, and 0
    without one. Other numbers of tokens default to those of ``SchedulerConfig``.

    Raises:
        ArgumentError: an option of the scheduler is out of its range, or conflicts with another.
    """
    given: dict[str, Any] = {**options, "max_model_len": max_model_len}
    cache = {name: given[name] for name in CacheOptions.__annotations__ if name in given}
    if given.get("num_draft_tokens") is None:
        given["num_draft_tokens"] = DEFAULT_NUM_DRAFT_TOKENS if has_draft_model else 0
    for name in ("max_num_batched_tokens", "max_num_mixed_tokens"):
        if given.get(name) is None:
            given[name] = getattr(SchedulerConfig, name)
    names = [each.name for each in fields(SchedulerConfig) if each.name in given]
    scheduler = checked_options("scheduler", {name: given[name] for name in names})
    return cast(CacheOptions, cache), SchedulerConfig(**scheduler)


def with_step_seconds(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an engine that steps by itself: if neither the seconds nor the tokens of a
    step are given, the seconds are set to their defaults.
    """
    chosen = dict(options)
    if options.get("token_budgets") is None:
        tokens = options.get("max_num_batched_tokens")
        if options.get("prefill_step_seconds") is None and tokens is None:
            chosen["prefill_step_seconds"] = DEFAULT_PREFILL_STEP_SECONDS
        tokens = options.get("max_num_mixed_tokens")
        if options.get("mixed_step_seconds") is None and tokens is None:
            chosen["mixed_step_seconds"] = DEFAULT_MIXED_STEP_SECONDS
    return chosen


def _make_budgets(
    prefill_seconds: float | None,
    mixed_seconds: float | None,
    chosen: Sequence[tuple[int, int, int]] | None,
    limits: TokenBudgets,
) -> Budgets:
    if prefill_seconds or mixed_seconds:
        return ClockedBudgets(limits, prefill_seconds or 0, mixed_seconds or 0)
    return Budgets(limits, [ChosenBudgets(*each) for each in chosen or ()])


def tier_of(
    options: EngineOptions, config: SchedulerConfig, model: LanguageModel
) -> Callable[[Fingerprint], Tier] | None:
    """The factory of the tier of full blocks, if the options have one: :class:`DiskTierOptions`, or
    the caller's own.

    Raises:
        ArgumentError: an invalid value, or an engine that does not support a tier.
    """
    own = options.get("tier")
    if own is not None:
        checked_options("engine", {"tier": own})
    disk = DiskTierOptions.read(
        options.get("cache_dir"),
        options.get("cache_dir_size"),
        options.get("cache_dir_ttl"),
        options.get("cache_dir_writes"),
    )
    if own is not None and disk is not None:
        raise ArgumentError("[engine] tier replaces cache_dir; leave one out", "tier")
    made: Callable[[Fingerprint], Tier] | None = own or disk
    if made is not None:
        num_ranks = 1 if model.group is None else model.group.size()
        check_engine(
            "cache_dir" if own is None else "tier",
            options.get("kv", DEFAULT_KV),
            config,
            num_ranks,
        )
    return made
