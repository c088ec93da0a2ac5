"""Serialisation of recurrent states: the state of one sequence as bytes, and back.

The bytes describe themselves, since some arrays grow with the sequence and some are not set: the
length of a header (4 bytes, little-endian), the header as JSON (for each recurrent cache its slots:
dtype and shape, or null), and the arrays in turn.
"""

from __future__ import annotations

import json
import struct
from math import prod
from typing import Any, cast

import mlx.core as mx
import numpy as np

from mlx_paged.ops import StateArrays, StateRow, StateStack, dtype_name

_LENGTH = struct.Struct("<I")


def state_layout(arrays: StateArrays) -> list[list[tuple[str, tuple[int, ...]] | None]]:
    """The dtype and shape of one sequence's array in each recurrent cache and slot, without the
    axis of sequences.
    """
    return [
        [
            None if array is None else (dtype_name(array.dtype), tuple(array.shape[1:]))
            for array in slots
        ]
        for slots in arrays
    ]


def state_to_bytes(row: StateRow) -> bytes:
    """Serialise the state of one sequence bit by bit; waits until it is computed."""
    stack = row.alone().stack
    header = json.dumps(state_layout(stack.arrays), separators=(",", ":")).encode()
    pieces = [_bytes_of(array).data for array in stack.leaves if array.size]
    return b"".join([_LENGTH.pack(len(header)), header, *pieces])


def state_from_bytes(content: bytes) -> StateRow:
    """The state that :func:`state_to_bytes` serialised.

    Raises:
        ValueError: the bytes are malformed.
    """
    try:
        (length,) = _LENGTH.unpack_from(content)
        begin = _LENGTH.size + length
        arrays: list[list[mx.array | None]] = []
        for slots in json.loads(content[_LENGTH.size : begin]):
            arrays.append([])
            for slot in slots:
                array = None if slot is None else _read(content, begin, *slot)
                arrays[-1].append(array)
                begin += 0 if array is None else array.nbytes
    except (struct.error, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"[paged cache] these bytes are not a state: {error}") from error
    if begin != len(content):
        raise ValueError(
            f"[paged cache] a state must have {begin} bytes by its header, got {len(content)}"
        )
    row = StateRow(StateStack(arrays, 1), 0)
    mx.eval(row.stack.leaves)
    return row


def _bytes_of(array: mx.array) -> np.ndarray:
    # No MLX operation if possible: it would wait for the step in flight, though the state itself
    # has been computed.
    is_contiguous = memoryview(cast(Any, array)).c_contiguous
    return np.frombuffer(cast(Any, array if is_contiguous else mx.contiguous(array)), np.uint8)


def _read(content: bytes, begin: int, name: str, shape: list[int]) -> mx.array:
    if any(size < 0 for size in shape):
        raise ValueError(f"a shape of {shape}")
    dtype = getattr(mx, name)
    # Unsigned integers: numpy has no bfloat16.
    numbers = np.frombuffer(content, f"u{dtype.size}", prod(shape), begin)
    return mx.array(numbers).view(dtype).reshape(1, *shape)
