"""Decodes that are replayed from a trace (``mx.compile``) instead of being built in Python."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeAlias

import mlx.core as mx

from mlx_paged.cache import PagedKVCache
from mlx_paged.cache.open_decode import DecodeArrays, DecodeShape
from mlx_paged.cache.paged import PagedLayerKV
from mlx_paged.engine.model_arrays import ModelArrays
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.ops import AttentionPlan, KVHandle, traced_decode

# To trace a decode of 28 layers takes 5 ms on an idle CPU, and a replay saves 0.7. So a shape that
# does not come back costs at most twice what its replays would have saved until then.
NUM_BUILT_FIRST = 8
# Some 0.7 MB each for 28 layers.
MAX_TRACES = 32

Trace: TypeAlias = Callable[..., tuple[mx.array, list[mx.array]]]


class CompiledDecode:
    """The decodes of one model on one cache.

    A decode has some thousand primitives, which Python takes longer to build than all else in a
    step. ``mx.compile`` traces them once per shape and then makes them in C++. The trace is a pure
    function: weights, tokens, positions, plans, slabs and fences are its inputs, logits and the
    next fences its results. It runs a copy of the model on layers of its own, so what fails in the
    middle leaves nothing behind. Weights that change are seen by the next step.

    A shape is traced when it has come up ``NUM_BUILT_FIRST`` times; the ``MAX_TRACES`` shapes that
    came up last are remembered. The first replay is held against a decode that is built. If that
    differs, or tracing raises, decodes are built from then on, and a warning says so.
    """

    def __init__(self, model: LanguageModel, cache: PagedKVCache):
        self._cache = cache
        self._model = ModelArrays(model)
        # The trace of each shape, or how often the shape has come up; the last one at the end.
        self._traces: dict[Hashable, Trace | int] = {}
        self._has_failed = False

    def replay(self, tokens: mx.array) -> mx.array | None:
        """Run the open step of the cache on ``tokens``, ``[num_tokens]``.

        Returns:
            The logits ``[num_tokens, vocab_size]``; ``None``, and nothing was done, if there is no
            trace for it.
        """
        decode = None if self._has_failed else self._cache.open_decode()
        if decode is None:
            return None
        shape, arrays, slabs = decode
        weights = self._model.current()
        if weights is None:  # Other modules make another graph.
            self._traces.clear()
            weights = self._model.read()
        trace, is_new = self._trace_of(shape, tokens.dtype)
        if trace is None:
            return None
        try:
            logits, fences = trace(weights, tokens, *arrays)
            if is_new:
                layers = traced_layers(self._cache, shape, arrays._replace(fences=fences))
                fences = self._check(weights, tokens, layers, logits)
        except Exception as error:
            self._has_failed = True
            self._traces.clear()
            warnings.warn(
                f"[engine] decodes can't be compiled ({type(error).__name__}: {error}); each is "
                "built in Python instead, which is slower",
                stacklevel=2,
            )
            return None
        for kv, fence in zip(slabs, fences, strict=True):
            kv.fence = fence
        return logits

    def _check(
        self,
        weights: list[mx.array],
        tokens: mx.array,
        layers: Sequence[PagedLayerKV],
        logits: mx.array,
    ) -> list[mx.array]:
        """Build the decode that was replayed once more, on layers after it: it writes the same
        rows into the same slots, and its logits have to agree to half of the digits of their dtype.
        ``mx.compile`` may join operations, and then rounds less often.

        Returns:
            The fences that it leaves.

        Raises:
            RuntimeError: the logits differ.
        """
        built = self._model.copy_on(weights)(tokens, layers)
        is_same = (built == logits) | (mx.isnan(built) & mx.isnan(logits))
        difference = mx.where(is_same, 0, mx.abs(built - logits)).max()
        tolerance = mx.finfo(built.dtype).eps ** 0.5 * mx.abs(built).max()
        if not (mx.all(is_same) | (difference <= tolerance)).item():
            raise RuntimeError("a replay gives other logits than the decode that was traced")
        return _fences_of(layers)

    def _trace_of(self, shape: DecodeShape, dtype: mx.Dtype) -> tuple[Trace | None, bool]:
        """The trace of a shape, if there is one by now, and whether it is new."""
        key = (shape, dtype)
        trace, is_new = self._traces.pop(key, 0), False
        if isinstance(trace, int):
            trace, is_new = trace + 1, trace >= NUM_BUILT_FIRST
            if is_new:
                trace = self._new_trace(shape)
        self._traces[key] = trace
        if len(self._traces) > MAX_TRACES:
            del self._traces[next(iter(self._traces))]
        return (None if isinstance(trace, int) else trace), is_new

    def _new_trace(self, shape: DecodeShape) -> Trace:
        cache, model = self._cache, self._model

        def decode(
            number: int, weights: list[mx.array], tokens: mx.array, *arrays: Any
        ) -> tuple[mx.array, list[mx.array]]:
            layers = traced_layers(cache, shape, DecodeArrays(*arrays))
            logits = model.copy_on(weights)(tokens, layers)
            return logits, _fences_of(layers)

        # MLX knows a traced function by its address, which a later one may get, and by arguments
        # that are not arrays. No two of ours have the same number.
        return partial(mx.compile(decode), next(_numbers))


_numbers = itertools.count()


def traced_layers(
    cache: PagedKVCache, shape: DecodeShape, arrays: DecodeArrays
) -> list[PagedLayerKV]:
    """The layers of a decode of this shape, on ``arrays``: those of the cache and its open step are
    not touched. When a model has run, the handles hold the next fences.
    """
    config = cache.config
    plans: list[dict[Hashable, object]] = [{} for _ in config.groups]
    for plan, array in zip(shape.plans, arrays.plans, strict=True):
        made = AttentionPlan(array, plan.num_partitions, plan.num_partial_rows)
        plans[plan.group][plan.key] = made
    slots: Sequence[mx.array | None] = arrays.slots or [None] * len(plans)
    steps = [
        traced_decode(config.block_size, arrays.positions, *each)
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
    """Of each slab, in the order of the slabs: layers of several groups may share one."""
    slabs = dict.fromkeys(layer.kv for layer in layers)
    return [kv.fence for kv in slabs if kv.fence is not None]
