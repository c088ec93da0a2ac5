"""An argument parser with errors of one line, and errors that name flags."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from mlx_paged import __version__
from mlx_paged.errors import one_line
from mlx_paged.foreign_arguments import INSTEAD
from mlx_paged.standard_streams import write

MAX_ERROR = 2000  # characters
_DASHES_AS_VALUE = re.compile(r"(--[^=]+)=--|(-[a-zA-Z])=?--")


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, exits with status 2, and advises which
    flag to use instead of another project's. It accepts no abbreviated flags.

    Args:
        flags: the flags by argument of the library, or by another project's name for it. The
            program may lack some.
        usage: the first line of the help, for programs with too many flags for it.
    """

    def __init__(
        self,
        *,
        prog: str,
        description: str,
        flags: Mapping[str, str] | None = None,
        usage: str | None = None,
    ):
        super().__init__(
            prog=prog,
            description=description,
            usage=usage,
            allow_abbrev=False,
            formatter_class=_HelpFormatter,
        )
        self._flags = {} if flags is None else flags

    def add_version(self) -> None:
        """Add ``--version``, which comes last in the help."""
        self.add_argument(
            "--version",
            action=_VersionAction,
            nargs=0,
            const=f"mlx_paged {__version__}",
            help="the version of mlx_paged",
        )

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        for word in words[: words.index("--")] if "--" in words else words:
            # Python 3.11 takes such a value for the end of the options, and returns an empty list.
            flag = _DASHES_AS_VALUE.fullmatch(word)
            if flag:
                self.error(f"argument {flag[1] or flag[2]}: the value can't be '--'")
        return super().parse_known_args(words, namespace)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        known, rest = self.parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}{self._advice(rest[0])}")
        return known  # type: ignore[no-any-return]

    def _advice(self, word: str) -> str:
        """What to use instead of another project's flag."""
        name = word.split("=")[0].lstrip("-").replace("-", "_")
        ours = INSTEAD.get(name, "")
        flag = self._flags.get(name) or self._flags.get(ours)
        if flag in self._option_string_actions:
            return f"; use {flag}"
        is_advice = bool(ours) and not ours.isidentifier()
        return f"; {ours}" if is_advice and word.startswith("--") else ""

    def print_help(self, file: Any = None) -> None:
        # argparse would ignore an error, such as a full disk.
        if file is None:
            write(self.format_help())
        else:
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        # The values in the message are the user's, and may contain line breaks.
        self.exit(2, f"{self.prog}: error: {one_line(message, MAX_ERROR)} (see --help)\n")


class _HelpFormatter(argparse.HelpFormatter):
    """Breaks no words, such as names of models and files, in a narrow terminal."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        words = " ".join(text.split())
        return textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False)


class _VersionAction(argparse.Action):
    """Writes ``const`` and exits. argparse's own would ignore an error, such as a full disk."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        write(f"{self.const}\n")
        parser.exit()


def error_line(error: BaseException, flags: Mapping[str, str]) -> str:
    """The text of an error on one line. If it is about an argument, flags replace arguments in it.

    Args:
        flags: the flags by argument of the library.
    """
    text = one_line(error, MAX_ERROR)
    argument = getattr(error, "argument", None)
    if argument not in flags:
        return text
    # A name without "_" may be an ordinary word, so it is replaced only if the error is about it.
    names = [name for name in flags if name == argument or "_" in name]
    return re.sub(rf"\b({'|'.join(names)})\b", lambda match: flags[match[1]], text)
