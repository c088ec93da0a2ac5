"""A model run on a few tokens of no meaning, to find out something about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import mlx.core as mx

from mlx_paged.cache import AnySeqId, KVCacheConfig, LayerSpec, PagedKVCache, group_layers
from mlx_paged.config import KVBudget
from mlx_paged.models.language_model import LanguageModel

BLOCK_SIZE = 8


def probe_ids(vocab_size: int, count: int, first: int = 3) -> list[int]:
    """Token ids that hardly repeat."""
    return [(first + 7 * i + 13 * i * i) % vocab_size for i in range(count)]


def probe_cache(
    model: LanguageModel, num_tokens: int, layers: Sequence[LayerSpec] | None = None
) -> PagedKVCache:
    """A cache in plain MLX for ``num_tokens`` tokens of few sequences.

    Args:
        layers: of the model, which may store K/V in another format than its own.
    """
    layers = model.layer_specs if layers is None else layers
    groups = group_layers(layers, BLOCK_SIZE)
    budget = KVBudget(num_blocks=(num_tokens // BLOCK_SIZE + 4) * len(groups))
    config = KVCacheConfig.within(budget, layers, BLOCK_SIZE, groups)
    return PagedKVCache(replace(config, state_nbytes=model.state_nbytes), "reference")


def run_step(
    model: LanguageModel,
    cache: PagedKVCache,
    batch: Mapping[AnySeqId, Sequence[int]],
    num_logit_rows: Sequence[int],
) -> mx.array:
    """Logits of the last tokens of each sequence, ``[sum(num_logit_rows), vocab_size]``,
    evaluated.
    """
    tokens = [token for ids in batch.values() for token in ids]
    with cache.step({seq: len(ids) for seq, ids in batch.items()}, num_logit_rows) as step:
        logits = model(mx.array(tokens), cache.layers, step.logit_rows)
        mx.eval(logits, cache.arrays)
    return logits
