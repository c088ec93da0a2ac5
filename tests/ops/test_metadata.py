"""What a step tells the operations: slots, block tables, positions, and the cut into decodes and
prefills.
"""

import dataclasses
import gc
import weakref

import mlx.core as mx
import pytest
from paged_testing.by_hand import step_of

from mlx_paged.ops import SlotMapping


def slot_state(mapping):
    return {
        "slots": list(mapping.slots),
        "block_size": mapping.block_size,
        "num_tokens": mapping.num_tokens,
        "max_slot": mapping.max_slot,
        "live_rows": None if mapping.live_rows is None else mapping.live_rows.tolist(),
        "places": [each.tolist() for each in mapping.places(2)],
    }


def state(metadata):
    return {
        "block_tables": [list(table) for table in metadata.block_tables],
        "context_lens": list(metadata.context_lens),
        "query_lens": list(metadata.query_lens),
        "cu_seqlens_q": list(metadata.cu_seqlens_q),
        "block_size": metadata.block_size,
        "slots": list(metadata.slot_mapping.slots),
        "num_seqs": metadata.num_seqs,
        "num_tokens": metadata.num_tokens,
        "max_query_len": metadata.max_query_len,
        "max_block_id": metadata.max_block_id,
    }


# Slots


def test_a_slot_is_its_block_times_the_block_size_plus_its_offset():
    assert slot_state(SlotMapping([35, 16, 0, 15], 16)) == {
        "slots": [35, 16, 0, 15],
        "block_size": 16,
        "num_tokens": 4,
        "max_slot": 35,
        "live_rows": None,
        "places": [
            [[2, 2], [1, 1], [0, 0], [0, 0]],
            [[0, 1], [0, 1], [0, 1], [0, 1]],
            [[3, 3], [0, 0], [0, 0], [15, 15]],
        ],
    }


def test_padding_keeps_its_place_among_the_slots_and_has_no_block():
    assert slot_state(SlotMapping([-1, 9, -5, 23], 8)) == {
        "slots": [-1, 9, -5, 23],
        "block_size": 8,
        "num_tokens": 4,
        "max_slot": 23,
        "live_rows": [1, 3],
        "places": [[[1, 1], [2, 2]], [[0, 1], [0, 1]], [[1, 1], [7, 7]]],
    }


@pytest.mark.parametrize(
    ("slots", "rows"), [([], None), ([-1, -2], [])], ids=["no_slots", "all_padding"]
)
def test_a_mapping_may_hold_no_row(slots, rows):
    assert slot_state(SlotMapping(slots, 8)) == {
        "slots": slots,
        "block_size": 8,
        "num_tokens": len(slots),
        "max_slot": -1,
        "live_rows": rows,
        "places": [[], [], []],
    }


# A step


def test_a_step_says_where_everything_lies():
    metadata = step_of(
        block_tables=[[7, 2, 19], [4], [0, 5]],
        context_lens=[34, 16, 17],
        query_lens=[1, 16, 3],
        block_size=16,
    )
    assert state(metadata) == {
        "block_tables": [[7, 2, 19], [4], [0, 5]],
        "context_lens": [34, 16, 17],
        "query_lens": [1, 16, 3],
        "cu_seqlens_q": [0, 1, 17, 20],
        "block_size": 16,
        "slots": [305, *range(64, 80), 14, 15, 80],
        "num_seqs": 3,
        "num_tokens": 20,
        "max_query_len": 16,
        "max_block_id": 19,
    }


def test_blocks_reserved_after_the_context_are_left_out():
    metadata = step_of([[3, 9, 8], [1, 6]], [8, 9], [2, 1], 8)
    assert state(metadata) == {
        "block_tables": [[3], [1, 6]],
        "context_lens": [8, 9],
        "query_lens": [2, 1],
        "cu_seqlens_q": [0, 2, 3],
        "block_size": 8,
        "slots": [30, 31, 48],
        "num_seqs": 2,
        "num_tokens": 3,
        "max_query_len": 2,
        "max_block_id": 6,
    }


def test_a_decode_goes_to_the_slot_of_its_position_in_the_last_block():
    # The first slot of all, the last of a block, the first of the next, and one between.
    tables, context_lens = [[4], [9, 0], [2, 7], [3, 1, 8], [5, 6]], [1, 16, 17, 40, 32]
    slots = [4 * 16, 9 * 16 + 15, 7 * 16, 8 * 16 + 7, 6 * 16 + 15]
    batch = step_of(tables, context_lens, [1] * 5, 16)
    assert list(batch.slot_mapping.slots) == slots
    for table, context_len, slot in zip(tables, context_lens, slots, strict=True):
        alone = step_of([table], [context_len], [1], 16)
        assert list(alone.slot_mapping.slots) == [slot]
        assert alone.slot_mapping.only_slot == divmod(slot, 16)
        if context_len > 1:  # The last of a longer run goes there, too.
            run = step_of([table], [context_len], [2], 16)
            assert run.slot_mapping.slots[-1] == slot


