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
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from mlx_paged.cache import KVFormat, LayerSpec
from mlx_paged.cache.state_bytes import state_layout
from mlx_paged.errors import UnsuitableModelError, one_line
from mlx_paged.models.mlx_lm.attention import (
    FetchedKeys,
    FetchedValues,
    OurAttention,
    WindowMask,
)
from mlx_paged.models.mlx_lm.cache_tree import leaves_of, with_leaves
from mlx_paged.models.mlx_lm.final_norm import leaves_rows_out
from mlx_paged.models.mlx_lm.mixers import RecordedState, run_by_groups
from mlx_paged.models.mlx_lm.module_calls import noted_calls, open_calls
from mlx_paged.models.mlx_lm.packed_kv import PackedKV

NUM_TOKENS = 3
# Long enough for a recurrent layer to have all of its state: convolutions see up to 4 tokens.
NUM_TOKENS_OF_STATE = 16
# Blocks count tokens, also where a model keeps no K/V: the narrowest rows that kernels take.
TOKENS_ALONE = 32


@dataclass(frozen=True)
class Recording:
    """What a model does in a packed step.

    Attributes:
        layers: the K/V of each layer that has some of its own; a narrow one, which is never
            written, where none has.
        windows: of each cache for K/V that the model asks for.
        entries: of each of them, its place in ``layers``; ``None`` for one without K/V.
        vocab_size: the width of the logits.
        keeps_wanted_rows: whether the model's last norm was prepared to leave rows out.
        ropes: of each layer what rotated its keys, if nothing came after it.
        attention: lets the model attend on this package's caches, while it is held.
    """

    layers: tuple[LayerSpec, ...]
    windows: tuple[int | None, ...]
    entries: tuple[int | None, ...]
    vocab_size: int
    keeps_wanted_rows: bool
    ropes: tuple[Module | None, ...]
    attention: OurAttention


class RecurrentCaches:
    """The caches of a model that hold states and no K/V.

    Args:
        model: of mlx-lm's.

    Attributes:
        caches: all that the model asks for, empty.
        num_slots: of each recurrent cache; empty for a model without.
        nbytes: of the states of one sequence.
        layout: of each recurrent cache the dtypes and shapes of its arrays, in words.

    Raises:
        UnsuitableModelError: mlx-lm can't run the model.
    """

    def __init__(self, model: Module):
        self.caches: list[Any] = list(make_prompt_cache(model))
        self.num_slots = [
            len(leaf.cache) for leaf in leaves_of(self.caches) if isinstance(leaf, ArraysCache)
        ]
        arrays = _state_arrays(model) if self.num_slots else []
        self.nbytes = sum(array.nbytes for slots in arrays for array in slots if array is not None)
        self.layout = tuple(map(_described, state_layout(arrays)))

    def fill(self, of_kv: Sequence[Any], recurrent: Sequence[Any]) -> list[Any]:
        """What the model gets for its caches, in their order."""
        next_kv, next_recurrent = iter(of_kv), iter(recurrent)
        return with_leaves(
            self.caches,
            lambda leaf: next(next_recurrent if isinstance(leaf, ArraysCache) else next_kv),
        )


def _state_arrays(model: Module) -> list[list[mx.array | None]]:
    """Of each recurrent cache, after some tokens of one sequence."""
    caches = make_prompt_cache(model)
    try:
        model(mx.zeros((1, NUM_TOKENS_OF_STATE), dtype=mx.int32), cache=caches)
    except Exception as error:
        raise UnsuitableModelError(
            f"mlx-lm can't run it ({type(error).__name__}: {one_line(error)})"
        ) from error
    return [[*leaf.cache] for leaf in leaves_of(caches) if isinstance(leaf, ArraysCache)]


def _described(slots: Sequence[tuple[str, tuple[int, ...]] | None]) -> str:
    return ", ".join("none" if slot is None else f"{slot[0]} {[*slot[1]]}" for slot in slots)


