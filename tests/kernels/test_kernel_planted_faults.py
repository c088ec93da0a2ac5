"""The kernels with one mistake each: the tests of this folder see every one of them."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from helpers.backends import METAL, REFERENCE
from helpers.kernel_checks import (
    assert_same_slabs,
    attend_and_compare,
    checked_metal,
    copy_of,
    random_array,
    random_handle,
)
from helpers.kernel_grid import Case
from metal_emulator import Checks, ForbiddenWrite, MemoryFault, OrderDependence

from mlx_paged.ops import SlotMapping, kernels
from mlx_paged.ops.metal_sources import read_source

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
# Several streams and several simdgroups to each; runs that reach over the border of a partition.
SHARED = Case(
    "f32", 32, 8, 1, 10, ((300, 2), (257, 2), (16, 2)), None, True, "shuffled", "nan_values"
)
# A window that begins within a partition, so that some streams have no chunk of it in the last
# round.
WINDOW = Case("f32", 32, 8, 1, 10, ((1000, 2), (21, 2)), 300, True, "shuffled", "nan_values")


@pytest.mark.parametrize("case", [SHARED, WINDOW], ids=["shared", "window"])
def test_without_a_fault_there_is_nothing_to_see(case, compiler):
    with checked_metal(Checks().orders):
        attend_and_compare(case.problem())


def test_every_barrier_is_counted():
    counts = {name: read_source(f"{name}.metal").count(BARRIER) for name in kernels.KERNELS}
    assert {name: count for name, count in counts.items() if count} == {
        "paged_attention": 4,
        "merge_partitions": 1,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "occurrence"),
    [*(("paged_attention", number) for number in range(4)), ("merge_partitions", 0)],
    ids=[
        "before_a_chunk_is_shared",
        "after_it",
        "before_streams_are_combined",
        "while_they_are",
        "merge",
    ],
)
def test_a_missing_barrier_shows_as_dependence_on_the_order_of_threads(
    name, occurrence, plant, compiler
):
    with checked_metal(Checks().orders):
        plant(f"{name}.metal", BARRIER, ";", occurrence)
        with pytest.raises(OrderDependence, match=f"mlx_paged_{name}"):
            attend_and_compare(SHARED.problem())


WRONG_RESULTS = {
    "no_end_of_the_partition": (
        WINDOW,
        "paged_attention.metal",
        "position < end && position <= query_position",
        "position <= query_position",
    ),
    "no_causal_mask": (SHARED, "paged_attention.metal", "position <= query_position && ", ""),
    "no_window_mask": (
        WINDOW,
        "paged_attention.metal",
        " && position > query_position - window",
        "",
    ),
    "no_scale": (SHARED, "paged_attention.metal", " * softmax_scale", ""),
    "a_query_head_off": (SHARED, "paged_attention.metal", "row % GROUP", "(row + 1) % GROUP"),
    "a_block_behind": (
        SHARED,
        "paged_attention.metal",
        "block_table[next_begin",
        "block_table[chunk_begin",
    ),
    "no_shrinking": (SHARED, "paged_attention.metal", "acc[i][v] *= factor[i];", ""),
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
        "paged_kv.h",
        "if (position < first_new)",
        "if (true)",
    ),
    "not_writing_new_rows": (
        SHARED,
        "paged_kv.h",
        "((device vec<T, 4>*)(in_place(slab) + slot))[column] = newest;",
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
        # What lies behind the end is taken for a new row, read from where there is none and written
        # into its slot.
        (" || position >= end", ""),
        ("(in_place(slab) + slot)", "(in_place(slab) + slot + HEAD_DIM)"),
    ],
    ids=["behind_the_end", "next_to_it"],
)
def test_a_new_row_in_the_slot_of_another_is_a_forbidden_write(text, other, plant, compiler):
    case = replace(SHARED, num_kv_heads=2)
    with checked_metal():
        plant("paged_kv.h", text, other)
        with pytest.raises(ForbiddenWrite, match="mlx_paged_paged_attention"):
            attend_and_compare(case.problem())


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
        "const device Vec*)(value_rows",
        "const device Vec*)(key_rows",
        AssertionError,
    ),
    "the_source_is_written": ("copy_blocks", "2 * pair + 1]", "2 * pair]", AssertionError),
    "source_and_destination_swapped": (
        "copy_blocks",
        "[2 * pair] *",
        "[2 * pair + 1] *",
        AssertionError,
    ),
}


@pytest.mark.parametrize(
    ("name", "text", "other", "error"), BLOCK_FAULTS.values(), ids=BLOCK_FAULTS
)
def test_a_mistake_in_a_write_is_seen(name, text, other, error, plant, compiler):
    rng = np.random.default_rng(0)
    kv = random_handle(rng, 6, 2, 16, 64, mx.float16)
    k, v = (random_array(rng, (4, 2, 64), mx.float16) for _ in "kv")
    twin = copy_of(kv)
    with checked_metal():
        plant(f"{name}.metal", text, other)
        with pytest.raises(error):
            for handle, backend in ((kv, METAL), (twin, REFERENCE)):
                backend.reshape_and_cache(k, v, handle, SlotMapping.build(SLOTS, handle.block_size))
                backend.copy_blocks(handle, [(0, 4)])
            assert_same_slabs(kv, twin)
