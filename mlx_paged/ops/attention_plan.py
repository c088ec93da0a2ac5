"""What the attention kernels must know of a step, in one int32 array, and how their threadgroups are cut.

Records and fields are those that ``metal/paged_kv.h`` names ``PLAN_``, ``SEQ_``, ``WORK_`` and ``ROW_``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from mlx_paged.ops.metadata import AttentionMetadata

# The constants of the same names in metal/paged_kv.h.
SIMD_SIZE = 32
PARTITION_SIZE = 256
CHUNK_SIZE = 8
MERGE_STREAMS = 8

NO_WINDOW = 2**31 - 1
NUM_HEAD_FIELDS = 8

# Floats of queries and accumulators that a lane should hold: half of its registers on Apple GPUs, where the keys and
# values on their way take the other half.
MAX_FLOATS_PER_LANE = 64
# Threadgroups of more threads are refused there for kernels that use all registers.
MAX_SIMDGROUPS = 8
MAX_THREADGROUP_BYTES = 32 * 1024


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """One step, or the part of it that one dispatch computes."""

    array: mx.array  # int32
    num_partitions: int  # over all sequences: threadgroups per KV head
    num_partial_rows: int  # 0 when each sequence has one partition and nothing has to be merged

    @classmethod
    def pack(cls, metadata: AttentionMetadata, window: int | None, has_rows: bool) -> AttentionPlan:
        """Cut each sequence at multiples of ``PARTITION_SIZE``; partitions that no query sees are left out.

        Args:
            has_rows: whether K/V of the new tokens come from the inputs rather than from the slabs.
        """
        window = NO_WINDOW if window is None else min(window, NO_WINDOW)
        cuts = []  # first and last partition of each sequence
        for context_len, query_len in zip(metadata.context_lens, metadata.query_lens, strict=True):
            first_visible = max(0, context_len - query_len - window + 1)
            cuts.append((first_visible // PARTITION_SIZE, (context_len - 1) // PARTITION_SIZE))
        is_merged = any(first != last for first, last in cuts)

        # The lists follow one another behind the head: of 4 numbers per sequence, 3 per partition, 3 per merged row.
        work_begin = NUM_HEAD_FIELDS + 4 * len(cuts)
        rows_begin = work_begin + 3 * sum(last + 1 - first for first, last in cuts)
        blocks_begin = rows_begin + (3 * metadata.num_tokens if is_merged else 0)
        seqs: list[int] = []
        work: list[int] = []
        rows: list[int] = []
        blocks: list[int] = []
        num_partial_rows = 0
        for seq, (first, last) in enumerate(cuts):
            query_len, first_row = metadata.query_lens[seq], metadata.cu_seqlens_q[seq]
            seqs += (metadata.context_lens[seq], query_len, first_row, blocks_begin + len(blocks))
            blocks += metadata.block_tables[seq]
            for partition in range(first, last + 1):
                out_row = num_partial_rows + (partition - first) * query_len if is_merged else first_row
                work += (seq, partition, out_row)
            if is_merged:
                for row in range(query_len):
                    rows += (num_partial_rows + row, query_len, last + 1 - first)
                num_partial_rows += (last + 1 - first) * query_len

        head = [NUM_HEAD_FIELDS, work_begin, rows_begin, window, int(has_rows), 0, 0, 0]
        return cls(mx.array(head + seqs + work + rows + blocks, dtype=mx.int32), len(work) // 3, num_partial_rows)


@dataclass(frozen=True)
class Cut:
    """How the simdgroups of a threadgroup divide the keys and the query rows."""

    streams: int  # chunks of keys in flight
    row_splits: int  # simdgroups that share the rows of a chunk, through threadgroup memory when there are several

    @property
    def num_threads(self) -> int:
        return SIMD_SIZE * self.streams * self.row_splits

    def threadgroup_bytes(self, num_rows: int, head_dim: int, itemsize: int) -> int:
        """Threadgroup memory of the kernel, but for a few bytes."""
        row_vectors = 32 * -(-head_dim // 128) if head_dim > 64 else head_dim // 4
        tiles = 2 * self.streams * CHUNK_SIZE * row_vectors * 4 * itemsize if self.row_splits > 1 else 0
        simdgroups = self.streams * self.row_splits if self.streams > 1 else 0
        return max(tiles, 2 * simdgroups * row_vectors * 16) + simdgroups * 2 * -(-num_rows // self.row_splits) * 4


@cache
def cut_threadgroup(num_rows: int, head_dim: int, itemsize: int) -> Cut:
    """The most streams that fit, for ``num_rows`` query rows (group size times query tokens) per KV head.

    Rows are split until a simdgroup's fit its registers. Beyond ``MAX_SIMDGROUPS`` splits (more than 64 rows, or 32 of
    head_dim 256) they spill, which costs time and is correct.
    """
    floats_per_row = 2 * 4 * -(-head_dim // 128)
    row_splits = 1
    while num_rows * floats_per_row > MAX_FLOATS_PER_LANE * row_splits and row_splits < MAX_SIMDGROUPS:
        row_splits *= 2
    streams = MAX_SIMDGROUPS // row_splits
    while Cut(streams, row_splits).threadgroup_bytes(num_rows, head_dim, itemsize) > MAX_THREADGROUP_BYTES - 64:
        streams //= 2
    return Cut(streams, row_splits)
