"""Where an evaluated mx.array lies in memory, and arrays out of bytes.

On a CPU stream NumPy can look at an array's memory without a copy, and write it; bfloat16, which
NumPy lacks, is looked at through a uint16 view, which MLX makes without a copy, too. (So on Apple
Silicon, where memory is unified.)
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_emulator.launch import bytes_at

NUMPY_TYPES = {
    mx.bool_: np.bool_,
    mx.int8: np.int8,
    mx.int16: np.int16,
    mx.int32: np.int32,
    mx.int64: np.int64,
    mx.uint8: np.uint8,
    mx.uint16: np.uint16,
    mx.uint32: np.uint32,
    mx.uint64: np.uint64,
    mx.float16: np.float16,
    mx.bfloat16: np.uint16,
    mx.float32: np.float32,
    mx.complex64: np.complex64,
}


@dataclass
class HostView:
    """The memory of an array: from its lowest byte to its highest."""

    array: mx.array
    view: np.ndarray

    @classmethod
    def of(cls, array: mx.array) -> HostView:
        bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 and array.ndim else array
        if array.dtype == mx.bfloat16 and array.ndim == 0:
            bits = array.reshape(1).view(mx.uint16).reshape(())
        mx.eval(bits)
        return cls(array, np.array(bits, copy=False))

    @property
    def is_row_contiguous(self) -> bool:
        return self.view.flags.c_contiguous

    @property
    def element_strides(self) -> list[int]:
        return [stride // self.view.itemsize for stride in self.view.strides]

    @property
    def address(self) -> int:
        return self.view.ctypes.data

    @property
    def span(self) -> tuple[int, int]:
        """The lowest address and the number of bytes up to the end of the highest element."""
        if self.view.size == 0:
            return self.address, 0
        low = sum(
            min(0, (n - 1) * stride)
            for n, stride in zip(self.view.shape, self.view.strides, strict=True)
        )
        high = sum(
            max(0, (n - 1) * stride)
            for n, stride in zip(self.view.shape, self.view.strides, strict=True)
        )
        return self.address + low, high - low + self.view.itemsize

    @property
    def bytes(self) -> np.ndarray:
        """The array's own memory, writable."""
        return bytes_at(*self.span)


def contiguous_bytes(view: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(view).tobytes(), np.uint8)


def array_from_bytes(data: np.ndarray, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    values = mx.array(np.frombuffer(data.tobytes(), NUMPY_TYPES[dtype]).reshape(shape))
    if dtype == mx.bfloat16:
        values = (values if shape else values.reshape(1)).view(mx.bfloat16).reshape(shape)
    mx.eval(values)
    return values
