"""``PerSequenceModel``: a model of mlx-lm that runs one sequence at a time, with its own attention.

Some models can't run packed, because their attention adds a bias or reads the length of its keys.
Such a model is called as mlx-lm calls it: with the tokens of one sequence, ``[1, num_tokens]``, and
with caches that return all earlier K/V, which are written to blocks and gathered from them. These
subclass mlx-lm's own, so that a model finds every attribute that it uses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import (
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_paged.cache import KVFormat, LayerKV, LayerSpec
from mlx_paged.errors import UnsuitableModelError, one_line
from mlx_paged.models.adapted_layers import adapters_of
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm.model_args import MlxLmArgs, describe
from mlx_paged.models.mlx_lm.modules import (
    leaves_of,
    prepare_final_norm,
    recorded_calls,
    rows_wanted,
    with_leaves,
)
from mlx_paged.ops import AttentionMetadata

# With more unneeded rows of logits than these in a run, the needed ones are computed in a separate
# pass, as in mlx-lm: logits of 64 tokens over a vocabulary of 150,000 are 40 MB in float32.
MAX_UNWANTED_ROWS = 64
# Of the call whose graph shows what a model keeps; it is never evaluated.
NUM_TOKENS = 16
FLAT_KV_CACHES = (KVCache, ConcatenateKVCache, RotatingKVCache)


Rows: TypeAlias = tuple[mx.array, mx.array]
# Writes new rows of K and V, [1, num_kv_heads, num_tokens, width] each, and returns them together
# with the earlier ones.
Exchange: TypeAlias = Callable[[mx.array, mx.array], Rows]


class PerSequenceModel(LanguageModel):
    """An unmodified model of mlx-lm, whose sequences run one after the other.

    Args:
        model: as mlx-lm loads it; its modules and weights are not changed.
        config: its ``config.json``.

    Raises:
        UnsuitableModelError: it asks for caches of an unknown kind, or uses them in a way that
            blocks can't serve.
    """

    def __init__(self, model: Module, config: dict[str, Any]):
        super().__init__()
        self._traced = trace(model)
        self.args = MlxLmArgs.read(config, self._traced.vocab_size)
        self.description = describe(config, "per sequence")
        self.model_type = str(config.get("model_type"))
        self.inner = model

    @property
    def dtype(self) -> mx.Dtype:
        return self._traced.dtype

    @property
    def layer_specs(self) -> list[LayerSpec]:
        return [spec for spec in self._traced.specs if spec is not None]

    @property
    def runs_packed(self) -> bool:
        return False

    def stock_caches(self) -> list[tuple[Any, int | None]]:
        layers = itertools.count()
        # One per cache of K/V; the caller refuses caches of other kinds.
        has_kv = (spec is not None for spec in self._traced.specs)
        return [
            (cache, next(layers) if type(cache) in FLAT_KV_CACHES and next(has_kv) else None)
            for cache in make_prompt_cache(self["inner"])
        ]

    def rotate_keys(self, layer: int, keys: mx.array, distance: int) -> mx.array:
        raise NotImplementedError(f"{self.model_type} runs one sequence at a time")

    def __call__(
        self, tokens: mx.array, layers: Sequence[LayerKV], logit_rows: mx.array | None = None
    ) -> mx.array:
        step = layers[0].step
        counts = step.query_lens if logit_rows is None else step.logit_counts
        if not step.wants_logits:
            counts = [0] * step.num_seqs
        logits: list[mx.array] = []
        for seq, num_logits in enumerate(counts):
            start, length = step.cu_seqlens_q[seq], step.query_lens[seq]
            for begin, end in itertools.pairwise(self._cuts(length, num_logits)):
                num_rows = num_logits if end == length else 0
                new_tokens = tokens[start + begin : start + end]
                with adapters_of(slice(start, start + 1)):
                    rows = self._run(new_tokens, layers, seq, begin, num_rows)
                logits += [rows] if num_rows else []
        if not logits:
            row = mx.zeros((1, self._traced.vocab_size), self.dtype)
            done: mx.array = mx.depends(row, _slabs(layers))
            return done
        return logits[0] if len(logits) == 1 else mx.concatenate(logits)

    def _cuts(self, length: int, num_logits: int) -> list[int]:
        """Where the new tokens of a sequence are cut into passes, ends included."""
        num_unwanted = length - num_logits if num_logits else 0
        if num_unwanted > MAX_UNWANTED_ROWS and not self._traced.keeps_wanted_rows:
            return [0, num_unwanted, length]
        return [0, length]

    def _run(
        self,
        tokens: mx.array,  # [num_tokens], of one sequence
        layers: Sequence[LayerKV],
        seq: int,
        begin: int,  # the place of the first of them among the new tokens of the sequence
        num_logits: int,
    ) -> mx.array:
        """Call the model once; returns logits of the last tokens, ``[num_logits, vocab_size]``."""
        run = _run_of(layers[0].step, seq, begin, begin + tokens.size)
        exchanges = list(self._exchanges(layers, seq, begin, begin + tokens.size))
        caches = gathered_caches(self._traced.caches, exchanges, run.first_position)
        rows = mx.arange(tokens.size - num_logits, tokens.size)
        with rows_wanted(rows if self._traced.keeps_wanted_rows and num_logits else None, 1):
            logits: mx.array = self["inner"](tokens[None], cache=caches)
        logits = logits[0, logits.shape[1] - num_logits :]
        del caches  # They hold what was gathered, which may be views of slabs.
        if not layers[0].writes_in_place:
            # A later write would copy each slab that an unevaluated gather still reads.
            mx.eval(logits if num_logits else (), _slabs(layers))
        return logits

    def _exchanges(
        self, layers: Sequence[LayerKV], seq: int, begin: int, end: int
    ) -> Iterator[Exchange]:
        """How each K/V cache writes and reads the rows of a run of tokens."""
        layers_left = iter(layers)
        for spec in self._traced.specs:
            if spec is None:
                yield _refuse
            else:
                layer = next(layers_left)
                run = _run_of(layer.step, seq, begin, end)
                yield partial(_exchange, layer, run, spec.window and spec.window - 1)


def _run_of(step: AttentionMetadata, seq: int, begin: int, end: int) -> AttentionMetadata:
    """A step of these new tokens of one sequence alone; layers of a group share it."""
    return step.derived(("run", seq, begin), lambda: step.runs_of([seq], [begin], [end]))


def _slabs(layers: Sequence[LayerKV]) -> list[mx.array]:
    return [array for layer in layers for array in layer.arrays]


def _exchange(
    layer: LayerKV,
    run: AttentionMetadata,
    num_before: int | None,
    keys: mx.array,
    values: mx.array,
) -> Rows:
    width = values.shape[3]
    stored = values if width else mx.zeros((*values.shape[:3], layer.spec.value_dim), values.dtype)
    rows = keys[0].swapaxes(0, 1), stored[0].swapaxes(0, 1)
    k, v = layer.update_and_fetch(run, *rows, num_before)
    return k[None].astype(keys.dtype), v[None, ..., :width].astype(values.dtype)


def _refuse(keys: mx.array, values: mx.array) -> Rows:
    raise RuntimeError(
        "[per sequence] a layer writes K/V that wrote none when the model was loaded"
    )


class _GatheredCache:
    """What the K/V caches of this module have in common.

    Args:
        position: of the first new token.
        size: what the class of mlx-lm takes: a window, a chunk, or nothing.
    """

    keys: Any
    values: Any

    def __init__(self, exchange: Exchange, position: int, *size: int):
        super().__init__(*size)
        self._exchange = exchange
        self.offset = position

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Rows:
        self.offset += keys.shape[2]
        self.keys, self.values = self._exchange(keys, values)
        return self.keys, self.values

    def empty(self) -> bool:
        return self.offset == 0


class GatheredKVCache(_GatheredCache, KVCache):
    """For a layer that attends to all earlier tokens."""


class GatheredRotatingKVCache(_GatheredCache, RotatingKVCache):
    """For a layer that attends to the last ``max_size`` tokens, in the order of their positions."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Rows:
        rows = super().update_and_fetch(keys, values)
        self._idx = self.keys.shape[2]
        return rows

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        if N > 1:
            mask: mx.array | str | None = super().make_mask(N, window_size, return_array)
            return mask
        # mlx-lm's own cache is a ring, and rolls the mask with it.
        if window_size is None or window_size >= min(self.max_size, self.offset + 1):
            return None
        num_rows = min(self.offset + 1, self.max_size)
        return mx.arange(num_rows) >= num_rows - window_size


