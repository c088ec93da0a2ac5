"""The user's end of the chat: messages from a terminal or a pipe, the answer on stdout, and all
else on stderr, dimmed where a terminal can.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Protocol, TextIO

from mlx_paged.errors import harmless
from mlx_paged.standard_streams import read_line, say, write, write_codes

if TYPE_CHECKING:
    from mlx_paged.chat.markdown import MarkdownWriter

# A prompt with fewer tokens to compute than this has an answer before its progress could be read.
LONG_PROMPT = 128
# The rate is that of the last reports, since a token costs more the more stand before it.
NUM_REPORTS = 16

# Seconds between two lines of progress on a plain terminal, which are not replaced.
PLAIN_PAUSE = 5.0

_DIM, _PLAIN = "\033[2m", "\033[0m"
_CLEAR_REST = "\033[J"  # of the screen: a terminal that was made narrower has wrapped the line
_CLEAR_LINE = f"\r{_CLEAR_REST}"

# What is shown


class Screen:
    """Writes for the user, and knows which of the two streams is a terminal and what it can show.

    Colour codes are written only to a terminal, and not where ``NO_COLOR`` is set or ``TERM`` is
    dumb; answers are drawn as markdown where they are. A line of progress is written as it is, and
    not by rich's live displays: these hide the cursor and are drawn by a thread, and the second
    Ctrl-C ends this program in the middle of a step.

    Attributes:
        can_move: the terminal, if there is one, can move its cursor and clear a line.
        is_plain: text is written as it comes, on a terminal, too: nothing is drawn, dimmed, folded
            or replaced.
    """

    def __init__(
        self,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.can_move = environ.get("TERM") != "dumb"
        self.is_plain = False
        self.stdout_is_terminal = is_terminal(sys.stdout)
        self.stderr_is_terminal = is_terminal(sys.stderr)
        self._wants_colour = not environ.get("NO_COLOR")
        self._clock = clock
        self._progress_width = 0
        self._next_plain_progress: float | None = None  # while there is some
        self._drawing: MarkdownWriter | None = None  # of an answer
        self._is_in_line = False  # of one that is not drawn, on a terminal
        self._held_warnings: list[str] = []

    @property
    def has_colour(self) -> bool:
        """The terminal, if there is one, can show colours, and its user wants them."""
        return self.can_move and self._wants_colour and not self.is_plain

    def answer(self, text: str, is_thinking: bool = False) -> None:
        """A piece of the answer; raises :class:`OutputLostError` or ``BrokenPipeError``."""
        if not text:
            return
        self.clear_progress()
        if self.stdout_is_terminal:
            text = harmless(text)
        if self._draws_answers:
            if self._drawing is None:
                from mlx_paged.chat.markdown import MarkdownWriter

                self._drawing = MarkdownWriter(write, lambda: size_of(sys.stdout))
            self._drawing.add(text, is_thinking)
        else:
            write(text)
            self._is_in_line = self.stdout_is_terminal and not text.endswith("\n")
        self._say_held_warnings()

    def finish_answer(self) -> None:
        """The answer is over, and its last line ends; raises what :meth:`answer` does."""
        if not self._draws_answers:
            self.answer("\n")
        elif self._drawing is not None:
            self._drawing.finish()
            self._drawing = None
            self._say_held_warnings()

    def abandon_answer(self) -> None:
        """What is written of an answer is all that comes."""
        self._drawing, self._is_in_line = None, False

    def say(self, text: str) -> None:
        """Lines, which on a terminal are folded between words."""
        self.clear_progress()
        say(self._folded(harmless(text)))

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
        console = Console(width=self._width or 1000, color_system=None)
        with console.capture() as capture:
            console.print(table)
        self.clear_progress()
        say("\n".join(line.rstrip() for line in capture.get().splitlines()))

    def warn(self, text: str) -> None:
        """Say it, in the middle of an answer as soon as its line, or what is drawn of it, ends."""
        self._held_warnings.append(text)
        self._say_held_warnings()

    @property
    def _draws_answers(self) -> bool:
        return self.stdout_is_terminal and self.has_colour

    @property
    def _is_in_answer(self) -> bool:
        """Whether a line of the answer would be cleared or torn apart by another one."""
        return self._is_in_line or (self._drawing is not None and self._drawing.is_in_block)

    @property
    def _width(self) -> int | None:
        """That of what is said; ``None`` where nothing is folded."""
        is_folded = self.stderr_is_terminal and not self.is_plain
        return size_of(sys.stderr).columns if is_folded else None

    def _folded(self, text: str) -> str:
        if self._width is None:
            return text
        # A word that is longer than a line, such as the name of a file, stays in one piece.
        fold = TextWrapper(self._width, break_long_words=False, break_on_hyphens=False).fill
        return "\n".join(map(fold, text.split("\n")))

    def _say_held_warnings(self) -> None:
        if not self._is_in_answer:
            for text in self._held_warnings:
                self.say(text)
            self._held_warnings.clear()

    def say_dim(self, text: str) -> None:
        if not (self.stderr_is_terminal and self.has_colour):
            self.say(text)
            return
        self.clear_progress()
        write_codes(f"{_DIM}{self._folded(harmless(text))}{_PLAIN}\n")

    def show_progress(self, *forms: str) -> None:
        """Show a line that the next output replaces. A plain terminal gets such a line every
        ``PLAIN_PAUSE`` seconds, and it stays. Nothing is shown where stderr is not a terminal, and
        within a line of the answer, which would be cleared with it.

        Args:
            forms: of the same text, the longest first. The first that fits into a line is shown,
                or the beginning of the last one: two lines could not be cleared.
        """
        if not (self.stderr_is_terminal and forms) or self._is_in_answer:
            return
        if self.is_plain:
            now = self._clock()
            if self._next_plain_progress is None:
                self._next_plain_progress = now + PLAIN_PAUSE
            elif now >= self._next_plain_progress:
                say(forms[0])
                self._next_plain_progress = now + PLAIN_PAUSE
            return
        from rich.cells import cell_len, set_cell_size

        most = size_of(sys.stderr).columns - 1
        texts = list(map(harmless, forms))
        fitting = (text for text in texts if cell_len(text) <= most)
        text = next(fitting, None) or set_cell_size(texts[-1], most)
        # Without an escape code to clear the line, blanks do it.
        rest = _CLEAR_REST if self.can_move else " " * (self._progress_width - cell_len(text))
        # The terminal itself may have written ^C into the line.
        write_codes(f"\r{text}{rest}\r")
        self._progress_width = max(self._progress_width, cell_len(text))

    def announce(self, *forms: str) -> None:
        """Say what takes a while and begins now: a line of progress, which a plain terminal gets at
        once.
        """
        if self.stderr_is_terminal and self.is_plain and not self._is_in_answer:
            self.say(forms[0])
        else:
            self.show_progress(*forms)

    def clear_progress(self) -> None:
        self._next_plain_progress = None
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


def size_of(stream: TextIO | None) -> os.terminal_size:
    """That of a terminal; 80 columns and 24 rows where it does not say."""
    try:
        columns, rows = os.get_terminal_size(-1 if stream is None else stream.fileno())
    except (OSError, ValueError):
        columns = rows = 0
    return os.terminal_size((columns or 80, rows or 24))


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

    def confirm(self, question: str) -> bool:
        """Whether a person says yes."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was found."""


class PipeReader:
    """Each line of stdin is a message; its line end is not part of it."""

    is_interactive = False

    def read(self, text: str = "") -> str | None:
        line = read_line()
        return without_line_end(clean(line)) if line else None

    def confirm(self, question: str) -> bool:
        return False

    def close(self) -> None:
        pass


def clean(text: str) -> str:
    """Text that a tokenizer can encode: bytes that were not UTF-8, which Python hands over as lone
    surrogates, are replaced.
    """
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def without_line_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")
