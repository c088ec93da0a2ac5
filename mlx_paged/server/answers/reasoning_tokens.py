"""How many tokens of an answer are reasoning."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.server.answers.reader import AnswerFormat


class ReasoningTokens:
    """Counts the tokens between the marks of reasoning, the marks included.

    Args:
        start: the tokens of the mark that opens it; none: nothing is reasoning.
        end: those of the mark that closes it.
        is_thinking: the prompt has opened it already.

    Attributes:
        count: up to the last token that was added.
    """

    def __init__(self, start: Sequence[int], end: Sequence[int], is_thinking: bool = False):
        self.count = 0
        self._start, self._end = tuple(start), tuple(end)
        self._is_thinking = is_thinking
        self._last: deque[int] = deque(maxlen=max(len(start), len(end)))

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper, answer_format: AnswerFormat) -> ReasoningTokens:
        """A counter for an answer."""
        start, end = tokenizer.think_start_tokens, tokenizer.think_end_tokens
        if answer_format.think_marks is None or not start or not end:
            return cls((), ())
        return cls(start, end, answer_format.is_thinking)

    def add(self, token_ids: Iterable[int]) -> None:
        """The next tokens."""
        if not self._start:
            return
        for token in token_ids:
            self._last.append(token)
            self.count += self._is_thinking
            mark = self._end if self._is_thinking else self._start
            if tuple(self._last)[-len(mark) :] == mark:
                self.count += 0 if self._is_thinking else len(mark)
                self._is_thinking = not self._is_thinking
