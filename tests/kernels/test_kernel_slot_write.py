"""The slot write as a kernel: bit for bit what the reference writes, and no other byte."""

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

from mlx_paged.ops import KVFormat, KVHandle, SlotMapping


def write_and_compare(kv, k, v, slots):
    twin = copy_of(kv)
    mapping = slots if isinstance(slots, SlotMapping) else slots_of(slots, kv.block_size)
    METAL.reshape_and_cache((k,), (v,), kv, mapping)
    REFERENCE.reshape_and_cache((k,), (v,), twin, mapping)
    assert_same_slabs(kv, twin)


@mostly_slow(
    ("head_dim", "block_size", "dtype"),
    SHAPES,
    ids=[f"{dtype}-d{d}-b{b}" for d, b, dtype in SHAPES],
    quick=range(0, len(SHAPES), 5),
)
@pytest.mark.parametrize("num_rows", [1, 40], ids=["one_row", "40_rows"])
def test_rows_of_every_shape_land_in_their_slots(num_rows, head_dim, block_size, dtype, metal):
    rng = np.random.default_rng(head_dim + block_size)
    kv = random_handle(rng, 7, 2, block_size, head_dim, DTYPES[dtype])
    k, v = (random_array(rng, (num_rows, 2, head_dim), kv.dtype) for _ in "kv")
    write_and_compare(kv, k, v, rng.permutation(kv.num_slots)[:num_rows].tolist())


@mostly_slow("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "slots",
    [
        [0],
        [47],
        [-1],
        [-1, -1, -1],
        [5, -1, 9],
        [-1, 5, 9],
        [5, 9, -1],
        [-7, 5, -1000],
        [-1] * 20 + [3] + [-1] * 20,
        [1, 2, 3, 4, 5, 6, 7],
        [8, 1, 2, 3, 4, 5, 6, 7],
        list(range(16, 32)),
        list(range(47, -1, -1)),
        [],
    ],
    ids=[
        "first_slot",
        "last_slot",
        "one_padding",
        "all_padding",
        "padding_between",
        "padding_first",
        "padding_last",
        "any_negative_is_padding",
        "mostly_padding",
        "seven_rows",
        "eight_rows",
        "a_whole_block",
        "every_slot_in_reverse",
        "no_rows",
    ],
)
def test_every_kind_of_slot_list_is_exact(slots, dtype, metal):
    rng = np.random.default_rng(0)
    kv = random_handle(rng, 3, 2, 16, 64, dtype)
    k, v = (random_array(rng, (len(slots), 2, 64), dtype) for _ in "kv")
    write_and_compare(kv, k, v, slots)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 8, 16])
def test_rows_of_any_number_of_heads_are_exact(num_kv_heads, metal):
    rng = np.random.default_rng(num_kv_heads)
    kv = random_handle(rng, 5, num_kv_heads, 16, 64, mx.float16)
    k, v = (random_array(rng, (33, num_kv_heads, 64), mx.float16) for _ in "kv")
    write_and_compare(kv, k, v, rng.permutation(80)[:33].tolist())


def test_many_rows_are_exact(metal):
    rng = np.random.default_rng(0)
    kv = random_handle(rng, 100, 2, 16, 64, mx.bfloat16)
    k, v = (random_array(rng, (1000, 2, 64), mx.bfloat16) for _ in "kv")
    slots = rng.permutation(1600)[:1000]
    slots[rng.permutation(1000)[:100]] = -1
    write_and_compare(kv, k, v, slots.tolist())


VIEWS = {
    "heads_first": lambda rows: mx.contiguous(rows.swapaxes(0, 1)).swapaxes(0, 1),
    "every_second_token": lambda rows: mx.repeat(rows, 2, axis=0)[::2],
    "a_part_of_the_heads": lambda rows: mx.concatenate([rows, rows], axis=1)[:, 2:],
    "a_part_of_the_channels": lambda rows: mx.concatenate([rows, rows], axis=2)[..., 64:],
    "tokens_in_reverse": lambda rows: mx.contiguous(rows[::-1])[::-1],
    "behind_other_tokens": lambda rows: mx.concatenate([rows, rows])[rows.shape[0] :],
    "lazy": lambda rows: rows + 0,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_rows_that_are_views_are_exact(view, metal):
    rng = np.random.default_rng(0)
    kv = random_handle(rng, 5, 2, 16, 64, mx.float16)
    k, v = (random_array(rng, (9, 2, 64), mx.float16) for _ in "kv")
    write_and_compare(kv, view(k), view(v), [3, 70, -1, 9, 0, 41, 17, 5, 79])


def test_one_row_for_all_tokens_may_be_broadcast(metal):
    rng = np.random.default_rng(0)
    kv = random_handle(rng, 5, 2, 16, 64, mx.float16)
    row = mx.broadcast_to(random_array(rng, (1, 1, 64), mx.float16), (9, 2, 64))
    write_and_compare(kv, row, row, [3, 70, -1, 9, 0, 41, 17, 5, 79])


def test_nan_and_infinity_are_written_and_kept_like_any_number(metal):
    kv = dense_handle(mx.full((2, 1, 16, 64), mx.nan), mx.full((2, 1, 16, 64), -mx.inf))
    mx.eval(*kv.arrays)
    write_and_compare(kv, mx.full((1, 1, 64), mx.inf), mx.full((1, 1, 64), mx.nan), [17])


def test_a_slot_mapping_is_used_by_every_layer(metal):
    rng = np.random.default_rng(0)
    mapping = slots_of([3, -1, 17], 16)
    for _ in range(3):
        k, v = (random_array(rng, (3, 2, 64), mx.float16) for _ in "kv")
        write_and_compare(random_handle(rng, 3, 2, 16, 64, mx.float16), k, v, mapping)


def test_the_last_write_to_a_slot_wins_even_when_nothing_was_evaluated_between(metal):
    kv = KVHandle.allocate(2, 1, 16, 64, 64, KVFormat.dense("float16"))
    for value in (1.0, 2.0, 3.0):
        row = mx.full((2, 1, 64), value, mx.float16)
        METAL.reshape_and_cache((row[:1],), (-row[:1],), kv, slots_of([4], kv.block_size))
        METAL.reshape_and_cache((row,), (-row,), kv, slots_of([5, 6], kv.block_size))
    mx.eval(*kv.arrays)
    expected = KVHandle.allocate(2, 1, 16, 64, 64, KVFormat.dense("float16"))
    expected.k[0][0, 0, 4:7], expected.v[0][0, 0, 4:7] = mx.array(3.0), mx.array(-3.0)
    assert_same_bits(kv.k[0], expected.k[0])
    assert_same_bits(mx.abs(kv.v[0]), mx.abs(expected.v[0]))
    assert kv.v[0][0, 0, :, 0].tolist() == [0] * 4 + [-3] * 3 + [0] * 9
