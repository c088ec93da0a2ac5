"""What a plan holds, number by number, and how threadgroups are cut."""

from __future__ import annotations

import pytest
from helpers.kernel_grid import BLOCK_SIZES

from mlx_paged.ops import AttentionMetadata
from mlx_paged.ops.attention_plan import (
    MAX_SIMDGROUP_ROWS,
    NO_WINDOW,
    PARTITION_SIZE,
    SIMDGROUPS,
    AttentionPlan,
    Cut,
    cut_rows,
)


def pack(seqs, window=None, has_rows=False, block_size=64):
    """``seqs``: context length, query length and first block id; blocks are adjacent."""
    context_lens, query_lens, first_blocks = zip(*seqs, strict=True)
    tables = [
        range(first, first - (-n // block_size))
        for n, first in zip(context_lens, first_blocks, strict=True)
    ]
    metadata = AttentionMetadata.build(tables, context_lens, query_lens, block_size)
    plan = AttentionPlan.pack(metadata, window, has_rows)
    assert plan.array.size >= 8
    return plan.array.tolist(), plan.num_partitions, plan.num_partial_rows


def numbers(*parts):
    """All integers in nested lists."""
    return [
        number
        for part in parts
        for number in (numbers(*part) if isinstance(part, list) else [part])
    ]


def test_a_sequence_of_one_partition():
    head = [8, 12, 15, NO_WINDOW, 0, 0, 0, 0]
    seq = [100, 1, 0, 15]
    work = [0, 0, 0]
    assert pack([(100, 1, 5)]) == (numbers(head, seq, work, 5, 6), 1, 0)


def test_rows_from_the_inputs_are_one_number_of_the_head():
    head = [8, 12, 15, NO_WINDOW, 1, 0, 0, 0]
    assert pack([(100, 1, 5)], has_rows=True) == (numbers(head, 100, 1, 0, 15, 0, 0, 0, 5, 6), 1, 0)


def test_sequences_of_one_partition_each_write_their_own_rows_of_the_result():
    head = [8, 20, 29, NO_WINDOW, 0, 0, 0, 0]
    seqs = [[100, 1, 0, 29], [256, 3, 1, 31], [2, 2, 4, 35]]
    work = [[0, 0, 0], [1, 0, 1], [2, 0, 4]]
    blocks = [[5, 6], [10, 11, 12, 13], [7]]
    assert pack([(100, 1, 5), (256, 3, 10), (2, 2, 7)]) == (numbers(head, seqs, work, blocks), 3, 0)


def test_a_sequence_of_several_partitions_has_partials_of_each_one_partition_after_the_other():
    head = [8, 12, 21, NO_WINDOW, 0, 0, 0, 0]
    seq = [513, 2, 0, 27]
    work = [[0, 0, 0], [0, 1, 2], [0, 2, 4]]
    rows = [[0, 2, 3], [1, 2, 3]]  # first partial, distance of the next, how many
    blocks = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert pack([(513, 2, 1)]) == (numbers(head, seq, work, rows, blocks), 3, 6)


def test_one_long_sequence_makes_the_short_ones_write_partials_too():
    head = [8, 16, 25, NO_WINDOW, 1, 0, 0, 0]
    seqs = [[3, 2, 0, 34], [257, 1, 2, 35]]
    work = [[0, 0, 0], [1, 0, 2], [1, 1, 3]]
    rows = [[0, 2, 1], [1, 2, 1], [2, 1, 2]]
    blocks = [[9], [1, 2, 3, 4, 5]]
    assert pack([(3, 2, 9), (257, 1, 1)], has_rows=True) == (
        numbers(head, seqs, work, rows, blocks),
        3,
        4,
    )


def test_partitions_before_the_window_are_left_out():
    # The first query, at position 997, sees 698 to 997: partitions 2 and 3.
    head = [8, 12, 18, 300, 0, 0, 0, 0]
    seq = [1000, 3, 0, 27]
    work = [[0, 2, 0], [0, 3, 3]]
    rows = [[0, 3, 2], [1, 3, 2], [2, 3, 2]]
    assert pack([(1000, 3, 1)], window=300) == (
        numbers(head, seq, work, rows, list(range(1, 17))),
        2,
        6,
    )


def test_a_window_within_one_partition_needs_no_merge():
    head = [8, 16, 22, 16, 0, 0, 0, 0]
    seqs = [[1000, 1, 0, 22], [10, 1, 1, 38]]
    work = [[0, 3, 0], [1, 0, 1]]
    assert pack([(1000, 1, 1), (10, 1, 20)], window=16) == (
        numbers(head, seqs, work, list(range(1, 17)), 20),
        2,
        0,
    )


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
    assert plan[3] == (NO_WINDOW if window is None else min(window, 2**31 - 1))
    assert [plan[plan[1] + 3 * i + 1] for i in range(num_partitions)] == partitions
    assert num_partial_rows == (query_len * len(partitions) if len(partitions) > 1 else 0)


def test_partitions_begin_with_a_block_of_every_size():
    assert all(PARTITION_SIZE % block_size == 0 for block_size in BLOCK_SIZES)


# Threadgroups


@pytest.mark.parametrize(
    ("num_rows", "cut"),
    [
        (1, Cut(4, 1, 1)),
        (4, Cut(4, 1, 1)),
        (5, Cut(2, 2, 1)),
        (8, Cut(2, 2, 1)),
        (9, Cut(1, 3, 1)),
        (16, Cut(1, 4, 1)),
        (17, Cut(1, 3, 2)),
        (32, Cut(1, 4, 2)),
        (128, Cut(1, 4, 8)),
    ],
)
def test_rows_are_cut_over_simdgroups_then_over_threadgroups(num_rows, cut):
    assert cut_rows(num_rows) == cut


@pytest.mark.parametrize("num_rows", range(1, 129))
def test_no_simdgroup_has_more_rows_than_its_registers_hold(num_rows):
    cut = cut_rows(num_rows)
    simdgroups = cut.row_splits * cut.row_parts
    assert -(-num_rows // simdgroups) <= MAX_SIMDGROUP_ROWS
    # Every threadgroup has rows, and all simdgroups that have a use.
    rows = -(-num_rows // simdgroups)
    assert (cut.row_parts - 1) * cut.row_splits * rows < num_rows
    assert cut.streams * cut.row_splits <= SIMDGROUPS < (cut.streams + 1) * cut.row_splits
    assert cut.num_threads == 32 * cut.streams * cut.row_splits
