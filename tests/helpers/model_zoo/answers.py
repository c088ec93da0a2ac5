"""Greedy answers: mlx-lm's own, and those of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx.nn import Module
from mlx_lm.generate import generate_step

from mlx_paged import Engine, SamplingParams

NUM_TOKENS = 16  # of each answer

# Logits of float32 models differ by a millionth of their spread where sums are added up in another
# order; steps whose two best lie nearer than this are left to chance.
NEAR_TIE = 2e-4


def make_prompts(length: int) -> list[list[int]]:
    """A long one, and two short ones, the first of which begins with the same block of 8."""
    rng = np.random.default_rng(0)
    long, *others = rng.integers(0, 256, (3, length)).tolist()
    return [long, long[:9] + others[0][:5], others[1][:12]]


PROMPTS = make_prompts(27)


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


def stock_answers(model: Module, prompts: Sequence[list[int]] = PROMPTS) -> StockAnswers:
    """Answers of mlx-lm's ``generate_step`` with the model's own cache, one prompt at a time."""
    tokens, margins = [], []
    for prompt in prompts:
        answer = []
        for token, logprobs in generate_step(mx.array(prompt), model, max_tokens=NUM_TOKENS):
            answer.append(token)
            margins.append(_margin(logprobs))
        tokens.append(answer)
    return StockAnswers(tokens, float(mx.min(mx.stack(margins))))


def _margin(logprobs: mx.array) -> mx.array:
    second, first = mx.topk(logprobs, 2)
    spread = mx.where(mx.isinf(logprobs), first, logprobs).astype(mx.float32)
    return (first - second) / mx.std(spread)


def answers_of(engine: Engine, prompts: Sequence[list[int]] = PROMPTS) -> list[list[int]]:
    """An engine's greedy answers to all prompts at once."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    tokens = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
    return [tokens[index] for index in range(len(prompts))]
