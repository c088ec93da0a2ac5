"""What a model that is split over ranks sends for each token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from mlx_paged.cache import Sequences
from mlx_paged.models.kv_cache import make_kv_cache
from mlx_paged.models.language_model import LanguageModel

_NUM_TOKENS = 4


def summed_bytes_per_token(model: LanguageModel) -> int:
    """Bytes of the vectors that the ranks add up for one token, in all layers: two of
    ``hidden_size`` numbers for each layer, as a rule.

    They are counted in the graph of a step, which is built and never evaluated.
    """
    cache = make_kv_cache(model, kv_cache_bytes="8blocks", backend="reference")
    with _noted_sums() as nbytes, Sequences(cache).step({"a": _NUM_TOKENS}):
        model(mx.zeros((_NUM_TOKENS,), dtype=mx.int32), cache.layers)
    return sum(nbytes) // _NUM_TOKENS


@contextmanager
def _noted_sums() -> Iterator[list[int]]:
    """The bytes of each array that layers would add up over the ranks."""
    nbytes: list[int] = []

    def note(x: mx.array, *_: Any, **__: Any) -> mx.array:
        nbytes.append(x.nbytes)
        return x

    # Layers look it up when they are called. No other thread runs a model that is split.
    all_sum, mx.distributed.all_sum = mx.distributed.all_sum, note
    try:
        yield nbytes
    finally:
        mx.distributed.all_sum = all_sum


def sent_bytes_per_token(model: LanguageModel) -> int:
    """Bytes of activations that each rank sends for one token, in all layers; 0 where the model is
    whole.

    A ring passes ``2 (n - 1) / n`` of a vector on from each of its n ranks: parts of it are added
    up on the way round, and then the sums go round.
    """
    if model.group is None:
        return 0
    num_ranks = model.group.size()
    return summed_bytes_per_token(model) * 2 * (num_ranks - 1) // num_ranks
