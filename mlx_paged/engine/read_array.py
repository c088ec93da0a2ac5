"""Small arrays as lists, with exact types: MLX annotates ``tolist`` with all possible ones."""

from __future__ import annotations

import mlx.core as mx


def read_ints(array: mx.array) -> list[int]:
    """The elements of integers ``[n]``."""
    return array.tolist()  # type: ignore[return-value]


def read_floats(array: mx.array) -> list[float]:
    """The elements of floats ``[n]``."""
    return array.tolist()  # type: ignore[return-value]


def read_int_rows(array: mx.array) -> list[list[int]]:
    """The rows of integers ``[m, n]``."""
    return array.tolist()  # type: ignore[return-value]


def read_float_rows(array: mx.array) -> list[list[float]]:
    """The rows of floats ``[m, n]``."""
    return array.tolist()  # type: ignore[return-value]
