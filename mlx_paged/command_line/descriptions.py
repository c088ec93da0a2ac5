"""Short descriptions of an engine and its cache, which programs print when they start."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_paged.block_store import BlockStore
from mlx_paged.memory import format_nbytes, memory_size, recommended_memory
from mlx_paged.models.kv_cache import num_tokens_held, weight_nbytes
from mlx_paged.models.mlx_lm import check_model

if TYPE_CHECKING:
    from mlx_paged.cache import KVCache
    from mlx_paged.engine.engine import Engine


def describe_engine(model: str | None, engine: Engine) -> list[str]:
    """The parts of a program's first line: model, device, K/V budget, other memory, tier on disk if
    there is one, and context limit.
    """
    return [
        describe_model(model, engine),
        f"{describe_device()}, {describe_backend(engine.cache)}",
        describe_budget(engine.cache),
        describe_memory(engine),
        *describe_disk_tier(engine),
        f"context: {describe_context(engine)}",
    ]


def describe_device() -> str:
    if mx.metal.is_available():
        return "Metal"
    return "GPU" if mx.default_device().type == mx.gpu else "CPU"


def describe_backend(cache: KVCache) -> str:
    return "MLX SDPA" if cache.backend is None else cache.backend.name


def describe_model(name: str | None, engine: Engine) -> str:
    """The model's name, and which implementation runs it."""
    description = check_model(engine.model).description
    return f"{name or 'bundled demo model'} ({description})"


def describe_budget_in_full(cache: KVCache) -> str:
    config = cache.config
    grows = "; grows into it" if cache.nbytes_held < config.nbytes else ""
    return (
        f"{config.num_blocks:,} blocks of {config.block_size} tokens = {config.num_slots:,} tokens "
        f"= {config.nbytes / 1e9:.2f} GB ({describe_token_size(cache)}){grows}"
    )


def describe_token_size(cache: KVCache) -> str:
    formats = dict.fromkeys(str(layer.format) for layer in cache.config.layers)
    return f"{cache.config.nbytes_per_token:,} bytes a token in {' or '.join(formats)}"


def describe_budget(cache: KVCache) -> str:
    config = cache.config
    kind = "K/V" if cache.kind == "paged" else f"{cache.kind} K/V"
    token = "" if config.layers[0].format.is_as_computed else f", {describe_token_size(cache)}"
    return f"{format_nbytes(config.nbytes)} for {kind}, {in_words(config.num_slots)} tokens{token}"


def in_words(number: int) -> str:
    """A number of tokens: ``"4,096"``, ``"6 million"``, ``"1.2 billion"``."""
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:,.1f}".removesuffix(".0") + f" {word}"
    return f"{number:,}"


def describe_memory(engine: Engine) -> str:
    """The memory that the engine needs in addition to K/V, and the memory that there is."""
    recommended = recommended_memory()
    limit = format_nbytes(recommended or memory_size())
    return (
        f"memory: weights {format_nbytes(weight_nbytes(engine.model))}, activations some "
        f"{format_nbytes(engine.nbytes_activations)} at most (estimated), of {limit}"
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
    held = known if stats.num_blocks else "up to"
    ttl = "" if store.ttl is None else f", unused blocks for {describe_duration(store.ttl)}"
    limit, a_day = format_nbytes(store.max_nbytes), store.max_nbytes_a_day
    writes = "" if a_day is None else f", {format_nbytes(a_day)} written a day"
    return [f"disk: {held} {limit}{ttl}{writes}, in {store.folder}"]


def describe_disk_tier_briefly(engine: Engine) -> list[str]:
    """What is known of the tier on disk, in two words or three; empty if there is none that
    works.
    """
    tier = engine.disk_tier
    if tier is None or tier.stats().failure is not None:
        return []
    number = tier.stats().num_blocks
    return [f"{number:,} blocks on disk" if number else "disk cache"]


def describe_duration(seconds: float) -> str:
    """A duration in the largest unit that divides it."""
    for unit, length in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:g} seconds"


def describe_context_briefly(engine: Engine) -> str:
    limit = engine.max_model_len
    num_held = num_tokens_held(engine.cache, engine.manager)
    if num_held >= (sys.maxsize if limit is None else limit):
        return "context without end" if limit is None else f"context: {limit:,} tokens"
    return f"context: {num_held:,}{'' if limit is None else f' of {limit:,}'} tokens"


def describe_context(engine: Engine) -> str:
    limit, retention = engine.max_model_len, engine.cache.config.groups[0].retention
    num_held = num_tokens_held(engine.cache, engine.manager)
    if num_held < (sys.maxsize if limit is None else limit):
        of_limit = "" if limit is None else f" of {limit:,}"
        length = f"{num_held:,}{of_limit} tokens, as many as the K/V budget holds"
    else:
        length = "without end" if limit is None else f"{limit:,} tokens"
    if not retention.cuts_runs:
        return length
    return (
        f"{length}; the first {retention.num_sink_tokens:,} and the last "
        f"{retention.num_recent_tokens:,} are seen"
    )
