"""``PerSequenceModel``: a model of mlx-lm that runs one sequence at a time, with its own attention.

Some models can't run packed, because their attention adds a bias or reads the length of its keys.
Such a model is called as mlx-lm calls it: with the tokens of one sequence, ``[1, num_tokens]``, and
with caches that return all earlier K/V, which are written to blocks and gathered from them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, RotatingKVCache, make_prompt_cache

from mlx_paged.cache import LayerKV, LayerSpec
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm.final_norm import rows_wanted
from mlx_paged.models.mlx_lm.model_args import MlxLmArgs, describe
from mlx_paged.models.mlx_lm.per_sequence_caches import CacheLayout, Exchange, Rows
from mlx_paged.models.mlx_lm.per_sequence_trace import trace
from mlx_paged.ops import AttentionMetadata

# With more unneeded rows of logits than these in a run, the needed ones are computed in a separate
# pass, as in mlx-lm: logits of 64 tokens over a vocabulary of 150,000 are 40 MB in float32.
MAX_UNWANTED_ROWS = 64
FLAT_KV_CACHES = (KVCache, ConcatenateKVCache, RotatingKVCache)


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
        self._layout = CacheLayout(make_prompt_cache(model))
        self._traced = trace(model, self._layout)
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
        caches = self._layout.open(exchanges, run.first_position)
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
        """How each K/V entry writes and reads the rows of a run of tokens."""
        layers_left = iter(layers)
        for entry, spec in zip(self._layout.entries, self._traced.specs, strict=True):
            if spec is None:
                yield _refuse
            else:
                layer = next(layers_left)
                run = _run_of(layer.step, seq, begin, end)
                yield partial(_exchange, layer, run, entry.num_before)


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
