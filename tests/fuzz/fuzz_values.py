"""Unexpected values of an argument: wrong types, extremes, and objects that raise when
they are looked at.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np


class Raises:
    """An object that raises whatever is done with it."""

    def __repr__(self) -> str:
        raise LookupError("no repr")

    def __eq__(self, other: object) -> bool:
        raise LookupError("no equality")

    def __bool__(self) -> bool:
        raise LookupError("no truth")

    def __len__(self) -> int:
        raise LookupError("no length")

    def __iter__(self) -> Any:
        raise LookupError("no elements")

    def __index__(self) -> int:
        raise LookupError("no index")

    def __float__(self) -> float:
        raise LookupError("no float")

    __hash__ = object.__hash__


class WideRepr:
    """An object whose repr is long and has many lines."""

    def __repr__(self) -> str:
        return "wide\n" * 1000


class Text(str):
    """A text of a type of its own."""


class Whole(int):
    """An integer of a type of its own."""


def raises(*args: object, **options: object) -> Any:
    raise LookupError("called")


def generator() -> Any:
    yield 1


VALUES = (
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 10**30, -(2**63), 0.0, 0.5, -0.5, 1.5, 1e308,
    float("nan"), float("inf"), -float("inf"), "", "x", "16", "1G", "a" * 5000, "\ud800", "\x00",
    "é\n", "../..", "/", b"", b"x", bytearray(b"x"), memoryview(b"x"), ..., NotImplemented, int,
    object(), raises, len, Text("t"), Whole(3), 1 + 2j, Decimal("0.5"), Fraction(1, 3),
    date(2000, 1, 1), Path("x"), range(3), range(0),
)  # fmt: skip
# Some values are used up by their use, so each is made when it is needed.
JUNK: list[Callable[[], Any]] = [
    *(lambda value=value: value for value in VALUES),
    list, dict, set, tuple, lambda: [1, 2], lambda: [1, None], lambda: ["a", 1], lambda: [[1], [2]],
    lambda: [[]], lambda: [None], lambda: (1, 2), lambda: {1, 2}, lambda: {"a": 1}, lambda: {1: 2},
    lambda: {"prompt": 1}, lambda: [{"prompt": "x"}], lambda: {"prompt_token_ids": [1, "a"]},
    lambda: iter([1, 2]), generator, Raises, WideRepr, lambda: [Raises()], lambda: [WideRepr()],
    asyncio.Event, lambda: np.int64(3), lambda: np.float32(0.5), lambda: np.array(3),
    lambda: np.array([1, 2]), lambda: np.array([1.5]), lambda: np.array([[1, 2], [3, 4]]),
    lambda: np.array([]), lambda: np.array(["a"]), lambda: np.bool_(True), lambda: np.array([None]),
    lambda: np.nan, lambda: mx.array(3), lambda: mx.array(0.5), lambda: mx.array([1, 2]),
    lambda: mx.array([[1, 2]]), lambda: mx.array([1.5]), lambda: mx.array([], dtype=mx.int32),
    lambda: mx.array(True), lambda: mx.array([2**31]),
]  # fmt: skip


def junk(rng: random.Random) -> Any:
    """An unexpected value, at times inside a list or a dict."""
    value = rng.choice(JUNK)()
    nesting = rng.random()
    if nesting < 0.08:
        return [value, rng.choice(JUNK)()]
    if nesting < 0.11:
        return {rng.choice(("prompt", "prompt_token_ids", "role", "content", "type", "x")): value}
    return value


def described(value: object) -> str:
    """A value for the report, whatever its repr does."""
    try:
        text = " ".join(ascii(value).split())
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:77] + "..."
