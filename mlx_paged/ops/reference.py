"""The operations in plain MLX, for any device: the formula that every kernel is held against, and the CPU's backend.

Slot writes are *donated scatters*: MLX writes a slab in place as long as nobody else holds it, at the cost of the rows
alone. So evaluate a step before the next one is built, and keep no view of a slab across a write.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property

import mlx.core as mx
import numpy as np

from mlx_paged.ops.kv_handle import KVHandle
from mlx_paged.ops.metadata import AttentionMetadata, SlotMapping

# Runs of adjacent blocks are read as views of the slab, one matmul each; where the mean run has fewer bytes of K than
# this, one gather of all blocks is cheaper. On a 2-core x86 CPU a view costs about 40 us in all, a gather 0.3 ns/byte.
MIN_VIEW_BYTES = 128 * 1024
# K of the sequences that are attended to together. Larger parts leave the CPU's cache, and their temporaries are fresh
# pages each time; smaller ones are many small operations. Measured: benchmarks/attention.py.
MAX_PART_BYTES = 1024 * 1024


def reshape_and_cache(k: mx.array, v: mx.array, kv: KVHandle, slot_mapping: SlotMapping) -> None:
    if slot_mapping.only_slot is not None:
        # A slice update costs a third of a scatter of one row.
        block_id, offset = slot_mapping.only_slot
        kv.k[block_id : block_id + 1, :, offset : offset + 1] = k[:, :, None]
        kv.v[block_id : block_id + 1, :, offset : offset + 1] = v[:, :, None]
        return
    if slot_mapping.rows is not None:
        k, v = k[slot_mapping.rows], v[slot_mapping.rows]
    if k.shape[0] == 0:
        return
    kv.k[slot_mapping.block_ids, :, slot_mapping.offsets] = k
    kv.v[slot_mapping.block_ids, :, slot_mapping.offsets] = v


def paged_attention(
    q: mx.array,
    kv: KVHandle,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Block-parallel, a few sequences at a time: their K is what a CPU's cache holds, and temporaries are as small.

    What lies behind the end of a sequence in its last block gets a weight of 0, and has to be finite for that.
    """
    block_nbytes = kv.k.nbytes // kv.num_blocks
    parts = metadata.plan(("parts by bytes", block_nbytes), lambda: _parts_by_bytes(metadata, block_nbytes))
    outputs = [_attend_block_parallel(q[rows], kv, part, scale, window, sinks) for part, rows in parts]
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def _attend_block_parallel(
    q: mx.array,
    kv: KVHandle,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
) -> mx.array:
    """One matmul for the scores of all (query token, block) pairs, a segment softmax, one matmul with the values."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv.num_kv_heads
    group = num_heads // num_kv_heads
    pairs = metadata.plan(("block_pairs", window), lambda: _BlockPairs(metadata, window))

    # Scores [num_pairs, num_kv_heads, group, block_size]: each block against the query that reads it.
    queries = (q * scale).astype(kv.dtype).reshape(num_tokens, num_kv_heads, group, head_dim)
    scores = pairs.matmul(pairs.spread(queries), kv.k, transpose=True).astype(mx.float32) + pairs.bias

    # Softmax of each query token over all of its blocks, unnormalised until the values are summed, too.
    highest = pairs.segment_max(scores)
    if sinks is not None:
        sink_logits = sinks.astype(mx.float32).reshape(1, num_kv_heads, group, 1)
        highest = mx.maximum(highest, sink_logits)
    weights = mx.exp(scores - pairs.spread(highest))
    denominator = pairs.segment_sum(weights.sum(axis=-1, keepdims=True))
    if sinks is not None:
        denominator = denominator + mx.exp(sink_logits - highest)

    values = pairs.matmul(weights.astype(kv.dtype), kv.v, transpose=False).astype(mx.float32)
    out = pairs.segment_sum(values) / denominator
    return out.reshape(num_tokens, num_heads, head_dim).astype(q.dtype)


def _parts_by_bytes(metadata: AttentionMetadata, block_nbytes: int) -> list[tuple[AttentionMetadata, slice]]:
    """The step in runs of sequences with at most ``MAX_PART_BYTES`` of K each, or a single sequence with more."""
    parts = []
    begin, nbytes = 0, 0
    for seq, table in enumerate(metadata.block_tables):
        if seq > begin and nbytes + len(table) * block_nbytes > MAX_PART_BYTES:
            parts.append(metadata.select_run(begin, seq))
            begin, nbytes = seq, 0
        nbytes += len(table) * block_nbytes
    return [*parts, metadata.select_run(begin, metadata.num_seqs)]


def paged_prefill_attention(
    q: mx.array,
    kv: KVHandle,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    return _prefill(q, None, kv, metadata, scale, window, sinks)


def _prefill(
    q: mx.array,
    rows: tuple[mx.array, mx.array] | None,
    kv: KVHandle,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
) -> mx.array:
    starts = metadata.cu_seqlens_q

    def dense(seq: int) -> tuple[mx.array, mx.array]:
        if rows is not None and metadata.context_lens[seq] == metadata.query_lens[seq]:
            # Nothing but new tokens: their rows are all there is to see.
            k, v = (array[starts[seq] : starts[seq + 1]].swapaxes(0, 1).astype(kv.dtype) for array in rows)
            return k, v
        return gather_blocks(kv, metadata.block_tables[seq], metadata.context_lens[seq])

    return attend_densely(q, dense, kv.dtype, metadata, scale, window, sinks)


def attend(
    q: mx.array,
    kv: KVHandle,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    def attend_part(part: AttentionMetadata, part_q: mx.array) -> mx.array:
        operation = paged_attention if is_decode(part.max_query_len) else paged_prefill_attention
        return operation(part_q, kv, part, scale, window, sinks)

    return metadata.map_parts(is_decode, attend_part, q)


def update_and_attend(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    kv: KVHandle,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    reshape_and_cache(k, v, kv, metadata.slot_mapping)

    def attend_part(part: AttentionMetadata, part_q: mx.array, *rows: mx.array) -> mx.array:
        if is_decode(part.max_query_len):
            return paged_attention(part_q, kv, part, scale, window, sinks)
        return _prefill(part_q, rows, kv, part, scale, window, sinks)

    return metadata.map_parts(is_decode, attend_part, q, k, v)


def is_decode(query_len: int) -> bool:
    """Block-parallel, which reads each block once per query token, or gathered for MLX's SDPA, once per run.

    Measured on a 2-core CPU (benchmarks/results/attention-cpu.json and attention-runs-cpu.json): runs of 2 to 8 take
    1.1 to 8 times as long block-parallel. Single tokens are faster so, by 1.2 to 5 times, but for batches of 4 with 8
    query heads per KV head up to 1,024 tokens (1.3 times as long), and single sequences of 16 tokens.
    """
    return query_len == 1


def attend_densely(
    q: mx.array,  # [num_tokens, num_heads, head_dim]
    dense: Callable[[int], tuple[mx.array, mx.array]],
    dtype: mx.Dtype,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
) -> mx.array:
    """Per sequence: its keys and values, then MLX's own SDPA, causal within the query run.

    Args:
        dense: the K and V of a sequence, ``[num_kv_heads, context_len, head_dim]`` each, in ``dtype``.
    """
    outputs = []
    starts = metadata.cu_seqlens_q
    for seq in range(metadata.num_seqs):
        context_len, query_len = metadata.context_lens[seq], metadata.query_lens[seq]
        keys, values = dense(seq)
        queries = q[starts[seq] : starts[seq + 1]].swapaxes(0, 1)[None]
        out = mx.fast.scaled_dot_product_attention(
            queries.astype(dtype),
            keys[None],
            values[None],
            scale=scale,
            mask=_causal_mask(query_len, context_len, window),
            sinks=None if sinks is None else sinks.astype(dtype),
        )
        outputs.append(out[0].swapaxes(0, 1))
    return (outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)).astype(q.dtype)


def gather_blocks(kv: KVHandle, block_table: list[int], num_tokens: int) -> tuple[mx.array, mx.array]:
    first = block_table[0]
    ids = slice(first, first + len(block_table)) if _is_run(block_table) else mx.array(block_table, dtype=mx.int32)

    def gather(slab: mx.array) -> mx.array:
        heads_first = slab[ids].swapaxes(0, 1).reshape(kv.num_kv_heads, -1, kv.head_dim)
        return heads_first[:, :num_tokens]

    return gather(kv.k), gather(kv.v)


def copy_blocks(kv: KVHandle, src_dst_pairs: Sequence[tuple[int, int]]) -> None:
    sources = mx.array([src for src, _ in src_dst_pairs])
    destinations = mx.array([dst for _, dst in src_dst_pairs])
    k_rows, v_rows = kv.k[sources], kv.v[sources]
    # The gather must be done before the scatter is built: while it holds the slab, the scatter would copy it whole.
    mx.eval(k_rows, v_rows)
    kv.k[destinations] = k_rows
    kv.v[destinations] = v_rows


def zero_blocks(kv: KVHandle, block_ids: Sequence[int]) -> None:
    ids = mx.array(block_ids, dtype=mx.int32)
    kv.k[ids] = 0
    kv.v[ids] = 0


def _causal_mask(query_len: int, context_len: int, window: int | None) -> mx.array | str:
    if window is None or context_len <= window:
        return "causal"
    query_positions = mx.arange(context_len - query_len, context_len)[:, None]
    key_positions = mx.arange(context_len)[None]
    return (key_positions <= query_positions) & (key_positions > query_positions - window)


class _BlockPairs:
    """All (query token, block) pairs of a step, and the segment operations that reduce them per query token.

    A pair is in when the block holds at least one key that the query may see. Pairs of one query token lie behind one
    another, in the order of its block table.
    """

    def __init__(self, metadata: AttentionMetadata, window: int | None):
        block_size = metadata.block_size
        block_ids: list[int] = []
        counts: list[int] = []
        hidden: list[tuple[int, slice]] = []  # pair, slots of its block that the query must not see
        for table, context_len, query_len in zip(
            metadata.block_tables, metadata.context_lens, metadata.query_lens, strict=True
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
        # 0 where the query sees the key, else -inf; adding is cheaper than choosing.
        bias = np.zeros((len(block_ids), 1, 1, block_size), dtype=np.float32)
        for pair, slots in hidden:
            bias[pair, 0, 0, slots] = -np.inf
        self.bias = mx.array(bias)
        self._num_tokens = len(counts)
        self._ends = list(itertools.accumulate(counts))
        self._tokens = mx.array(np.repeat(np.arange(len(counts), dtype=np.int32), counts)) if len(counts) > 1 else None
        self._block_ids = block_ids
        self._runs = _adjacent_runs(block_ids)

    @cached_property
    def _gather_ids(self) -> mx.array:
        return mx.array(self._block_ids, dtype=mx.int32)

    def matmul(self, rows: mx.array, slab: mx.array, transpose: bool) -> mx.array:
        """``rows @ block`` for every pair; ``rows`` is ``[num_pairs, num_kv_heads, group, n]``, or one row for all."""

        def product(part: mx.array, blocks: mx.array) -> mx.array:
            return part @ (blocks.swapaxes(-1, -2) if transpose else blocks)

        if len(self._runs) == 1:
            first, start, end = self._runs[0]
            return product(rows, slab[first : first + end - start])
        if len(self._block_ids) * (slab.nbytes // slab.shape[0]) < MIN_VIEW_BYTES * len(self._runs):
            return product(rows, slab[self._gather_ids])
        parts = [
            product(rows if rows.shape[0] == 1 else rows[start:end], slab[first : first + end - start])
            for first, start, end in self._runs
        ]
        return mx.concatenate(parts)

    def segment_max(self, values: mx.array) -> mx.array:
        """``[num_pairs, num_kv_heads, group, n]`` to the largest of each query token, ``[num_tokens, ..., 1]``."""
        if self._num_tokens == 1:
            return values.max(axis=(0, 3), keepdims=True)
        shape = (self._num_tokens, *values.shape[1:3], 1)
        return mx.full(shape, -mx.inf, dtype=mx.float32).at[self._tokens].maximum(values.max(axis=-1, keepdims=True))

    def segment_sum(self, values: mx.array) -> mx.array:
        """``[num_pairs, num_kv_heads, group, n]`` to the sum of each query token, ``[num_tokens, ..., n]``."""
        # Pairs of a token lie behind one another; sums of slices take a third of the time of a scatter.
        segments = mx.split(values, self._ends[:-1]) if self._num_tokens > 1 else [values]
        sums = [segment.sum(axis=0, keepdims=True) for segment in segments]
        return sums[0] if len(sums) == 1 else mx.concatenate(sums)

    def spread(self, per_token: mx.array) -> mx.array:
        """What each query token has, for each of its pairs; one token's broadcasts by itself."""
        return per_token if self._num_tokens == 1 else per_token[self._tokens]


def _is_run(block_ids: Sequence[int]) -> bool:
    return list(block_ids) == list(range(block_ids[0], block_ids[0] + len(block_ids)))


def _adjacent_runs(block_ids: list[int]) -> list[tuple[int, int, int]]:
    """``(first block id, first pair, end)`` of each run of adjacent ids."""
    if _is_run(block_ids):
        return [(block_ids[0], 0, len(block_ids))]
    breaks = [i for i, (a, b) in enumerate(itertools.pairwise(block_ids), 1) if b != a + 1]
    return [(block_ids[start], start, end) for start, end in itertools.pairwise([0, *breaks, len(block_ids)])]
