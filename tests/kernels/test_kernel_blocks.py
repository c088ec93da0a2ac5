"""Whole blocks on kernels: gathered and copied bit for bit as the reference does."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from helpers.backends import METAL, REFERENCE
from helpers.fast_lane import mostly_slow
from helpers.kernel_checks import (
    assert_same_bits,
    assert_same_slabs,
    copy_of,
    random_array,
    random_handle,
)
from helpers.kernel_grid import SHAPES
from helpers.numpy_attention import DTYPES
from paged_testing.by_hand import dense_handle, slots_of

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def handle(num_blocks=12, num_kv_heads=2, block_size=16, head_dim=64, dtype=mx.float16):
    return random_handle(
        np.random.default_rng(num_blocks), num_blocks, num_kv_heads, block_size, head_dim, dtype
    )


# Gather


def gather_and_compare(kv, table, num_tokens):
    before = copy_of(kv)
    ours = METAL.gather_blocks(kv, table, num_tokens)
    theirs = REFERENCE.gather_blocks(copy_of(kv), table, num_tokens)
    mx.eval(*ours)
    for one, other in zip(ours, theirs, strict=True):
        assert_same_bits(one, other)
    assert_same_slabs(kv, before)


@mostly_slow(
    ("head_dim", "block_size", "dtype"),
    SHAPES,
    ids=[f"{dtype}-d{d}-b{b}" for d, b, dtype in SHAPES],
    quick=range(0, len(SHAPES), 5),
)
def test_blocks_of_every_shape_are_gathered(head_dim, block_size, dtype, metal):
    kv = handle(6, 2, block_size, head_dim, DTYPES[dtype])
    gather_and_compare(kv, [4, 1, 2, 0], 3 * block_size + 1)


@pytest.mark.parametrize(
    "table",
    [[5], [0], [11], [3, 4, 5, 6], list(range(12)), [6, 5, 4, 3], [9, 0, 11, 4], [2, 2]],
    ids=["one", "first", "last", "adjacent", "all", "reversed", "shuffled", "same_block_twice"],
)
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_every_order_of_blocks_is_gathered(num_kv_heads, table, metal):
    gather_and_compare(handle(num_kv_heads=num_kv_heads), table, 16 * len(table))


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 63, 64])
def test_every_number_of_tokens_is_gathered_and_blocks_behind_them_are_not_looked_at(
    num_tokens, metal
):
    gather_and_compare(handle(), [9, 0, 11, 4, 999], num_tokens)


def test_what_unused_slots_hold_is_not_gathered(metal):
    kv = handle()
    kv.k[0][4, :, 1:], kv.v[0][4, :, 1:] = (
        mx.array(mx.nan, mx.float16),
        mx.array(mx.nan, mx.float16),
    )
    keys, values = METAL.gather_blocks(kv, [9, 4], 17)
    assert mx.isfinite(keys).all().item() and mx.isfinite(values).all().item()


def test_what_was_gathered_survives_a_later_write(metal):
    kv = handle()
    expected = REFERENCE.gather_blocks(copy_of(kv), [9, 0, 11], 3 * kv.block_size)
    gathered = METAL.gather_blocks(kv, [9, 0, 11], 3 * kv.block_size)
    rows = mx.zeros((12, 2, 64), mx.float16)
    METAL.reshape_and_cache(
        (rows,), (rows,), kv, slots_of([16 * block for block in range(12)], kv.block_size)
    )
    mx.eval(*kv.arrays)
    for one, other in zip(gathered, expected, strict=True):
        assert_same_bits(one, other)


# Copy

PAIRS = {
    "one": [(3, 7)],
    "first_to_last": [(0, 11)],
    "last_to_first": [(11, 0)],
    "one_source_many_times": [(3, 7), (3, 8), (3, 0)],
    "several": [(1, 2), (5, 4), (9, 10)],
    "a_run": [(1, 6), (2, 7), (3, 8)],
    "six": [(0, 6), (1, 7), (2, 8), (3, 9), (4, 10), (5, 11)],
    "none": [],
}


@dtypes
@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
def test_blocks_are_copied_whole_and_the_others_stay(pairs, dtype, metal):
    kv = handle(dtype=dtype)
    twin = copy_of(kv)
    METAL.copy_blocks(kv, pairs)
    REFERENCE.copy_blocks(twin, pairs)
    assert_same_slabs(kv, twin)


@pytest.mark.parametrize(
    ("num_kv_heads", "block_size", "head_dim"),
    # 64, 480, 2,560 and 10,240 threads for a block; a threadgroup has at most 256.
    [(1, 8, 32), (3, 8, 80), (5, 32, 64), (5, 64, 128)],
)
def test_blocks_of_any_size_are_copied_whole(num_kv_heads, block_size, head_dim, metal):
    kv = handle(6, num_kv_heads, block_size, head_dim)
    twin = copy_of(kv)
    for handle_, backend in ((kv, METAL), (twin, REFERENCE)):
        backend.copy_blocks(handle_, [(5, 0), (2, 3)])
    assert_same_slabs(kv, twin)


def test_each_operation_sees_those_before_it(metal):
    rng = np.random.default_rng(0)
    kv = handle(4)
    twin = copy_of(kv)
    k, v = ((random_array(rng, (2, 2, 64), mx.float16),) for _ in "kv")
    results = []
    for handle_, backend in ((kv, METAL), (twin, REFERENCE)):
        backend.reshape_and_cache(k, v, handle_, slots_of([2, 20], handle_.block_size))
        backend.copy_blocks(handle_, [(0, 2), (1, 3)])
        backend.reshape_and_cache(v, k, handle_, slots_of([5, 36], handle_.block_size))
        results.append(backend.gather_blocks(handle_, [3, 2, 0, 1], 4 * handle_.block_size))
    for one, other in zip(*results, strict=True):
        assert_same_bits(one, other)
    assert_same_slabs(kv, twin)


def test_a_table_of_more_blocks_than_a_plan_has_padding_is_gathered(metal):
    rng = np.random.default_rng(0)
    kv = dense_handle(*(random_array(rng, (70, 1, 16, 64), mx.float16) for _ in "kv"))
    gather_and_compare(kv, rng.permutation(70).tolist(), 1100)
