"""An unmodified model of mlx-lm on packed input: each token is a batch entry of length 1.

Entries of a batch depend on each other only through their caches. So prompts, chunks of prompts,
decodes and any mix of them look the same to the model, and nothing is padded: the batch is the
packed axis, ``cache.offset`` holds the position of each row, and attention is computed by this
package's caches (:mod:`mlx_paged.models.mlx_lm.attention`). Modules with a recurrent state, which
mix the tokens of a sequence, run by groups of runs (:mod:`mlx_paged.models.mlx_lm.run_groups`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from mlx_paged.cache import KVFormat, LayerKV, LayerSpec
from mlx_paged.cache.state_bytes import state_layout
from mlx_paged.errors import UnsuitableModelError, one_line
from mlx_paged.models.language_model import LanguageModel, rotate_on, stock_cache
from mlx_paged.models.mlx_lm.attention import (
    AttentionPatch,
    FetchedKeys,
    FetchedValues,
    PackedKV,
    WindowMask,
)
from mlx_paged.models.mlx_lm.model_args import MlxLmArgs, describe
from mlx_paged.models.mlx_lm.modules import (
    Calls,
    leaves_of,
    prepare_final_norm,
    recorded_calls,
    rows_wanted,
    with_leaves,
)
from mlx_paged.models.mlx_lm.run_groups import PackedState, RunGroups, run_by_groups
from mlx_paged.ops import AttentionMetadata

# Of the step whose graph shows what a model does; it is never evaluated.
NUM_TOKENS = 3
# Enough for a recurrent layer to fill its whole state: convolutions span up to 4 tokens.
NUM_TOKENS_OF_STATE = 16
# Blocks count tokens even where a model keeps no K/V: the narrowest head that kernels take.
NARROWEST_DIM = 32


class PackedModel(LanguageModel):
    """A model of mlx-lm on the caches of this package.

    Args:
        model: as mlx-lm loads it; its modules and weights are not changed.
        config: its ``config.json``.

    Raises:
        UnsuitableModelError: it can't run on packed input.
    """

    def __init__(self, model: Module, config: dict[str, Any]):
        super().__init__()
        self._recurrent = RecurrentCaches(model)
        self._recording = record_packed(model, self._recurrent)
        self.args = MlxLmArgs.read(config, self._recording.vocab_size)
        self.description = describe(config, "packed, with state" if self.state_nbytes else "packed")
        self.inner = model

    def __call__(
        self, tokens: mx.array, layers: Sequence[LayerKV], logit_rows: mx.array | None = None
    ) -> mx.array:
        recording, step = self._recording, layers[0].step
        entries = [
            PackedKV(None if index is None else layers[index], step.positions)
            for index in recording.entries
        ]
        groups = self._groups_of(step)
        num_states = len(self._recurrent.num_slots)
        states = [PackedState(groups, index) for index in range(num_states)] if groups else []
        wanted = logit_rows if recording.keeps_wanted_rows else None
        with rows_wanted(wanted, 0):
            logits: mx.array = self["inner"](
                tokens[:, None], cache=self._recurrent.fill(entries, states)
            )
        logits = logits.squeeze(1)
        logits = logits if wanted is logit_rows else logits[logit_rows]
        return mx.depends(logits, groups.put_states()) if groups else logits

    def _groups_of(self, step: AttentionMetadata) -> RunGroups | None:
        """``None`` for a model without recurrent layers."""
        if not self._recurrent.num_slots:
            return None
        if step.states is None:
            raise ValueError(
                f"[packed] a {self.model_type} keeps a recurrent state of each sequence; pass the "
                "states when the step is opened"
            )
        return RunGroups(step, step.states, self._recurrent.num_slots)

    def stock_caches(self) -> list[tuple[Any, int | None]]:
        recording = self._recording
        return [
            (stock_cache(window), layer)
            for window, layer in zip(recording.windows, recording.entries, strict=True)
        ]

    def rotate_keys(self, layer: int, keys: mx.array, distance: int) -> mx.array:
        rope = self._recording.ropes[layer]
        if rope is None:
            raise NotImplementedError(
                f"{self.description}, has layers whose keys are not rotated as a whole"
            )
        return rotate_on(rope, keys, distance)

    @property
    def model_type(self) -> str:
        return self.description.partition(" ")[0]

    @property
    def state_nbytes(self) -> int:
        return self._recurrent.nbytes

    @property
    def state_layout(self) -> tuple[str, ...]:
        return self._recurrent.layout

    @property
    def keeps_kv(self) -> bool:
        return any(entry is not None for entry in self._recording.entries)

    @property
    def hidden_row_size(self) -> int:
        return self._recording.hidden_row_size

    @property
    def num_layers(self) -> int:
        return len(self._recurrent.caches)

    @property
    def dtype(self) -> mx.Dtype:
        return self._recording.layers[0].format.dtype

    @property
    def layer_specs(self) -> list[LayerSpec]:
        return list(self._recording.layers)


@dataclass(frozen=True)
class Recording:
    """What a model does in a packed step.

    Attributes:
        layers: one per layer with K/V of its own; a single narrow one, which is never written, for
            a model without K/V.
        windows: one per K/V cache that the model asks for.
        entries: for each of these caches its index in ``layers``; ``None`` for an unused cache.
        vocab_size: the width of the logits.
        keeps_wanted_rows: whether the model's last norm can drop rows.
        hidden_row_size: the width of that norm's rows; 0 if it can't.
        ropes: for each layer the module whose result its keys are; ``None`` where that is not RoPE.
        attention: routes the model's attention to this package's caches for as long as it lives.
    """

    layers: tuple[LayerSpec, ...]
    windows: tuple[int | None, ...]
    entries: tuple[int | None, ...]
    vocab_size: int
    keeps_wanted_rows: bool
    hidden_row_size: int
    ropes: tuple[Module | None, ...]
    attention: AttentionPatch


class RecurrentCaches:
    """The recurrent caches of a model, which hold a state instead of K/V.

    Args:
        model: one of mlx-lm.

    Attributes:
        caches: all caches that the model asks for, empty.
        num_slots: one number per recurrent cache; empty for a model without.
        nbytes: the size of one sequence's states.
        layout: per recurrent cache, the dtypes and shapes of its arrays as text.

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
        """The list of caches that the model is called with, in its own order."""
        next_kv, next_recurrent = iter(of_kv), iter(recurrent)
        return with_leaves(
            self.caches,
            lambda leaf: next(next_recurrent if isinstance(leaf, ArraysCache) else next_kv),
        )


