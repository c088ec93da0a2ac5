"""Checks of single arguments: their type and range, in one line each. Imports no MLX."""

from __future__ import annotations

import math
import operator

from mlx_paged.errors import shown

MAX_REASON = 300  # characters of an error that is quoted


def kind_of(value: object) -> str:
    """The name of a value's type."""
    return type(value).__name__


def reason(error: BaseException, limit: int = MAX_REASON) -> str:
    """What an error of somebody else's code says, on one line."""
    text = " ".join(str(error).split())
    return f"{kind_of(error)}: {text if len(text) <= limit else text[: limit - 3] + '...'}"


def as_integer(value: object) -> int | None:
    """An integer of any type (numpy's and MLX's, too) as Python's; ``None`` for what is none, such
    as a bool, a float or a text."""
    # A bool of numpy before 2 takes itself for an index.
    if isinstance(value, bool) or "bool" in kind_of(value):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except Exception:
        return _scalar_of_an_array(value)


def _scalar_of_an_array(value: object) -> int | None:
    """The integer in an array without dimensions: MLX's are no index before 0.32.3."""
    if getattr(value, "ndim", None) != 0 or "int" not in str(getattr(value, "dtype", "")):
        return None
    item = value.item()  # type: ignore[attr-defined]
    return item if type(item) is int else None


def as_number(value: object) -> float | None:
    """A finite number of any type as Python's float; ``None`` for what is none, such as a bool."""
    if isinstance(value, (bool, str, bytes, bytearray)) or kind_of(value) in ("bool_", "bool"):
        return None
    if getattr(value, "ndim", 0) != 0 or "bool" in str(getattr(value, "dtype", "")):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except Exception:
        return None
    return number if math.isfinite(number) else None


def check_integer(
    room: str, name: str, value: object, low: int | None = None, what: str | None = None
) -> int:
    """``value`` as a Python integer of at least ``low``, or of any size.

    Args:
        what: the range in words, where it is not ``at least low``.

    Raises:
        ValueError: it is none; the message names the argument.
    """
    number = as_integer(value)
    if number is None or (low is not None and number < low):
        what = what or ("a whole number" if low is None else f"at least {low}")
        raise refused(room, name, value, what, "a whole number")
    return number


def check_number(
    room: str, name: str, value: object, low: float, high: float = math.inf, what: str = ""
) -> float:
    """``value`` as a finite Python float within ``low..high``; errors as :func:`check_integer`."""
    number = as_number(value)
    if number is None or not low <= number <= high:
        raise refused(room, name, value, what or f"at least {low}", "a number")
    return number


def check_callable(room: str, name: str, value: object, what: str) -> None:
    """Raise ``ValueError`` unless ``value`` can be called."""
    if not callable(value):
        raise ValueError(f"[{room}] {name} must be {what}, got {shown(value)} ({kind_of(value)})")


def refused(room: str, name: str, value: object, range_: str, kind: str) -> ValueError:
    """The error for a number that is out of its range, or is none."""
    read = as_number(value) if kind == "a number" else as_integer(value)
    no_number = f", which is not {kind}" if read is None and range_ != kind else ""
    return ValueError(f"[{room}] {name} must be {range_}, got {shown(value)}{no_number}")