def test_a_step_may_hold_no_sequence():
    assert state(step_of([], [], [], 8)) == {
        "block_tables": [],
        "context_lens": [],
        "query_lens": [],
        "cu_seqlens_q": [0],
        "block_size": 8,
        "slots": [],
        "num_seqs": 0,
        "num_tokens": 0,
        "max_query_len": 0,
        "max_block_id": -1,
    }


def test_sequences_may_share_blocks_that_none_of_them_writes():
    metadata = step_of([[3, 5], [3, 6]], [9, 10], [1, 2], 8)
    assert list(metadata.slot_mapping.slots) == [40, 48, 49]


def test_what_is_derived_from_a_step_is_made_once_per_key():
    metadata = step_of([[1]], [3], [1], 8)
    made = []

    def make(name):
        return lambda: made.append(name) or name

    got = [
        metadata.derived("a", make("first")),
        metadata.derived("a", make("second")),
        metadata.derived("b", make("third")),
    ]
    assert (got, made) == (["first", "first", "third"], ["first", "third"])


def test_the_sequences_with_history_are_those_with_tokens_before_the_step():
    step = step_of([[1], [2, 3], [4], [5]], [7, 20, 1, 9], [7, 12, 1, 1], 16)
    old = step.with_history
    assert (old.context_lens, old.query_lens) == ([20, 9], [12, 1])
    assert [table.tolist() for table in old.block_tables] == [[2, 3], [5]]
    assert step.with_history is old
    assert old.with_history is old
    assert step_of([[1]], [7], [7], 16).with_history.num_seqs == 0


def test_what_is_derived_from_two_steps_is_apart():
    steps = [step_of([[1]], [3], [1], 8) for _ in range(2)]
    assert [step.derived("a", lambda n=n: n) for n, step in enumerate(steps)] == [0, 1]


# Decodes and prefills


def parts(metadata, capacities=(8,)):
    """The parts of a step by capacity, and the rows of the flat query axis that each got."""
    found, row_order = metadata.parts(capacities)
    rows = [list(range(metadata.num_tokens)) if p.rows is None else p.rows.tolist() for p in found]
    in_order = mx.array([row for part_rows in rows for row in part_rows])
    if row_order is not None:
        in_order = in_order[row_order]
    assert in_order.tolist() == list(range(metadata.num_tokens)), (
        "results come back in the order of the tokens"
    )
    assert metadata.parts(capacities)[0] is found, "cut once for all layers"
    return [(p.capacity, state(p.step), r) for p, r in zip(found, rows, strict=True)]


@pytest.mark.parametrize(
    ("query_lens", "capacity"), [([1, 8], 8), ([9, 12], 0)], ids=["decodes", "prefills"]
)
def test_a_step_of_one_kind_is_one_part_with_all_rows_as_they_are(query_lens, capacity):
    metadata = step_of([[0, 1], [2, 3]], [12, 14], query_lens, 8)
    assert metadata.parts((8,)) == ([(capacity, metadata, None)], None)


def test_a_mixed_step_is_cut_into_decodes_and_prefills_with_the_rows_of_each():
    metadata = step_of([[4, 1], [2], [7, 3], [5, 6]], [12, 8, 10, 16], [9, 1, 10, 8], 8)
    decodes = {
        "block_tables": [[2], [5, 6]],
        "context_lens": [8, 16],
        "query_lens": [1, 8],
        "cu_seqlens_q": [0, 1, 9],
        "block_size": 8,
        "slots": [23, *range(48, 56)],
        "num_seqs": 2,
        "num_tokens": 9,
        "max_query_len": 8,
        "max_block_id": 6,
    }
    prefills = {
        "block_tables": [[4, 1], [7, 3]],
        "context_lens": [12, 10],
        "query_lens": [9, 10],
        "cu_seqlens_q": [0, 9, 19],
        "block_size": 8,
        "slots": [35, 36, 37, 38, 39, 8, 9, 10, 11, *range(56, 64), 24, 25],
        "num_seqs": 2,
        "num_tokens": 19,
        "max_query_len": 10,
        "max_block_id": 7,
    }
    assert parts(metadata) == [
        (0, prefills, [*range(9), *range(10, 20)]),
        (8, decodes, [9, *range(20, 28)]),
    ]


