"""Checks an engine's options and splits them for its cache, its scheduler and its disk tier."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, cast

from mlx_paged.block_store import BlockStore, Fingerprint
from mlx_paged.block_store.layout import folder_path
from mlx_paged.core.tier import Tier
from mlx_paged.engine.request import TokenRules
from mlx_paged.engine.scheduling.step_budget import (
    Budgets,
    ChosenBudgets,
    ClockedBudgets,
    TokenBudgets,
)
from mlx_paged.errors import ArgumentError, shown
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.options.config import (
    CHUNK_TOKENS,
    DEFAULT_CACHE_DIR_SIZE,
    DEFAULT_KV,
    DEFAULT_MIXED_STEP_SECONDS,
    DEFAULT_NUM_DRAFT_TOKENS,
    DEFAULT_PREFILL_STEP_SECONDS,
    MAX_STEP_ROWS,
    SchedulerConfig,
)
from mlx_paged.options.engine_options import ENGINE_OPTIONS, CacheOptions, EngineOptions

_STEP_SIZES = ("max_num_batched_tokens", "max_num_mixed_tokens")
_BUDGET_OPTIONS = ("prefill_step_seconds", "mixed_step_seconds", "token_budgets")
_ADAPTER_OPTIONS = ("adapters", "max_adapters", "max_adapter_rank")


class RequestOptions(TypedDict, total=False):
    """The keyword arguments of :meth:`Engine.add_request`."""

    priority: int
    cache_salt: str | None
    no_store: bool
    user: str | None
    adapter: str | None
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
        run_ahead: whether a step is launched before the previous one is read; ``None`` means if the
            cache supports it.
        make_budgets: makes the object that chooses the budgets of steps, from their limits.
    """

    seed: int | None
    run_ahead: bool | None
    wired_limit: str | int | None
    make_budgets: Callable[[TokenBudgets], Budgets]
    adapters: Mapping[str, str | Path]
    max_adapters: int | None
    max_adapter_rank: int | None


def split_own_options(options: EngineOptions) -> tuple[OwnOptions, EngineOptions]:
    """The options of this rank, and those that must be equal on all ranks.

    Raises:
        ArgumentError: an option of this rank is out of its range, or conflicts with another one.
    """
    check_deterministic(options)
    given: dict[str, Any] = {**options}
    wired_limit = given.pop("wired_limit", None)
    names = ("seed", "run_ahead", *_BUDGET_OPTIONS, *_ADAPTER_OPTIONS)
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
        OwnOptions(
            own["seed"],
            own["run_ahead"],
            wired_limit,
            make_budgets,
            *(own[name] for name in _ADAPTER_OPTIONS),
        ),
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
    if given.get("deterministic"):
        # Steps have these sizes, whatever runs.
        given["max_num_batched_tokens"], given["max_num_mixed_tokens"] = CHUNK_TOKENS, MAX_STEP_ROWS
    cache = {name: given[name] for name in CacheOptions.__annotations__ if name in given}
    if given.get("num_draft_tokens") is None:
        given["num_draft_tokens"] = DEFAULT_NUM_DRAFT_TOKENS if has_draft_model else 0
    for name in _STEP_SIZES:
        if given.get(name) is None:
            given[name] = getattr(SchedulerConfig, name)
    names = [each.name for each in fields(SchedulerConfig) if each.name in given]
    scheduler = checked_options("scheduler", {name: given[name] for name in names})
    return cast(CacheOptions, cache), SchedulerConfig(**scheduler)


def check_deterministic(options: EngineOptions) -> None:
    """Refuse options that a deterministic engine can't have.

    Raises:
        ArgumentError: an option conflicts with ``deterministic``; the message says why.
    """
    given: dict[str, Any] = {**options}
    deterministic = given.get("deterministic", False)
    if not ENGINE_OPTIONS["deterministic"].domain.check("engine", "deterministic", deterministic):
        return
    steps = (
        f"its steps are chunks of {CHUNK_TOKENS} tokens of a prompt, and up to {MAX_STEP_ROWS} rows"
    )
    reasons = dict.fromkeys((*_STEP_SIZES, *_BUDGET_OPTIONS), f"{steps}; leave it out")
    for name, reason in reasons.items():
        if given.get(name) is not None:
            raise _conflict(name, reason)
    if given.get("kv") == "basic":
        reason = "the order of its sums depends on the length of a step; use kv='paged'"
        raise _conflict("kv", reason)
    if given.get("matmul") == "mlx":
        reason = "MLX adds in other orders for other numbers of rows; leave it out"
        raise _conflict("matmul", reason)
    if given.get("max_num_seqs", 1) > MAX_STEP_ROWS:
        raise _conflict("max_num_seqs", f"{steps}; leave it out, or at most {MAX_STEP_ROWS}")


