"""What the attention kernels must know of a step, in one int32 array, and how their threadgroups
are cut.

Records and fields are those that ``metal/paged_kv.h`` names ``PLAN_``, ``SEQ_``, ``WORK_`` and
``ROW_``.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import repeat
from operator import add, mul

import mlx.core as mx

from mlx_paged.ops.metadata import AttentionMetadata

# The constants of the same names in metal/paged_kv.h.
SIMD_SIZE = 32
PARTITION_SIZE = 256
MERGE_STREAMS = 8

NO_WINDOW = 2**31 - 1
NUM_HEAD_FIELDS = 8

# Query rows of a simdgroup: four fill the registers of a lane of an Apple GPU, five would spill.
MAX_SIMDGROUP_ROWS = 4
# Of a threadgroup. Several small ones share a core, so that one loads while another one combines.
SIMDGROUPS = 4


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """One step, or the part of it that one dispatch computes."""

    array: mx.array  # int32
    num_partitions: int  # over all sequences: threadgroups per KV head
    num_partial_rows: int  # 0 when each sequence has one partition and nothing has to be merged

    @classmethod
    def of(cls, step: AttentionMetadata, window: int | None, has_rows: bool) -> AttentionPlan:
        """The plan of ``step``, packed for its first layer."""
        return step.derived((cls, window, has_rows), lambda: cls.pack(step, window, has_rows))

    @classmethod
    def pack(cls, step: AttentionMetadata, window: int | None, has_rows: bool) -> AttentionPlan:
        """Cut each sequence at multiples of ``PARTITION_SIZE``; partitions that no query sees are
        left out.

        Args:
            has_rows: whether K/V of the new tokens come from the inputs rather than from the slabs.
        """
        window = NO_WINDOW if window is None else min(window, NO_WINDOW)
        context_lens, query_lens, tables = step.context_lens, step.query_lens, step.block_tables
        last = [(context_len - 1) // PARTITION_SIZE for context_len in context_lens]
        first = [0] * step.num_seqs
        if window < NO_WINDOW:
            first = [
                max(0, context_len - query_len - window + 1) // PARTITION_SIZE
                for context_len, query_len in zip(context_lens, query_lens, strict=True)
            ]

        work_records, row_records, num_partial_rows = _pack_partitions(
            tuple(first), tuple(last), tuple(query_lens)
        )

        # The records follow the head: 4 numbers per sequence, 3 per partition, 3 per merged row.
        work_begin = NUM_HEAD_FIELDS + 4 * step.num_seqs
        rows_begin = work_begin + len(work_records)
        table_begins = list(
            itertools.accumulate(map(len, tables), initial=rows_begin + len(row_records))
        )[:-1]
        seq_records = _interleave(context_lens, query_lens, step.cu_seqlens_q[:-1], table_begins)
        head = array("i", [NUM_HEAD_FIELDS, work_begin, rows_begin, window, int(has_rows), 0, 0, 0])
        packed = b"".join((head, seq_records, work_records, row_records, *tables))
        records = memoryview(packed).cast("i")
        plan = mx.array(records)  # type: ignore[arg-type]  # not in MLX's stub: buffers
        return cls(plan, len(work_records) // 3, num_partial_rows)


@lru_cache(maxsize=16)
def _pack_partitions(
    first: tuple[int, ...], last: tuple[int, ...], query_lens: tuple[int, ...]
) -> tuple[array[int], array[int], int]:
    """Records of the partitions and of the rows to merge, and the number of partial rows.

    Kept, as many decode steps share them: a sequence takes another partition only after
    ``PARTITION_SIZE`` tokens.

    Args:
        first, last: partition of each sequence.
    """
    # One column per field, of chained ranges and without a loop.
    chained = itertools.chain.from_iterable
    if first == last:
        first_rows = itertools.accumulate(query_lens[:-1], initial=0)
        return _interleave(range(len(first)), first, first_rows), array("i"), 0
    num_partitions = [end + 1 - begin for begin, end in zip(first, last, strict=True)]
    out_begins = list(itertools.accumulate(map(mul, num_partitions, query_lens), initial=0))
    num_partial_rows = out_begins.pop()
    work = _interleave(
        chained(map(repeat, range(len(first)), num_partitions)),
        chained(map(range, first, [end + 1 for end in last])),
        chained(map(range, out_begins, [*out_begins[1:], num_partial_rows], query_lens)),
    )
    rows = _interleave(
        chained(map(range, out_begins, map(add, out_begins, query_lens))),
        chained(map(repeat, query_lens, query_lens)),
        chained(map(repeat, num_partitions, query_lens)),
    )
    return work, rows, num_partial_rows


def _interleave(*columns: Iterable[int]) -> array[int]:
    """Records one after another, each with one field of every column."""
    fields = [array("i", list(column)) for column in columns]
    records = array("i", bytes(4 * len(fields) * len(fields[0])))
    for index, field in enumerate(fields):
        records[index :: len(fields)] = field
    return records


@dataclass(frozen=True)
class Cut:
    """How simdgroups divide the keys of a partition and the query rows of a KV head."""

    streams: int  # simdgroups of a threadgroup that walk different keys
    row_splits: int  # simdgroups of a threadgroup that walk the same keys for different rows
    row_parts: int  # threadgroups that do

    @property
    def num_threads(self) -> int:
        """Of a threadgroup."""
        return SIMD_SIZE * self.streams * self.row_splits


@cache
def cut_rows(num_rows: int) -> Cut:
    """The cut for ``num_rows`` query rows (group size times query tokens) per KV head: no
    simdgroup has more than ``MAX_SIMDGROUP_ROWS``, and what is left of ``SIMDGROUPS`` walks other
    keys.
    """
    splits = -(-num_rows // MAX_SIMDGROUP_ROWS)
    row_parts = -(-splits // SIMDGROUPS)
    row_splits = -(-splits // row_parts)
    return Cut(SIMDGROUPS // row_splits, row_splits, row_parts)
