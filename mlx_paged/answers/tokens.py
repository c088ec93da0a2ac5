"""``TokenReader`` and ``PartReader``: read an answer token by token, or in parts of text, and count
the tokens of its reasoning.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

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
