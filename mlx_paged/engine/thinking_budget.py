"""``ThinkingBudget``: ends a model's reasoning after a number of tokens by forcing its end mark."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_paged.answers.tokens import ReasoningLimit
from mlx_paged.engine.request import Completion


class ThinkingBudget:
    """The state of an answer's reasoning. Tokens are only appended, and each is read once."""

    def __init__(self, limit: ReasoningLimit):
        self._limit = limit
        self._reader = limit.new_reader()
        self._num_read = 0  # tokens of the answer
        self._is_forcing = False  # the tokens of the end, of which some have come

    def forced_token(self, completion: Completion) -> int | None:
        """The token that has to come next; ``None`` if any may."""
        self._reader.add(completion.token_ids[completion.num_prompt_tokens + self._num_read :])
        self._num_read = completion.num_output_tokens
        end, reader = self._limit.end_token_ids, self._reader
        is_over = reader.is_reasoning and reader.num_within >= self._limit.num_tokens
        if is_over or self._is_forcing:
            for length in range(min(len(end) - 1, self._num_read), 0, -1):
                if tuple(completion.token_ids[-length:]) == end[:length]:
                    return end[length]  # The mark has begun.
        # The first of several tokens may end the reasoning; the others follow all the same.
        self._is_forcing = is_over
        return end[0] if is_over else None


def force_tokens(
    logits: mx.array,  # [num_completions, vocab_size]
    completions: Sequence[Completion],
    budgets: Sequence[ThinkingBudget | None],  # [num_completions]
) -> mx.array:
    """The logits with -inf for all but the forced token of each request that has one, as a new
    array.
    """
    forced = {
        entry: token
        for entry, (completion, budget) in enumerate(zip(completions, budgets, strict=True))
        if budget is not None and (token := budget.forced_token(completion)) is not None
    }
    if not forced:
        return logits
    rows = np.full((len(forced), logits.shape[-1]), -np.inf, np.float32)
    rows[np.arange(len(forced)), list(forced.values())] = 0
    logits = mx.array(logits)
    logits[mx.array(list(forced))] = mx.array(rows).astype(logits.dtype)
    return logits
