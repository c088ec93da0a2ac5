"""Decodes that are replayed from a trace (``mx.compile``) instead of being built in Python."""

from __future__ import annotations

import copy
import itertools
import operator
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import mlx.core as mx

from mlx_paged.cache import PagedKVCache
from mlx_paged.cache.open_decode import DecodeArrays, DecodeShape
from mlx_paged.cache.paged import PagedLayerKV
from mlx_paged.models.adapted_layers import AdapterRows, adapter_rows, running_adapters
from mlx_paged.models.language_model import LanguageModel, wanted_hidden_rows
from mlx_paged.ops import AttentionPlan, KVHandle, StateStack, StepState, traced_decode

# Tracing a decode of 28 layers takes 5 ms on an idle CPU, and a replay saves 0.7 ms. So a shape
# that does not recur costs at most twice what replays would have saved until then.
NUM_BUILT_FIRST = 8
# Some 0.7 MB each for 28 layers.
MAX_TRACES = 32

Trace: TypeAlias = Callable[
    ..., tuple[mx.array, list[mx.array], list[mx.array], list[mx.array | None]]
]


class CompiledDecode:
    """The decodes of one model on one cache.

    A decode has some thousand primitives. Building them is the largest part of Python's time in a
    step. ``mx.compile`` traces them once per shape and then builds them in C++. The trace is a pure
    function: weights, tokens, slots of adapters, states, positions, plans, slabs and fences are its
    inputs; logits, the next fences and the next states are its results. It runs a copy of the model
    on separate layers, so an exception leaves no partial state. Changed weights are used from the
    next step on.

    A shape is traced when it has occurred ``NUM_BUILT_FIRST`` times; the ``MAX_TRACES`` most recent
    shapes are kept. The first replay is compared with a decode built in Python. If they differ, or
    tracing raises, all later decodes are built in Python, with a warning.
    """

    def __init__(self, model: LanguageModel, cache: PagedKVCache):
        self._cache = cache
        self._model = ModelArrays(model)
        # The trace of each shape, or how often it has occurred; the most recent one at the end.
        self._traces: dict[Hashable, Trace | int] = {}
        # Drops all traces, in the thread that replayed them. That thread outlives the engine
        # shortly, so it must not refer to the cache.
        self.forget_traces = self._traces.clear
        self._has_failed = False

    def replay(self, tokens: mx.array) -> mx.array | None:
        """Run the open step of the cache on ``tokens``, ``[num_tokens]``.

        Returns:
            The logits ``[num_tokens, vocab_size]``; ``None``, without any effect, if there is no
            trace of its shape.
        """
        decode = None if self._has_failed else self._cache.open_decode()
        if decode is None:
            return None
        shape, arrays, slabs, states = decode
        before = None if states is None else _states_before(states)
        if states is not None and before is None:
            return None
        weights = self._model.current()
        if weights is None:  # Other modules need another trace.
            self.forget_traces()
            weights = self._model.read()
        trace, is_new = self._trace_of(shape, tokens.dtype, before)
        if trace is None:
            return None
        try:
            leaves = [] if before is None else before.leaves
            rows = adapter_rows()
            slots = [] if rows is None else [rows.ids]
            logits, fences, made, hidden_rows = trace(weights, tokens, slots, leaves, *arrays)
            if is_new:
                fenced = arrays._replace(fences=fences)
                layers = traced_layers(self._cache, shape, fenced, _step_states(before))
                fences = self._check(weights, tokens, layers, logits)
        except Exception as error:
            self._has_failed = True
            self.forget_traces()
            warnings.warn(
                f"[engine] decodes can't be compiled ({type(error).__name__}: {error}); each is "
                "built in Python instead, which is slower",
                stacklevel=2,
            )
            return None
        for kv, fence in zip(slabs, fences, strict=True):
            kv.fence = fence
        _put_hidden_rows(hidden_rows)
        if states is not None and before is not None:
            after = StateStack.of_leaves(made, before.num_slots)
            for state, row in zip(states, after.rows(), strict=True):
                state.after = row
                state.at_cuts += [row.alone() for _ in state.cuts]
        return logits

    def _check(
        self,
        weights: list[mx.array],
        tokens: mx.array,
        layers: Sequence[PagedLayerKV],
        logits: mx.array,
    ) -> list[mx.array]:
        """Build the replayed decode once more in Python, on layers that depend on it: it writes the
        same rows into the same slots, and its logits have to agree to half of the digits of their
        dtype. ``mx.compile`` may fuse operations, which then round less often.

        Returns:
            The fences after it.

        Raises:
            RuntimeError: the logits differ.
        """
        built = self._model.copy_on(weights)(tokens, layers)
        is_same = (built == logits) | (mx.isnan(built) & mx.isnan(logits))
        difference = mx.where(is_same, 0, mx.abs(built - logits)).max()
        tolerance = mx.finfo(built.dtype).eps ** 0.5 * mx.abs(built).max()
        if not (mx.all(is_same) | (difference <= tolerance)).item():
            raise RuntimeError("a replay has different logits than the traced decode")
        return _fences_of(layers)

    def _trace_of(
        self, shape: DecodeShape, dtype: mx.Dtype, before: StateStack | None
    ) -> tuple[Trace | None, bool]:
        """The trace of a shape, once there is one, and whether it is new."""
        key = (shape, dtype, None if before is None else before.shapes, adapter_rows() is None)
        trace, is_new = self._traces.pop(key, 0), False
        if isinstance(trace, int):
            trace, is_new = trace + 1, trace >= NUM_BUILT_FIRST
            if is_new:
                trace = self._new_trace(shape, before)
        self._traces[key] = trace
        if len(self._traces) > MAX_TRACES:
            del self._traces[next(iter(self._traces))]
        return (None if isinstance(trace, int) else trace), is_new

    def _new_trace(self, shape: DecodeShape, before: StateStack | None) -> Trace:
        cache, model = self._cache, self._model
        # The trace must not refer to the arrays themselves.
        num_slots = None if before is None else before.num_slots

        def decode(
            number: int,
            weights: list[mx.array],
            tokens: mx.array,
            slots: list[mx.array],
            leaves: list[mx.array],
            *arrays: Any,
        ) -> tuple[mx.array, list[mx.array], list[mx.array], list[mx.array | None]]:
            stack = None if num_slots is None else StateStack.of_leaves(leaves, num_slots)
            states = _step_states(stack)
            layers = traced_layers(cache, shape, DecodeArrays(*arrays), states)
            with running_adapters(AdapterRows(slots[0]) if slots else None):
                logits = model.copy_on(weights)(tokens, layers)
            after = None if states is None else states[0].after
            leaves_after = [] if after is None else after.stack.leaves
            return logits, _fences_of(layers), leaves_after, _hidden_rows()

        # MLX identifies a traced function by its address, which a later one may reuse, and by its
        # arguments that are not arrays: a unique number for each trace.
        return partial(mx.compile(decode), next(_numbers))


