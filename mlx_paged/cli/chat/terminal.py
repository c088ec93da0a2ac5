"""Input and output of the chat: messages from a terminal or a pipe, answers on stdout, everything
else on stderr.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from textwrap import TextWrapper
from typing import TYPE_CHECKING, TextIO

from mlx_paged.cli.streams import write, write_codes
from mlx_paged.errors import harmless, system_reason

if TYPE_CHECKING:
    from mlx_paged.cli.chat.markdown import MarkdownWriter

# Progress is shown for prompts with at least this many tokens to compute.
LONG_PROMPT = 128
# The rate is taken over the last reports, since tokens get slower as the context grows.
NUM_REPORTS = 16

# Seconds between two lines of progress on a plain terminal, which are not replaced.
PLAIN_PAUSE = 5.0

_DIM, _PLAIN = "\033[2m", "\033[0m"
_CLEAR_REST = "\033[J"  # of the screen: a terminal that was made narrower has wrapped the line

# What is shown


class Screen:
    """Writes to stdout and stderr what they support: each may be a terminal or not.

    Colours, and answers as markdown, are written only to a terminal, unless ``NO_COLOR`` is set or
    ``TERM`` is dumb. Progress is not shown with rich's live displays, which hide the cursor and
    draw from a thread: the second Ctrl-C exits this program in the middle of a step.

    Attributes:
        can_move: the terminal, if there is one, can move its cursor and clear a line.
        is_plain: nothing is drawn, dimmed, folded or replaced, even on a terminal.
    """

    def __init__(
        self,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.can_move = environ.get("TERM") != "dumb"
        self.is_plain = False
        self.stdout_is_terminal = sys.stdout.isatty()
        self.stderr_is_terminal = sys.stderr.isatty()
        self._wants_colour = not environ.get("NO_COLOR")
        self._clock = clock
        self._progress_width = 0
        self._next_plain_progress = 0.0  # 0: there is none to be replaced
        self._drawing: MarkdownWriter | None = None  # of an answer
        self._is_in_line = False  # of one that is not drawn, on a terminal
        self._held_warnings: list[str] = []

    @property
    def has_colour(self) -> bool:
        """The terminal, if there is one, supports colours, and its user wants them."""
        return self.can_move and self._wants_colour and not self.is_plain

    def answer(self, text: str, is_thinking: bool = False) -> None:
        """Write a piece of the answer; raises :class:`OutputLostError`."""
        if not text:
            return
        self.clear_progress()
        if self.stdout_is_terminal:
            text = harmless(text)
        if self._draws_answers:
            if self._drawing is None:
                from mlx_paged.cli.chat.markdown import MarkdownWriter

                self._drawing = MarkdownWriter(write, lambda: size_of(sys.stdout))
            self._drawing.add(text, is_thinking)
        else:
            write(text)
            self._is_in_line = self.stdout_is_terminal and not text.endswith("\n")
        self._say_held_warnings()

    def finish_answer(self) -> None:
        """End the answer and its last line; raises what :meth:`answer` does."""
        if not self._draws_answers:
            self.answer("\n")
        elif self._drawing is not None:
            self._drawing.finish()
            self._drawing = None
            self._say_held_warnings()

    def abandon_answer(self) -> None:
        """Drop the unfinished answer."""
        self._drawing, self._is_in_line = None, False

    def say(self, text: str, is_dim: bool = False, indent: int = 0) -> None:
        """Write lines to stderr. A terminal gets them dim if it can, and wrapped between words;
        ``indent`` is of the lines after the first one.
        """
        self.clear_progress()
        text, rest = harmless(text), " " * indent
        if self._width is not None:
            # A word that is longer than a line, such as a file name, is not broken.
            wrapper = TextWrapper(
                self._width, "", rest, break_long_words=False, break_on_hyphens=False
            )
            text = "\n".join(map(wrapper.fill, text.split("\n")))
        if is_dim and self.stderr_is_terminal and self.has_colour:
            text = f"{_DIM}{text}{_PLAIN}"
        write_codes(f"{text}\n")

    def say_in_a_line(self, parts: Sequence[str], last: str) -> None:
        """Say something whose parts are joined in brackets. On a terminal it takes one line: parts
        before the last one are left out if there are too many, and the first one loses its
        beginning if it is too long.
        """
        parts, width = list(map(harmless, parts)), self._width
        if width is not None:
            from rich.cells import cell_len

            while len(parts) > 1 and cell_len(_bracketed([*parts, last])) > width:
                parts.pop()
            if (excess := cell_len(_bracketed([*parts, last])) - width) > 0:
                parts = [f"...{parts[0][excess + 3 :]}"]
        self.say(_bracketed([*parts, last]))

    def say_rows(self, rows: Sequence[tuple[str, str]]) -> None:
        """Write a table of two columns. On a terminal the second one is wrapped."""
        indent = max(len(name) for name, _ in rows) + 3
        for name, text in rows:
            self.say(f"{name:<{indent}}{text}", indent=indent)

    def warn(self, text: str) -> None:
        """Say something, during an answer only when its line or its drawn block has ended."""
        self._held_warnings.append(text)
        self._say_held_warnings()

    @property
    def _draws_answers(self) -> bool:
        return self.stdout_is_terminal and self.has_colour

    @property
    def _is_in_answer(self) -> bool:
        """Whether other output would tear a line or a drawn block of the answer."""
        return self._is_in_line or (self._drawing is not None and self._drawing.is_in_block)

    @property
    def _width(self) -> int | None:
        """The width that lines on stderr are wrapped to; ``None``: they are not."""
        is_folded = self.stderr_is_terminal and not self.is_plain
        return size_of(sys.stderr).columns if is_folded else None

    def _say_held_warnings(self) -> None:
        if not self._is_in_answer:
            for text in self._held_warnings:
                self.say(text)
            self._held_warnings.clear()

    def show_progress(self, *forms: str) -> None:
        """Show a line that the next output replaces; a plain terminal gets one every
        ``PLAIN_PAUSE`` seconds that stays. Nothing is shown if stderr is not a terminal, or within
        a line of the answer, which would be cleared with it.

        Args:
            forms: of the same text, the longest first. The first that fits on a line is shown, or
                else the beginning of the last one: two lines could not be cleared.
        """
        if not (self.stderr_is_terminal and forms) or self._is_in_answer:
            return
        if self.is_plain:
            now, due = self._clock(), self._next_plain_progress
            if due and now >= due:
                write_codes(f"{harmless(forms[0])}\n")
            if now >= due:
                self._next_plain_progress = now + PLAIN_PAUSE
            return
        from rich.cells import cell_len, set_cell_size

        most = size_of(sys.stderr).columns - 1
        texts = list(map(harmless, forms))
        fitting = (text for text in texts if cell_len(text) <= most)
        text = next(fitting, None) or set_cell_size(texts[-1], most)
        # Without an escape code to clear the line, it is overwritten by blanks.
        rest = _CLEAR_REST if self.can_move else " " * (self._progress_width - cell_len(text))
        # The terminal may have echoed ^C into the line.
        write_codes(f"\r{text}{rest}\r")
        self._progress_width = max(self._progress_width, cell_len(text))

    def announce(self, *forms: str) -> None:
        """Show that something begins which takes a while: as :meth:`show_progress`, but a plain
        terminal gets the line at once.
        """
        if self.stderr_is_terminal and self.is_plain and not self._is_in_answer:
            self.say(forms[0])
        else:
            self.show_progress(*forms)

    def clear_progress(self) -> None:
        self._next_plain_progress = 0.0
        if self._progress_width:
            blanks = " " * self._progress_width + "\r"
            write_codes("\r" + (_CLEAR_REST if self.can_move else blanks))
            self._progress_width = 0


def _bracketed(parts: Sequence[str]) -> str:
    return f"[{' | '.join(filter(None, parts))}]"


class PromptProgress:
    """Reports the progress of a prompt: tokens, rate and remaining time.

    Args:
        num_known: tokens of the prompt that were computed in earlier turns.
        clock: in seconds.
    """

    def __init__(self, num_known: int, clock: Callable[[], float] = time.monotonic):
        self._num_known = num_known
        self._clock = clock
        self._reports = deque([(clock(), num_known)], NUM_REPORTS)

    def words(self, done: int, total: int) -> Sequence[str]:
        """The report when ``done`` of ``total`` tokens are computed, its longest form first; empty
        if the prompt is short or done.
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


