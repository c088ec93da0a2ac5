"""``Cursor``: a place in a text that still grows. Parsers are generators that yield while they need
more of the text, so that what they find doesn't depend on how the text is cut.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any, TypeAlias, TypeVar

import regex

T = TypeVar("T")
# Text that is searched in pieces is put together once there is this much of it.
MAX_PIECE_CHARACTERS = 256
Steps: TypeAlias = Generator[None, None, T]
"""A parser: it yields while it needs more text, and returns what it has read."""


class NotACallError(Exception):
    """The text is no call of a tool."""


class TruncatedError(NotACallError):
    """The text has ended within what may have become a call."""


class Sought:
    """A pattern that a growing text is searched for.

    Args:
        source: of the module ``regex``.
        first: the characters that a match may begin with.
        source_at_end: what is sought instead once the text is over.
    """

    __slots__ = ("at_end", "first", "pattern")

    def __init__(self, source: str, first: str, source_at_end: str | None = None):
        self.pattern: Any = regex.compile(source, regex.DOTALL)
        self.at_end: Any = self.pattern
        if source_at_end is not None:
            self.at_end = regex.compile(source_at_end, regex.DOTALL)
        # Most pieces of a text have none of them, which the module ``re`` sees much faster.
        self.first = re.compile(f"[{re.escape(first)}]" if first else "(?!)")

    def search(self, text: str, begin: int, *, is_complete: bool) -> Any:
        """The first match, or a partial one at the end of a text that is not over."""
        first = self.first.search(text, begin)
        if first is None:
            return None
        if is_complete:
            return self.at_end.search(text, first.start())
        return self.pattern.search(text, first.start(), partial=True)


class Cursor:
    """A place in a growing text.

    Attributes:
        text: as far as it is known and added.
        place: what is before it was read.
        is_complete: no more text follows.
        is_cut: the text is over although the model has not ended it.
        num_held: characters that follow ``text`` and are not added to it yet: none of them begins
            what a parser searches for.
    """

    __slots__ = ("_held", "_sought", "is_complete", "is_cut", "num_held", "place", "text")

    def __init__(self, text: str = "", *, is_complete: bool = False):
        self.text = text
        self.place = 0
        self.is_complete = is_complete
        self.is_cut = False
        self.num_held = 0
        self._held: list[str] = []
        self._sought: Sought | None = None

    def add(self, text: str) -> bool:
        """Add what follows; returns whether there may be more to read."""
        if self._sought is not None:
            self._held.append(text)
            self.num_held += len(text)
            if self.num_held < MAX_PIECE_CHARACTERS and not self._sought.first.search(text):
                return False
            self.stop_search()
        else:
            self.text += text
        return True

    def end(self, *, is_cut: bool) -> None:
        """No more text follows."""
        self.stop_search()
        self.is_complete, self.is_cut = True, is_cut

    def stop_search(self) -> None:
        """Add what is held, and hold nothing more."""
        if self._held:
            self.text += "".join(self._held)
            self._held, self.num_held = [], 0
        self._sought = None

    def match(self, pattern: Any) -> Steps[Any]:
        """Read what matches a pattern of the module ``regex`` here.

        Raises:
            NotACallError: nothing that may still follow matches.
        """
        found = yield from self.find(pattern)
        if found is None:
            raise NotACallError
        return found

    def find(self, pattern: Any) -> Steps[Any]:
        """Read what matches a pattern here; ``None`` if nothing does."""
        while True:
            found = pattern.match(self.text, self.place, partial=not self.is_complete)
            if found is None:
                if self.is_complete and pattern.match(self.text, self.place, partial=True):
                    raise TruncatedError
                return None
            if not found.partial:
                self.place = found.end()
                return found
            yield

    def peek(self) -> Steps[str]:
        """The next character; empty at the end of the text."""
        while self.place == len(self.text) and not self.is_complete:
            yield
        return self.text[self.place : self.place + 1]

    def search(self, sought: Sought) -> Steps[Any]:
        """What matches first from here on, which is read up to its end.

        Raises:
            TruncatedError: there is none in the whole text.
        """
        begin = self.place
        while True:
            found = sought.search(self.text, begin, is_complete=self.is_complete)
            if found is not None and not found.partial:
                self.place = found.end()
                return found
            if self.is_complete:
                raise TruncatedError
            length = len(self.text)
            begin = length if found is None else found.start()
            self._sought = sought if begin == length else None
            while len(self.text) == length and not self.is_complete:
                yield


def run(steps: Steps[T]) -> T:
    """What a parser returns for a text that is over."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result
