"""What a plan holds, number by number, and how threadgroups are cut."""

from __future__ import annotations

import mlx.core as mx
import pytest
from helpers.kernel_grid import BLOCK_SIZES
from paged_testing.by_hand import step_of

from mlx_paged.ops.attention_plan import (
    MAX_SIMDGROUP_ROWS,
    NO_WINDOW,
    SIMDGROUPS,
    AttentionPlan,
    PartitionCut,
    cut_rows,
    num_records,
    partition_sizes,
    plan_size,
)


def pack(seqs, window=None, block_size=64, num_kv_heads=16):
    """The plan without the zeros at its end, and its numbers of records and partial rows.

    ``seqs``: context length, query length and first block id; blocks are adjacent. With 16 KV
    heads all partitions have 256 positions.
    """
    context_lens, query_lens, first_blocks = zip(*seqs, strict=True)
    tables = [
        range(first, first - (-n // block_size))
        for n, first in zip(context_lens, first_blocks, strict=True)
    ]
    metadata = step_of(tables, context_lens, query_lens, block_size)
    plan = AttentionPlan.pack(metadata, window, num_kv_heads)
    assert plan.array.dtype == mx.int32 and plan.array.size in (64, 128, 256, 512, 1024, 2048, 8192)
    used = plan.array.tolist()
    while used[-1] == 0:
        used.pop()
    return used, plan.num_partitions, plan.num_partial_rows


def numbers(*parts):
    """All integers in nested lists."""
    return [
        number
        for part in parts
        for number in (numbers(*part) if isinstance(part, list) else [part])
    ]


# A head begins with where the rows to merge begin, the window, and whether rows are inputs. Work is
# first and last position, context, query length, first row, first row of the result, first block.


def test_a_sequence_of_one_partition():
    head = [15, NO_WINDOW, 1, 0, 0, 0, 0, 0]
    work = [0, 256, 100, 1, 0, 0, 15]
    assert pack([(100, 1, 5)]) == (numbers(head, work, 5, 6), 1, 0)


def test_layers_that_write_no_rows_have_the_same_plan_but_for_one_number():
    step = step_of([[5, 6]], [100], [1], 64)
    plan = AttentionPlan.pack(step, None, 16)
    assert plan.array_without_rows.dtype == mx.int32
    assert plan.array[2].item() == 1
    expected = plan.array.tolist()
    expected[2] = 0
    assert plan.array_without_rows.tolist() == expected


def test_sequences_of_one_partition_each_write_their_own_rows_of_the_result():
    head = [29, NO_WINDOW, 1, 0, 0, 0, 0, 0]
    work = [[0, 256, 100, 1, 0, 0, 29], [0, 256, 256, 3, 1, 1, 31], [0, 256, 2, 2, 4, 4, 35]]
    blocks = [[5, 6], [10, 11, 12, 13], [7]]
    assert pack([(100, 1, 5), (256, 3, 10), (2, 2, 7)]) == (numbers(head, work, blocks), 3, 0)


def test_a_sequence_of_several_partitions_has_partials_of_each_one_partition_after_the_other():
    head = [29, NO_WINDOW, 1, 0, 0, 0, 0, 0]
    work = [
        [0, 256, 513, 2, 0, 0, 35],
        [256, 512, 513, 2, 0, 2, 35],
        [512, 768, 513, 2, 0, 4, 35],
    ]
    rows = [[0, 2, 3], [1, 2, 3]]  # first partial, distance of the next, how many
    blocks = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert pack([(513, 2, 1)]) == (numbers(head, work, rows, blocks), 3, 6)


def test_one_long_sequence_makes_the_short_ones_write_partials_too():
    head = [29, NO_WINDOW, 1, 0, 0, 0, 0, 0]
    work = [[0, 256, 3, 2, 0, 0, 38], [0, 256, 257, 1, 2, 2, 39], [256, 512, 257, 1, 2, 3, 39]]
    rows = [[0, 2, 1], [1, 2, 1], [2, 1, 2]]
    blocks = [[9], [1, 2, 3, 4, 5]]
    assert pack([(3, 2, 9), (257, 1, 1)]) == (numbers(head, work, rows, blocks), 3, 4)


def test_sequences_of_one_step_are_cut_by_partitions_of_their_own_size():
    # With 8 KV heads, 128 positions below a context of 2,048, and 256 from there on.
    plan, num_partitions, num_partial_rows = pack([(2047, 1, 1), (2048, 1, 40)], num_kv_heads=8)
    ranges = [plan[8 + 7 * i : 10 + 7 * i] for i in range(num_partitions)]
    assert ranges == [
        *([begin, begin + 128] for begin in range(0, 2048, 128)),
        *([begin, begin + 256] for begin in range(0, 2048, 256)),
    ]
    assert num_partial_rows == 16 + 8
    assert plan[plan[0] : plan[0] + 6] == [0, 1, 16, 16, 1, 8]


def test_partitions_before_the_window_are_left_out():
    # The first query, at position 997, sees 698 to 997: partitions 2 and 3.
    head = [22, 300, 1, 0, 0, 0, 0, 0]
    work = [[512, 768, 1000, 3, 0, 0, 31], [768, 1024, 1000, 3, 0, 3, 31]]
    rows = [[0, 3, 2], [1, 3, 2], [2, 3, 2]]
    assert pack([(1000, 3, 1)], window=300) == (
        numbers(head, work, rows, list(range(1, 17))),
        2,
        6,
    )


def test_a_window_within_one_partition_needs_no_merge():
    head = [22, 16, 1, 0, 0, 0, 0, 0]
    work = [[768, 1024, 1000, 1, 0, 0, 22], [0, 256, 10, 1, 1, 1, 38]]
    assert pack([(1000, 1, 1), (10, 1, 20)], window=16) == (
        numbers(head, work, list(range(1, 17)), 20),
        2,
        0,
    )


def test_a_window_is_cut_by_the_keys_that_it_shows():
    # 100,000 tokens of one KV head are cut into 256, a window of 500 of them into 16.
    plan, num_partitions, _ = pack([(100_000, 1, 1)], window=500, num_kv_heads=1)
    ranges = [plan[8 + 7 * i : 10 + 7 * i] for i in range(num_partitions)]
    assert ranges == [[begin, begin + 16] for begin in range(99_488, 100_000, 16)]


@pytest.mark.parametrize(
    ("context_len", "query_len", "window", "partitions"),
    [
        (256, 1, None, [0]),
        (257, 1, None, [0, 1]),
        (257, 1, 1, [1]),
        (257, 1, 2, [0, 1]),
        (257, 2, 1, [0, 1]),
        (512, 1, 256, [1]),
        (512, 1, 257, [0, 1]),
        (513, 1, 256, [1, 2]),
        (513, 1, 257, [1, 2]),
        (513, 1, 258, [0, 1, 2]),
        (1000, 8, 225, [3]),
        (1000, 8, 226, [2, 3]),
        (1000, 1, 999, [0, 1, 2, 3]),
        (1000, 1, 2**31 - 1, [0, 1, 2, 3]),
        (1000, 1, 2**40, [0, 1, 2, 3]),
    ],
)
def test_partitions_are_those_that_some_query_sees(context_len, query_len, window, partitions):
    plan, num_partitions, num_partial_rows = pack([(context_len, query_len, 0)], window)
    assert plan[1] == (NO_WINDOW if window is None else min(window, 2**31 - 1))
    begins = [plan[8 + 7 * i] for i in range(num_partitions)]
    assert begins == [256 * partition for partition in partitions]
    assert num_partial_rows == (query_len * len(partitions) if len(partitions) > 1 else 0)


# Empty records and zeros at the end: steps in a row have plans of one size


def test_empty_records_follow_the_decodes_whose_partitions_are_merged():
    # 3 and 6 partitions are 9, rounded up to 10. Each record has a row of partials.
    plan, num_records, num_partial_rows = pack([(700, 1, 1), (1500, 1, 20)])
    assert (num_records, num_partial_rows) == (10, 10)
    records = [plan[8 + 7 * i : 15 + 7 * i] for i in range(num_records)]
    assert [record[2] for record in records[:9]] == [700] * 3 + [1500] * 6
    assert records[9] == [0, 0, 0, 1, 0, 9, 0]
    assert [record[5] for record in records] == list(range(10))
    assert plan[0] == 8 + 7 * 10
    assert plan[plan[0] : plan[0] + 6] == [0, 1, 3, 3, 1, 6]
    assert [record[6] for record in records[:9]] == [84] * 3 + [95] * 6
    assert plan[84:] == [*range(1, 12), *range(20, 44)]


def test_runs_have_no_empty_records():
    assert pack([(700, 3, 1), (1500, 1, 20)])[1:] == (9, 3 * 3 + 6)


def test_no_record_is_empty_where_nothing_is_merged():
    for num_seqs in (1, 9, 17, 33):
        plan, num_partitions, num_partial_rows = pack([(100, 1, 1)] * num_seqs)
        assert (num_partitions, num_partial_rows) == (num_seqs, 0)
        assert [plan[10 + 7 * i] for i in range(num_seqs)] == [100] * num_seqs


def test_records_are_rounded_up_by_less_than_a_quarter_in_few_steps():
    assert [num_records(n) for n in range(1, 18)] == [
        *range(1, 9),
        *(10, 10, 12, 12, 14, 14, 16, 16, 20),
    ]
    sizes = [num_records(n) for n in range(1, 4097)]
    assert all(n <= size < 1.25 * n for n, size in enumerate(sizes, start=1))
    assert len(set(sizes)) == 8 + 4 * 9


def test_a_plan_has_a_power_of_two_of_numbers():
    assert [plan_size(n) for n in (15, 64, 65, 128, 129, 5000)] == [64, 64, 128, 128, 256, 8192]


def test_the_size_of_a_plan_lasts_for_many_steps():
    def sizes(context_len):
        tables = [range(-(-context_len // 16))]
        step = step_of(tables, [context_len], [1], 16)
        plan = AttentionPlan.pack(step, None, 8)
        return plan.array.size, plan.num_partitions, plan.num_partial_rows

    assert len({sizes(n) for n in range(1, 4097)}) == 17


# Partitions


@pytest.mark.parametrize(
    ("num_kv_heads", "sizes"),
    [
        (
            1,
            {
                1: 256,
                255: 256,
                256: 16,
                1024: 16,
                2047: 16,
                2048: 32,
                16_383: 128,
                16_384: 256,
                10**6: 256,
            },
        ),
        (2, {1024: 32, 2048: 64, 8192: 256}),
        (3, {1024: 32}),
        (8, {255: 256, 256: 128, 1024: 128, 2047: 128, 2048: 256, 2**31 - 1: 256}),
        (10, {1024: 128}),
        (16, {1: 256, 1024: 256, 10**6: 256}),
        (128, {1: 256, 1024: 256}),
    ],
)
def test_partitions_grow_with_the_keys_that_are_seen_and_the_kv_heads(num_kv_heads, sizes):
    assert {n: partition_sizes(num_kv_heads)[n.bit_length()] for n in sizes} == sizes


@pytest.mark.parametrize("num_kv_heads", range(1, 33))
def test_one_sequence_of_1024_tokens_is_work_for_64_threadgroups(num_kv_heads):
    for context_len in (1024, 1025, 2047, 2048, 5000, 16_384, 100_000):
        _, num_partitions, _ = pack([(context_len, 1, 1)], num_kv_heads=num_kv_heads)
        assert num_partitions * num_kv_heads >= 64


def test_partitions_begin_with_a_chunk_of_every_kernel_or_in_it():
    # A chunk lies in one block, and is not walked by two partitions unless blocks are larger.
    sizes = {size for heads in range(1, 65) for size in partition_sizes(heads)[1:32]}
    assert sizes == {16, 32, 64, 128, 256}
    assert all(size % block == 0 or block % size == 0 for size in sizes for block in BLOCK_SIZES)


# Threadgroups


@pytest.mark.parametrize(
    ("num_rows", "row_bytes", "cut"),
    [
        (1, 256, PartitionCut(4, 1, 1)),
        (4, 256, PartitionCut(4, 1, 1)),
        (5, 256, PartitionCut(2, 2, 1)),
        (8, 512, PartitionCut(2, 2, 1)),
        (9, 512, PartitionCut(1, 3, 1)),
        (16, 512, PartitionCut(1, 4, 1)),
        (17, 128, PartitionCut(1, 3, 2)),
        (32, 128, PartitionCut(1, 4, 2)),
        (20, 1152, PartitionCut(2, 2, 5)),
        (26, 1152, PartitionCut(2, 2, 7)),
        (128, 128, PartitionCut(1, 4, 8)),
        (2, 1024, PartitionCut(4, 1, 1)),
        (4, 1024, PartitionCut(2, 2, 1)),
        (8, 1024, PartitionCut(1, 4, 1)),
        (9, 2048, PartitionCut(1, 3, 2)),
    ],
)
def test_rows_are_cut_over_simdgroups_then_over_threadgroups(num_rows, row_bytes, cut):
    assert cut_rows(num_rows, row_bytes) == cut


@pytest.mark.parametrize(("row_bytes", "most"), [(512, MAX_SIMDGROUP_ROWS), (528, 2)])
@pytest.mark.parametrize("num_rows", range(1, 129))
def test_no_simdgroup_has_more_rows_than_its_registers_hold(num_rows, row_bytes, most):
    cut = cut_rows(num_rows, row_bytes)
    simdgroups = cut.row_splits * cut.row_parts
    assert -(-num_rows // simdgroups) <= most
    # Every threadgroup has rows, and all simdgroups that have a use.
    rows = -(-num_rows // simdgroups)
    assert (cut.row_parts - 1) * cut.row_splits * rows < num_rows
    assert cut.streams * cut.row_splits <= SIMDGROUPS < (cut.streams + 1) * cut.row_splits
    assert cut.num_threads == 32 * cut.streams * cut.row_splits
