"""What K and V look like in memory: the only room that knows. Dense rows so far."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

DENSE_DTYPES = ("float32", "float16", "bfloat16")


class KVFormat(ABC):
    """How a cache stores rows of K or V. A row is one head of one token, ``[..., width]``."""

    @abstractmethod
    def row_nbytes(self, width: int) -> int:
        """Bytes that a row of ``width`` numbers takes."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...]) -> mx.array:
        """Storage for rows, ``[..., width]`` each, that hold zeros."""

    @abstractmethod
    def encode(self, rows: mx.array) -> mx.array:
        """Rows of any floating dtype as the storage holds them."""

    @abstractmethod
    def to_host(self, stored: mx.array) -> np.ndarray:
        """A copy of stored rows in host memory, bit for bit."""

    @abstractmethod
    def from_host(self, copy: np.ndarray) -> mx.array:
        """What :meth:`to_host` copied, as the storage holds it."""


@dataclass(frozen=True)
class DenseFormat(KVFormat):
    """One number per element, in ``dtype``: ``"float32"``, ``"float16"`` or ``"bfloat16"``.

    Raises:
        ValueError: another dtype.
    """

    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in DENSE_DTYPES:
            raise ValueError(f"[kv cache] dtype must be one of {DENSE_DTYPES}, got {self.dtype!r}")

    def __str__(self) -> str:
        return self.dtype

    @cached_property
    def _mx_dtype(self) -> mx.Dtype:
        dtype: mx.Dtype = getattr(mx, self.dtype)
        return dtype

    def row_nbytes(self, width: int) -> int:
        return width * self._mx_dtype.size

    def zeros(self, shape: tuple[int, ...]) -> mx.array:
        return mx.zeros(shape, self._mx_dtype)

    def encode(self, rows: mx.array) -> mx.array:
        return rows.astype(self._mx_dtype)

    def to_host(self, stored: mx.array) -> np.ndarray:
        # numpy has no bfloat16.
        return np.array(stored.view(mx.uint16) if stored.itemsize == 2 else stored)

    def from_host(self, copy: np.ndarray) -> mx.array:
        return mx.array(copy).view(self._mx_dtype)
