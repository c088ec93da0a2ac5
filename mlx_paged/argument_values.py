"""Checks of the types of single arguments. Does not import MLX."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeGuard

from mlx_paged.errors import ArgumentError, shown


def kind_of(value: object) -> str:
    """The name of a value's type."""
    return type(value).__name__


def is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether ``value`` is a sequence other than text and bytes."""
    return isinstance(value, Sequence) and not isinstance(
        value, (str, bytes, bytearray, memoryview)
    )


def is_plain_integer(value: object, low: int | None = None) -> TypeGuard[int]:
    """Whether ``value`` is a Python ``int`` of at least ``low``, as in JSON, and not a ``bool``."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return low is None or value >= low


def as_integer(value: object) -> int | None:
    """An integer of any type, such as numpy's or MLX's, as Python's ``int``.

    ``None`` for everything else: a bool, a float, a text.
    """
    # Before numpy 2, a bool of numpy could be used as an index.
    if isinstance(value, bool) or "bool" in kind_of(value):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except Exception:
        # __index__ of an unknown type may raise anything.
        return _scalar_of_an_array(value)


def _scalar_of_an_array(value: object) -> int | None:
    # Before 0.32.3, an array of MLX without dimensions could not be used as an index.
    if getattr(value, "ndim", None) != 0 or "int" not in str(getattr(value, "dtype", "")):
        return None
    item = value.item()  # type: ignore[attr-defined]
    return item if type(item) is int else None


def check_positive(part: str, name: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` is a Python ``int`` of at least 1."""
    if not is_plain_integer(value, 1):
        raise ArgumentError(f"[{part}] {name} must be a positive integer, got {shown(value)}")