_numbers = itertools.count()


def _hidden_rows() -> list[mx.array | None]:
    hidden = wanted_hidden_rows()
    return [] if hidden is None else [hidden.rows]


def _put_hidden_rows(rows: Sequence[mx.array | None]) -> None:
    hidden = wanted_hidden_rows()
    if hidden is not None:
        (hidden.rows,) = rows


def _states_before(states: Sequence[StepState]) -> StateStack | None:
    """The states before a decode, in one stack; ``None`` if a sequence has none yet, or if their
    arrays are not all there yet, or differ in shape.
    """
    rows = [state.before for state in states if state.before is not None]
    shapes = {row.stack.shapes for row in rows}
    if len(rows) < len(states) or len(shapes) > 1 or None in next(iter(shapes)):
        return None
    return StateStack.of(rows)


def _step_states(before: StateStack | None) -> list[StepState] | None:
    return None if before is None else [StepState(row) for row in before.rows()]


def traced_layers(
    cache: PagedKVCache,
    shape: DecodeShape,
    arrays: DecodeArrays,
    states: list[StepState] | None = None,
) -> list[PagedLayerKV]:
    """Layers for a decode of this shape, on ``arrays``; the cache and its open step are not used.
    After the model has run, the handles have the next fences.
    """
    config = cache.config
    plans: list[dict[Hashable, object]] = [{} for _ in config.groups]
    for plan, array in zip(shape.plans, arrays.plans, strict=True):
        made = AttentionPlan(array, plan.num_partitions, plan.num_partial_rows)
        plans[plan.group][plan.key] = made
    slots: Sequence[mx.array | None] = arrays.slots or [None] * len(plans)
    steps = [
        traced_decode(config.block_size, arrays.positions, *each, states)
        for each in zip(plans, slots, strict=True)
    ]
    kept = [cache.layers[index].kv for index in shape.layers]
    parts = zip(arrays.keys, arrays.values, arrays.fences, strict=True)
    traced = {
        kv: KVHandle(k, v, kv.format, fence)
        for kv, (k, v, fence) in zip(dict.fromkeys(kept), parts, strict=True)
    }
    layers = []
    for index, kv in zip(shape.layers, kept, strict=True):
        layers.append(PagedLayerKV(config.layers[index], cache.backend, traced[kv]))
        layers[-1].open(steps[config.group_of(index)])
    return layers


