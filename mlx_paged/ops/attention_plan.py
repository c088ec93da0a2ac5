"""``AttentionPlan``: a step as the attention kernels read it, in one int32 array, and how sequences
and query rows are divided among threadgroups.

Records and fields are named ``PLAN_``, ``WORK_`` and ``ROW_`` in ``metal/paged_kv.h``.
"""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_paged.ops.kv_handle import KVHandle
from mlx_paged.ops.metadata import AttentionMetadata, rounded_up

# The constants of the same names in metal/paged_kv.h.
SIMDGROUP_LANES = 32
MERGE_STREAMS = 8
PLAN_HAS_ROWS, PLAN_WORK = 2, 8
WORK_BEGIN, WORK_END, WORK_CONTEXT_LEN, WORK_QUERY_LEN = 0, 1, 2, 3
WORK_FIRST_ROW, WORK_FIRST_OUT_ROW, WORK_BLOCKS = 4, 5, 6
WORK_FIELDS = 7

NO_WINDOW = 2**31 - 1

# A sequence of SHORT_CONTEXT tokens is cut into at least MIN_THREADGROUPS, so that it alone uses
# all cores. A partition leaves head_dim + 4 floats per query row; for the largest partition that is
# one percent of its K/V. Merging pays if the keys taken off a threadgroup would take it longer than
# a launch: from WHOLE_BELOW keys on, at 16 cycles a key (head_dim 128, four heads, by Mesa's
# compiler) and 3 us a launch, both not measured on a Mac.
MIN_THREADGROUPS = 64
SHORT_CONTEXT = 1024
MIN_PARTITION_SIZE, MAX_PARTITION_SIZE = 16, 256
WHOLE_BELOW = 256

MIN_PLAN_SIZE = 64

# The most query rows of a simdgroup that fit the registers of an Apple GPU; half as many for rows
# above LANE_ROW_BYTES, of which a lane has several loads.
MAX_SIMDGROUP_ROWS = 4
LANE_ROW_BYTES = 16 * SIMDGROUP_LANES
# Per threadgroup. Several small threadgroups share a core, so that one loads while another one
# combines.
SIMDGROUPS = 4