def _conflict(name: str, reason: str) -> ArgumentError:
    return ArgumentError(f"[engine] {name} can't be combined with deterministic: {reason}", name)


def with_step_seconds(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an engine that steps by itself: if neither the seconds nor the tokens of a
    step are given, the seconds are set to their defaults.
    """
    chosen = dict(options)
    if options.get("token_budgets") is None and not options.get("deterministic"):
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


@dataclass(frozen=True)
class DiskTierOptions:
    """Where full blocks of K/V are stored on disk.

    Args:
        folder: absolute path; made if it does not exist.
        max_nbytes: the most bytes that its blocks take, including those of other models and engines
            that use the folder.
        ttl: seconds after which an unused block is removed; ``None`` for never.
        max_nbytes_a_day: the most bytes that are written in 24 hours; ``None`` for no limit.
    """

    folder: Path
    max_nbytes: int
    ttl: float | None = None
    max_nbytes_a_day: int | None = None

    @classmethod
    def read(
        cls,
        cache_dir: str | os.PathLike[str] | None,
        cache_dir_size: str | int | None = None,
        cache_dir_ttl: str | float | None = None,
        cache_dir_writes: str | int | None = None,
    ) -> DiskTierOptions | None:
        """The options as users give them to an engine; ``None`` without a folder.

        Args:
            cache_dir: a leading ``~`` is the user's home.
            cache_dir_size: bytes, in the notation of budgets; ``None`` is
                ``DEFAULT_CACHE_DIR_SIZE``.
            cache_dir_ttl: a duration, such as ``"7d"``, or seconds.
            cache_dir_writes: bytes per day, such as ``"50G/day"``.

        Raises:
            ArgumentError: an invalid value, or a limit without a folder.
        """
        limits: dict[str, str | float | None] = {
            "cache_dir_size": cache_dir_size,
            "cache_dir_ttl": cache_dir_ttl,
            "cache_dir_writes": cache_dir_writes,
        }
        given = {name: value for name, value in limits.items() if value is not None}
        if cache_dir is None:
            for name, value in given.items():
                raise ArgumentError(
                    f"[engine] {name} {shown(value)} is of no use without cache_dir, the folder in "
                    "which K/V are kept on disk",
                    name,
                )
            return None
        folder = folder_path(cache_dir)
        checked = checked_options("engine", {"cache_dir_size": DEFAULT_CACHE_DIR_SIZE, **given})
        return cls(
            folder,
            checked["cache_dir_size"],
            checked.get("cache_dir_ttl"),
            checked.get("cache_dir_writes"),
        )

    def __call__(self, fingerprint: Fingerprint) -> BlockStore:
        """Open the store of a fingerprint's blocks.

        Raises:
            BlockStoreError: the folder can't be used.
        """
        return BlockStore(
            self.folder, self.max_nbytes, fingerprint, self.ttl, self.max_nbytes_a_day
        )

    def check_holds(self, what: str, nbytes: int) -> None:
        """Check that one block or state fits within the limits.

        Raises:
            ArgumentError: it does not.
        """
        for name, limit in (
            ("cache_dir_size", self.max_nbytes),
            ("cache_dir_writes", self.max_nbytes_a_day),
        ):
            if limit is not None and nbytes > limit:
                a_day = " a day" if name == "cache_dir_writes" else ""
                raise ArgumentError(
                    f"[engine] {name} of {limit} bytes{a_day} is too small: a {what} takes "
                    f"{nbytes}",
                    name,
                )


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


def check_engine(name: str, kv: str, config: SchedulerConfig, num_ranks: int) -> None:
    """Check that an engine finds its K/V by the hashes of blocks, which a tier requires.

    Args:
        name: the option that requests a tier.

    Raises:
        ArgumentError: the cache is contiguous, there is no prefix cache, or the model is split over
            ranks.
    """
    why = None
    if kv != "paged":
        why = f"needs blocks, which kv={shown(kv)} does not have; use kv='paged'"
    elif not config.enable_prefix_caching:
        why = "needs the prefix cache, and enable_prefix_caching is False"
    elif num_ranks > 1:
        why = (
            f"can't be combined with {num_ranks} ranks, each of which has a part of the K/V; leave "
            "it out"
        )
    if why is not None:
        raise ArgumentError(f"[engine] {name} {why}", name)