class GatheredChunkedKVCache(_GatheredCache, ChunkedKVCache):
    """For a layer that attends to the tokens of its own chunk of ``chunk_size``."""

    def __init__(self, exchange: Exchange, position: int, chunk_size: int):
        super().__init__(exchange, position, chunk_size)
        self.start_position = max(0, position - (chunk_size - 1))

    def maybe_trim_front(self) -> None:
        """Does nothing: only rows that may be attended to are gathered."""


def gathered_caches(caches: Sequence[Any], exchanges: Sequence[Exchange], position: int) -> Any:
    """The caches for one call of a model, in the order of its own.

    Args:
        caches: as ``mlx_lm.models.cache.make_prompt_cache`` makes them.
        exchanges: one per cache.
        position: of the first new token of the sequence.
    """
    following = iter(exchanges)
    return with_leaves(caches, lambda cache: _gathered(cache, next(following), position))


def _gathered(cache: Any, exchange: Exchange, position: int) -> _GatheredCache:
    if type(cache) is RotatingKVCache:
        return GatheredRotatingKVCache(exchange, position, cache.max_size)
    if type(cache) is ChunkedKVCache:
        return GatheredChunkedKVCache(exchange, position, cache.chunk_size)
    return GatheredKVCache(exchange, position)


def _window_of(cache: Any) -> int | None:
    """The most tokens that a query attends to, itself included; ``None`` for all."""
    if type(cache) in (KVCache, ConcatenateKVCache):
        return None
    if type(cache) is RotatingKVCache and not cache.keep:
        return int(cache.max_size)
    if type(cache) is ChunkedKVCache:
        return int(cache.chunk_size)
    kind = type(cache).__name__
    what = "recurrent state" if kind == "ArraysCache" else f"a {kind}"
    raise UnsuitableModelError(f"it keeps {what} in its caches")