class PlanKey(NamedTuple):
    """Layers with equal keys share the plan of a step, whether they write K/V or read those of
    another layer.
    """

    window: int | None
    num_kv_heads: int

    @classmethod
    def of(cls, window: int | None, kv: KVHandle) -> PlanKey:
        """The key of a layer with this window on these slabs, both for the cache, which prepares
        the plans of a decode, and for the backend, which reads them.
        """
        return cls(window, kv.num_kv_heads)


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """One step, or the part of it that one dispatch computes."""

    array: mx.array  # int32, for layers whose K/V of the new tokens come from the inputs
    num_partitions: int  # of all sequences, including empty ones: threadgroups per KV head
    num_partial_rows: int  # 0 if each sequence has one partition and nothing has to be merged

    @classmethod
    def of(cls, step: AttentionMetadata, key: PlanKey) -> AttentionPlan:
        """The plan of ``step``, packed for its first layer."""
        return step.derived(key, lambda: cls.pack(step, *key))

    @classmethod
    def pack(cls, step: AttentionMetadata, window: int | None, num_kv_heads: int) -> AttentionPlan:
        """Cut each sequence at multiples of its partition size, without partitions that no query
        sees.

        Sizes are rounded up, so that consecutive steps have the same: in decodes whose partitions
        are merged, empty records follow the work, and zeros follow the block tables.
        """
        window = NO_WINDOW if window is None else min(window, NO_WINDOW)
        context_lens, query_lens, tables = step.context_lens, step.query_lens, step.block_tables
        num_keys, begins = context_lens, None  # that some query sees
        if window < NO_WINDOW:
            begins = [
                max(0, context_len - query_len - window + 1)
                for context_len, query_len in zip(context_lens, query_lens, strict=True)
            ]
            num_keys = [end - begin for begin, end in zip(begins, context_lens, strict=True)]
        size_of = partition_sizes(num_kv_heads)
        sizes = [size_of[count.bit_length()] for count in num_keys]
        first = [0] * step.num_seqs
        if begins is not None:
            first = [begin // size for begin, size in zip(begins, sizes, strict=True)]
        last = [-(-end // size) for end, size in zip(context_lens, sizes, strict=True)]
        cut = _cut_sequences(tuple(sizes), tuple(first), tuple(last), tuple(query_lens))

        # Where each table begins, and where the last one ends.
        rows_begin = PLAN_WORK + cut.work.size
        *table_begins, end = itertools.accumulate(
            map(len, tables), initial=rows_begin + cut.rows_size
        )
        work = cut.work.copy()
        live = work[: cut.num_live]
        live[:, WORK_CONTEXT_LEN] = np.array(context_lens, dtype=np.int32).repeat(
            cut.num_partitions
        )
        live[:, WORK_BLOCKS] = np.array(table_begins, dtype=np.int32).repeat(cut.num_partitions)
        head = array("i", [rows_begin, window, 1, 0, 0, 0, 0, 0])
        zeros = bytes(4 * (plan_size(end) - end))
        records = b"".join((head, work.data, cut.rows, *tables, zeros))
        plan = mx.array(memoryview(records).cast("i"))  # type: ignore[arg-type]  # buffers
        return cls(plan, len(work), cut.num_partial_rows)

    @cached_property
    def array_without_rows(self) -> mx.array:
        """The array for layers whose K/V of the new tokens are in the slabs already. It is computed
        from :attr:`array`, so that a trace contains it.
        """
        return self.array * _all_but_has_rows(self.array.size)


@cache
def _all_but_has_rows(size: int) -> mx.array:
    """Ones, and 0 at ``PLAN_HAS_ROWS``; evaluated, since all threads share it."""
    ones = mx.ones((size,), dtype=mx.int32)
    ones[PLAN_HAS_ROWS] = 0
    mx.eval(ones)
    return ones


def plan_size(num_needed: int) -> int:
    """The size of a plan's array: a power of two, since padding costs next to nothing."""
    return max(MIN_PLAN_SIZE, 1 << (num_needed - 1).bit_length())


def num_records(num_partitions: int) -> int:
    """The number of work records of a merged decode: ``num_partitions`` up to 8, then rounded up to
    one of four sizes per power of two, so that less than a quarter is empty.

    By Mesa's compiler a threadgroup of an empty record issues about a sixth of the slots of one of
    256 positions.
    """
    return rounded_up(num_partitions, 4)


@cache
def partition_sizes(num_kv_heads: int) -> tuple[int, ...]:
    """The positions of a partition, by the bit length of the number of keys that the queries of a
    sequence see.

    They are powers of two that depend on nothing else, so that a sequence is cut alike and gets the
    same bits in any batch.
    """
    heads = 1 << num_kv_heads.bit_length() - 1
    sizes = []
    for bits in range(33):
        num_keys = max(SHORT_CONTEXT, 1 << bits >> 1)
        size = max(MIN_PARTITION_SIZE, num_keys * heads // MIN_THREADGROUPS)
        sizes.append(min(size, MAX_PARTITION_SIZE))
    whole = WHOLE_BELOW.bit_length()
    return (*[MAX_PARTITION_SIZE] * whole, *sizes[whole:])


class _SequenceCut(NamedTuple):
    # [num_records, WORK_FIELDS], 0 in fields that change every step, empty after the partitions
    work: NDArray[np.int32]
    rows: bytes  # [num_tokens, ROW_FIELDS] int32, or no rows if nothing is merged
    rows_size: int  # numbers in it
    num_partitions: NDArray[np.int32]  # [num_seqs]
    num_live: int  # records that are not empty
    num_partial_rows: int


@lru_cache(maxsize=16)
def _cut_sequences(
    sizes: tuple[int, ...],
    first: tuple[int, ...],
    last: tuple[int, ...],
    query_lens: tuple[int, ...],
) -> _SequenceCut:
    """The partitions and the rows to merge. They are cached, since a sequence takes another
    partition only after as many decode steps as a partition has positions.

    Args:
        sizes: positions per partition of each sequence.
        first, last: partitions of each sequence, the last one excluded.
    """
    columns = np.array((sizes, first, last, query_lens), dtype=np.int32)
    size, begin, end, query_len = columns
    num_partitions = end - begin
    first_rows = query_len.cumsum() - query_len
    is_merged = num_partitions.max() > 1
    num_out_rows = query_len * num_partitions if is_merged else query_len
    first_out_rows = num_out_rows.cumsum() - num_out_rows

    # Per partition: its sequence, and its number in it.
    seq = np.arange(len(sizes)).repeat(num_partitions)
    number = np.arange(len(seq)) - (num_partitions.cumsum() - num_partitions)[seq]
    work = np.zeros((len(seq), WORK_FIELDS), dtype=np.int32)
    work[:, WORK_BEGIN] = (begin[seq] + number) * size[seq]
    work[:, WORK_END] = work[:, WORK_BEGIN] + size[seq]
    work[:, WORK_QUERY_LEN] = query_len[seq]
    work[:, WORK_FIRST_ROW] = first_rows[seq]
    work[:, WORK_FIRST_OUT_ROW] = first_out_rows[seq] + number * query_len[seq]
    num_partial_rows = int(num_out_rows.sum()) if is_merged else 0
    num_live = len(work)
    if is_merged and query_len.max() == 1:
        # One row of partials each, also for empty records, so that all are written.
        num_partial_rows = num_records(len(work))
        work = np.pad(work, ((0, num_partial_rows - len(work)), (0, 0)))
        work[len(seq) :, WORK_QUERY_LEN] = 1
        work[len(seq) :, WORK_FIRST_OUT_ROW] = range(len(seq), len(work))

    # Per query token: its first partial, the distance to the next one, how many.
    seq = np.arange(len(sizes)).repeat(query_len if is_merged else 0)
    first_partial = first_out_rows[seq] + np.arange(len(seq)) - first_rows[seq]
    rows = np.array((first_partial, query_len[seq], num_partitions[seq]), dtype=np.int32).T
    return _SequenceCut(
        work,
        rows.tobytes(),
        rows.size,
        num_partitions,
        num_live,
        num_partial_rows,
    )


@dataclass(frozen=True)
class PartitionCut:
    """How simdgroups divide the keys of a partition and the query rows of a KV head."""

    streams: int  # simdgroups of a threadgroup on different keys
    row_splits: int  # simdgroups of a threadgroup on the same keys for different rows
    row_parts: int  # threadgroups on the same keys for different rows

    @property
    def num_threads(self) -> int:
        """Threads per threadgroup."""
        return SIMDGROUP_LANES * self.streams * self.row_splits


@cache
def cut_rows(num_rows: int, row_bytes: int) -> PartitionCut:
    """The cut for ``num_rows`` query rows (group size times query tokens) per KV head, each of at
    most ``row_bytes``: the rows of a simdgroup fit its registers, as few simdgroups as possible
    have no rows, and the remaining ones of ``SIMDGROUPS`` take other keys.
    """
    max_rows = MAX_SIMDGROUP_ROWS if row_bytes <= LANE_ROW_BYTES else MAX_SIMDGROUP_ROWS // 2
    splits = -(-num_rows // max_rows)
    row_splits = splits
    if splits > SIMDGROUPS:
        row_splits = min(range(SIMDGROUPS, 1, -1), key=lambda share: -splits % share)
    return PartitionCut(SIMDGROUPS // row_splits, row_splits, -(-splits // row_splits))
