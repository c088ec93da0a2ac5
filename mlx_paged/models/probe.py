"""What a model is run on to find out something about it: a few tokens of no meaning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlx_paged.cache import KVCacheConfig, LayerSpec, PagedKVCache, Sequences, group_layers
from mlx_paged.config import KVBudget
from mlx_paged.models.language_model import LanguageModel

BLOCK_SIZE = 8


def probe_ids(vocab_size: int, count: int, first: int = 3) -> list[int]:
    """Token ids that hardly repeat."""
    return [(first + 7 * i + 13 * i * i) % vocab_size for i in range(count)]


def probe_sequences(
    model: LanguageModel, num_tokens: int, layers: Sequence[LayerSpec] | None = None
) -> Sequences:
    """Few sequences of ``num_tokens`` tokens together, on a cache in plain MLX.

    Args:
        layers: of the model, which may store K/V in another format than its own.
    """
    layers = model.layer_specs if layers is None else layers
    groups = group_layers(layers, BLOCK_SIZE)
    budget = KVBudget(num_blocks=(num_tokens // BLOCK_SIZE + 4) * len(groups))
    config = KVCacheConfig.within(budget, layers, BLOCK_SIZE, groups)
    config = replace(config, state_nbytes=model.state_nbytes)
    return Sequences(PagedKVCache(config, "reference"))
