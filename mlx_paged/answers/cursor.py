"""``Cursor``: a place in a text that still grows. Parsers are generators that yield while they need
more of the text, so that what they find doesn't depend on how the text is cut.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""A parser: it yields while it needs more text, and returns what it has read."""


class NotACallError(Exception):
    """The text is no call of a tool."""


class TruncatedError(NotACallError):
    """The text has ended within what may have become a call."""


class Cursor:
    """A place in a growing text.

    Attributes:
        text: as far as it is known.
        place: what is before it was read.
        is_over: no more text follows.
        is_cut: the text is over although the model has not ended it.
    """

    __slots__ = ("is_cut", "is_over", "place", "text")

    def __init__(self, text: str = "", *, is_over: bool = False):
        self.text = text
        self.place = 0
        self.is_over = is_over
        self.is_cut = False

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
            found = pattern.match(self.text, self.place, partial=not self.is_over)
            if found is None:
                if self.is_over and pattern.match(self.text, self.place, partial=True):
                    raise TruncatedError
                return None
            if not found.partial:
                self.place = found.end()
                return found
            yield

    def peek(self) -> Steps[str]:
        """The next character; empty at the end of the text."""
        while self.place == len(self.text) and not self.is_over:
            yield
        return self.text[self.place : self.place + 1]

    def search(self, pattern: Any, at_end: Any = None) -> Steps[Any]:
        """What matches a pattern first from here on, which is read up to its end.

        Args:
            at_end: the pattern in its place once the text is over.

        Raises:
            TruncatedError: there is none in the whole text.
        """
        begin = self.place
        while True:
            if self.is_over and at_end is not None:
                pattern = at_end
            found = pattern.search(self.text, begin, partial=not self.is_over)
            if found is not None and not found.partial:
                self.place = found.end()
                return found
            if self.is_over:
                raise TruncatedError
            begin = len(self.text) if found is None else found.start()
            length = len(self.text)
            while len(self.text) == length and not self.is_over:
                yield


def run(steps: Steps[T]) -> T:
    """What a parser returns for a text that is over."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result
