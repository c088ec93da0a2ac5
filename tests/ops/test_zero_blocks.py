"""Blocks filled with zeros, so that nothing of their last owner is left behind a context that fills
them in part.
"""

import mlx.core as mx
import numpy as np
import pytest
from helpers.backends import DECODING, REFERENCE
from helpers.numpy_attention import DTYPES, assert_matches_formula, make_problem
from paged_testing.by_hand import dense_handle

from mlx_paged.ops import KVHandle, SlotMapping


def random_handle(num_blocks=12, dtype=mx.float32):
    kv = dense_handle(*(mx.random.normal((num_blocks, 2, 8, 32)).astype(dtype) for _ in "kv"))
    mx.eval(*kv.arrays)
    return kv


def as_numpy(kv):
    return [np.array(slab.astype(mx.float32)) for slab in kv.arrays]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "block_ids",
    [[0], [11], [3, 4, 5], [9, 0, 4], list(range(12)), []],
    ids=lambda ids: f"blocks_{len(ids)}",
)
def test_the_named_blocks_are_zero_and_the_others_stay(block_ids, dtype):
    kv = random_handle(dtype=dtype)
    expected = as_numpy(kv)
    for slab in expected:
        slab[block_ids] = 0
    REFERENCE.zero_blocks(kv, block_ids)
    assert [slab.tolist() for slab in as_numpy(kv)] == [slab.tolist() for slab in expected]


@pytest.mark.parametrize("order", ["adjacent", "shuffled"])
def test_attention_sees_nothing_of_a_last_owner_that_left_nan(order):
    problem = make_problem([1, 17, 300], 1, order=order)
    dirty = dense_handle(
        mx.full(problem.kv.k[0].shape, mx.nan), mx.full(problem.kv.v[0].shape, mx.inf)
    )
    mx.eval(*dirty.arrays)
    for table, context_len, (_, k, v) in zip(
        problem.tables, problem.context_lens, problem.dense, strict=True
    ):
        REFERENCE.zero_blocks(dirty, table)
        REFERENCE.reshape_and_cache(
            (k,),
            (v,),
            dirty,
            SlotMapping.build(
                [table[t // 16] * 16 + t % 16 for t in range(context_len)], dirty.block_size
            ),
        )
        mx.eval(*dirty.arrays)
    q, _, *rest = problem.args
    assert_matches_formula(DECODING.attend(q, dirty, *rest), problem)


@pytest.mark.parametrize(
    ("block_ids", "message"),
    [
        ([0, 12], r"\[zero_blocks\] block_ids: block 12 is out of range, the slabs have 12 blocks"),
        ([-1], r"\[zero_blocks\] block_ids: block -1 is out of range, the slabs have 12 blocks"),
        ([1.0], r"\[zero_blocks\] block_ids: block ids must be integers, got 1.0"),
    ],
    ids=["behind_the_last", "negative", "float"],
)
def test_blocks_that_are_not_there_are_refused_and_nothing_changes(block_ids, message):
    kv = random_handle()
    before = as_numpy(kv)
    with pytest.raises(ValueError, match=message):
        REFERENCE.zero_blocks(kv, block_ids)
    assert [slab.tolist() for slab in as_numpy(kv)] == [slab.tolist() for slab in before]


@pytest.mark.parametrize("num_slots", [1_000, 100_000])
def test_zeroing_copies_no_slab(num_slots, extra_peak_bytes):
    kv = KVHandle.allocate(num_slots // 8, 2, 8, 32, 32)

    def zero():
        REFERENCE.zero_blocks(kv, [3, 9])
        mx.eval(*kv.arrays)

    assert extra_peak_bytes(zero) < kv.k[0].nbytes // 2
