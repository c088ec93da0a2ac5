"""Command-line arguments: a parser whose errors are one line, and types that say what they
accept. Imports no MLX.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from mlx_paged.config import KVBudget
from mlx_paged.standard_streams import write

Number = TypeVar("Number", int, float)
_DASHES_AS_VALUE = re.compile(r"(--[^=]+)=--|(-[a-zA-Z])=?--")


class Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong in one line and exits with status 2."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        for word in words[: words.index("--")] if "--" in words else words:
            # Python 3.11 takes this value for the end of the options, and makes an empty list of
            # it.
            flag = _DASHES_AS_VALUE.fullmatch(word)
            if flag:
                self.error(f"argument {flag[1] or flag[2]}: the value can't be '--'")
        return super().parse_known_args(words, namespace)

    def print_help(self, file: Any = None) -> None:
        # argparse would swallow the error of an output that is full.
        if file is None:
            write(self.format_help())
        else:
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        # The values in it are the user's, and may hold line ends.
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (see --help)\n")


class VersionAction(argparse.Action):
    """Writes ``const`` and leaves; argparse's own would swallow the error of an output that is
    full.
    """

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        write(f"{self.const}\n")
        parser.exit()


def number(text: str, kind: Callable[[str], Number], low: float, high: float, what: str) -> Number:
    try:
        value: Number | None = kind(text)
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
    return (
        -1
        if text.strip() == "-1"
        else number(text, int, 1, 2**63, "a whole number, at least 1, or -1")
    )


def at_least_0(text: str) -> float:
    return number(text, float, 0, sys.float_info.max, "a number, at least 0")


def probability(text: str) -> float:
    return number(text, float, 0, 1, "within 0..1")


def budget(text: str) -> str:
    try:
        KVBudget.parse(text)
    except OverflowError as error:
        raise argparse.ArgumentTypeError(f"{text[:20]}... is too large") from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).split("] ", 1)[-1]) from error
    return text
