"""The backend of plain MLX, for any device: the reference that every kernel is tested against.

Slots are written by *donated scatters*: MLX writes a slab in place as long as there is no other
reference to it, and the cost depends on the rows alone. So evaluate a step before building the next
one, and keep no view of a slab across a write.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

import mlx.core as mx
import numpy as np

from mlx_paged.ops import checks
from mlx_paged.ops.attention_plan import PlanKey
from mlx_paged.ops.backend import Backend
from mlx_paged.ops.formats import BlockPairs, Parts
from mlx_paged.ops.kv_handle import KVHandle
from mlx_paged.ops.metadata import AttentionMetadata, AttentionParams, Rows, SlotMapping, StoredRows
from mlx_paged.ops.prefill import capped, prefill

# Block-parallel attention reads each block once per query token, gathered K/V are read once per
# run. Measured on a 2-core CPU (benchmarks/results/attention-cpu.json, attention-runs-cpu.json),
# block-parallel over gathered: single tokens 0.2 to 1.1, runs of 2 and 4 0.6 to 1.1, of 8 1.0 to
# 1.3, all in float32. In half precision a CPU copies each block once per query token, so only
# single tokens are decoded.
DECODE_RUNS = (1,)


class ReferenceBackend(Backend):
    """MLX's own operations. Each waits for earlier kernels on the same slabs first.

    Args:
        decode_runs: lengths up to which query runs are decoded block-parallel; for longer ones K
            and V are gathered.
    """

    name = "reference"
    reads_unused_slots = True  # decodes multiply whole blocks

    def __init__(self, decode_runs: tuple[int, ...] = DECODE_RUNS):
        self._decode_runs = decode_runs

    def reshape_and_cache(
        self, k: Parts, v: Parts, kv: KVHandle, slot_mapping: SlotMapping
    ) -> None:
        checks.check_slot_write("reshape_and_cache", k, v, kv, slot_mapping)
        kv.leave_chain()
        _write_rows(k, v, kv, slot_mapping)

    def update(self, k: mx.array, v: mx.array, kv: KVHandle, slot_mapping: SlotMapping) -> None:
        checks.check_rows("update", k, v, kv, slot_mapping)
        kv.leave_chain()
        _write_rows(*kv.format.encode(k, v), kv, slot_mapping)

    def update_and_attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        kv: KVHandle,
        step: AttentionMetadata,
        params: AttentionParams,
    ) -> mx.array:
        checks.check_rows("update_and_attend", k, v, kv, step.slot_mapping)
        checks.check_attention("update_and_attend", q, kv, step, params)
        kv.leave_chain()
        stored = kv.format.encode(k, v)
        _write_rows(*stored, kv, step.slot_mapping)
        return self._attend(q, stored, kv, step, params)

    def attend(
        self, q: mx.array, kv: KVHandle, step: AttentionMetadata, params: AttentionParams
    ) -> mx.array:
        checks.check_attention("attend", q, kv, step, params)
        kv.leave_chain()
        return self._attend(q, None, kv, step, params)

    def _attend(
        self,
        q: mx.array,
        stored: StoredRows | None,  # rows of the step's tokens, also in the slabs
        kv: KVHandle,
        step: AttentionMetadata,
        params: AttentionParams,
    ) -> mx.array:
        q = kv.format.rotated(q)
        # Latents are multiplied where they are gathered.
        parts, row_order = step.parts(() if params.holds_latents else self._decode_runs)
        rows = None
        if stored is not None and any(part.capacity == 0 for part in parts):
            rows = kv.format.decode(*stored)
        outputs = []
        for step_part in parts:
            run, part, _ = step_part
            part_q, part_rows = step_part.take(q, rows)
            if run:
                outputs.append(_decode(part_q, kv, part, params))
            else:
                outputs.append(prefill(part_q, part_rows, kv, part, params, _gather_all))
        return outputs[0] if row_order is None else mx.concatenate(outputs)[row_order]

    def gather_blocks(self, kv: KVHandle, block_table: Sequence[int], num_tokens: int) -> Rows:
        table = checks.check_block_table("gather_blocks", block_table, num_tokens, kv)
        kv.leave_chain()
        return kv.format.decode(*_gather(kv, table, num_tokens))

    def gather_step(self, kv: KVHandle, step: AttentionMetadata) -> list[Rows]:
        checks.check_step("gather_step", kv, step)
        kv.leave_chain()
        return _gather_all(kv, step)

    def gather_parts(self, kv: KVHandle, block_table: Sequence[int], num_tokens: int) -> StoredRows:
        table = checks.check_block_table("gather_parts", block_table, num_tokens, kv)
        kv.leave_chain()
        return _gather(kv, table, num_tokens)

    def copy_blocks(self, kv: KVHandle, src_dst_pairs: Sequence[tuple[int, int]]) -> None:
        checks.check_copy_pairs("copy_blocks", src_dst_pairs, kv)
        if not src_dst_pairs:
            return
        kv.leave_chain()
        sources, destinations = mx.array(list(zip(*src_dst_pairs, strict=True)), dtype=mx.int32)
        blocks = [slab[sources] for slab in kv.slabs]
        # Evaluate the gather before the scatter is built: while it references the slab, the scatter
        # would copy it whole.
        mx.eval(blocks)
        for slab, copied in zip(kv.slabs, blocks, strict=True):
            slab[destinations] = copied

    def write_blocks(self, kv: KVHandle, block_ids: Sequence[int], k: Parts, v: Parts) -> None:
        checks.check_block_write("write_blocks", block_ids, k, v, kv)
        kv.leave_chain()
        runs = list(_runs_of(block_ids))
        # Slice by slice takes a sixth to a tenth of the time of a scatter.
        for slab, blocks in zip(kv.slabs, k + v, strict=True):
            for start, end in runs:
                first = block_ids[start]
                slab[first : first + end - start] = blocks[start:end]

    def zero_blocks(self, kv: KVHandle, block_ids: Sequence[int]) -> None:
        checks.check_block_ids("zero_blocks", "block_ids", block_ids, kv)
        kv.leave_chain()
        ids = mx.array(list(block_ids), dtype=mx.int32)
        for slab in kv.slabs:
            slab[ids] = 0

    def decode_plans(self, step: AttentionMetadata, keys: Collection[PlanKey]) -> None:
        return None


def _runs_of(block_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The begin and end of each run of adjacent ids."""
    start = 0
    for end in range(1, len(block_ids) + 1):
        if end == len(block_ids) or block_ids[end] != block_ids[end - 1] + 1:
            yield start, end
            start = end