@dataclass(frozen=True)
class Trace:
    """What one call of a model shows.

    Attributes:
        caches: those that the model asks for, empty.
        specs: one per cache of K/V; ``None`` for a cache that the model does not write.
        vocab_size: the width of the logits.
        dtype: of the logits.
        keeps_wanted_rows: whether the model's last norm can drop rows.
    """

    caches: tuple[Any, ...]
    specs: tuple[LayerSpec | None, ...]
    vocab_size: int
    dtype: mx.Dtype
    keeps_wanted_rows: bool


def trace(model: Module) -> Trace:
    """Build the graph of one call with ``NUM_TOKENS`` tokens.

    Raises:
        UnsuitableModelError: the model can't run on such caches, or asks for one of another kind.
    """
    caches = make_prompt_cache(model)
    windows = list(map(_window_of, leaves_of(caches)))
    with recorded_calls(model) as calls:
        written, logits = _call(model, caches)
    specs = []
    for window, rows in zip(windows, written, strict=True):
        if len(rows) > 1:
            raise UnsuitableModelError("it writes the K/V of a layer twice in one pass")
        specs.append(_spec(*rows[0], window) if rows else None)
    if not any(specs):
        raise UnsuitableModelError("none of its layers writes K/V to a cache")
    is_prepared = prepare_final_norm(calls, lambda: _call(model, caches)[1], axis=1)
    return Trace(tuple(caches), tuple(specs), logits.shape[-1], logits.dtype, is_prepared)


def _call(model: Module, stock: Sequence[Any]) -> tuple[list[list[Rows]], mx.array]:
    """The K and V that the model writes to each cache, and the logits."""
    written: list[list[Rows]] = [[] for _ in leaves_of(stock)]

    def record(rows: list[Rows], keys: mx.array, values: mx.array) -> Rows:
        rows.append((keys, values))
        return keys, values

    caches = gathered_caches(stock, [partial(record, rows) for rows in written], position=0)
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
