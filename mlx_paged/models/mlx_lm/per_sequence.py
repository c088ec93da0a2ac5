"""``PerSequenceModel``: a model of mlx-lm that runs one sequence at a time, with its own attention.

Some models can't run packed: their attention adds a bias of its own, or reads the length of its
keys. Here such a model sees what it sees in mlx-lm: the tokens of one sequence, ``[1,
num_tokens]``, and caches that hand out all K/V before them. The K/V are written to blocks and
gathered from them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
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

# If a run has more tokens whose logits are not wanted, its last ones are computed in a pass of
# their own, as mlx-lm does: logits of 64 tokens and 150,000 tokens of vocabulary are 40 MB in
# float32.
MAX_UNWANTED_ROWS = 64
FLAT_KV_CACHES = (KVCache, ConcatenateKVCache, RotatingKVCache)


class PerSequenceModel(LanguageModel):
    """An unmodified model of mlx-lm, whose sequences run one after the other.

    Args:
        model: as mlx-lm loads it; its modules and weights stay as they are.
        config: its ``config.json``.

    Raises:
        UnsuitableModelError: it asks for caches that are not known here, or uses them in a way that
            blocks can't serve.
    """

    def __init__(self, model: Module, config: dict[str, Any]):
        super().__init__()
        self._plan = CacheLayout(make_prompt_cache(model))
        self._traced = trace(model, self._plan)
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
        # Those of K/V alone: the caller refuses caches of another kind.
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
        starts = step.cu_seqlens_q
        logits: list[mx.array] = []
        for seq, num_logits in enumerate(counts):
            new_tokens = tokens[starts[seq] : starts[seq + 1]]
            logits += self._run_sequence(new_tokens, layers, seq, num_logits)
        if not logits:
            row = mx.zeros((1, self._traced.vocab_size), self.dtype)
            written = [array for layer in layers for array in layer.arrays]
            done: mx.array = mx.depends(row, written)
            return done
        return logits[0] if len(logits) == 1 else mx.concatenate(logits)

    def _run_sequence(
        self,
        tokens: mx.array,  # [num_tokens]
        layers: Sequence[LayerKV],
        seq: int,
        num_logits: int,
    ) -> list[mx.array]:
        """The logits of the last ``num_logits`` tokens: pieces ``[n, vocab_size]``."""
        first_wanted = tokens.size - num_logits
        cuts = [tokens.size]
        num_unwanted = first_wanted if num_logits else 0
        if num_unwanted > MAX_UNWANTED_ROWS and not self._traced.keeps_wanted_rows:
            cuts.insert(0, first_wanted)
        begin = 0
        logits: list[mx.array] = []
        for end in cuts:
            wanted = max(0, end - max(begin, first_wanted))
            rows = self._run(_Part(tokens[begin:end], layers, seq, begin), wanted)
            logits += [rows] if wanted else []
            begin = end
        return logits

    def _run(self, part: _Part, num_logits: int) -> mx.array:
        """One call of the model: logits of the last tokens."""
        caches = self._plan.open(*part.exchanges(self._plan, self._traced.specs))
        rows = mx.arange(part.tokens.size - num_logits, part.tokens.size)
        with rows_wanted(rows if self._traced.keeps_wanted_rows and num_logits else None, 1):
            logits: mx.array = self["inner"](part.tokens[None], cache=caches)
        logits = logits[0, logits.shape[1] - num_logits :]
        del caches  # They hold what was gathered, which may be views of slabs.
        if not part.layers[0].writes_in_place:
            # Before the next rows are written: while what was gathered is not used, a write would
            # copy the slab.
            mx.eval(
                logits if num_logits else (),
                [array for layer in part.layers for array in layer.arrays],
            )
        return logits


@dataclass(frozen=True)
class _Part:
    """New tokens of a sequence of the open step, from its ``begin``-th new token on."""

    tokens: mx.array
    layers: Sequence[LayerKV]
    seq: int
    begin: int

    def exchanges(
        self, plan: CacheLayout, specs: Sequence[LayerSpec | None]
    ) -> tuple[list[Exchange], list[int]]:
        """What the K/V entries read and write, and their positions."""
        layers = iter(self.layers)
        runs: dict[AttentionMetadata, AttentionMetadata] = {}
        exchanges: list[Exchange] = []
        positions = []
        for entry, spec in zip(plan.entries, specs, strict=True):
            if spec is None:
                exchanges.append(_refuse)
                positions.append(self._run_in(runs, self.layers[0]).first_position)
                continue
            layer = next(layers)
            run = self._run_in(runs, layer)
            exchanges.append(partial(_exchange, layer, run, entry.num_before))
            positions.append(run.first_position)
        return exchanges, positions

    def _run_in(
        self, runs: dict[AttentionMetadata, AttentionMetadata], layer: LayerKV
    ) -> AttentionMetadata:
        """The run in the step of a layer, which is the same for all layers of its group."""
        if layer.step not in runs:
            end = self.begin + self.tokens.size
            runs[layer.step] = layer.step.runs_of([self.seq], [self.begin], [end])
        return runs[layer.step]


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
