"""An engine, its cache and its statistics in words, for the programs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_paged.block_store import BlockStore
from mlx_paged.models.kv_cache import num_tokens_held, weight_nbytes
from mlx_paged.models.memory import format_nbytes, memory_size, recommended_memory
from mlx_paged.models.mlx_lm import check_model

if TYPE_CHECKING:
    from mlx_paged.cache import KVCache
    from mlx_paged.engine.engine import Engine
    from mlx_paged.request import SpecDecodingStats


def describe_engine(model: str | None, engine: Engine) -> list[str]:
    """The parts of a program's first line: model, device, K/V budget, other memory, matmul if it is
    not MLX's, tier on disk if there is one, and context limit.
    """
    cache = engine.cache
    config, kind = cache.config, "K/V" if cache.kind == "paged" else f"{cache.kind} K/V"
    is_as_computed = config.layers[0].format.is_as_computed
    token = "" if is_as_computed else f", {describe_token_size(cache)}"
    return [
        describe_model(model, engine),
        f"{describe_device()}, {describe_backend(cache)}",
        f"{format_nbytes(config.nbytes)} for {kind}, {in_words(config.num_slots)} tokens{token}",
        describe_memory(engine),
        *(["deterministic"] if engine.scheduler.config.deterministic else []),
        *([describe_matmul(engine)] if engine.runner.matmul.is_used else []),
        *describe_disk_tier(engine),
        f"context: {describe_context(engine)}",
    ]


def describe_model(name: str | None, engine: Engine) -> str:
    """The model's name, and which implementation runs it."""
    return f"{name or 'bundled demo model'} ({check_model(engine.model).description})"


def describe_device() -> str:
    if mx.metal.is_available():
        return "Metal"
    return "GPU" if mx.default_device().type == mx.gpu else "CPU"


def describe_backend(cache: KVCache) -> str:
    return "MLX SDPA" if cache.backend is None else cache.backend.name


def describe_token_size(cache: KVCache) -> str:
    formats = dict.fromkeys(str(layer.format) for layer in cache.config.layers)
    return f"{cache.config.nbytes_per_token:,} bytes a token in {' or '.join(formats)}"


def in_words(number: int) -> str:
    """A number of tokens: ``"4,096"``, ``"6 million"``, ``"1.2 billion"``."""
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:,.1f}".removesuffix(".0") + f" {word}"
    return f"{number:,}"


def describe_matmul(engine: Engine) -> str:
    """Which matmul linear layers run, for how many rows."""
    return str(engine.runner.matmul.stats())


def describe_memory(engine: Engine) -> str:
    """The memory that the engine needs in addition to K/V, and the memory that there is."""
    recommended = recommended_memory()
    limit = format_nbytes(recommended or memory_size())
    activations = f"activations some {format_nbytes(engine.nbytes_activations)} at most (estimated)"
    nbytes = engine.adapters.nbytes
    adapters = f"up to {format_nbytes(nbytes)} of adapters, " if nbytes else ""
    return (
        f"memory: weights {format_nbytes(weight_nbytes(engine.model))}, {adapters}"
        f"{activations}, of {limit}"
        f"{' that Metal recommends' * bool(recommended)}"
    )


def describe_disk_tier(engine: Engine) -> list[str]:
    """The size, limit and folder of the tier on disk; empty if there is none."""
    tier = engine.disk_tier
    if tier is None or not isinstance(tier.store, BlockStore):
        return []
    stats, store = tier.stats(), tier.store
    if stats.failure is not None:
        return [f"disk: off, {stats.failure}"]
    # A folder is listed while the first requests run; until then its blocks are not counted.
    known = f"{stats.num_blocks:,} blocks, {format_nbytes(stats.nbytes)} of"
    held, a_day = known if stats.num_blocks else "up to", store.max_nbytes_a_day
    ttl = "" if store.ttl is None else f", unused blocks for {_duration(store.ttl)}"
    writes = "" if a_day is None else f", {format_nbytes(a_day)} written a day"
    return [f"disk: {held} {format_nbytes(store.max_nbytes)}{ttl}{writes}, in {store.folder}"]


def _duration(seconds: float) -> str:
    """A duration in the largest unit that divides it."""
    for unit, length in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:g} seconds"


def describe_context(engine: Engine) -> str:
    """The tokens that a prompt and its answer may have, and which of them are seen."""
    length, is_budget = context_length(engine)
    retention = engine.cache.config.groups[0].retention
    if is_budget:
        length += ", as many as the K/V budget holds"
    if not retention.cuts_runs:
        return length
    return (
        f"{length}; the first {retention.num_sink_tokens:,} and the last "
        f"{retention.num_recent_tokens:,} are seen"
    )


def context_length(engine: Engine) -> tuple[str, bool]:
    """The tokens that a prompt and its answer may have, in words, and whether the K/V budget limits
    them.
    """
    limit, num_held = engine.max_model_len, num_tokens_held(engine.cache, engine.manager)
    if num_held < (sys.maxsize if limit is None else limit):
        return f"{num_held:,}{'' if limit is None else f' of {limit:,}'} tokens", True
    return "without end" if limit is None else f"{limit:,} tokens", False


def describe_stats(engine: Engine) -> list[str]:
    """Lines about the blocks, the hits of the prefix cache and of the tier on disk, and drafts; the
    last one is about memory.
    """
    stats, config = engine.stats(), engine.cache.config
    lines = [
        f"blocks: {stats.num_cached_blocks:,} of {config.num_blocks:,} hold K/V "
        f"({stats.num_cached_blocks / config.num_blocks:.1%}), {config.block_size} tokens "
        f"each, {stats.num_evictions} evicted so far",
        f"prefix cache: {stats.num_hit_tokens:,} of {stats.num_queried_tokens:,} prompt tokens "
        f"found ({stats.hit_rate:.1%})",
    ]
    if (tier := stats.disk_tier) is not None:
        num_hits = stats.num_cached_prompt_tokens - stats.num_read_prompt_tokens  # in memory
        lines += [
            *describe_disk_tier(engine),
            f"disk cache: {stats.num_read_prompt_tokens} of {stats.num_prompt_tokens - num_hits} "
            f"prompt tokens found that were not in memory; blocks: {tier.num_written_blocks} "
            f"written, {tier.num_dropped_blocks} dropped, {tier.num_corrupt_blocks} corrupt, "
            f"{tier.num_evicted_blocks} evicted; {format_nbytes(tier.nbytes_written)} written",
        ]
    if (drafts := stats.spec_decoding).num_drafts:
        lines.append(
            f"drafts: {describe_drafts(drafts)}; {drafts.mean_acceptance_length:.1f} tokens per "
            "step with drafts"
        )
    held, budget = format_nbytes(stats.nbytes_held), format_nbytes(stats.nbytes_budget)
    return [*lines, f"K/V memory: {held} allocated, budget {budget}"]


def describe_drafts(drafts: SpecDecodingStats) -> str:
    return (
        f"{drafts.num_accepted_tokens:,} of {drafts.num_draft_tokens:,} accepted "
        f"({drafts.acceptance_rate:.1%}), by position {acceptance_by_position(drafts)}"
    )


def acceptance_by_position(drafts: SpecDecodingStats) -> str:
    return ", ".join(f"{rate:.0%}" for rate in drafts.acceptance_rate_per_pos)
