"""Reading an answer token by token or in parts: ``TokenReader`` and ``PartReader`` count the tokens
of its reasoning, and ``ReasoningSplitter`` tells its text from that of the answer, marks included.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mlx_paged.answers.dialect import AnswerFormat, Detokenizer
from mlx_paged.answers.events import Event
from mlx_paged.answers.reader import AnswerReader, Part, Span


class TokenPlaces:
    """Where tokens lie in the text of an answer, in which each mark is one character.

    Args:
        characters: of the tokens that are marks.
        skipped: tokens without a text.

    Attributes:
        begins: of each token.
    """

    def __init__(
        self,
        characters: Mapping[int, str],
        detokenizer: Detokenizer,
        skipped: Collection[int] = (),
    ):
        self.begins: list[int] = []
        self._characters = characters
        self._detokenizer = detokenizer
        self._skipped = skipped
        self._length = 0

    def add(self, token_id: int) -> str:
        """Add a token; returns its text."""
        self.begins.append(self._length)
        character = self._characters.get(token_id)
        if character is not None:
            text = self._detokenizer.finish() + character
        else:
            text = "" if token_id in self._skipped else self._detokenizer.add(token_id)
        self._length += len(text)
        return text

    def num_in(self, spans: Iterable[Span]) -> int:
        """The number of tokens of reasoning, marks included."""
        return sum(self._num_from(span.begin, span.end) for span in spans)

    def num_within(self, spans: Iterable[Span]) -> int:
        """The number of tokens of reasoning without its marks."""
        return sum(self._num_from(span.inner_begin, span.inner_end) for span in spans)

    def _num_from(self, begin: int, end: int | None) -> int:
        last = len(self.begins) if end is None else bisect_left(self.begins, end)
        return max(0, last - bisect_left(self.begins, begin))


class PartReader(AnswerReader):
    """Reads the parts of a completion, and counts the tokens of its reasoning."""

    def __init__(self, answer_format: AnswerFormat):
        super().__init__(answer_format)
        self._places: TokenPlaces | None = None
        self._unplaced: list[int] = []  # tokens, which are counted when their number is asked for

    def read(self, part: Part) -> list[Event]:
        self._unplaced += part.token_ids
        return super().read(part)

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of tokens of reasoning, its marks included."""
        form = self._format
        if not self.spans or form.detokenizer is None:
            return 0
        if self._places is None:
            self._places = TokenPlaces(form.marks.characters, form.detokenizer(), form.skipped)
        for token in self._unplaced:
            self._places.add(token)
        self._unplaced.clear()
        return self._places.num_in(self.spans)


class TokenReader:
    """Reads one answer token by token.

    Args:
        detokenizer: for the text after the prompt.
    """

    def __init__(self, answer_format: AnswerFormat, detokenizer: Detokenizer):
        self._reader = AnswerReader(answer_format)
        self._places = TokenPlaces(answer_format.marks.characters, detokenizer)

    @property
    def is_reasoning(self) -> bool:
        """Whether what follows is reasoning, as far as is known."""
        return self._reader.is_reasoning

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of tokens of reasoning, its marks included."""
        return self._places.num_in(self._reader.spans)

    @property
    def num_within(self) -> int:
        """The number of tokens of reasoning without complete marks."""
        return self._places.num_within(self._reader.spans)

    def add(self, token_ids: Iterable[int]) -> None:
        """Add the next tokens."""
        for token in token_ids:
            self._reader.add(self._places.add(token))


class Piece(NamedTuple):
    text: str
    is_reasoning: bool


class ReasoningSplitter:
    """Splits the text of an answer, as it is generated, into reasoning, its marks included, and the
    rest.
    """

    def __init__(self, answer_format: AnswerFormat):
        self._marks, self._reader = answer_format.marks, AnswerReader(answer_format)
        self._text, self._num_split = "", 0  # what was read and not split yet, and what is before

    def add(self, text: str, token: int = -1) -> list[Piece]:
        """The next pieces. The end of ``text`` is held back if it may begin a mark.

        Args:
            token: the last one of the text; -1: none that is a mark.
        """
        character = self._marks.characters.get(token, "")
        if character and text.endswith(mark := self._marks.decode(character)):
            text = text.removesuffix(mark) + character
        self._text += text
        self._reader.add(text)
        return self._split(len(self._text) - self._reader.num_pending)

    def finish(self) -> list[Piece]:
        """The text that was held back at the end of the answer."""
        self._reader.finish()
        return self._split(len(self._text))

    def _split(self, length: int) -> list[Piece]:
        text, begin = self._text[:length], self._num_split
        self._text, self._num_split = self._text[length:], begin + length
        spans = self._reader.spans
        groups = itertools.groupby(
            enumerate(text, begin), lambda place: any(place[0] in span for span in spans)
        )
        return [
            Piece(self._marks.decode("".join(character for _, character in group)), is_reasoning)
            for is_reasoning, group in groups
        ]


@dataclass(frozen=True)
class ReasoningLimit:
    """The limit of a request's reasoning.

    Args:
        new_reader: makes a reader of an answer to the request's prompt.
        end_token_ids: what ends the reasoning.
        num_tokens: between marks, in the whole answer.
    """

    new_reader: Callable[[], TokenReader]
    end_token_ids: tuple[int, ...]
    num_tokens: int