def _write_rows(k: Parts, v: Parts, kv: KVHandle, slot_mapping: SlotMapping) -> None:
    if slot_mapping.only_slot is not None:
        # A slice update costs a third of a scatter of one row.
        block_id, offset = slot_mapping.only_slot
        for slab, rows in zip(kv.slabs, k + v, strict=True):
            slab[block_id : block_id + 1, :, offset : offset + 1] = rows[:, :, None]
        return
    live_rows, places = slot_mapping.live_rows, slot_mapping.places(kv.num_kv_heads)
    if places[0].size > 0:
        for slab, rows in zip(kv.slabs, k + v, strict=True):
            slab[places] = rows if live_rows is None else rows[live_rows]


def _decode(
    q: mx.array, kv: KVHandle, step: AttentionMetadata, params: AttentionParams
) -> mx.array:
    """Block-parallel: one matmul per step for the scores of all (query token, block) pairs, a
    segment softmax, one matmul with the values.

    Slots past the end of a sequence in its last block get a weight of 0, and must be finite.
    """
    num_tokens, num_heads, key_dim = q.shape
    num_kv_heads = kv.num_kv_heads
    group = num_heads // num_kv_heads
    pairs = step.derived(
        (_PairsOfStep, params.window, num_kv_heads),
        lambda: _PairsOfStep(step, params.window, num_kv_heads),
    )

    # Scores of each block for the query that reads it, [num_pairs, num_kv_heads, group, block_size]
    queries = (q * params.scale).reshape(num_tokens, num_kv_heads, group, key_dim)
    scores = kv.format.key.multiply_blocks(queries, kv.k, pairs.of_tokens, True)
    # -inf where a query must not see a key.
    scores = capped(scores, params.softcap) + pairs.bias

    # Softmax of each query token over all of its blocks, normalised after the values are summed.
    highest = pairs.segment_max(scores)
    sink_logits: mx.array | None = None
    if params.sinks is not None:
        sink_logits = params.sinks.astype(mx.float32).reshape(1, num_kv_heads, group, 1)
        highest = mx.maximum(highest, sink_logits)
    weights = mx.exp(scores - pairs.spread(highest))
    denominator = pairs.segment_sum(weights.sum(axis=-1, keepdims=True))
    if sink_logits is not None:
        denominator = denominator + mx.exp(sink_logits - highest)

    values = kv.format.value.multiply_blocks(weights, kv.v, pairs.of_pairs, False)
    out = pairs.segment_sum(values) / denominator
    return out.reshape(num_tokens, num_heads, kv.value_dim).astype(q.dtype)


def _gather_all(kv: KVHandle, step: AttentionMetadata) -> list[Rows]:
    tables = zip(step.block_tables, step.context_lens, strict=True)
    decode = kv.format.decode
    return [decode(*_gather(kv, list(table), context_len)) for table, context_len in tables]


