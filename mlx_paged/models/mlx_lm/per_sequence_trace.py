"""Which K/V a model of mlx-lm keeps of a sequence: read off the graph of one call, which is never
evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_paged.cache import KVFormat, LayerSpec
from mlx_paged.errors import UnsuitableModelError, one_line
from mlx_paged.models.mlx_lm.final_norm import prepare_final_norm
from mlx_paged.models.mlx_lm.module_calls import recorded_calls
from mlx_paged.models.mlx_lm.per_sequence_caches import CacheLayout, Rows

NUM_TOKENS = 16


@dataclass(frozen=True)
class Trace:
    """What one call of a model shows.

    Attributes:
        specs: one per K/V entry; ``None`` for an entry that the model does not write.
        vocab_size: the width of the logits.
        dtype: of the logits.
        keeps_wanted_rows: whether the model's last norm can drop rows.
    """

    specs: tuple[LayerSpec | None, ...]
    vocab_size: int
    dtype: mx.Dtype
    keeps_wanted_rows: bool


def trace(model: Module, layout: CacheLayout) -> Trace:
    """Build the graph of one call with ``NUM_TOKENS`` tokens.

    Raises:
        UnsuitableModelError: the model can't run on such caches.
    """
    with recorded_calls(model) as calls:
        written, logits = _call(model, layout)
    specs = []
    for entry, rows in zip(layout.entries, written, strict=True):
        if len(rows) > 1:
            raise UnsuitableModelError("it writes the K/V of a layer twice in one pass")
        specs.append(_spec(*rows[0], entry.window) if rows else None)
    if not any(specs):
        raise UnsuitableModelError("none of its layers writes K/V to a cache")
    is_prepared = prepare_final_norm(calls, lambda: _call(model, layout)[1], axis=1)
    return Trace(tuple(specs), logits.shape[-1], logits.dtype, is_prepared)


def _call(model: Module, layout: CacheLayout) -> tuple[list[list[Rows]], mx.array]:
    """The K and V that the model writes to each entry, and the logits."""
    written: list[list[Rows]] = [[] for _ in layout.entries]

    def record(rows: list[Rows], keys: mx.array, values: mx.array) -> Rows:
        rows.append((keys, values))
        return keys, values

    caches = layout.open([partial(record, rows) for rows in written], position=0)
    try:
        logits = model(mx.zeros((1, NUM_TOKENS), dtype=mx.int32), cache=caches)
    except Exception as error:
        # An unknown model may raise anything on a cache that is not its own.
        raise UnsuitableModelError(
            f"it can't run on rows in blocks ({type(error).__name__}: {one_line(error)})"
        ) from error
    if not isinstance(logits, mx.array) or logits.ndim != 3:
        raise UnsuitableModelError("it does not return one row of logits per token")
    return written, logits


def _spec(keys: mx.array, values: mx.array, window: int | None) -> LayerSpec:
    if keys.ndim != 4 or values.shape[:3] != keys.shape[:3]:
        raise UnsuitableModelError(
            f"a layer has K of shape {list(keys.shape)} and V of shape {list(values.shape)}"
        )
    # The dtype that both promote to, in case they differ.
    dtype = (mx.zeros(1, keys.dtype) + mx.zeros(1, values.dtype)).dtype
    # An indexer may keep K alone, with V of width 0; a slab needs rows of V nonetheless.
    value_dim = values.shape[3] or keys.shape[3]
    return LayerSpec(keys.shape[1], keys.shape[3], value_dim, window, KVFormat.dense(dtype))
