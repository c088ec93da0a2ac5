"""What a model of mlx-lm does with its caches, found out without computing anything.

The model's graph is built once on caches that note what they are asked for, and is never evaluated.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlx_paged.cache import KVFormat, LayerSpec
from mlx_paged.errors import UnsuitableModelError, one_line
from mlx_paged.models.mlx_lm.attention import (
    FetchedKeys,
    FetchedValues,
    OurAttention,
    WindowMask,
)
from mlx_paged.models.mlx_lm.final_norm import leaves_rows_out
from mlx_paged.models.mlx_lm.module_calls import noted_calls
from mlx_paged.models.mlx_lm.packed_kv import PackedKV

NUM_TOKENS = 3


@dataclass(frozen=True)
class Recording:
    """What a model does in a packed step.

    Attributes:
        layers: the K/V of each layer that has some of its own.
        windows: of each cache that the model asks for.
        entries: of each of them, its place in ``layers``; ``None`` for one without K/V.
        vocab_size: the width of the logits.
        keeps_wanted_rows: whether the model's last norm was prepared to leave rows out.
        ropes: of each layer what rotated its keys, if nothing came after it.
        attention: lets the model attend on caches of ours, while it is held.
    """

    layers: tuple[LayerSpec, ...]
    windows: tuple[int | None, ...]
    entries: tuple[int | None, ...]
    vocab_size: int
    keeps_wanted_rows: bool
    ropes: tuple[Module | None, ...]
    attention: OurAttention


def record_packed(model: Module) -> Recording:
    """Build the graph of a packed step of ``NUM_TOKENS`` tokens.

    Raises:
        UnsuitableModelError: the model can't run on such a step.
    """
    attention = OurAttention()
    windows = [_window_of(cache) for cache in make_prompt_cache(model)]
    with noted_calls(model, "norm") as norms, noted_calls(model, "rope") as rotations:
        recorded, logits = _record(model, windows)
    is_prepared = leaves_rows_out(
        [norm for norm, _ in norms], lambda: _call(model, windows)[1], NUM_TOKENS - 1, axis=0
    )
    layers = tuple(entry.spec for entry in recorded if entry.spec is not None)
    places = itertools.count()
    entries = tuple(None if entry.spec is None else next(places) for entry in recorded)
    if not layers:
        raise UnsuitableModelError("none of its layers attends to K/V of a cache")
    ropes = tuple(
        next((rope for rope, result in rotations if result is entry.new_keys), None)
        for entry in recorded
        if entry.spec is not None
    )
    return Recording(
        layers, tuple(windows), entries, logits.shape[-1], is_prepared, ropes, attention
    )


def _window_of(cache: Any) -> int | None:
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return int(cache.max_size)
    if type(cache) is KVCache:
        return None
    raise UnsuitableModelError(f"it keeps {_kinds(cache)} in its caches")


def _kinds(cache: Any) -> str:
    kind = type(cache).__name__
    return "recurrent state" if kind == "ArraysCache" else f"a {kind}"


def _call(model: Module, windows: Sequence[int | None]) -> tuple[list[_Entry], mx.array]:
    offset = mx.arange(NUM_TOKENS)
    entries = [_Entry(window, offset) for window in windows]
    return entries, model(mx.zeros((NUM_TOKENS, 1), dtype=mx.int32), cache=entries)


def _record(model: Module, windows: Sequence[int | None]) -> tuple[list[_Entry], mx.array]:
    try:
        entries, logits = _call(model, windows)
    except UnsuitableModelError:
        raise
    except Exception as error:
        # An unknown model may stumble over anything that is not its own kind of cache.
        raise UnsuitableModelError(
            f"it can't take tokens as rows of a batch ({type(error).__name__}: {one_line(error)})"
        ) from error
    if not isinstance(logits, mx.array) or logits.shape[:-1] != (NUM_TOKENS, 1):
        raise UnsuitableModelError("it does not return one row of logits per token")
    if any(entry.is_open for entry in entries):
        raise UnsuitableModelError("it computes attention in its own way")
    return entries, logits


class _Entry(PackedKV):
    """A cache that notes the shapes of a layer, and attends to nothing."""

    def __init__(self, window: int | None, offset: mx.array):
        super().__init__(_ShapesOnly(self), offset)
        self.window = window
        self.spec: LayerSpec | None = None
        self.new_keys: mx.array | None = None

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[FetchedKeys, FetchedValues]:
        self.new_keys = keys
        return super().update_and_fetch(keys, values)

    def attend(
        self,
        queries: mx.array,
        keys: FetchedKeys,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if isinstance(mask, WindowMask):
            if self.spec is not None and self.window != mask.window:
                raise UnsuitableModelError("layers that share K/V have different windows")
            if self.window is not None and self.window < mask.window:
                raise UnsuitableModelError(
                    f"a layer sees {mask.window} tokens of a cache that keeps {self.window}"
                )
            self.window = mask.window
        elif isinstance(mask, mx.array):
            raise UnsuitableModelError("it adds its own mask to the scores")
        return super().attend(queries, keys, values, cache, scale, mask, sinks)


class _ShapesOnly:
    """Stands in for a layer of a cache."""

    def __init__(self, entry: _Entry):
        self._entry = entry

    def update_and_attend(
        self, q: mx.array, k: mx.array, v: mx.array, *, scale: float, sinks: mx.array | None
    ) -> mx.array:
        self._note(q, k, v)
        return self.attend(q, scale=scale, sinks=sinks)

    def attend(self, q: mx.array, *, scale: float, sinks: mx.array | None) -> mx.array:
        spec = self._entry.spec
        assert spec is not None
        if q.shape[1] % spec.num_kv_heads or q.shape[2] != spec.key_dim:
            raise UnsuitableModelError("its queries don't fit its keys")
        return mx.zeros((*q.shape[:2], spec.value_dim), dtype=q.dtype)

    def update_and_attend_latents(
        self, q: mx.array, latents: mx.array, rope_keys: mx.array
    ) -> mx.array:
        self._note(q, latents, rope_keys, holds_latents=True)
        return mx.zeros((*q.shape[:2], latents.shape[2]), dtype=q.dtype)

    def _note(self, q: mx.array, k: mx.array, v: mx.array, holds_latents: bool = False) -> None:
        heads, key_dim = k.shape[1:]
        if v.shape[1] != heads:
            raise UnsuitableModelError("its K and V have different numbers of heads")
        self._entry.spec = LayerSpec(
            heads,
            key_dim,
            v.shape[2],
            self._entry.window,
            KVFormat.dense(k.dtype),
            num_heads=q.shape[1],
            holds_latents=holds_latents,
        )
