"""Whole blocks: gathered into dense K and V, and copied within the slabs."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.backends import REFERENCE
from helpers.numpy_attention import DTYPES
from paged_testing.by_hand import dense_handle, slots_of

from mlx_paged.ops import KVHandle

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def random_handle(num_blocks=12, num_kv_heads=2, block_size=8, head_dim=32, dtype=mx.float32):
    rng = np.random.default_rng(num_blocks)
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    kv = dense_handle(
        *(mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(dtype) for _ in "kv")
    )
    mx.eval(*kv.arrays)
    return kv


def as_numpy(array):
    return np.array(array.astype(mx.float32))


def dense(slab, table, num_tokens):
    """Token by token: ``[num_kv_heads, num_tokens, head_dim]``."""
    block_size = slab.shape[2]
    return np.stack(
        [slab[table[t // block_size], :, t % block_size] for t in range(num_tokens)], axis=1
    )


# Gather

TABLES = {
    "one_block": [5],
    "first_block": [0],
    "last_block": [11],
    "adjacent": [3, 4, 5, 6],
    "all": list(range(12)),
    "reversed": [6, 5, 4, 3],
    "shuffled": [9, 0, 11, 4],
    "two_runs": [7, 8, 2, 3],
    "almost_adjacent": [3, 4, 6, 7],
    "ends_like_a_run": [3, 5, 4, 6],
    "same_block_twice": [2, 2],
}


@dtypes
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_order_of_blocks_is_gathered_as_numpy_does(table, dtype):
    kv = random_handle(dtype=dtype)
    keys, values = REFERENCE.gather_blocks(kv, table, kv.block_size * len(table))
    assert keys.dtype == values.dtype == dtype
    np.testing.assert_array_equal(as_numpy(keys), dense(as_numpy(kv.k[0]), table, 8 * len(table)))
    np.testing.assert_array_equal(as_numpy(values), dense(as_numpy(kv.v[0]), table, 8 * len(table)))


@pytest.mark.parametrize("table", [[3, 4, 5, 6], [9, 0, 11, 4]], ids=["adjacent", "shuffled"])
@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 15, 16, 17, 31, 32])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_every_length_is_gathered_as_numpy_does(num_kv_heads, num_tokens, table):
    kv = random_handle(num_kv_heads=num_kv_heads)
    keys, values = REFERENCE.gather_blocks(kv, table, num_tokens)
    assert keys.shape == values.shape == (num_kv_heads, num_tokens, 32)
    np.testing.assert_array_equal(as_numpy(keys), dense(as_numpy(kv.k[0]), table, num_tokens))
    np.testing.assert_array_equal(as_numpy(values), dense(as_numpy(kv.v[0]), table, num_tokens))


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("head_dim", [32, 80, 256])
def test_every_block_shape_is_gathered_as_numpy_does(head_dim, block_size):
    kv = random_handle(5, 2, block_size, head_dim)
    keys, values = REFERENCE.gather_blocks(kv, [4, 1, 2], 2 * block_size + 1)
    np.testing.assert_array_equal(
        as_numpy(keys), dense(as_numpy(kv.k[0]), [4, 1, 2], 2 * block_size + 1)
    )
    np.testing.assert_array_equal(
        as_numpy(values), dense(as_numpy(kv.v[0]), [4, 1, 2], 2 * block_size + 1)
    )


@pytest.mark.parametrize("given", [list, tuple], ids=["list", "tuple"])
def test_a_table_may_come_in_any_form(given):
    kv = random_handle()
    keys, _ = REFERENCE.gather_blocks(kv, given([9, 0, 11]), 20)
    np.testing.assert_array_equal(as_numpy(keys), dense(as_numpy(kv.k[0]), [9, 0, 11], 20))


def test_blocks_after_the_tokens_are_not_read():
    kv = random_handle()
    keys, _ = REFERENCE.gather_blocks(kv, [9, 0, 999], 16)
    np.testing.assert_array_equal(as_numpy(keys), dense(as_numpy(kv.k[0]), [9, 0], 16))


@pytest.mark.parametrize(
    "table", [[5], [3, 4, 5], [9, 0, 11]], ids=["one_block", "adjacent", "shuffled"]
)
def test_what_was_gathered_survives_a_later_write(table):
    kv = random_handle()
    expected = dense(as_numpy(kv.k[0]), table, 8 * len(table))
    keys, values = REFERENCE.gather_blocks(kv, table, kv.block_size * len(table))
    mx.eval(keys, values)
    for block in range(12):
        REFERENCE.reshape_and_cache(
            (mx.zeros((1, 2, 32)),),
            (mx.zeros((1, 2, 32)),),
            kv,
            slots_of([8 * block], kv.block_size),
        )
        mx.eval(*kv.arrays)
    np.testing.assert_array_equal(as_numpy(keys), expected)


@pytest.mark.parametrize(
    ("block_table", "num_tokens", "message"),
    [
        ([], 16, r"block_table: must name at least one block"),
        ([[1, 2]], 8, r"block_table: block ids must be integers, got \[1, 2\]"),
        ([1.0, 2.0], 16, r"block_table: block ids must be integers, got 1.0"),
        ([1, 12], 16, r"block_table: block 12 is out of range, the slabs have 12 blocks"),
        ([1, -1], 16, r"block_table: block -1 is out of range, the slabs have 12 blocks"),
        ([1, 2**32 + 1], 16, r"block_table: block 4294967297 is out of range"),
        ([1, 2], 17, r"num_tokens: must be within 1..16 \(2 blocks of 8\), got 17"),
        ([1, 2], 0, r"num_tokens: must be within 1..16 \(2 blocks of 8\), got 0"),
        ([1, 2], -1, r"num_tokens: must be within 1..16 \(2 blocks of 8\), got -1"),
    ],
    ids=[
        "empty_table",
        "two_dimensions",
        "floats",
        "block_behind_the_last",
        "negative_block",
        "block_that_wraps_to_a_valid_one",
        "too_many_tokens",
        "no_tokens",
        "negative_tokens",
    ],
)
def test_gathers_that_do_not_fit_are_refused_by_name(block_table, num_tokens, message):
    with pytest.raises(ValueError, match=rf"\[gather_blocks\] {message}"):
        REFERENCE.gather_blocks(random_handle(), block_table, num_tokens)


# Copy


def copied(slab, pairs):
    out = slab.copy()
    for source, destination in pairs:
        out[destination] = slab[source]
    return out


@dtypes
@pytest.mark.parametrize(
    "pairs",
    [
        [(3, 7)],
        [(0, 11)],
        [(11, 0)],
        [(3, 7), (3, 8), (3, 0)],
        [(1, 2), (5, 4), (9, 10)],
        [(1, 6), (2, 7), (3, 8)],
    ],
    ids=["one", "first_to_last", "last_to_first", "one_source_many_times", "several", "a_run"],
)
def test_blocks_are_copied_whole_and_the_others_stay(pairs, dtype):
    kv = random_handle(dtype=dtype)
    expected = [copied(as_numpy(slab), pairs) for slab in kv.arrays]
    REFERENCE.copy_blocks(kv, pairs)
    assert [as_numpy(slab).tolist() for slab in kv.arrays] == [slab.tolist() for slab in expected]


@pytest.mark.parametrize(
    "given", [list, tuple, lambda p: [list(x) for x in p]], ids=["list", "tuple", "lists"]
)
def test_pairs_may_come_in_any_form(given):
    kv = random_handle()
    expected = [copied(as_numpy(slab), [(3, 7), (2, 5)]) for slab in kv.arrays]
    REFERENCE.copy_blocks(kv, given([(3, 7), (2, 5)]))
    assert [as_numpy(slab).tolist() for slab in kv.arrays] == [slab.tolist() for slab in expected]


def test_no_pairs_copy_nothing():
    kv = random_handle()
    before = [as_numpy(slab) for slab in kv.arrays]
    REFERENCE.copy_blocks(kv, [])
    assert [as_numpy(slab).tolist() for slab in kv.arrays] == [slab.tolist() for slab in before]


def test_a_copy_sees_the_write_before_it_and_is_seen_by_the_write_after_it():
    kv = KVHandle.allocate(3, 1, 8, 32, 32)
    REFERENCE.reshape_and_cache(
        (mx.full((1, 1, 32), 1.0),),
        (mx.full((1, 1, 32), 1.0),),
        kv,
        slots_of([2], kv.block_size),
    )
    REFERENCE.copy_blocks(kv, [(0, 2)])
    REFERENCE.reshape_and_cache(
        (mx.full((1, 1, 32), 5.0),),
        (mx.full((1, 1, 32), 5.0),),
        kv,
        slots_of([19], kv.block_size),
    )
    for slab in kv.arrays:
        assert slab[:, 0, :, 0].tolist() == [
            [0, 0, 1, 0, 0, 0, 0, 0],
            [0] * 8,
            [0, 0, 1, 5, 0, 0, 0, 0],
        ]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(0, 12)], r"block 12 is out of range, the slabs have 12 blocks"),
        ([(12, 0)], r"block 12 is out of range, the slabs have 12 blocks"),
        ([(-1, 0)], r"block -1 is out of range, the slabs have 12 blocks"),
        ([(1, 3), (2, 3)], r"a destination is named twice"),
        ([(1, 2), (2, 3)], r"a block is both source and destination"),
        ([(4, 4)], r"a block is both source and destination"),
        ([(1, 2, 3)], r"expected pairs \(source, destination\), got .*1, 2, 3"),
        ([(1.0, 2.0)], r"block ids must be integers, got 1.0"),
    ],
    ids=[
        "destination_out_of_range",
        "source_out_of_range",
        "negative",
        "destination_twice",
        "chain",
        "onto_itself",
        "triples",
        "floats",
    ],
)
def test_copies_that_do_not_fit_are_refused_and_change_nothing(pairs, message):
    kv = random_handle()
    before = [as_numpy(slab).tolist() for slab in kv.arrays]
    with pytest.raises(ValueError, match=rf"\[copy_blocks\] src_dst_pairs: {message}"):
        REFERENCE.copy_blocks(kv, pairs)
    assert [as_numpy(slab).tolist() for slab in kv.arrays] == before


# Memory


def copy_costs(extra_peak_bytes, num_slots, keep_view=False, repeats=1):
    """Extra peak bytes of each of some copies in slabs of ``num_slots`` slots, and the bytes of one
    slab.
    """
    kv = KVHandle.allocate(num_slots // 8, 2, 8, 32, 32)
    holders = [kv.k[0][3:5]] if keep_view else []
    mx.eval(*holders)

    def copy():
        REFERENCE.copy_blocks(kv, [(0, 9), (1, 7), (5, 100)])
        mx.eval(*kv.arrays)

    return [extra_peak_bytes(copy) for _ in range(repeats)], kv.k[0].nbytes


@pytest.mark.parametrize("num_slots", [1_000, 100_000])
def test_a_copy_of_blocks_copies_no_slab(num_slots, extra_peak_bytes):
    (extra,), slab_bytes = copy_costs(extra_peak_bytes, num_slots)
    assert extra < slab_bytes // 2


def test_a_copy_of_blocks_takes_the_same_memory_in_a_small_and_in_a_large_slab(extra_peak_bytes):
    small, large = (
        copy_costs(extra_peak_bytes, num_slots, repeats=20)[0] for num_slots in (1_000, 100_000)
    )
    # Another thread frees the ids of sources and destinations (int32, for K and for V), sooner or
    # later than the peak.
    index_bytes = 2 * 2 * 4 * 3
    assert max(small + large) - min(small + large) <= index_bytes, f"{small} bytes, {large} bytes"


def test_the_counter_sees_the_copy_that_a_second_holder_of_the_slab_causes(extra_peak_bytes):
    (extra,), slab_bytes = copy_costs(extra_peak_bytes, 100_000, keep_view=True)
    assert extra >= slab_bytes


@pytest.mark.parametrize(
    "table", [list(range(20)), list(range(20, 0, -1))], ids=["adjacent", "reversed"]
)
def test_a_gather_takes_the_memory_of_its_tokens_and_not_of_the_slab(table, extra_peak_bytes):
    kv = KVHandle.allocate(12_500, 2, 8, 32, 32)
    gathered = []

    def gather():
        gathered.extend(REFERENCE.gather_blocks(kv, table, kv.block_size * len(table)))
        mx.eval(*gathered)

    num_bytes = 2 * 2 * 160 * 32 * 4
    assert num_bytes <= extra_peak_bytes(gather) <= 2 * num_bytes + 1024