def _fences_of(layers: Sequence[PagedLayerKV]) -> list[mx.array]:
    """The fence of each slab, in order; layers of several groups may share a slab."""
    slabs = dict.fromkeys(layer.kv for layer in layers)
    return [kv.fence for kv in slabs if kv.fence is not None]


# The arrays of a model as a flat list, so that they can be the inputs of a function


class ModelArrays:
    """All arrays in the tree of a model's modules, dictionaries and lists.

    :meth:`current` reflects weights that are replaced or changed in place. A tree whose modules
    change, as by quantisation or adapters, has to be :meth:`read` again.
    """

    def __init__(self, model: LanguageModel):
        self._model = model
        self.read()

    def read(self) -> list[mx.array]:
        """Find all arrays of the tree; returns them."""
        edges = list(_edges(self._model))
        arrays = [edge for edge in edges if isinstance(edge[2], mx.array)]
        others = [edge for edge in edges if not isinstance(edge[2], mx.array)]
        self._num_arrays = len(arrays)
        self._parents = [parent for parent, _, _ in arrays + others]
        self._keys = [key for _, key, _ in arrays + others]
        self._nodes = [node for _, _, node in others]
        self._lengths = list(map(len, [self._model, *self._nodes]))
        return [array for _, _, array in arrays]

    def current(self) -> list[mx.array] | None:
        """The current arrays, in the order of :meth:`read`; ``None`` if the tree has changed."""
        # Loops in C, because there are hundreds of arrays and this runs once per step.
        try:
            found: list[Any] = list(map(operator.getitem, self._parents, self._keys))
        except LookupError:
            return None
        nodes = found[self._num_arrays :]
        if not all(map(operator.is_, nodes, self._nodes)):
            return None
        if list(map(len, [self._model, *nodes])) != self._lengths:
            return None
        return found[: self._num_arrays]

    def copy_on(self, arrays: list[mx.array]) -> LanguageModel:
        """A copy of the model with other arrays, in the order of :meth:`read`."""
        places = zip(map(id, self._parents), self._keys, strict=True)
        copied: LanguageModel = _copy_on(self._model, dict(zip(places, arrays, strict=False)))
        return copied


def _children(node: Any) -> Iterator[tuple[Any, Any]]:
    """The keys and values of a module, dictionary, list or tuple."""
    return iter(node.items()) if isinstance(node, dict) else enumerate(node)


def _edges(node: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Parent, key and child for each array, and for each container that may hold arrays."""
    for key, child in _children(node):
        if isinstance(child, mx.array):
            yield node, key, child
        elif isinstance(child, dict | list | tuple):
            yield node, key, child
            yield from _edges(child)


def _copy_on(node: Any, arrays: dict[tuple[int, Any], mx.array]) -> Any:
    """A copy of a tree whose array at ``key`` of ``parent`` is ``arrays[id(parent), key]``."""
    children = {}
    for key, child in _children(node):
        if isinstance(child, mx.array):
            children[key] = arrays[id(node), key]
        elif isinstance(child, dict | list | tuple):
            children[key] = _copy_on(child, arrays)
        else:
            children[key] = child
    if isinstance(node, list | tuple):
        return type(node)(children.values())
    copied = copy.copy(node)
    dict.update(copied, children)  # ``nn.Module.update`` is another method.
    return copied
