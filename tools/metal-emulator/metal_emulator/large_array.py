"""An input that is larger than the memory of the machine: only the pages that are touched exist."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_emulator.host_memory import NUMPY_TYPES
from metal_emulator.launch import GuardedBuffer


@dataclass(frozen=True, eq=False)
class LargeArray:
    """A row-contiguous array of zeros between guard pages; bfloat16 is seen as uint16.

    Kernels read and write it where it lies, so nothing compares it before and after a call, and
    runs in several orders see what the runs before them wrote.
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype
    buffer: GuardedBuffer

    @classmethod
    @contextmanager
    def zeros(cls, shape: tuple[int, ...], dtype: mx.Dtype) -> Iterator[LargeArray]:
        """Address space of ``prod(shape)`` elements, given back at the end.

        Raises:
            MemoryError: the machine hands out no more address space than it has memory.
        """
        buffer = GuardedBuffer(math.prod(shape) * dtype.size, start_aligned=False)
        try:
            yield cls(shape, dtype, buffer)
        finally:
            buffer.unmap()

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.size

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes

    def __getitem__(self, index: int) -> np.ndarray:
        """``array[index]`` along the first axis, a view that can be written."""
        nbytes = self.nbytes // self.shape[0]
        part = self.buffer.data[index * nbytes : (index + 1) * nbytes]
        return part.view(NUMPY_TYPES[self.dtype]).reshape(self.shape[1:])
