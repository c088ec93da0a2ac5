"""Domains of arguments' values: their description, check and parser. Does not import MLX."""

from __future__ import annotations

import argparse
import contextlib
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from mlx_paged.argument_values import as_integer
from mlx_paged.errors import ArgumentError, shown

T = TypeVar("T")


@dataclass(frozen=True)
class Domain(Generic[T]):
    """The values that an argument can have.

    Args:
        what: a description, which follows "must be" in errors.
        read: returns a value in the form that is used, such as the bytes of ``"2G"``, or ``None``
            if it is invalid.
        parse: converts a flag's text to a value for ``read``; it may raise ``ValueError``.
        flag_what: ``what`` for a flag, if that differs.
        metavar: the name of the value in a flag's help; by default derived from the flag's name.
        choices: all values, which a flag's help lists.
        may_be_none: whether ``None`` is valid, too.
    """

    what: str
    read: Callable[[object], T | None]
    parse: Callable[[str], object] = str
    flag_what: str = ""
    metavar: str = ""
    choices: tuple[T, ...] | None = None
    may_be_none: bool = False

    def check(self, part: str, name: str, value: object) -> T:
        """The value of the argument ``name`` in the form that is used.

        Args:
            part: of the package, in brackets at the beginning of errors.

        Raises:
            ArgumentError: the value is invalid.
        """
        found = self.read(value)
        if found is None and not (value is None and self.may_be_none):
            raise refused(part, name, self.what, value)
        return found  # type: ignore[return-value]

    def read_flag(self, text: str) -> Any:
        """The value of a flag. Raises ``argparse.ArgumentTypeError``."""
        with contextlib.suppress(ValueError):
            value = self.parse(text)
            if self.read(value) is not None:
                return value
        raise argparse.ArgumentTypeError(
            f"must be {self.flag_what or self.what}, got {shown(text)}"
        )


@dataclass(frozen=True)
class Several(Domain[Any]):
    """Sequences of values, as tuples. A text is a single value. ``None`` is the empty tuple, or
    stays ``None`` if ``may_be_none``.

    Args:
        what, read: of the elements.
        least: the minimum length.
    """

    least: int = 0

    def check(self, part: str, name: str, value: object) -> Any:
        if value is None:
            return None if self.may_be_none else ()
        try:
            values = (value,) if isinstance(value, str) else tuple(value)  # type: ignore[arg-type]
        except Exception:
            # __iter__ of an unknown type may raise anything.
            raise refused(part, name, "a sequence", value) from None
        if len(values) < self.least:
            raise refused(part, name, self.what, value)
        found = tuple(map(self.read, values))
        for each, read in zip(values, found, strict=True):
            if read is None:
                raise refused(part, name, self.what, each)
        return found


def refused(part: str, name: str, what: str, value: object) -> ArgumentError:
    """The error for an invalid value of an argument."""
    return ArgumentError(f"[{part}] {name} must be {what}, got {shown(value)}", name)


def or_none(domain: Domain[Any], what: str = "") -> Domain[Any]:
    """The values of a domain, and ``None``."""
    return replace(domain, what=what or f"{domain.what}, or None", may_be_none=True)


def such(what: str, is_right: Callable[[Any], bool], **more: Any) -> Domain[Any]:
    """The values for which ``is_right`` holds, unchanged."""
    return Domain(what, lambda value: value if is_right(value) else None, **more)


def whole(
    low: float = -math.inf, high: float = math.inf, what: str = "", flag_what: str = ""
) -> Domain[int]:
    """Integers of any type within ``low..high``."""

    def read(value: object) -> int | None:
        number = value if type(value) is int else as_integer(value)
        return number if number is not None and low <= number <= high else None

    if not what:
        is_open = math.isinf(high)
        bounds = (f", at least {low}" if is_open else f" within {low}..{high}") * (low > -math.inf)
        what = f"a whole number{bounds}"
    return Domain(what, read, int, flag_what, "N")


def number(
    low: float, high: float, what: str, flag_what: str = "", *, is_open: bool = False
) -> Domain[float]:
    """Finite numbers within ``low..high``, without ``low`` if ``is_open``."""

    def is_right(value: Any) -> bool:
        return is_number(value) and low <= value <= high and not (is_open and value == low)

    return such(what, is_right, parse=float, flag_what=flag_what)


def one_of(*values: T) -> Domain[T]:
    """One of these values."""
    what = f"one of {', '.join(map(str, values))}"
    return such(what, values.__contains__, parse=type(values[0]), choices=values)


def is_number(value: object) -> bool:
    """Whether a value is a finite number of any type but bool."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


BOOL = such("True or False", lambda value: isinstance(value, bool), parse=bool)
TEXT = such("a text that is not empty", lambda value: isinstance(value, str) and value != "")
TOKEN = whole(0, what="token ids")
SHARE = number(0, 1, "a number within 0..1", "within 0..1")
AT_LEAST_0 = whole(0, 2**63, "a whole number, at least 0")
AT_LEAST_1 = whole(1, 2**63, "a positive integer", "a whole number, at least 1")