def size_of(stream: TextIO) -> os.terminal_size:
    """The size of a terminal; 80 columns and 24 rows if it is unknown."""
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        columns = rows = 0
    return os.terminal_size((columns or 80, rows or 24))


# What is read


class Reader:
    """Reads each line of stdin as a message, without its line end.

    Attributes:
        is_interactive: whether a user sees a prompt and can edit a text.
    """

    is_interactive = False

    def read(self, text: str = "") -> str:
        """The next message; ``text`` is offered for editing.

        Raises:
            EOFError: the end of the input.
        """
        return read_stdin(sys.stdin.readline)

    def confirm(self, question: str) -> bool:
        """Whether the user answers yes."""
        return False

    def close(self) -> None:
        """Restore the terminal's settings."""


def read_stdin(read: Callable[[], str]) -> str:
    """What a method of stdin reads, without the last line end.

    Raises:
        ValueError: stdin can't be read.
        EOFError: nothing is left.
    """
    try:
        text = clean(read())
    except OSError as error:
        raise ValueError(f"standard input can't be read: {system_reason(error)}") from error
    if not text:
        raise EOFError
    return text.removesuffix("\n").removesuffix("\r")


def clean(text: str) -> str:
    """Text that a tokenizer can encode: bytes that are not UTF-8, which Python represents as lone
    surrogates, are replaced.
    """
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