def _state_arrays(model: Module) -> list[list[mx.array | None]]:
    """The arrays of each recurrent cache after some tokens of one sequence."""
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
    """Build the graph of a packed step of ``NUM_TOKENS`` tokens. From then on, the modules that use
    recurrent caches run by groups.

    Raises:
        UnsuitableModelError: the model can't run on such a step.
    """
    attention = AttentionPatch()
    windows = [
        _window_of(leaf)
        for leaf in leaves_of(recurrent.caches)
        if not isinstance(leaf, ArraysCache)
    ]
    run = _run(model, recurrent, windows)
    if not isinstance(run.logits, mx.array) or run.logits.shape[:-1] != (NUM_TOKENS, 1):
        raise UnsuitableModelError("it does not return one row of logits per token")
    if any(entry.is_open for entry in run.entries):
        raise UnsuitableModelError("it computes attention in its own way")
    is_prepared = prepare_final_norm(
        run.calls, lambda: _run(model, recurrent, windows).logits, axis=0
    )
    run_by_groups(module for state in run.states for module in state.users.values())
    with_kv = [(entry.spec, entry) for entry in run.entries if entry.spec is not None]
    if not with_kv and not run.states:
        raise UnsuitableModelError("none of its layers attends to K/V of a cache")
    indices = itertools.count()
    rotations = run.calls.of_kind("rope")
    ropes = tuple(
        next((rope for rope, result in rotations if result is entry.new_keys), None)
        for _, entry in with_kv
    )
    narrow = LayerSpec(1, NARROWEST_DIM, NARROWEST_DIM, format=KVFormat.dense(run.logits.dtype))
    return Recording(
        tuple(spec for spec, _ in with_kv) or (narrow,),
        tuple(windows),
        tuple(None if entry.spec is None else next(indices) for entry in run.entries),
        run.logits.shape[-1],
        is_prepared,
        run.calls.of_kind("norm")[-1][1].shape[-1] if is_prepared else 0,
        ropes or (None,),
        attention,
    )


