"""Serialisation of recurrent states: the state of one sequence as bytes, and back.

The bytes describe themselves, since some arrays grow with the sequence and some are not set: the
length of a header (4 bytes, little-endian), the header as JSON (for each recurrent cache its slots:
dtype and shape, or null), and the arrays in turn.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
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


def state_from_bytes(content: bytes, layout: Sequence[str] = ()) -> StateRow:
    """The state that :func:`state_to_bytes` serialised.

    Args:
        layout: ``KVCacheConfig.state_layout`` of the cache for which it is; the dtypes of its
            arrays have to be the same. Not compared if it is empty.

    Raises:
        ValueError: the bytes are malformed, or a dtype differs.
    """
    try:
        (length,) = _LENGTH.unpack_from(content)
        begin = _LENGTH.size + length
        arrays: list[list[mx.array | None]] = []
        header = json.loads(content[_LENGTH.size : begin])
        _check_dtypes(header, layout)
        for slots in header:
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


def _check_dtypes(header: list[list[Any]], layout: Sequence[str]) -> None:
    """Raise ValueError if an array has another dtype than in the layout of a cache. Arrays that are
    not set have none.
    """
    if not layout:
        return
    # As in "float32 [3, 192], none".
    ours = [re.sub(r" \[[^]]*\]", "", text).split(", ") for text in layout]
    theirs = [["none" if slot is None else slot[0] for slot in slots] for slots in header]
    is_same = [len(slots) for slots in ours] == [len(slots) for slots in theirs] and all(
        one == other or "none" in (one, other)
        for pair in zip(ours, theirs, strict=True)
        for one, other in zip(*pair, strict=True)
    )
    if not is_same:
        raise ValueError(f"it has arrays of {_in_words(theirs)}, and this cache {_in_words(ours)}")


def _in_words(dtypes: list[list[str]]) -> str:
    return "; ".join(", ".join(map(str, slots)) for slots in dtypes)


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
