"""Greedy answers: mlx-lm's own, and those of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx.nn import Module
from mlx_lm.generate import generate_step

from mlx_paged import Engine, SamplingParams

NUM_TOKENS = 16

# Logits of float32 models differ by a millionth of their spread where sums are added up in another
# order; steps whose two best lie nearer than this are left to chance.
NEAR_TIE = 2e-4


def _prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    first, others = rng.integers(0, 256, 27).tolist(), rng.integers(0, 256, (2, 9)).tolist()
    return [first, first[:17] + others[0], others[1]]


# The first two begin with the same two blocks of 8.
PROMPTS = _prompts()


@dataclass(frozen=True)
class StockAnswers:
    """What mlx-lm answers.

    Attributes:
        tokens: of each prompt, greedy.
        margin: the least distance between the two best logits of a step, over the spread of all.
    """

    tokens: list[list[int]]
    margin: float

    @property
    def is_clear(self) -> bool:
        """Whether rounding can't change a token."""
        return self.margin > NEAR_TIE


def stock_answers(
    model: Module, prompts: Sequence[list[int]] = PROMPTS, num_tokens: int = NUM_TOKENS
) -> StockAnswers:
    """Answers of mlx-lm's ``generate_step`` with the model's own cache, one prompt at a time."""
    tokens, margins = [], []
    for prompt in prompts:
        answer = []
        for token, logprobs in generate_step(mx.array(prompt), model, max_tokens=num_tokens):
            answer.append(token)
            margins.append(_margin(logprobs))
        tokens.append(answer)
    return StockAnswers(tokens, float(mx.min(mx.stack(margins))))


def _margin(logprobs: mx.array) -> mx.array:
    second, first = mx.topk(logprobs, 2)
    spread = mx.where(mx.isinf(logprobs), first, logprobs).astype(mx.float32)
    return (first - second) / mx.std(spread)


def answers_of(
    engine: Engine, prompts: Sequence[list[int]] = PROMPTS, num_tokens: int = NUM_TOKENS
) -> list[list[int]]:
    """An engine's greedy answers to all prompts at once."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    tokens = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
    return [tokens[index] for index in range(len(prompts))]
