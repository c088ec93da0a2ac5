"""The kernels with their threads in three orders: the same bits, or a barrier is missing."""

from __future__ import annotations

import itertools
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from helpers.backends import METAL, REFERENCE
from helpers.kernel_checks import (
    assert_same_slabs,
    checked_metal,
    copy_of,
    random_array,
    random_handle,
)
from helpers.kernel_grid import GRID
from helpers.numpy_attention import DTYPES, assert_matches_formula, before_the_step
from metal_emulator import Checks
from paged_testing.by_hand import slots_of

from mlx_paged.ops.attention_plan import cut_rows


@pytest.fixture
def metal_in_three_orders(compiler):
    with checked_metal(Checks().orders) as trace:
        yield trace


def one_of_each_cut():
    """Cases of the grid with each way to cut a threadgroup and each number of loads of a row, which
    decides over which lanes it lies; each of them merged and direct, where the grid has both.
    """
    found, seen = {}, set()
    # First those that bring both, so that few are needed.
    for num_new, case in itertools.product((2, 1), GRID):
        cut = cut_rows(case.capacity * case.group, case.row_bytes)
        loads = case.head_dim * DTYPES[case.dtype].size // 16
        end = "merged" if case.is_merged else "direct"
        new = {(cut, end), (loads, end)} - seen
        if len(new) >= num_new:
            seen |= new
            key = f"{cut.streams}x{cut.row_splits}_of_{cut.row_parts}-{loads}_loads-{end}"
            found[key] = case
    return found


CUTS = one_of_each_cut()


def test_the_cases_cover_streams_and_splits_and_both_of_them():
    shapes = {
        (cut_rows(case.capacity * case.group, case.row_bytes), case.is_merged) for case in GRID
    }
    kinds = {
        (cut.streams, cut.row_splits, cut.row_parts > 1, is_merged) for cut, is_merged in shapes
    }
    ways = {(4, 1, False), (2, 2, False), (1, 3, False), (1, 4, False)}
    ways |= {(2, 2, True), (1, 3, True), (1, 4, True)}
    assert kinds == {(*way, is_merged) for way in ways for is_merged in (False, True)}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if index == 0 else pytest.mark.slow)
        for index, (name, case) in enumerate(CUTS.items())
    ],
)
def test_attention_does_not_depend_on_the_order_of_threads(case, metal_in_three_orders):
    run = case.capacity
    # Two rounds at least for every stream, with rows of their own in the last of them.
    seqs = ((300, run), (17, run)) if case.is_merged else ((150, run), (17, run))
    problem = replace(case, seqs=seqs, window=None, num_kv_heads=1, poison="nan_values").problem()
    kv, k, v = before_the_step(problem)
    out = METAL.update_and_attend(problem.q, k, v, kv, *problem.args[2:])
    assert_matches_formula(out, problem)
    assert_same_slabs(kv, problem.kv)


@pytest.mark.parametrize(
    "operation",
    [
        lambda kv, k, v, backend: backend.reshape_and_cache(
            k, v, kv, slots_of([40, 3, -1, 17, 5, 0, 95], kv.block_size)
        ),
        lambda kv, k, v, backend: backend.gather_blocks(kv, [4, 0, 5], 41),
        lambda kv, k, v, backend: backend.copy_blocks(kv, [(0, 4), (1, 5)]),
    ],
    ids=["reshape_and_cache", "gather_blocks", "copy_blocks"],
)
def test_blocks_and_rows_do_not_depend_on_the_order_of_threads(operation, metal_in_three_orders):
    rng = np.random.default_rng(0)
    kv = random_handle(rng, 6, 2, 16, 64, mx.float16)
    k, v = ((random_array(rng, (7, 2, 64), mx.float16),) for _ in "kv")
    twin = copy_of(kv)
    ours, theirs = operation(kv, k, v, METAL), operation(twin, k, v, REFERENCE)
    assert_same_slabs(kv, twin)
    for one, other in zip(ours or (), theirs or (), strict=True):
        assert mx.array_equal(one, other).item()
