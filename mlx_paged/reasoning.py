"""``ReasoningMarks``: what stands around a model's reasoning, and how many tokens are between."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_NUM_TAIL_TOKENS = 16  # more than a mark and the space behind it have


class ReasoningMarks(NamedTuple):
    """What opens and what closes reasoning, as text and as tokens."""

    start: str
    end: str
    start_token_ids: tuple[int, ...] = ()
    end_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper) -> ReasoningMarks | None:
        """Those that mlx-lm found in the tokenizer; ``None`` for a model that has none."""
        start, end = tokenizer.think_start, tokenizer.think_end
        if not start or not end:
            return None
        token_ids = tokenizer.think_start_tokens, tokenizer.think_end_tokens
        return cls(start, end, *(tuple(each or ()) for each in token_ids))

    def are_opened_by(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins within reasoning."""
        return prompt.rstrip().endswith(self.start)

    def are_closed_by(self, prompt: str) -> bool:
        """Whether the prompt ends with a reasoning, so that an answer has none."""
        return prompt.rstrip().endswith(self.end)

    def without_empty_pair(self, prompt: str) -> str | None:
        """The prompt without the marks at its end that have nothing between them, which templates
        write where thinking is off; ``None`` where there are none.
        """
        body = prompt.rstrip()
        if not body.endswith(self.end):
            return None
        body = body[: -len(self.end)].rstrip()
        return body[: -len(self.start)] if body.endswith(self.start) else None


class ReasoningLimit(NamedTuple):
    """How long a request may reason.

    Args:
        num_tokens: between marks, in the whole answer.
        is_open: the prompt has opened the reasoning already.
    """

    marks: ReasoningMarks
    num_tokens: int
    is_open: bool

    @classmethod
    def of(
        cls, tokenizer: TokenizerWrapper | None, prompt_token_ids: Sequence[int], num_tokens: int
    ) -> ReasoningLimit | None:
        """That of an answer to a prompt; ``None`` for a model whose reasoning has no marks."""
        marks = None if tokenizer is None else ReasoningMarks.of(tokenizer)
        if tokenizer is None or marks is None or not all(marks):
            return None
        tail = list(prompt_token_ids[-_NUM_TAIL_TOKENS:])
        is_open = marks.are_opened_by(str(tokenizer.decode(tail, skip_special_tokens=False)))
        return cls(marks, num_tokens, is_open)


class ReasoningTokens:
    """Counts the tokens between the marks of reasoning, the marks included.

    Args:
        marks: those of the model; without tokens of both, nothing is reasoning.
        is_thinking: the prompt has opened it already.

    Attributes:
        count: up to the last token that was added.
        num_within: of these, those that belong to no whole mark.
        is_thinking: the last token that was added is within reasoning.
    """

    def __init__(self, marks: ReasoningMarks | None, is_thinking: bool = False):
        self.count = self.num_within = 0
        self._marks = marks if marks and marks.start_token_ids and marks.end_token_ids else None
        self.is_thinking = is_thinking and self._marks is not None
        longest = max(map(len, self._marks[2:])) if self._marks else 0
        self._last: deque[int] = deque(maxlen=longest)

    def add(self, token_ids: Iterable[int]) -> None:
        """The next tokens."""
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
