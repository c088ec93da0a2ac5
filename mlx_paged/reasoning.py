"""``ReasoningMarks``: the marks around a model's reasoning, and the number of tokens in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_NUM_TAIL_TOKENS = 16  # more than those of a mark and white space


class ReasoningMarks(NamedTuple):
    """The marks that open and close reasoning, as text and as tokens."""

    start: str
    end: str
    start_token_ids: tuple[int, ...] = ()
    end_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper) -> ReasoningMarks | None:
        """The marks that mlx-lm found in the tokenizer; ``None`` if there are none."""
        start, end = tokenizer.think_start, tokenizer.think_end
        if not start or not end:
            return None
        token_ids = tokenizer.think_start_tokens, tokenizer.think_end_tokens
        return cls(start, end, *(tuple(each or ()) for each in token_ids))

    def are_opened_by(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins within reasoning."""
        return prompt.rstrip().endswith(self.start)

    def are_closed_by(self, prompt: str) -> bool:
        """Whether the prompt ends with closed reasoning, so that an answer has none."""
        return prompt.rstrip().endswith(self.end)

    def without_empty_pair(self, prompt: str) -> str | None:
        """The prompt without the empty pair of marks at its end, which templates write if thinking
        is off; ``None`` if there is none.
        """
        body = prompt.rstrip()
        if not body.endswith(self.end):
            return None
        body = body[: -len(self.end)].rstrip()
        return body[: -len(self.start)] if body.endswith(self.start) else None


class ReasoningLimit(NamedTuple):
    """The limit of a request's reasoning.

    Args:
        num_tokens: between marks, in the whole answer.
        is_open: whether the prompt has already opened the reasoning.
    """

    marks: ReasoningMarks
    num_tokens: int
    is_open: bool

    @classmethod
    def of(
        cls, tokenizer: TokenizerWrapper | None, prompt_token_ids: Sequence[int], num_tokens: int
    ) -> ReasoningLimit | None:
        """For an answer to a prompt; ``None`` for a model whose reasoning has no marks."""
        marks = None if tokenizer is None else ReasoningMarks.of(tokenizer)
        if tokenizer is None or marks is None or not all(marks):
            return None
        tail = list(prompt_token_ids[-_NUM_TAIL_TOKENS:])
        is_open = marks.are_opened_by(str(tokenizer.decode(tail, skip_special_tokens=False)))
        return cls(marks, num_tokens, is_open)


class ReasoningTokens:
    """Counts the tokens of reasoning, its marks included.

    Args:
        marks: of the model; if either has no tokens, nothing is counted.
        is_thinking: whether the prompt has already opened the reasoning.

    Attributes:
        count: tokens of reasoning so far.
        num_within: of these, the tokens that are not part of a complete mark.
        is_thinking: whether the last token is within reasoning.
    """

    def __init__(self, marks: ReasoningMarks | None, is_thinking: bool = False):
        self.count = self.num_within = 0
        self._marks = marks if marks and marks.start_token_ids and marks.end_token_ids else None
        self.is_thinking = is_thinking and self._marks is not None
        longest = max(map(len, self._marks[2:])) if self._marks else 0
        self._last: deque[int] = deque(maxlen=longest)

    def add(self, token_ids: Iterable[int]) -> None:
        """Count the next tokens."""
        if self._marks is None:
            return
        _, _, start, end = self._marks
        for token in token_ids:
            self._last.append(token)
            self.count += self.is_thinking
            self.num_within += self.is_thinking
            mark = end if self.is_thinking else start
            if token == mark[-1] and tuple(self._last)[-len(mark) :] == mark:
                if self.is_thinking:
                    self.num_within -= len(mark)
                else:
                    self.count += len(mark)
                self.is_thinking = not self.is_thinking