def _gather(kv: KVHandle, block_table: list[int], num_tokens: int) -> StoredRows:
    first, num_blocks = block_table[0], len(block_table)
    # Gather heads first, [num_kv_heads, num_blocks]: whole blocks would have to be transposed by
    # another copy.
    ids = None
    if block_table != list(range(first, first + num_blocks)):
        heads = mx.arange(kv.num_kv_heads)[:, None]
        ids = heads + mx.array(block_table, dtype=mx.int32) * kv.num_kv_heads

    def gather(slab: mx.array) -> mx.array:
        run = slab[first : first + num_blocks].swapaxes(0, 1)
        heads_first = run if ids is None else slab.flatten(0, 1)[ids]
        return heads_first.reshape(kv.num_kv_heads, -1, slab.shape[3])[:, :num_tokens]

    return tuple(map(gather, kv.k)), tuple(map(gather, kv.v))


class _PairsOfStep:
    """All (query token, block) pairs of a step, and the segment operations that reduce them per
    query token.

    There is a pair for each block with at least one key that the query sees. Pairs of one query
    token are adjacent, in the order of its block table.
    """

    def __init__(self, step: AttentionMetadata, window: int | None, num_kv_heads: int):
        block_size = step.block_size
        block_ids: list[int] = []
        counts: list[int] = []
        hidden: list[tuple[int, slice]] = []  # pair, slots of its block that the query must not see
        for table, context_len, query_len in zip(
            step.block_tables, step.context_lens, step.query_lens, strict=True
        ):
            for position in range(context_len - query_len, context_len):
                first_visible = 0 if window is None else max(0, position - window + 1)
                first, hidden_before = divmod(first_visible, block_size)
                last, last_offset = divmod(position, block_size)
                if hidden_before:
                    hidden.append((len(block_ids), slice(0, hidden_before)))
                block_ids += table[first : last + 1]
                counts.append(last + 1 - first)
                if last_offset + 1 < block_size:
                    hidden.append((len(block_ids) - 1, slice(last_offset + 1, None)))
        # 0 where the query sees the key, else -inf; an addition is cheaper than mx.where.
        bias = np.zeros((len(block_ids), 1, 1, block_size), dtype=np.float32)
        for pair, slots in hidden:
            bias[pair, 0, 0, slots] = -np.inf
        self.bias = mx.array(bias)
        self._num_tokens = len(counts)
        self._ends = list(itertools.accumulate(counts))
        # Unsigned: mx.gather_mm would convert them in each call.
        tokens = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)
        self._tokens = mx.array(tokens)  # [num_pairs]
        num_pairs = len(block_ids)

        def by_head(ids: np.ndarray) -> mx.array:
            return mx.array(ids[:, None] * num_kv_heads + np.arange(num_kv_heads, dtype=np.uint32))

        row_ids = None if self._num_tokens == 1 else self._tokens
        blocks = np.array(block_ids, dtype=np.uint32)
        block_matrices = by_head(blocks)
        # For rows per query token, and for rows per pair.
        self.of_tokens = BlockPairs(row_ids, mx.array(blocks), by_head(tokens), block_matrices)
        each = by_head(np.arange(num_pairs, dtype=np.uint32))
        self.of_pairs = BlockPairs(None, self.of_tokens.block_ids, each, block_matrices)

    def segment_max(self, values: mx.array) -> mx.array:
        """The maximum per query token, from ``[num_pairs, num_kv_heads, group, n]`` to
        ``[num_tokens, num_kv_heads, group, 1]``.
        """
        if self._num_tokens == 1:
            return values.max(axis=(0, 3), keepdims=True)
        shape = (self._num_tokens, *values.shape[1:3], 1)
        return (
            mx.full(shape, -mx.inf, dtype=mx.float32)
            .at[self._tokens]
            .maximum(values.max(axis=-1, keepdims=True))
        )

    def segment_sum(self, values: mx.array) -> mx.array:
        """The sum per query token, from ``[num_pairs, num_kv_heads, group, n]`` to
        ``[num_tokens, num_kv_heads, group, n]``.
        """
        if self._num_tokens == 1:
            return values.sum(axis=0, keepdims=True)
        if values.shape[-1] == 1:
            return (
                mx.zeros((self._num_tokens, *values.shape[1:]), dtype=mx.float32)
                .at[self._tokens]
                .add(values)
            )
        # Pairs of a token are adjacent, and sums of slices take a third of the time of a scatter.
        segments = mx.split(values, self._ends[:-1])
        return mx.concatenate([segment.sum(axis=0, keepdims=True) for segment in segments])

    def spread(self, per_token: mx.array) -> mx.array:
        """Values per query token repeated for each of its pairs; those of one token broadcast."""
        return per_token if self._num_tokens == 1 else per_token[self._tokens]
