"""Types of values: each returns the value of a text, or says what it must be."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from mlx_paged.config import (
    BUDGET_NOTATION,
    DURATION_NOTATION,
    KV_BITS_NOTATION,
    MAX_DRAFT_TOKENS,
    NBYTES_NOTATION,
    WIRED_LIMIT_NOTATION,
    KVBits,
    KVBudget,
    parse_duration,
    parse_nbytes,
    parse_wired_limit,
)
from mlx_paged.errors import one_line, shown

Number = TypeVar("Number", int, float)


def whole(text: str) -> int:
    return _number(text, int, 0, 2**63, "a whole number, at least 0")


def positive(text: str) -> int:
    return _number(text, int, 1, 2**63, "a whole number, at least 1")


def drafts(text: str) -> int:
    return _number(text, int, 0, MAX_DRAFT_TOKENS, f"a whole number within 0..{MAX_DRAFT_TOKENS}")


def port(text: str) -> int:
    return _number(text, int, 0, 65535, "a whole number within 0..65535")


def max_tokens(text: str) -> int:
    what = "a whole number, at least 1, or -1"
    return -1 if text.strip() == "-1" else _number(text, int, 1, 2**63, what)


def at_least_0(text: str) -> float:
    return _number(text, float, 0, sys.float_info.max, "a number, at least 0")


def probability(text: str) -> float:
    return _number(text, float, 0, 1, "within 0..1")


def probability_or_off(text: str) -> float:
    """0 is off, which is 1, as in mlx-lm."""
    return probability(text) or 1.0


def up_to_a_half(text: str) -> float:
    return _number(text, float, 0, 0.5, "within 0..0.5")


def below_1(text: str) -> float:
    return _number(text, float, 0, 1 - sys.float_info.epsilon, "within 0..1, below 1")


def budget(text: str) -> str:
    try:
        KVBudget.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {BUDGET_NOTATION}, got {shown(text)}") from error
    return text


def budget_or_0(text: str) -> str:
    return "0" if text.strip() == "0" else budget(text)


def num_bytes(text: str) -> int:
    """A number of bytes in the notation of budgets."""
    try:
        return parse_nbytes(text, "the value")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {NBYTES_NOTATION}, got {shown(text)}") from error


def wired_limit(text: str) -> str | int:
    """A number of bytes in the notation of budgets, or ``recommended``."""
    try:
        return parse_wired_limit(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be {WIRED_LIMIT_NOTATION}, got {shown(text)}"
        ) from error


def duration(text: str) -> float:
    """Seconds, from a number with a unit."""
    try:
        return parse_duration(text, "the value")
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be {DURATION_NOTATION}, got {shown(text)}"
        ) from error


def kv_bits(text: str) -> str:
    try:
        KVBits.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be {KV_BITS_NOTATION}, got {shown(text)}"
        ) from error
    return text


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(
            f"must be a JSON object, got {shown(text)}: {one_line(error)}"
        ) from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {shown(text)}")
    return value


def _number(text: str, kind: Callable[[str], Number], low: float, high: float, what: str) -> Number:
    with contextlib.suppress(ValueError):
        value = kind(text)
        if low <= value <= high:
            return value
    raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")
