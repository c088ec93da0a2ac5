"""``Marks``: control tokens in a text. Each is one character that no text contains, so that a mark
that a model spells out is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping

# Characters that decoded text never has: high surrogates, from this one on.
_FIRST = 0xD800
_CHARACTERS = re.compile("[\ud800-\udbff]")


class Marks:
    """The control tokens among the marks of a format.

    Args:
        token_ids: their texts and ids. Marks that are not in it are text.

    Attributes:
        characters: the character of each token id, for the text of an answer.
    """

    def __init__(self, token_ids: Mapping[str, int] | None = None):
        self.token_ids = dict(token_ids or {})
        texts = sorted(self.token_ids, key=len, reverse=True)
        self._character_of = {text: chr(_FIRST + index) for index, text in enumerate(texts)}
        self._text_of = {character: text for text, character in self._character_of.items()}
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        self.characters = {self.token_ids[text]: self._character_of[text] for text in texts}

    def encode(self, text: str) -> str:
        """A text with a character for each control token in it."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda found: self._character_of[found[0]], text)

    def decode(self, text: str) -> str:
        """A text as readers see it."""
        return self._replaced(text, str)

    def decode_json(self, text: str) -> str:
        """The same for JSON text, in whose strings there may be control tokens."""
        return self._replaced(text, lambda mark: json.dumps(mark, ensure_ascii=False)[1:-1])

    def split(self, text: str) -> list[str | int]:
        """The texts and the token ids that a mark consists of."""
        parts: list[str | int] = []
        for piece in re.split("([\ud800-\udbff])", self.encode(text)):
            if piece:
                mark = self._text_of.get(piece)
                parts.append(piece if mark is None else self.token_ids[mark])
        return parts

    def without(self, text: str) -> str:
        """A text without control tokens."""
        return _CHARACTERS.sub("", text) if self._pattern is not None else text

    def _replaced(self, text: str, write: Callable[[str], str]) -> str:
        if self._pattern is None or not _CHARACTERS.search(text):
            return text
        return _CHARACTERS.sub(lambda found: write(self._text_of.get(found[0], found[0])), text)


class MarkFinder:
    """Finds the first of several marks in a growing text.

    Args:
        actions: the marks, and what each of them does.
    """

    def __init__(self, actions: Mapping[str, str]):
        self.actions = actions
        # At the same position, the longer mark is preferred.
        marks = sorted(actions, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, marks))) if marks else None
        self._beginnings = frozenset(mark[:length] for mark in marks for length in range(len(mark)))
        self._longest = max(map(len, marks), default=0)
        firsts = "".join(sorted({re.escape(mark[0]) for mark in marks}))
        self._first = re.compile(f"[{firsts}]" if firsts else "(?!)")

    def find(self, text: str, is_complete: bool) -> tuple[int, str]:
        """The position of the first mark, and the mark; or the position where an incomplete mark
        may begin, and ``""``.
        """
        if self._pattern is None or not self._first.search(text):
            return len(text), ""
        found = self._pattern.search(text)
        if not is_complete:
            limit = len(text) if found is None else found.start() + 1
            for first in self._first.finditer(text, max(0, len(text) - self._longest + 1), limit):
                if text[first.start() :] in self._beginnings:
                    return first.start(), ""
        if found is None:
            return len(text), ""
        return found.start(), found[0]

    def find_half(self, text: str, starts: Iterable[str]) -> int:
        """Where a mark that begins calls is truncated at the end of a text; its length if none is.
        A character or two may be anything, unless one of them is a control token.
        """
        for place in range(max(0, len(text) - self._longest + 1), len(text)):
            rest = text[place:]
            is_one = len(rest) > 2 or _CHARACTERS.search(rest)
            if is_one and any(start.startswith(rest) for start in starts):
                return place
        return len(text)