def test_a_run_belongs_to_the_smallest_capacity_that_holds_it():
    metadata = step_of([[0, 1]] * 5, [16] * 5, [1, 12, 8, 1, 3], 8)
    lens = [(n, part["query_lens"]) for n, part, _ in parts(metadata, (1, 2, 4, 8))]
    assert lens == [(1, [1, 1]), (0, [12]), (8, [8]), (4, [3])]


def test_the_rows_of_the_parts_are_all_rows():
    metadata = step_of([[0, 1]] * 5, [16] * 5, [1, 12, 8, 9, 3], 8)
    assert sorted(row for _, _, rows in parts(metadata) for row in rows) == list(range(33))


# Positions, and the rows whose logits are wanted

TABLES, CONTEXT_LENS, QUERY_LENS = [[4, 1], [2], [7, 3], [5, 6]], [12, 8, 10, 16], [3, 1, 10, 2]


def test_each_new_token_has_its_position():
    metadata = step_of(TABLES, CONTEXT_LENS, QUERY_LENS, 8)
    assert metadata.positions.dtype == mx.int32
    assert metadata.positions.tolist() == [9, 10, 11, 7, *range(10), 14, 15]
    assert step_of([], [], [], 8).positions.tolist() == []


@pytest.mark.parametrize(
    ("num_logit_rows", "rows", "seqs"),
    [
        (None, [2, 3, 13, 15], [0, 1, 2, 3]),
        ([1, 1, 1, 1], [2, 3, 13, 15], [0, 1, 2, 3]),
        ([2, 1, 0, 2], [1, 2, 3, 14, 15], [0, 1, 3]),
        ([0, 0, 10, 0], list(range(4, 14)), [2]),
        ([0, 0, 0, 0], [], []),
    ],
    ids=["default", "one_each", "none_one_and_several", "all_of_one", "none"],
)
def test_the_rows_of_logits_are_the_last_ones_of_each_sequence(num_logit_rows, rows, seqs):
    metadata = step_of(TABLES, CONTEXT_LENS, QUERY_LENS, 8, num_logit_rows=num_logit_rows)
    assert metadata.logit_rows.dtype == mx.int32
    assert metadata.logit_rows.tolist() == rows
    counts = num_logit_rows or [1] * 4
    queries = metadata.logit_queries
    assert [list(table) for table in queries.block_tables] == [TABLES[seq] for seq in seqs]
    assert queries.context_lens == [CONTEXT_LENS[seq] for seq in seqs]
    assert queries.query_lens == [counts[seq] for seq in seqs]
    assert queries.positions.tolist() == [metadata.positions.tolist()[row] for row in rows]
    assert queries.logit_rows is None or queries.max_query_len > 1


@pytest.mark.parametrize(
    ("query_lens", "num_logit_rows"), [([1] * 4, None), ([1] * 4, [1] * 4), ([3, 1, 10, 2],) * 2]
)
def test_where_all_rows_are_wanted_nothing_is_selected(query_lens, num_logit_rows):
    metadata = step_of(TABLES, CONTEXT_LENS, query_lens, 8, num_logit_rows=num_logit_rows)
    assert metadata.logit_rows is None
    assert metadata.logit_queries is metadata


def test_a_step_is_freed_when_the_last_reference_to_it_is_gone():
    step = step_of([[1], [2]], [3, 4], [3, 4], 16)
    step.parts((1,)), step.logit_queries, step.positions, step.slot_mapping
    freed = weakref.ref(step)
    gc.disable()
    try:
        del step
        assert freed() is None
    finally:
        gc.enable()


def test_a_short_run_becomes_a_sequence_for_each_of_its_tokens():
    # A run over the end of a block, a single token, and a run that is too long.
    step = step_of([[3, 4], [7], [5, 6, 8]], [10, 3, 20], [3, 1, 9], 8)
    step = dataclasses.replace(step, num_logit_rows=[2, 1, 4])
    single = step.token_by_token(8)
    assert state(single) == state(step) | {
        "block_tables": [[3], [3, 4], [3, 4], [7], [5, 6, 8]],
        "context_lens": [8, 9, 10, 3, 20],
        "query_lens": [1, 1, 1, 1, 9],
        "cu_seqlens_q": [0, 1, 2, 3, 4, 13],
        "num_seqs": 5,
    }
    assert single.shares_new_blocks and single.num_logit_rows == [0, 1, 1, 1, 4]
    assert single.logit_rows.tolist() == step.logit_rows.tolist()
    assert single.positions.tolist() == step.positions.tolist()
    assert step_of([[3]], [4], [1], 8).token_by_token(8).shares_new_blocks is False
