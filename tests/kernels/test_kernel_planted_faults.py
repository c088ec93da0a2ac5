"""The kernels with one mistake each: the tests of this folder see every one of them."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from helpers.backends import METAL, REFERENCE
from helpers.fast_lane import mostly_slow
from helpers.kernel_checks import (
    assert_same_slabs,
    attend_and_compare,
    checked_metal,
    copy_of,
    nan_before_the_window,
    random_array,
    random_handle,
)
from helpers.kernel_grid import Case
from helpers.numpy_attention import assert_matches_formula, before_the_step, make_problem
from helpers.quantised_problems import quantised
from metal_emulator import (
    Checks,
    DataRace,
    ForbiddenWrite,
    MemoryFault,
    OrderDependence,
    UnwrittenRead,
)
from paged_testing.by_hand import slots_of

from mlx_paged.ops import kernels

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
# Several simdgroups and threadgroups for the rows; runs that reach over the border of a partition.
SHARED = Case(
    "f32", 32, 8, 1, 10, ((300, 2), (257, 2), (16, 2)), None, True, "shuffled", "nan_values"
)
# Several streams, some of which have no chunk in the last round.
STREAMS = Case("f16", 128, 16, 2, 3, ((300, 1), (21, 1)), None, True, "shuffled", "nan_values")
# A window that begins within a partition.
WINDOW = Case("f32", 32, 8, 1, 10, ((1000, 2), (21, 2)), 300, True, "shuffled", "nan_values")


@pytest.mark.parametrize("case", [SHARED, STREAMS, WINDOW], ids=["shared", "streams", "window"])
def test_without_a_fault_there_is_nothing_to_see(case, compiler):
    with checked_metal(Checks().orders):
        attend_and_compare(case.problem())


def test_every_barrier_is_counted():
    counts = {name: kernels.body(name).count(BARRIER) for name in kernels.KERNELS}
    assert {name: count for name, count in counts.items() if count} == {
        "paged_attention": 1,
        "paged_attention_affine": 1,
        "merge_partitions": 1,
        "rows_matmul": 1,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "occurrence"),
    [("paged_attention", 0), ("merge_partitions", 0)],
    ids=["attention", "merge"],
)
def test_a_missing_barrier_shows_as_dependence_on_the_order_of_threads(
    name, occurrence, plant, compiler
):
    with checked_metal(Checks().orders):
        plant(f"{name}.metal", BARRIER, ";", occurrence)
        with pytest.raises(OrderDependence, match=f"mlx_paged_{name}"):
            attend_and_compare(SHARED.problem())


@mostly_slow("name", ["paged_attention", "merge_partitions"], quick=(1,))
@pytest.mark.parametrize(
    "weaker",
    [
        "threadgroup_barrier(mem_flags::mem_device);",
        "threadgroup_barrier(mem_flags::mem_none);",
        "simdgroup_barrier(mem_flags::mem_threadgroup);",
    ],
    ids=["mem_device", "mem_none", "simdgroup_barrier"],
)
def test_a_barrier_that_orders_other_memory_or_fewer_threads_is_a_race(
    name, weaker, plant, compiler
):
    with checked_metal(Checks().orders):
        plant(f"{name}.metal", BARRIER, weaker)
        with pytest.raises((DataRace, UnwrittenRead), match=f"mlx_paged_{name}.* in line "):
            attend_and_compare(STREAMS.problem())


ATTENTION = "paged_attention.metal"
WRONG_RESULTS = {
    "no_end_of_the_older_keys": (
        SHARED,
        ATTENTION,
        "position >= old_begin && position < old_end",
        "position >= old_begin",
    ),
    "no_begin_of_the_window": (
        replace(STREAMS, window=99),
        ATTENTION,
        "position >= old_begin && position < old_end",
        "position < old_end",
    ),
    "no_end_of_the_new_keys": (SHARED, ATTENTION, "visible = position < end", "visible = true"),
    "no_causal_mask": (SHARED, ATTENTION, "position <= query_position && ", ""),
    "no_window_mask": (
        WINDOW,
        ATTENTION,
        "visible && position > query_position - window",
        "visible",
    ),
    "the_window_of_another_token": (
        replace(WINDOW, group=8),
        ATTENTION,
        "first_query + first_row / GROUP - window",
        "first_query - window",
    ),
    "no_window_mask_of_new_keys": (
        replace(WINDOW, window=1),
        ATTENTION,
        " && position > query_position - window",
        "",
    ),
    "no_scale": (SHARED, ATTENTION, "(softmax_scale * LOG2_E)", "LOG2_E"),
    "no_scale_of_the_queries": (
        replace(SHARED, dtype="bf16"),
        "row_formats.h",
        "return power;",
        "return 1;",
    ),
    "a_query_head_off": (SHARED, ATTENTION, "row % GROUP", "(row + 1) % GROUP"),
    "a_block_behind": (
        SHARED,
        ATTENTION,
        "next_begin = min(chunk_begin + STREAMS * CHUNK_SIZE",
        "next_begin = min(chunk_begin",
    ),
    "no_shrinking": (SHARED, ATTENTION, "acc[i][u] *= factor;", ""),
    "keys_that_are_not_turned": (STREAMS, ATTENTION, "position ^ s", "chunk_begin + subgroup ^ s"),
    "weights_that_are_not_turned": (
        STREAMS,
        ATTENTION,
        "simd_shuffle_xor(weight[i][0], s * (SHARERS / STEPS))",
        "weight[i][0]",
    ),
    "a_new_key_counted_by_all_its_lanes": (STREAMS, ATTENTION, "turn == 0 ? weight : 0", "weight"),
    "a_stream_left_out": (
        STREAMS,
        ATTENTION,
        "total = fma(stream_sum[other], share, total);",
        "total = fma(stream_sum[other], s == 1 ? 0 : share, total);",
    ),
    "no_sink": (SHARED, "merge_partitions.metal", "sinks[head]", "-INFINITY"),
    "partials_of_another_query": (
        SHARED,
        "merge_partitions.metal",
        "first + p * stride, head, num_heads);",
        "first + p, head, num_heads);",
    ),
    "a_partition_left_out": (
        SHARED,
        "merge_partitions.metal",
        "p = stream; p < num_partitions",
        "p = stream + 1; p < num_partitions",
    ),
    "reading_new_rows_from_the_slab": (
        SHARED,
        ATTENTION,
        "Keys::newest(has_rows, Formats",
        "Keys::newest(false, Formats",
    ),
    "not_writing_new_rows": (
        SHARED,
        ATTENTION,
        "Values::store(stored_values, slot, ValueRow::place(column, n), value[n]);",
        "",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "name", "text", "other"), WRONG_RESULTS.values(), ids=WRONG_RESULTS
)
def test_a_mistake_in_the_arithmetic_shows_in_the_result_or_in_the_slabs(
    case, name, text, other, plant, compiler
):
    with checked_metal():
        plant(name, text, other)
        with pytest.raises(AssertionError, match=r"sequence \d|Arrays are not equal"):
            attend_and_compare(case.problem())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("Keys::store(stored_keys, slot, ", "Keys::store(stored_keys, slot + 1, "),
        ("Values::store(stored_values, slot, ", "Values::store(stored_values, slot + 2, "),
    ],
    ids=["next_key", "next_but_one_value"],
)
def test_a_new_row_in_the_slot_of_another_is_a_forbidden_write(text, other, plant, compiler):
    case = replace(SHARED, num_kv_heads=2)
    with checked_metal():
        plant(ATTENTION, text, other)
        with pytest.raises(ForbiddenWrite, match="mlx_paged_paged_attention"):
            attend_and_compare(case.problem())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("min(THREADGROUP_ROWS, num_rows - row_part * THREADGROUP_ROWS)", "THREADGROUP_ROWS"),
        ("const int readable = min(position, end - 1);", "const int readable = position;"),
    ],
    ids=["rows", "new_keys"],
)
def test_what_lies_behind_the_end_of_a_run_is_out_of_bounds(text, other, plant, compiler):
    problem = replace(SHARED, seqs=((300, 2),)).problem()
    kv, k, v = before_the_step(problem)
    with checked_metal():
        plant(ATTENTION, text, other)
        with pytest.raises(MemoryFault):
            mx.eval(METAL.update_and_attend(problem.q, k, v, kv, *problem.args[2:]))


@pytest.mark.slow
def test_a_scale_from_behind_the_end_of_a_row_lets_a_nan_out(plant, compiler):
    problem = make_problem([17], 1, num_kv_heads=1, group=1, head_dim=96, dtype=mx.float16)
    with checked_metal():
        plant(
            ATTENTION,
            "key_place = KeyRow::readable(column, 0)",
            "key_place = KeyRow::place(column, 0)",
        )
        with pytest.raises(AssertionError, match=r"sequence 0"):
            attend_and_compare(quantised(problem, 8, 4))


@pytest.mark.slow
def test_a_walk_over_keys_that_no_query_sees_lets_a_nan_out(plant, compiler):
    problem = replace(STREAMS, window=1).problem()
    hidden = nan_before_the_window(problem)
    with checked_metal():
        plant(ATTENTION, "old_begin < old_end && ", "")
        with pytest.raises(AssertionError, match=r"sequence \d"):
            assert_matches_formula(METAL.attend(problem.q, hidden, *problem.args[2:]), problem)


SLOTS = [40, 3, -1, 17]
BLOCK_FAULTS = {
    "padding_is_written": (
        "reshape_and_cache",
        "if (slot >= 0)",
        "if (true)",
        (ForbiddenWrite, MemoryFault),
    ),
    "the_next_slot": (
        "reshape_and_cache",
        "slot % BLOCK_SIZE",
        "(slot + 1) % BLOCK_SIZE",
        ForbiddenWrite,
    ),
    "k_for_v": (
        "reshape_and_cache",
        "value_rows, packed_row",
        "key_rows, packed_row",
        AssertionError,
    ),
    "the_source_is_written": ("copy_blocks", "2 * pair + 1]", "2 * pair]", AssertionError),
    "the_destination_is_read": ("copy_blocks", "[2 * pair];", "[2 * pair + 1];", AssertionError),
}


@pytest.mark.parametrize(
    ("name", "text", "other", "error"), BLOCK_FAULTS.values(), ids=BLOCK_FAULTS
)
def test_a_mistake_in_a_write_is_seen(name, text, other, error, plant, compiler):
    rng = np.random.default_rng(0)
    kv = random_handle(rng, 6, 2, 16, 64, mx.float16)
    k, v = ((random_array(rng, (4, 2, 64), mx.float16),) for _ in "kv")
    twin = copy_of(kv)
    with checked_metal():
        plant(f"{name}.metal", text, other)
        with pytest.raises(error):
            for handle, backend in ((kv, METAL), (twin, REFERENCE)):
                backend.reshape_and_cache(k, v, handle, slots_of(SLOTS, handle.block_size))
                backend.copy_blocks(handle, [(0, 4)])
            assert_same_slabs(kv, twin)
