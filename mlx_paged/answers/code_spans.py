"""``CodeSpans``: whether what looks like a call is quoted, in code or in quotation marks."""

from __future__ import annotations

import re
from collections.abc import Callable

import regex

from mlx_paged.answers.cursor import Cursor, Sought, Steps, TruncatedError

# Of the text after a call that may turn out to be quoted.
MAX_HELD_CHARACTERS = 32_768
_QUOTES = {'"': '"', "'": "'", "“": "”", "«": "»", "„": "“", "‘": "’", "「": "」"}
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_TICKS = re.compile(r"`+")


def wait_for(cursor: Cursor, sought: Sought) -> Steps[None]:
    """Wait for a pattern, and read it; or for ``MAX_HELD_CHARACTERS`` without it, and read nothing.

    Raises:
        TruncatedError: the text has ended before either.
    """
    begin = cursor.place
    search = cursor.search(sought)
    try:
        for _ in search:
            if len(cursor.text) - begin > MAX_HELD_CHARACTERS:
                cursor.stop_search()
                return
            yield
    except TruncatedError:
        if len(cursor.text) - begin <= MAX_HELD_CHARACTERS:
            raise
    if cursor.place - begin > MAX_HELD_CHARACTERS:
        cursor.place = begin


class CodeSpans:
    """Whether a text that is generated is within a code span or a block of code."""

    def __init__(self) -> None:
        self._line: list[str] = []  # pieces of the last one
        self._fence = ""

    @property
    def is_open(self) -> bool:
        """Whether the text so far has opened one."""
        return bool(self._fence or self._open_ticks())

    def add(self, text: str) -> None:
        """Add a text."""
        self._line.append(text)
        if "\n" not in text:
            return
        *lines, last = "".join(self._line).split("\n")
        for line in lines:
            found = _FENCE.match(line)
            if found is None:
                continue
            if not self._fence:
                self._fence = found[1]
            elif found[1].startswith(self._fence):
                self._fence = ""
        self._line = [last]

    def _open_ticks(self) -> str:
        opened = ""
        for ticks in _TICKS.findall("".join(self._line)):
            if not opened:
                opened = ticks
            elif ticks == opened:
                opened = ""
        return opened

    def after(self, space: str) -> CodeSpans:
        """What it is after white space that is not shown yet."""
        if not space:
            return self
        later = CodeSpans()
        later._line, later._fence = [*self._line], self._fence
        later.add(space)
        return later

    def closing(self) -> Callable[[Cursor], Steps[bool]] | None:
        """A test of whether a call that begins here is quoted: it reads what closes the quotation.
        ``None`` if it can't be.
        """
        ticks = self._open_ticks()
        if self._fence:
            return _closes(Sought(rf"\n {{0,3}}{regex.escape(self._fence)}", "\n"))
        if ticks:
            closed = rf"(?<!`){ticks}(?=[^`]"
            return _closes(Sought(rf"{closed})|\n", "`\n", rf"{closed}|$)|\n"))
        quote = _QUOTES.get("".join(self._line)[-1:])
        return None if quote is None else _is_followed_by(quote)


def _closes(sought: Sought) -> Callable[[Cursor], Steps[bool]]:
    def closes(cursor: Cursor) -> Steps[bool]:
        begin = cursor.place
        try:
            yield from wait_for(cursor, sought)
        except TruncatedError:
            return False
        return not cursor.text[begin : cursor.place].endswith("\n")

    return closes


def _is_followed_by(quote: str) -> Callable[[Cursor], Steps[bool]]:
    def follows(cursor: Cursor) -> Steps[bool]:
        return (yield from cursor.peek()) == quote

    return follows
