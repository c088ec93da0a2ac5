"""An argument parser that reports an error in one line, and errors that name flags."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from mlx_paged import __version__
from mlx_paged.errors import one_line
from mlx_paged.foreign_arguments import ADVICE, OTHER_NAMES
from mlx_paged.standard_streams import write

MAX_ERROR = 2000  # characters
_DASHES_AS_VALUE = re.compile(r"(--[^=]+)=--|(-[a-zA-Z])=?--")


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line and exits with status 2, and for flags
    of other programs what is here instead.

    It has ``--version``, and takes no abbreviated flags.

    Args:
        flags: arguments of the library, and names that other programs have for them; and the flags
            that stand for them here, of which a program may lack some.
        usage: the first line of the help, where all flags would be too many for it.
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
            # Python 3.11 takes such a value for the end of the options, and makes an empty list of
            # it.
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
        """What is here instead of another program's flag."""
        name = word.split("=")[0].lstrip("-").replace("-", "_")
        ours = self._flags.get(name) or self._flags.get(OTHER_NAMES.get(name, ""))
        if ours in self._option_string_actions:
            return f"; use {ours}"
        return f"; {ADVICE[name]}" if name in ADVICE and word.startswith("--") else ""

    def print_help(self, file: Any = None) -> None:
        # argparse would swallow the error of an output that is full.
        if file is None:
            write(self.format_help())
        else:
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        # The values in the message are the user's, and may contain line breaks.
        self.exit(2, f"{self.prog}: error: {one_line(message, MAX_ERROR)} (see --help)\n")


class _HelpFormatter(argparse.HelpFormatter):
    """Breaks no word, such as the name of a model or a file, in a narrow terminal."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        words = " ".join(text.split())
        return textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False)


class _VersionAction(argparse.Action):
    """Writes ``const`` and leaves. argparse's own would swallow the error of an output that is
    full.
    """

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        write(f"{self.const}\n")
        parser.exit()


def error_line(error: BaseException, flags: Mapping[str, str]) -> str:
    """The text of an error, on one line, with flags in the place of arguments, if it is about one.

    Args:
        flags: arguments of the library, and the flags that are passed on as them.
    """
    text = one_line(error, MAX_ERROR)
    argument = getattr(error, "argument", None)
    if argument not in flags:
        return text
    # A name without "_" may be an ordinary word, so it stays where it is not what the error is
    # about.
    names = [name for name in flags if name == argument or "_" in name]
    return re.sub(rf"\b({'|'.join(names)})\b", lambda match: flags[match[1]], text)
