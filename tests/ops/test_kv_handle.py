"""The handle of one layer's slabs: its sizes, what it refuses to hold, and growth."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from helpers.backends import REFERENCE
from helpers.numpy_attention import DTYPES
from paged_testing.by_hand import dense_handle, slots_of

from mlx_paged.ops import KVFormat, KVHandle


def state(kv):
    return {
        "shapes": [list(kv.k[0].shape), list(kv.v[0].shape)],
        "num_blocks": kv.num_blocks,
        "num_kv_heads": kv.num_kv_heads,
        "block_size": kv.block_size,
        "key_dim": kv.key_dim,
        "value_dim": kv.value_dim,
        "num_slots": kv.num_slots,
        "dtype": kv.dtype,
        "nbytes": kv.nbytes,
        "zeros": not (mx.any(kv.k[0]).item() or mx.any(kv.v[0]).item()),
        "fence": kv.fence,
    }


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_new_slabs_hold_zeros_and_their_bytes_are_the_formula(dtype):
    assert state(KVHandle.allocate(5, 2, 8, 96, 64, KVFormat.dense(dtype))) == {
        "shapes": [[5, 2, 8, 96], [5, 2, 8, 64]],
        "num_blocks": 5,
        "num_kv_heads": 2,
        "block_size": 8,
        "key_dim": 96,
        "value_dim": 64,
        "num_slots": 40,
        "dtype": dtype,
        "nbytes": 5 * 2 * 8 * (96 + 64) * dtype.size,
        "zeros": True,
        "fence": None,
    }


@pytest.mark.parametrize(
    ("k", "v", "message"),
    [
        (
            mx.zeros((4, 2, 16, 32)),
            mx.zeros((5, 2, 16, 32)),
            r"= \[4, 2, 16, 32\] float32, got \[5, 2, 16, 32\] float32",
        ),
        (
            mx.zeros((4, 2, 16, 32)),
            mx.zeros((4, 2, 8, 32)),
            r"= \[4, 2, 16, 32\] float32, got \[4, 2, 8, 32\] float32",
        ),
        (mx.zeros((4, 16, 32)), mx.zeros((4, 16, 32)), r"got \[4, 16, 32\] float32"),
        (
            mx.zeros((4, 2, 16, 32), mx.int8),
            mx.zeros((4, 2, 16, 32), mx.int8),
            "dtype must be one of .*, got .int8",
        ),
        (
            mx.zeros((4, 2, 16, 32)),
            mx.zeros((4, 2, 16, 32), mx.float16),
            r"slabs of float32 must be .*float32, got \[4, 2, 16, 32\] float16",
        ),
    ],
    ids=["num_blocks", "block_size", "three_dimensions", "integers", "two_dtypes"],
)
def test_slabs_that_do_not_fit_one_another_are_refused(k, v, message):
    with pytest.raises(ValueError, match=message):
        dense_handle(k, v)


def test_growth_adds_zeros_at_the_end_and_keeps_every_row():
    kv = KVHandle.allocate(2, 1, 8, 32, 32)
    rows = mx.ones((2, 1, 32))
    REFERENCE.reshape_and_cache((rows,), (2 * rows,), kv, slots_of([3, 15], kv.block_size))
    kv.grow(1)
    written = [[0, 0, 0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1], [0] * 8]
    assert kv.k[0][:, 0, :, 0].tolist() == written
    assert kv.v[0][:, 0, :, 0].tolist() == [[2 * value for value in block] for block in written]
    assert kv.num_slots == 24
    REFERENCE.reshape_and_cache((rows[:1],), (rows[:1],), kv, slots_of([23], kv.block_size))
    assert kv.k[0][2, 0, :, 0].tolist() == [0] * 7 + [1]


def test_slabs_of_two_widths_keep_them_when_they_grow_and_shrink():
    kv = KVHandle.allocate(2, 1, 8, 64, 32, KVFormat.dense("float16"))
    kv.k[0][1], kv.v[0][1] = mx.array(1, mx.float16), mx.array(2, mx.float16)
    for resize, num_blocks in ((kv.grow, 3), (kv.shrink_to, 2)):
        resize(num_blocks)
        assert kv.k[0].shape[3] == 64 and kv.v[0].shape[3] == 32
        assert mx.all(kv.k[0][1] == 1).item() and mx.all(kv.v[0][1] == 2).item()
    assert kv.num_blocks == 2


def test_a_handle_that_can_not_grow_to_its_end_is_as_it_was(monkeypatch):
    handle = KVHandle.allocate(3, 2, 8, 16, 16)
    handle.k[0][1] = 1
    handle.v[0][2] = 2
    k, v = np.array(handle.k[0]), np.array(handle.v[0])
    real = mx.concatenate
    calls = []

    def failing(arrays, *args):
        calls.append(len(arrays))
        if len(calls) == 2:
            raise RuntimeError("[malloc] Unable to allocate")
        return real(arrays, *args)

    monkeypatch.setattr(mx, "concatenate", failing)
    with pytest.raises(RuntimeError, match="Unable to allocate"):
        handle.grow(5)
    assert handle.num_blocks == 3 and handle.v[0].shape == handle.k[0].shape
    assert np.array_equal(handle.k[0], k) and np.array_equal(handle.v[0], v)


LEAVING = {
    "leave_chain": lambda kv: kv.leave_chain(),
    "grow": lambda kv: kv.grow(1),
    "shrink_to": lambda kv: kv.shrink_to(1),
    "plain_mlx": lambda kv: REFERENCE.gather_blocks(kv, [0], kv.block_size),
}
leaving = pytest.mark.parametrize("leave", LEAVING.values(), ids=LEAVING)


@leaving
def test_no_call_leaves_the_chain_before_its_last_kernel_is_done(
    leave: Callable[[KVHandle], object],
) -> None:
    kv = KVHandle.allocate(2, 1, 8, 32, 32)
    token = kv.fence = mx.zeros((8,), mx.int32) + 1  # what a kernel returns that has not run yet
    leave(kv)
    assert kv.fence is None
    with ThreadPoolExecutor(max_workers=1) as thread:
        # A thread can't evaluate what another one left undone.
        assert thread.submit(token.tolist).result() == [1] * 8


@leaving
def test_a_chain_whose_last_kernel_fails_is_not_left(leave: Callable[[KVHandle], object]) -> None:
    kv = KVHandle.allocate(2, 1, 8, 32, 32)
    with ThreadPoolExecutor(max_workers=1) as thread:
        token = kv.fence = thread.submit(lambda: mx.zeros((8,), mx.int32) + 1).result()
    with pytest.raises(RuntimeError, match="There is no Stream"):
        leave(kv)
    assert kv.fence is token and kv.num_blocks == 2
