"""The user's end of the chat: messages from a terminal or a pipe, the answer on stdout, and all
else on stderr, dimmed where a terminal can.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TextIO

from mlx_paged.errors import harmless
from mlx_paged.standard_streams import read_line, say, write, write_codes

# A prompt with fewer tokens to compute than this has an answer before its progress could be read.
LONG_PROMPT = 128
# The rate is that of the last reports, since a token costs more the more stand before it.
NUM_REPORTS = 16

_DIM, _PLAIN = "\033[2m", "\033[0m"
_CLEAR_REST = "\033[K"  # of the line
_CLEAR_LINE = f"\r{_CLEAR_REST}"

# What is shown


class Screen:
    """Writes for the user, and knows which of the two streams is a terminal and what it can show.

    Colour codes are written only to a terminal, and not where ``NO_COLOR`` is set or ``TERM`` is
    dumb. A line of progress is written as it is, and not by rich's live displays: these hide the
    cursor and are drawn by a thread, and the second Ctrl-C ends this program in the middle of a
    step.

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

    def say_rows(self, rows: Iterable[tuple[str, str]]) -> None:
        """Two columns, as wide as they have to be. On a terminal the second one is folded into what
        is left of the width.
        """
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 3, 0, 0))
        for row in rows:
            table.add_row(*map(Text, map(harmless, row)))
        width = num_columns(sys.stderr) if self.stderr_is_terminal else 1000
        console = Console(width=width, color_system=None)
        with console.capture() as capture:
            console.print(table)
        self.say("\n".join(line.rstrip() for line in capture.get().splitlines()))

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
        """A line that the next one replaces; nothing if stderr is not a terminal, or in the middle
        of a line of the answer, which would be cleared with it.

        Args:
            forms: of the same text, the longest first. The first is shown that fits into a line,
                or the beginning of the last one: two lines could not be cleared.
        """
        if not self.stderr_is_terminal or not forms or self._is_in_line:
            return
        from rich.cells import cell_len, set_cell_size

        most = num_columns(sys.stderr) - 1
        texts = list(map(harmless, forms))
        fitting = (text for text in texts if cell_len(text) <= most)
        text = next(fitting, None) or set_cell_size(texts[-1], most)
        # Without an escape code to clear the line, blanks do it.
        rest = _CLEAR_REST if self.can_move else " " * (self._progress_width - cell_len(text))
        # The terminal itself may have written ^C into the line.
        write_codes(f"\r{text}{rest}\r")
        self._progress_width = max(self._progress_width, cell_len(text))

    def clear_progress(self) -> None:
        if self._progress_width:
            write_codes(_CLEAR_LINE if self.can_move else f"\r{' ' * self._progress_width}\r")
            self._progress_width = 0


class PromptProgress:
    """Says how many tokens of a prompt are done, at which rate, and how long the rest takes.

    Args:
        num_known: tokens of the prompt that were computed in earlier turns, as far as is known.
        clock: in seconds.
    """

    def __init__(self, num_known: int, clock: Callable[[], float] = time.monotonic):
        self._num_known = num_known
        self._clock = clock
        self._reports = deque([(clock(), num_known)], NUM_REPORTS)

    def words(self, done: int, total: int) -> Sequence[str]:
        """What to show when ``done`` of ``total`` tokens are computed, the longest form first;
        nothing where the prompt is short or done.
        """
        now = self._clock()
        if done >= total or total - self._num_known < LONG_PROMPT:
            return ()
        share = f"{done / total:.0%}"
        begin, num_before = self._reports[0]
        self._reports.append((now, done))
        if done <= num_before or now <= begin:
            return f"[prompt {done:,}/{total:,} tokens, {share}]", f"[prompt {share}]"
        rate = (done - num_before) / (now - begin)
        seconds = (total - done) / rate
        left = f"{seconds:.0f} s left" if seconds < 100 else f"{seconds / 60:.0f} min left"
        return (
            f"[prompt {done:,}/{total:,} tokens, {share}, {rate:,.0f} tokens/s, {left}]",
            f"[{done:,}/{total:,}, {rate:,.0f} tokens/s, {left}]",
            f"[{done:,}/{total:,}, {left}]",
            f"[{share}, {left}]",
        )


def num_columns(stream: TextIO) -> int:
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


# What is read


class Reader(Protocol):
    """Reads one message after the other.

    Attributes:
        is_interactive: a person is there, who sees a prompt and can edit a text.
    """

    is_interactive: bool

    def read(self, text: str = "") -> str | None:
        """The next message, ``None`` at the end of the input; ``text`` is there to be edited."""


class PipeReader:
    """Each line of stdin is a message; its line end is not part of it."""

    is_interactive = False

    def read(self, text: str = "") -> str | None:
        line = read_line()
        return without_line_end(clean(line)) if line else None


def clean(text: str) -> str:
    """Text that a tokenizer can encode: bytes that were not UTF-8, which Python hands over as lone
    surrogates, are replaced.
    """
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def without_line_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")
