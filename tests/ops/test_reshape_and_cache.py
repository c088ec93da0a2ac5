"""Slot writes: the right rows in the right slots, nothing else touched, and no copy of a slab."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.backends import REFERENCE
from helpers.fast_lane import mostly_slow
from helpers.numpy_attention import DTYPES
from paged_testing.by_hand import dense_handle, slots_of, step_of

from mlx_paged.ops import AttentionParams, KVFormat, KVHandle, SlotMapping

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def random_array(rng, shape, dtype):
    """Normal numbers of the dtype: no payloads of NaN, which a cast could change."""
    return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)


def raw(array):
    """The bytes of an array as integers, so that equal means equal to the bit."""
    return np.array(array.view(mx.uint32 if array.itemsize == 4 else mx.uint16))


def random_handle(rng, num_blocks, num_kv_heads, block_size, head_dim, dtype=mx.float32):
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    kv = dense_handle(random_array(rng, shape, dtype), random_array(rng, shape, dtype))
    mx.eval(*kv.arrays)
    return kv


def expected_slabs(kv, k, v, slots):
    """What the slabs must hold after the write, by a loop over the rows in numpy."""
    slabs = [raw(kv.k[0]), raw(kv.v[0])]
    for slab, rows in zip(slabs, (raw(k), raw(v)), strict=True):
        for row, slot in zip(rows, slots, strict=True):
            if slot >= 0:
                slab[slot // kv.block_size, :, slot % kv.block_size] = row
    return slabs


def assert_write_is_exact(kv, slots, rng):
    k, v = (random_array(rng, (len(slots), kv.num_kv_heads, kv.key_dim), kv.dtype) for _ in "kv")
    expected = expected_slabs(kv, k, v, slots)
    REFERENCE.reshape_and_cache((k,), (v,), kv, slots_of(slots, kv.block_size))
    assert [raw(kv.k[0]).tolist(), raw(kv.v[0]).tolist()] == [slab.tolist() for slab in expected]


@dtypes
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_rows_land_in_their_slots_and_no_other_byte_changes(block_size, num_kv_heads, dtype):
    rng = np.random.default_rng(block_size)
    kv = random_handle(rng, 6, num_kv_heads, block_size, 32, dtype)
    slots = rng.permutation(6 * block_size)[:20].tolist()
    assert_write_is_exact(kv, slots, rng)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_rows_of_every_head_dim_land_whole(head_dim):
    rng = np.random.default_rng(head_dim)
    assert_write_is_exact(random_handle(rng, 3, 2, 8, head_dim), [23, 0, 9], rng)


@dtypes
@pytest.mark.parametrize(
    "slots",
    [
        [0],
        [47],
        [17],
        [-1],
        [-1, -1, -1],
        [5, -1, 9],
        [-1, 5, 9],
        [5, 9, -1],
        [-1, 5],
        [-7, 5, -1000],
        list(range(16, 32)),
        list(range(47, -1, -1)),
        [],
    ],
    ids=[
        "first_slot",
        "last_slot",
        "one_slot",
        "one_padding",
        "all_padding",
        "padding_between",
        "padding_first",
        "padding_last",
        "padding_and_one_row",
        "any_negative_is_padding",
        "a_whole_block",
        "every_slot_in_reverse",
        "no_rows",
    ],
)
def test_every_kind_of_slot_list_is_exact(slots, dtype):
    rng = np.random.default_rng(0)
    assert_write_is_exact(random_handle(rng, 3, 2, 16, 32, dtype), slots, rng)


@pytest.mark.parametrize(
    "given",
    [
        list,
        tuple,
        np.array,
        lambda slots: np.array(slots, np.int32),
        mx.array,
    ],
    ids=[
        "list",
        "tuple",
        "numpy_int64",
        "numpy_int32",
        "mx_array",
    ],
)
@pytest.mark.parametrize("slots", [[13], [13, -1, 2]], ids=["one_row", "with_padding"])
def test_slots_may_come_in_any_form(given, slots):
    rng = np.random.default_rng(0)
    kv = random_handle(rng, 3, 2, 8, 32)
    k, v = (random_array(rng, (len(slots), 2, 32), mx.float32) for _ in "kv")
    expected = expected_slabs(kv, k, v, slots)
    REFERENCE.reshape_and_cache((k,), (v,), kv, slots_of(given(slots), kv.block_size))
    assert [raw(kv.k[0]).tolist(), raw(kv.v[0]).tolist()] == [slab.tolist() for slab in expected]


def test_a_slot_mapping_is_used_by_every_layer():
    rng = np.random.default_rng(0)
    mapping = slots_of([3, -1, 17], 8)
    for _ in range(3):
        kv = random_handle(rng, 3, 2, 8, 32)
        k, v = (random_array(rng, (3, 2, 32), mx.float32) for _ in "kv")
        expected = expected_slabs(kv, k, v, [3, -1, 17])
        REFERENCE.reshape_and_cache((k,), (v,), kv, mapping)
        assert [raw(kv.k[0]).tolist(), raw(kv.v[0]).tolist()] == [
            slab.tolist() for slab in expected
        ]


def test_nan_and_infinity_are_written_and_kept_like_any_number():
    kv = dense_handle(mx.full((2, 1, 8, 32), mx.nan), mx.full((2, 1, 8, 32), -mx.inf))
    REFERENCE.reshape_and_cache(
        (mx.full((1, 1, 32), mx.inf),),
        (mx.zeros((1, 1, 32)),),
        kv,
        slots_of([9], kv.block_size),
    )
    k, v = np.full((2, 1, 8, 32), np.nan), np.full((2, 1, 8, 32), -np.inf)
    k[1, 0, 1], v[1, 0, 1] = np.inf, 0
    np.testing.assert_array_equal(np.array(kv.k[0]), k)
    np.testing.assert_array_equal(np.array(kv.v[0]), v)


def test_the_last_write_to_a_slot_wins_even_when_nothing_was_evaluated_between():
    kv = KVHandle.allocate(2, 1, 8, 32, 32)
    for value in (1.0, 2.0, 3.0):
        REFERENCE.reshape_and_cache(
            (mx.full((1, 1, 32), value),),
            (mx.full((1, 1, 32), -value),),
            kv,
            slots_of([4], kv.block_size),
        )
        REFERENCE.reshape_and_cache(
            (mx.full((2, 1, 32), value),),
            (mx.full((2, 1, 32), -value),),
            kv,
            slots_of([5, 6], kv.block_size),
        )
    assert kv.k[0][0, 0, :, 0].tolist() == [0, 0, 0, 0, 3, 3, 3, 0]
    assert kv.v[0][0, 0, :, 0].tolist() == [0, 0, 0, 0, -3, -3, -3, 0]


def test_an_array_read_before_a_write_keeps_what_it_held():
    kv = KVHandle.allocate(2, 1, 8, 32, 32)
    evaluated, lazy = kv.k[0][0, 0, :, 0], kv.v[0][0, 0, :, 0]
    mx.eval(evaluated)
    REFERENCE.reshape_and_cache(
        (mx.ones((1, 1, 32)),), (mx.ones((1, 1, 32)),), kv, slots_of([4], kv.block_size)
    )
    mx.eval(*kv.arrays)
    assert evaluated.tolist() == lazy.tolist() == [0] * 8
    assert kv.k[0][0, 0, :, 0].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]


# Refusals

ROWS = mx.ones((2, 2, 32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"slot_mapping": [0, 64]},
            r"slot_mapping: slot 64 is out of range, the slabs have 64 slots \(4 blocks of 16\)",
        ),
        ({"slot_mapping": [2**31, 0]}, r"slot_mapping: slot 2147483648 is out of range"),
        ({"slot_mapping": [2**32 + 3, 0]}, r"slot_mapping: slot 4294967299 is out of range"),
        (
            {"slot_mapping": slots_of([0, 1], 8)},
            r"slot_mapping: built for blocks of 8, the slabs hold 16",
        ),
        (
            {"slot_mapping": [0, 1, 2]},
            r"k: expected \[num_tokens, .*, dim\] = \[3, 2, 32\], got \[2, 2, 32\]",
        ),
        ({"k": (mx.ones((2, 4, 32)),)}, r"k: expected .* = \[2, 2, 32\], got \[2, 4, 32\]"),
        ({"v": (mx.ones((2, 2, 64)),)}, r"v: expected .* = \[2, 2, 32\], got \[2, 2, 64\]"),
        ({"v": (mx.ones((2, 64)),)}, r"v: expected .* = \[2, 2, 32\], got \[2, 64\]"),
        ({"v": (mx.ones((1, 2, 32)),)}, r"v: expected .* = \[2, 2, 32\], got \[1, 2, 32\]"),
        ({"k": (mx.ones((2, 2, 32), mx.float16),)}, r"k: .*float16 rows don't fit .*float32 slabs"),
        (
            {"v": (mx.ones((2, 2, 32), mx.bfloat16),)},
            r"v: .*bfloat16 rows don't fit .*float32 slabs",
        ),
    ],
    ids=[
        "slot_behind_the_last",
        "slot_of_33_bits",
        "slot_that_wraps_to_a_valid_one",
        "mapping_for_other_blocks",
        "more_slots_than_rows",
        "heads_of_k",
        "head_dim_of_v",
        "v_of_two_dimensions",
        "rows_of_v",
        "dtype_of_k",
        "dtype_of_v",
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(change, message):
    arguments = {
        "k": (ROWS,),
        "v": (ROWS,),
        "kv": KVHandle.allocate(4, 2, 16, 32, 32),
        "slot_mapping": [0, 1],
    } | change
    kv, slots = arguments["kv"], arguments.pop("slot_mapping")
    with pytest.raises(ValueError, match=rf"\[reshape_and_cache\] {message}"):
        mapping = slots if isinstance(slots, SlotMapping) else slots_of(slots, 16)
        REFERENCE.reshape_and_cache(**arguments, slot_mapping=mapping)
    assert [mx.any(slab).item() for slab in kv.arrays] == [False, False], (
        "a refused write has written"
    )


def test_the_same_padding_may_come_many_times():
    kv = KVHandle.allocate(4, 2, 16, 32, 32)
    rows = mx.ones((4, 2, 32))
    REFERENCE.reshape_and_cache((rows,), (rows,), kv, slots_of([-1, 3, -1, -1], kv.block_size))
    assert kv.k[0].sum().item() == 2 * 32


# No copy of a slab

BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 8, 2, 32
NUM_SLOTS = (1_000, 100_000)


def append_costs(
    extra_peak_bytes, num_slots, num_rows, dtype=mx.float32, keep_view=False, repeats=1
):
    """Extra peak bytes of each of some appends into slabs of ``num_slots`` slots, and the bytes of
    one slab.
    """
    kv = KVHandle.allocate(
        num_slots // BLOCK_SIZE, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, HEAD_DIM, KVFormat.dense(dtype)
    )
    rows = mx.ones((num_rows, NUM_KV_HEADS, HEAD_DIM), dtype)
    slots = [7 * row for row in range(num_rows)]
    holders = (kv.k[0][3:5], kv.v[0][3:5]) if keep_view else ()
    mx.eval(rows, *holders)

    def append():
        REFERENCE.reshape_and_cache((rows,), (rows,), kv, slots_of(slots, kv.block_size))
        mx.eval(*kv.arrays)

    extra = [extra_peak_bytes(append) for _ in range(repeats)]
    assert kv.k[0][slots[-1] // BLOCK_SIZE, 0, slots[-1] % BLOCK_SIZE, 0].item() == 1, (
        "the row was not written"
    )
    return extra, kv.k[0].nbytes


@dtypes
@pytest.mark.parametrize("num_rows", [1, 2, 64], ids=["one_row", "two_rows", "64_rows"])
@pytest.mark.parametrize("num_slots", NUM_SLOTS)
def test_an_append_copies_no_slab(num_slots, num_rows, dtype, extra_peak_bytes):
    (extra,), slab_bytes = append_costs(extra_peak_bytes, num_slots, num_rows, dtype)
    assert extra < slab_bytes // 2


@mostly_slow("num_rows", [1, 2, 64], ids=["one_row", "two_rows", "64_rows"])
def test_an_append_takes_the_same_memory_in_a_slab_of_a_thousand_and_of_a_hundred_thousand_slots(
    num_rows, extra_peak_bytes
):
    small, large = (
        append_costs(extra_peak_bytes, num_slots, num_rows, repeats=20)[0]
        for num_slots in NUM_SLOTS
    )
    # Another thread frees the block ids and the offsets (int32, for K and for V), sooner or later
    # than the peak.
    index_bytes = 2 * 2 * 4 * num_rows
    assert max(small + large) - min(small + large) <= index_bytes, f"{small} bytes, {large} bytes"
    assert max(small + large) <= 3 * 2 * num_rows * NUM_KV_HEADS * HEAD_DIM * 4, (
        "more than the rows"
    )


@pytest.mark.parametrize("num_rows", [1, 64], ids=["one_row", "64_rows"])
@pytest.mark.parametrize("num_slots", NUM_SLOTS)
def test_the_counter_sees_the_copy_that_a_second_holder_of_the_slab_causes(
    num_slots, num_rows, extra_peak_bytes
):
    (extra,), slab_bytes = append_costs(extra_peak_bytes, num_slots, num_rows, keep_view=True)
    assert extra >= slab_bytes


@pytest.mark.parametrize("table", [range(40), [*range(40, 0, -1)]], ids=["views", "gather"])
@pytest.mark.parametrize(
    "query_lens", [[1], [1, 1], [3, 20]], ids=["one_decode", "two_decodes", "mixed"]
)
def test_a_step_that_writes_and_reads_copies_no_slab_and_neither_does_the_next(
    query_lens, table, extra_peak_bytes
):
    kv = KVHandle.allocate(100_000 // BLOCK_SIZE, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, HEAD_DIM)
    table = list(table)
    half = len(table) // len(query_lens)
    tables = [table[half * seq : half * (seq + 1)] for seq in range(len(query_lens))]

    def decode():
        for context_len in range(100, 105):
            metadata = step_of(tables, [context_len] * len(tables), query_lens, BLOCK_SIZE)
            rows = mx.ones((metadata.num_tokens, NUM_KV_HEADS, HEAD_DIM))
            REFERENCE.reshape_and_cache((rows,), (rows,), kv, metadata.slot_mapping)
            mx.eval(REFERENCE.attend(rows, kv, metadata, AttentionParams(1.0)), *kv.arrays)

    assert extra_peak_bytes(decode) < kv.k[0].nbytes // 2


def test_many_appends_leave_memory_where_it_was():
    kv = KVHandle.allocate(1_000, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, HEAD_DIM)
    rows = mx.ones((1, NUM_KV_HEADS, HEAD_DIM))
    mx.eval(rows)
    held = []
    for slot in range(50):
        REFERENCE.reshape_and_cache((rows,), (rows,), kv, slots_of([slot], kv.block_size))
        mx.eval(*kv.arrays)
        mx.synchronize()
        held.append(mx.get_active_memory())
    assert set(held[1:]) == {held[1]}
    assert mx.sum(kv.k[0]).item() == 50 * NUM_KV_HEADS * HEAD_DIM
