"""What a model of mlx-lm keeps of a sequence, found out without computing anything."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_paged.cache import KVFormat, LayerSpec
from mlx_paged.errors import UnsuitableModelError, one_line
from mlx_paged.models.mlx_lm.final_norm import leaves_rows_out
from mlx_paged.models.mlx_lm.module_calls import noted_calls
from mlx_paged.models.mlx_lm.per_sequence_caches import CacheLayout, Rows

NUM_TOKENS = 16


@dataclass(frozen=True)
class Trace:
    """What one call of a model reveals about it.

    Attributes:
        specs: of the K/V entries; ``None`` for one that the model left alone.
        vocab_size: the width of the logits.
        dtype: of the logits.
        keeps_wanted_rows: whether the model's last norm was prepared to leave rows out.
    """

    specs: tuple[LayerSpec | None, ...]
    vocab_size: int
    dtype: mx.Dtype
    keeps_wanted_rows: bool


def trace(model: Module, plan: CacheLayout) -> Trace:
    """Build the graph of one call for ``NUM_TOKENS`` tokens, which is never evaluated.

    Raises:
        UnsuitableModelError: the model can't run so.
    """
    with noted_calls(model, "norm") as norms:
        noted, logits = _call(model, plan)
    specs = []
    for entry, shapes in zip(plan.entries, noted, strict=True):
        if len(shapes) > 1:
            raise UnsuitableModelError("it writes the K/V of a layer twice in one pass")
        specs.append(_spec(*shapes[0], entry.window) if shapes else None)
    if not any(specs):
        raise UnsuitableModelError("none of its layers writes K/V to a cache")
    is_prepared = leaves_rows_out(
        [norm for norm, _ in norms], lambda: _call(model, plan)[1], NUM_TOKENS - 1, axis=1
    )
    return Trace(tuple(specs), logits.shape[-1], logits.dtype, is_prepared)


def _call(model: Module, plan: CacheLayout) -> tuple[list[list[Rows]], mx.array]:
    """K and V of each entry, and the logits."""
    noted: list[list[Rows]] = [[] for _ in plan.entries]

    def note(shapes: list[Rows], keys: mx.array, values: mx.array) -> Rows:
        shapes.append((keys, values))
        return keys, values

    caches = plan.open([partial(note, shapes) for shapes in noted], [0] * len(noted))
    try:
        logits = model(mx.zeros((1, NUM_TOKENS), dtype=mx.int32), cache=caches)
    except Exception as error:
        # An unknown model may stumble over anything that is not its own kind of cache.
        raise UnsuitableModelError(
            f"it can't run on rows in blocks ({type(error).__name__}: {one_line(error)})"
        ) from error
    if not isinstance(logits, mx.array) or logits.ndim != 3:
        raise UnsuitableModelError("it does not return one row of logits per token")
    return noted, logits


def _spec(keys: mx.array, values: mx.array, window: int | None) -> LayerSpec:
    if keys.ndim != 4 or values.shape[:3] != keys.shape[:3]:
        raise UnsuitableModelError(
            f"a layer has K of shape {list(keys.shape)} and V of shape {list(values.shape)}"
        )
    # Where they differ, the one that holds both.
    dtype = (mx.zeros(1, keys.dtype) + mx.zeros(1, values.dtype)).dtype
    # An indexer may keep keys alone; a slab has rows of V all the same.
    value_dim = values.shape[3] or keys.shape[3]
    return LayerSpec(keys.shape[1], keys.shape[3], value_dim, window, KVFormat.dense(dtype))
