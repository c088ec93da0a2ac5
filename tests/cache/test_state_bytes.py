"""Recurrent states as bytes, and back."""

from __future__ import annotations

import json
import struct

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.cache.state_bytes import state_from_bytes, state_layout, state_to_bytes
from mlx_paged.ops import StateRow, StateStack

DTYPES = [mx.float32, mx.float16, mx.bfloat16, mx.int32, mx.uint8, mx.int64]


def bits_of(array: mx.array) -> bytes:
    return np.array(mx.contiguous(array).view(mx.uint8)).tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_a_stack_comes_back_bit_by_bit_in_its_own_dtype(dtype: mx.Dtype):
    numbers = np.random.default_rng(0).integers(0, 200, (3, 5, 7))
    first = mx.array(numbers).astype(dtype)
    # A view of rows that lie apart, a slot that is not set, and one that is empty.
    stack = StateStack([[first[:, ::2], None], [first, mx.zeros((3, 0, 4), dtype)]], 3)
    for index in range(3):
        content = state_to_bytes(StateRow(stack, index))
        found = state_from_bytes(content).stack
        assert state_layout(found.arrays) == state_layout(stack.arrays)
        assert found.num_states == 1 and found.arrays[0][1] is None
        for (cache, slot), expected in (((0, 0), first[:, ::2]), ((1, 0), first)):
            array = found.arrays[cache][slot]
            assert array is not None and array.dtype == dtype
            assert bits_of(array[0]) == bits_of(expected[index])


def test_bits_that_are_no_numbers_come_back_too():
    payload = mx.array([0x7FC1, 0xFF80, 0x8000, 0x7F80], mx.uint16).view(mx.bfloat16)[None]
    row = StateRow(StateStack([[payload]], 1), 0)
    (array,) = state_from_bytes(state_to_bytes(row)).stack.leaves
    assert bits_of(array) == bits_of(payload)


def with_header(header: object, rest: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<I", len(text)) + text + rest


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1\0",
        b"\xff\xff\xff\xff{}",
        b"\4\0\0\0nope",
        with_header(7),
        with_header([7]),
        with_header([[7]]),
        with_header([[["float31", [2]]]], b"12345678"),
        with_header([[["float32", [2]]]], b"1234567"),
        with_header([[["float32", [2]]]], b"123456789"),
        with_header([[["float32", [-1]]]], b"1234"),
        with_header([[["float32", "2"]]], b"12345678"),
        with_header([[["Dtype", [2]]]], b"12345678"),
    ],
)
def test_other_bytes_are_no_state(content: bytes):
    with pytest.raises(ValueError, match=r"these bytes are not a state|a state must have"):
        state_from_bytes(content)


def test_a_state_has_the_dtypes_of_the_layout_whatever_its_shapes():
    stack = StateStack([[mx.zeros((1, 3)), None], [mx.zeros((1, 2, 5), mx.bfloat16)]], 1)
    content = state_to_bytes(StateRow(stack, 0))
    for layout in (
        ("float32 [3], none", "bfloat16 [2, 5]"),
        ("float32 [4], float16 [2, 7]", "bfloat16 [9, 9, 9]"),  # one is not set
        ("none, none", "none"),
    ):
        assert state_layout(state_from_bytes(content, layout).stack.arrays) == [
            [("float32", (3,)), None],
            [("bfloat16", (2, 5))],
        ]
    for layout in (
        ("float32 [3], none", "float16 [2, 5]"),
        ("float32 [3]", "bfloat16 [2, 5]"),
        ("float32 [3], none",),
    ):
        with pytest.raises(ValueError, match="it has arrays of float32, none; bfloat16, and this"):
            state_from_bytes(content, layout)
