"""What the user sees: the answer on stdout, all else on stderr, dimmed where a terminal can."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TextIO

from mlx_paged.errors import harmless
from mlx_paged.standard_streams import say, write, write_codes

_DIM, _PLAIN = "\033[2m", "\033[0m"
_CLEAR_REST = "\033[K"  # of the line
_CLEAR_LINE = f"\r{_CLEAR_REST}"


class Screen:
    """Writes for the user, and knows which of the two streams is a terminal and what it can show.

    Colour codes are written only to a terminal, and not where ``NO_COLOR`` is set or ``TERM`` is
    dumb.

    Attributes:
        can_move: the terminal, if there is one, can move its cursor and clear a line.
        has_colour: it can show colours, too, and its user wants them.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ):
        self.can_move = environ.get("TERM") != "dumb"
        self.has_colour = self.can_move and not environ.get("NO_COLOR")
        self.stdout_is_terminal = is_terminal(sys.stdout)
        self.stderr_is_terminal = is_terminal(sys.stderr)
        self._dims_stdout = self.has_colour and self.stdout_is_terminal
        self._dims_stderr = self.has_colour and self.stderr_is_terminal
        self._progress_width = 0
        self._is_in_line = False  # an answer, on a terminal
        self._held_warnings: list[str] = []

    def answer(self, text: str, is_thinking: bool = False) -> None:
        """A piece of the answer; raises :class:`OutputLostError` or ``BrokenPipeError``."""
        if not text:
            return
        self.clear_progress()
        if self.stdout_is_terminal:
            text = harmless(text)
        write(f"{_DIM}{text}{_PLAIN}" if is_thinking and self._dims_stdout else text)
        self._is_in_line = self.stdout_is_terminal and not text.endswith("\n")
        self._say_held_warnings()

    def say(self, text: str) -> None:
        self.clear_progress()
        say(text)

    def warn(self, text: str) -> None:
        """Say it, in the middle of an answer as soon as its line ends."""
        self._held_warnings.append(text)
        self._say_held_warnings()

    def _say_held_warnings(self) -> None:
        if not self._is_in_line:
            for text in self._held_warnings:
                self.say(text)
            self._held_warnings.clear()

    def say_dim(self, text: str) -> None:
        if not self._dims_stderr:
            self.say(text)
            return
        self.clear_progress()
        write_codes(f"{_DIM}{harmless(text)}{_PLAIN}\n")

    def show_progress(self, *forms: str) -> None:
        """A line that the next one replaces; nothing where stderr is no terminal, or in the middle
        of a line of the answer, which would be cleared with it.

        Args:
            forms: of the same text, the longest first. The first is shown that fits into a line,
                or the beginning of the last one: two lines could not be cleared.
        """
        if self.stderr_is_terminal and forms and not self._is_in_line:
            most = _num_columns(sys.stderr) - 1
            texts = list(map(harmless, forms))
            text = next((text for text in texts if len(text) <= most), texts[-1][:most])
            # Without an escape code to clear the line, blanks do it.
            rest = _CLEAR_REST if self.can_move else " " * (self._progress_width - len(text))
            # The terminal itself may have written ^C into the line.
            write_codes(f"\r{text}{rest}\r")
            self._progress_width = max(self._progress_width, len(text))

    def clear_progress(self) -> None:
        if self._progress_width:
            write_codes(_CLEAR_LINE if self.can_move else f"\r{' ' * self._progress_width}\r")
            self._progress_width = 0


def _num_columns(stream: TextIO) -> int:
    """The width of a terminal; 80 where it does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False