def record_packed(model: Module, recurrent: RecurrentCaches) -> Recording:
    """Build the graph of a packed step of ``NUM_TOKENS`` tokens. The modules that use recurrent
    caches run by groups from then on.

    Raises:
        UnsuitableModelError: the model can't run on such a step.
    """
    attention = OurAttention()
    windows = [
        _window_of(leaf)
        for leaf in leaves_of(recurrent.caches)
        if not isinstance(leaf, ArraysCache)
    ]
    step = _RecordedStep(model, recurrent, windows)
    with noted_calls(model, "norm") as norms, noted_calls(model, "rope") as rotations:
        recorded, states, logits = step.run_and_check()
    is_prepared = leaves_rows_out(
        [norm for norm, _ in norms], lambda: step.run()[2], NUM_TOKENS - 1, axis=0
    )
    run_by_groups(module for state in states for module in state.users.values())
    layers = tuple(entry.spec for entry in recorded if entry.spec is not None)
    places = itertools.count()
    entries = tuple(None if entry.spec is None else next(places) for entry in recorded)
    if not layers and not states:
        raise UnsuitableModelError("none of its layers attends to K/V of a cache")
    tokens_alone = LayerSpec(1, TOKENS_ALONE, TOKENS_ALONE, format=KVFormat.dense(logits.dtype))
    ropes = tuple(
        next((rope for rope, result in rotations if result is entry.new_keys), None)
        for entry in recorded
        if entry.spec is not None
    )
    return Recording(
        layers or (tokens_alone,),
        tuple(windows),
        entries,
        logits.shape[-1],
        is_prepared,
        ropes or (None,),
        attention,
    )


def _window_of(cache: Any) -> int | None:
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return int(cache.max_size)
    if type(cache) is KVCache:
        return None
    raise UnsuitableModelError(f"it keeps a {type(cache).__name__} in its caches")


class _RecordedStep:
    """A packed step on caches that note what they are asked for."""

    def __init__(self, model: Module, recurrent: RecurrentCaches, windows: Sequence[int | None]):
        self._model, self._recurrent, self._windows = model, recurrent, windows

    def run(self) -> tuple[list[_Entry], list[RecordedState], mx.array]:
        offset = mx.arange(NUM_TOKENS)
        entries = [_Entry(window, offset) for window in self._windows]
        with open_calls(self._model) as calls:
            states = [RecordedState(size, calls) for size in self._recurrent.num_slots]
            caches = self._recurrent.fill(entries, states)
            logits = self._model(mx.zeros((NUM_TOKENS, 1), dtype=mx.int32), cache=caches)
        return entries, states, logits

    def run_and_check(self) -> tuple[list[_Entry], list[RecordedState], mx.array]:
        try:
            entries, states, logits = self.run()
        except UnsuitableModelError:
            raise
        except Exception as error:
            # An unknown model may stumble over anything that is not its own kind of cache.
            raise UnsuitableModelError(
                "it can't take tokens as rows of a batch "
                f"({type(error).__name__}: {one_line(error)})"
            ) from error
        if not isinstance(logits, mx.array) or logits.shape[:-1] != (NUM_TOKENS, 1):
            raise UnsuitableModelError("it does not return one row of logits per token")
        if any(entry.is_open for entry in entries):
            raise UnsuitableModelError("it computes attention in its own way")
        return entries, states, logits


class _Entry(PackedKV):
    """A cache that notes the shapes of a layer, and attends to nothing."""

    def __init__(self, window: int | None, offset: mx.array):
        super().__init__(_ShapesOnly(self), offset)
        self.window = window
        self.softcap: float | None = None
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
        softcap: float | None = None,
    ) -> mx.array:
        if self.spec is not None and self.softcap != softcap:
            raise UnsuitableModelError("layers that share K/V cap their scores differently")
        self.softcap = softcap
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
        return super().attend(queries, keys, values, cache, scale, mask, sinks, softcap)


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
            softcap=self._entry.softcap,
            holds_latents=holds_latents,
        )
