"""``DenseModel``: a model of mlx-lm that runs one sequence at a time, with its own attention.

Some models can't run packed: their attention adds a bias of its own, reads the length of its keys,
or has recurrent layers, whose state is that of one sequence. Here such a model sees what it sees in
mlx-lm: the tokens of one sequence, ``[1, num_tokens]``, and caches that hand out all K/V before
them. The K/V are written to blocks and gathered from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from mlx_paged.cache import KVFormat, LayerKV, LayerSpec
from mlx_paged.models.language_model import LanguageModel, ModelArgs
from mlx_paged.models.mlx_lm.dense_caches import CachePlan, Exchange, Rows, StateArrays
from mlx_paged.ops import AttentionMetadata, StepState

# Of a run of more tokens whose logits nobody wants, these are computed in a pass of their own, as
# mlx-lm does: logits of 64 tokens and 150,000 tokens of vocabulary are 40 MB in float32.
MAX_UNWANTED_ROWS = 64
# Long enough for a recurrent layer to have all of its state: convolutions see up to 4 tokens.
NUM_TRACED_TOKENS = 16
# Blocks count tokens, also where a model keeps no K/V: the narrowest rows that kernels take.
TOKENS_ALONE = 32


@dataclass(frozen=True)
class Traced:
    """What one call of a model shows of it.

    Attributes:
        specs: of the K/V entries; ``None`` for one that the model left alone.
        state_nbytes: of all recurrent layers, for one sequence.
        vocab_size: of its logits.
        dtype: of its logits.
    """

    specs: tuple[LayerSpec | None, ...]
    state_nbytes: int
    vocab_size: int
    dtype: mx.Dtype


class DenseModel(LanguageModel):
    """An unmodified model of mlx-lm, whose sequences run one after the other.

    Args:
        model: as ``mlx_lm.load`` returns it.
        args: what the engine reads of its configuration.

    Raises:
        ValueError: it asks for caches that are not known here, or uses them in a way that blocks
            can't serve; the message says which, and begins with the model's type.
    """

    def __init__(self, model: Module, args: ModelArgs):
        super().__init__()
        self.args = args
        self.model = model
        self.model_type = str(getattr(model, "model_type", type(model).__module__))
        try:
            self._plan = CachePlan(make_prompt_cache(model))
            self._traced = _trace(model, self._plan)
        except ValueError as error:
            raise ValueError(f"[{self.model_type}] {error}") from error

    @property
    def dtype(self) -> mx.Dtype:
        return self._traced.dtype

    @property
    def layer_specs(self) -> list[LayerSpec]:
        specs = [spec for spec in self._traced.specs if spec is not None]
        narrow = LayerSpec(1, TOKENS_ALONE, TOKENS_ALONE, format=KVFormat.dense(self.dtype))
        return specs or [narrow]

    @property
    def runs_packed(self) -> bool:
        return False

    @property
    def state_nbytes(self) -> int:
        return self._traced.state_nbytes

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
            state = StepState(None) if step.states is None else step.states[seq]
            logits += self._run_sequence(new_tokens, layers, seq, num_logits, state)
        if not logits:
            row = mx.zeros((1, self._traced.vocab_size), self.dtype)
            return mx.depends(row, [array for layer in layers for array in layer.arrays])
        return logits[0] if len(logits) == 1 else mx.concatenate(logits)

    def _run_sequence(
        self,
        tokens: mx.array,  # [num_tokens]
        layers: Sequence[LayerKV],
        seq: int,
        num_logits: int,
        step_state: StepState,
    ) -> list[mx.array]:
        """The logits of the last ``num_logits`` tokens: pieces ``[n, vocab_size]``."""
        first_wanted = tokens.size - num_logits
        num_first = step_state.num_first
        cuts = {num_first, tokens.size}
        begin_of_last = num_first if num_first <= first_wanted else 0
        if num_logits and first_wanted - begin_of_last > MAX_UNWANTED_ROWS:
            cuts.add(first_wanted)
        begin, state = 0, step_state.before
        logits: list[mx.array] = []
        for end in sorted(cuts - {0}):
            part = _Part(tokens[begin:end], layers, seq, begin)
            wanted = max(0, end - max(begin, first_wanted))
            rows, state = self._run(part, state, wanted)
            logits += [rows] if wanted else []
            if end == num_first:
                step_state.behind_first = state
            begin = end
        step_state.after = state
        return logits

    def _run(
        self, part: _Part, state: StateArrays | None, num_logits: int
    ) -> tuple[mx.array, StateArrays]:
        """One call of the model: logits of the last tokens, and the state behind them."""
        caches = self._plan.open(*part.exchanges(self._plan, self._traced.specs), state)
        logits: mx.array = self.model(part.tokens[None], cache=caches)
        logits = logits[0, logits.shape[1] - num_logits :]
        state = self._plan.state_of(caches)
        del caches  # They hold what was gathered, which may be views of slabs.
        if part.layers[0].writes_in_place:
            mx.async_eval(state)
        else:
            # Before the next rows are written: while what was gathered is not used, a write would
            # copy the slab.
            wanted = logits if num_logits else []
            mx.eval(wanted, state, [array for layer in part.layers for array in layer.arrays])
        return logits, state


@dataclass(frozen=True)
class _Part:
    """New tokens of a sequence of the open step, from its ``begin``-th new token on."""

    tokens: mx.array
    layers: Sequence[LayerKV]
    seq: int
    begin: int

    def exchanges(
        self, plan: CachePlan, specs: Sequence[LayerSpec | None]
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
            runs[layer.step] = layer.step.run_of(self.seq, self.begin, end)
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
    raise RuntimeError("[dense] a layer writes K/V that wrote none when the model was loaded")


def _trace(model: Module, plan: CachePlan) -> Traced:
    """Build the graph of one call, which is never evaluated, and look at its shapes."""
    shapes: list[list[Rows]] = [[] for _ in plan.entries]

    def note(entry: int, keys: mx.array, values: mx.array) -> Rows:
        shapes[entry].append((keys, values))
        return keys, values

    exchanges = [partial(note, entry) for entry in range(len(shapes))]
    caches = plan.open(exchanges, [0] * len(shapes), None)
    logits = model(mx.zeros((1, NUM_TRACED_TOKENS), dtype=mx.int32), cache=caches)
    specs = []
    for entry, noted in zip(plan.entries, shapes, strict=True):
        if len(noted) > 1:
            raise ValueError("a layer writes its K/V more than once in a call")
        specs.append(_spec(*noted[0], entry.window) if noted else None)
    return Traced(
        tuple(specs),
        sum(array.nbytes for array in _arrays(plan.state_of(caches))),
        logits.shape[-1],
        logits.dtype,
    )


def _spec(keys: mx.array, values: mx.array, window: int | None) -> LayerSpec:
    if keys.ndim != 4 or values.shape[:3] != keys.shape[:3]:
        raise ValueError(f"a layer has K of shape {keys.shape} and V of shape {values.shape}")
    # Where they differ, the one that holds both.
    dtype = (mx.zeros(1, keys.dtype) + mx.zeros(1, values.dtype)).dtype
    # An indexer may keep keys alone; a slab has rows of V all the same.
    value_dim = values.shape[3] or keys.shape[3]
    return LayerSpec(keys.shape[1], keys.shape[3], value_dim, window, KVFormat.dense(dtype))


def _arrays(state: Any) -> Iterator[mx.array]:
    return (array for layer in state for array in layer if array is not None)