def _window_of(cache: Any) -> int | None:
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return int(cache.max_size)
    if type(cache) is KVCache:
        return None
    raise UnsuitableModelError(f"it keeps a {type(cache).__name__} in its caches")


class _RecordedRun(NamedTuple):
    """A packed step on caches that record their use."""

    entries: list[RecordedKV]
    states: list[_RecordedState]
    logits: mx.array
    calls: Calls


def _run(model: Module, recurrent: RecurrentCaches, windows: Sequence[int | None]) -> _RecordedRun:
    offset = mx.arange(NUM_TOKENS)
    entries = [RecordedKV(window, offset) for window in windows]
    with recorded_calls(model) as calls:
        states = [_RecordedState(size, calls) for size in recurrent.num_slots]
        caches = recurrent.fill(entries, states)
        try:
            logits = model(mx.zeros((NUM_TOKENS, 1), dtype=mx.int32), cache=caches)
        except UnsuitableModelError:
            raise
        except Exception as error:
            # An unknown model may raise anything on a cache that is not its own.
            raise UnsuitableModelError(
                "it can't take tokens as rows of a batch "
                f"({type(error).__name__}: {one_line(error)})"
            ) from error
    return _RecordedRun(entries, states, logits, calls)


class _RecordedState(ArraysCache):
    """A recurrent cache that records which modules use it: at each access, the innermost one that
    is running.
    """

    def __init__(self, num_slots: int, calls: Calls):
        super().__init__(num_slots)
        self._calls = calls
        self.users: dict[int, Module] = {}  # by identity

    def _record(self) -> None:
        if not self._calls.running:
            raise UnsuitableModelError("it uses a recurrent cache outside of its modules")
        user = self._calls.running[-1]
        self.users[id(user)] = user

    def __getitem__(self, slot: int) -> Any:
        self._record()
        return super().__getitem__(slot)

    def __setitem__(self, slot: int, value: Any) -> None:
        self._record()
        super().__setitem__(slot, value)


class RecordedKV(PackedKV):
    """A cache that records the shapes of a layer's K/V, and whose attention returns zeros."""

    def __init__(self, window: int | None, offset: mx.array):
        super().__init__(cast(LayerKV, _ShapesOnly(self)), offset)
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
                    f"a layer attends to {mask.window} tokens of a cache that keeps {self.window}"
                )
            self.window = mask.window
        elif isinstance(mask, mx.array):
            raise UnsuitableModelError("it adds its own mask to the scores")
        return super().attend(queries, keys, values, cache, scale, mask, sinks, softcap)


class _ShapesOnly:
    """In place of a cache's layer: checks and records shapes."""

    def __init__(self, entry: RecordedKV):
        self._entry = entry

    def update_and_attend(
        self, q: mx.array, k: mx.array, v: mx.array, *, scale: float, sinks: mx.array | None
    ) -> mx.array:
        self._record(q, k, v)
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
        self._record(q, latents, rope_keys, holds_latents=True)
        return mx.zeros((*q.shape[:2], latents.shape[2]), dtype=q.dtype)

    def _record(self, q: mx.array, k: mx.array, v: mx.array, holds_latents: bool = False) -> None:
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
