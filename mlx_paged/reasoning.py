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


def ends_with_open_reasoning(
    tokenizer: TokenizerWrapper, marks: ReasoningMarks, prompt_token_ids: Sequence[int]
) -> bool:
    """:meth:`ReasoningMarks.are_opened_by`, of a prompt in tokens."""
    tail = list(prompt_token_ids[-_NUM_TAIL_TOKENS:])
    return marks.are_opened_by(str(tokenizer.decode(tail, skip_special_tokens=False)))


class ReasoningTokens:
    """Counts the tokens between the marks of reasoning, the marks included.

    Args:
        marks: those of the model; without tokens of both, nothing is reasoning.
        is_thinking: the prompt has opened it already.

    Attributes:
        count: up to the last token that was added.
        is_thinking: the last token that was added is within reasoning.
    """

    def __init__(self, marks: ReasoningMarks | None, is_thinking: bool = False):
        self.count = 0
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
            mark = end if self.is_thinking else start
            if token == mark[-1] and tuple(self._last)[-len(mark) :] == mark:
                self.count += 0 if self.is_thinking else len(mark)
                self.is_thinking = not self.is_thinking
