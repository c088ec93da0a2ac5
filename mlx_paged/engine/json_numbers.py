"""Numbers in JSON schemas: which of them llguidance rounds, and ranges of numbers as regular
expressions, exact at any size. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from typing import Any

from mlx_paged.engine.one_of import Schema

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MAX_EXACT = 2**53
_MAX_INT64 = 2**63 - 1
_MAX_POWER = 10**18  # llguidance has no open ranges from here on


def is_rounded(value: Any) -> bool:
    """Whether llguidance keeps an answer to another number than this constant."""
    if not isinstance(value, int) or abs(value) <= _MAX_EXACT:
        return False
    try:
        near = float(value)
    except OverflowError:
        return True
    if abs(value) <= _MAX_INT64:
        return near != value
    # It writes the shortest digits, and overflows at the least of all 64-bit integers.
    return value == -_MAX_INT64 - 1 or Decimal(repr(near)) != value


def has_exact_bounds(schema: Schema) -> bool:
    """Whether llguidance computes with exactly the bounds of a schema."""
    bounds = list(_bounds_of(schema))
    sides = [side for side in (_bound_of(schema, 0), _bound_of(schema, 1)) if side[0] is not None]
    for bound, is_excluded in sides:
        # It adds 1 to an excluded bound.
        limit_of_side = _MAX_EXACT if is_excluded else _MAX_POWER if len(sides) == 1 else math.inf
        if abs(bound or 0) >= limit_of_side:
            return False
    # The greatest 64-bit integer is rounded up and limited to itself.
    limit = {_MAX_INT64} if schema.get("type") == "integer" else set()
    return all(bound in limit or _is_exact(bound) for bound in bounds)


def has_fractions(schema: Schema) -> bool:
    """Whether a bound of a schema for any number is not an integer."""
    return schema.get("type") != "integer" and any(
        bound != int(bound) for bound in _bounds_of(schema)
    )


def pattern_within_bounds(schema: Schema) -> str:
    """The numbers of a schema of integers, or of numbers between integers, as a regular expression;
    ``""`` if there are none.
    """
    (low, is_low_open), (high, is_high_open) = _bound_of(schema, 0), _bound_of(schema, 1)
    least = None if low is None else -int(-low // 1)
    most = None if high is None else int(high // 1)
    if schema["type"] != "integer":
        return _reals(least, is_low_open, most, is_high_open)
    if least is not None and is_low_open and least == low:
        least += 1
    if most is not None and is_high_open and most == high:
        most -= 1
    return _integers(least, most)


def _is_exact(bound: int | float) -> bool:
    try:
        return float(bound) == bound and abs(bound) <= _MAX_INT64
    except OverflowError:
        return False


def _bounds_of(schema: Schema) -> Iterator[int | float]:
    for name in BOUNDS:
        bound = schema.get(name)
        if isinstance(bound, int | float) and not isinstance(bound, bool):
            yield bound


def _bound_of(schema: Schema, side: int) -> tuple[int | float | None, bool]:
    """The lower (0) or upper (1) bound of a schema, and whether it is excluded itself."""
    bound, excluded = schema.get(BOUNDS[side]), schema.get(BOUNDS[side + 2])
    if excluded is None or isinstance(excluded, bool):  # as in draft 4
        return bound, bool(excluded)
    choose: Callable[..., int | float] = min if side else max
    if bound is None or choose(bound, excluded) == excluded:
        return excluded, True
    return bound, False


def _integers(low: int | None, high: int | None) -> str:
    """The integers of a range, with both bounds; ``""`` if there are none.

    Args:
        low, high: ``None`` is no bound.
    """
    parts = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        if negative := _naturals(least, None if low is None else -low):
            parts.append(f"-{negative}")
    if high is None or high >= 0:
        parts.append(_naturals(max(low or 0, 0), high))
    return _one_of_these(parts)


def _naturals(low: int, high: int | None) -> str:
    """The integers of a range that has no negative ones."""
    if high is not None and low > high:
        return ""
    num_digits = len(str(low))
    parts = []
    for length in range(num_digits, len(str(high)) + 1 if high is not None else num_digits + 1):
        least = max(low, 10 ** (length - 1) if length > 1 else 0)
        most = 10**length - 1
        parts.append(_of_length(str(least), str(most if high is None else min(high, most))))
    if high is None:
        parts.append(f"[1-9][0-9]{{{num_digits},}}")
    return _one_of_these(parts)


def _of_length(low: str, high: str) -> str:
    """The numbers of a range whose bounds have as many digits as each other."""
    if low == high:
        return low
    rest = len(low) - 1
    first, last = int(low[0]), int(high[0])
    if first == last:
        return low[0] + _of_length(low[1:], high[1:])
    parts = []
    if low[1:].strip("0"):
        parts.append(low[0] + _of_length(low[1:], "9" * rest))
        first += 1
    if high[1:].strip("9"):
        parts.append(high[0] + _of_length("0" * rest, high[1:]))
        last -= 1
    if first <= last:
        digits = f"[{first}-{last}]" if first < last else str(first)
        parts.append(digits + (f"[0-9]{{{rest}}}" if rest else ""))
    return _one_of_these(parts)


def _reals(low: int | None, is_low_open: bool, high: int | None, is_high_open: bool) -> str:
    """The numbers of a range, written without exponents; ``""`` if there are none.

    Args:
        low, high: ``None`` is no bound.
        is_low_open, is_high_open: whether the bound itself is excluded.
    """
    parts = []
    if low is None or low < 0:
        least, is_open = 0, True
        if high is not None and high < 0:
            least, is_open = -high, is_high_open
        if part := _reals_from(least, is_open, None if low is None else -low, is_low_open):
            parts.append(f"-{part}")
    if high is None or high >= 0:
        least, is_open = (low, is_low_open) if low is not None and low >= 0 else (0, False)
        parts.append(_reals_from(least, is_open, high, is_high_open))
    return _one_of_these(parts)


def _reals_from(low: int, is_low_open: bool, high: int | None, is_high_open: bool) -> str:
    """The same, of a range without negative numbers."""
    parts = []
    if high is None or low < high:
        if is_low_open:
            parts.append(rf"{low}\.[0-9]*[1-9][0-9]*")
        whole = _naturals(low + is_low_open, None if high is None else high - 1)
        parts.append(rf"{whole}(\.[0-9]+)?" if whole else "")
    if high is not None and not is_high_open and (low < high or (low == high and not is_low_open)):
        parts.append(rf"{high}(\.0+)?")
    return _one_of_these(parts)


def _one_of_these(parts: Iterable[str]) -> str:
    found = [part for part in parts if part]
    return found[0] if len(found) == 1 else f"({'|'.join(found)})" if found else ""
