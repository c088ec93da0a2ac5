"""Command-line arguments: a parser whose errors are one line, and types that say what they accept. Imports no MLX."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from mlx_paged.config import KVBudget


class Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong in one line and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


def number(text: str, kind: type, low: float, high: float, what: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not low <= value <= high:
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")
    return value


def whole(text: str) -> int:
    return number(text, int, 0, 2**63, "a whole number, at least 0")


def positive(text: str) -> int:
    return number(text, int, 1, 2**63, "a whole number, at least 1")


def max_tokens(text: str) -> int:
    return -1 if text.strip() == "-1" else number(text, int, 1, 2**63, "a whole number, at least 1, or -1")


def at_least_0(text: str) -> float:
    return number(text, float, 0, sys.float_info.max, "a number, at least 0")


def probability(text: str) -> float:
    return number(text, float, 0, 1, "within 0..1")


def budget(text: str) -> str:
    try:
        KVBudget.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).split("] ", 1)[-1]) from error
    return text
