"""Greedy answers: mlx-lm's own, and those of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx.nn import Module
from mlx_lm.generate import generate_step

from mlx_paged import Engine, SamplingParams

NUM_TOKENS = 10  # of each answer

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
class Answers:
    """To some prompts.

    Attributes:
        tokens: of each prompt, greedy.
        logprobs: of these tokens. A small fault in what was read before, as a state of too few
            tokens, may change them and no token.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]


@dataclass(frozen=True)
class StockAnswers(Answers):
    """What mlx-lm answers.

    Attributes:
        margin: the least distance between the two best logits of a step, over the spread of all.
        spread: the least one of a step.
    """

    margin: float
    spread: float

    @property
    def is_clear(self) -> bool:
        """Whether rounding can't change a token."""
        return self.margin > NEAR_TIE

    def check(self, found: Answers, what: str, first: int = 0) -> None:
        """Hold answers to the prompts from ``first`` on to these.

        Raises:
            AssertionError: tokens differ, or log-probabilities do by more than rounding.
        """
        assert found.tokens == self.tokens[first:], what
        for logprobs, expected in zip(found.logprobs, self.logprobs[first:], strict=True):
            error = np.abs(np.subtract(logprobs, expected)).max()
            assert error <= NEAR_TIE * self.spread, f"{what}: log-probabilities differ by {error}"


def stock_answers(model: Module, prompts: Sequence[list[int]] = PROMPTS) -> StockAnswers:
    """Answers of mlx-lm's ``generate_step`` with the model's own cache, one prompt at a time."""
    tokens, of_tokens, margins, spreads = [], [], [], []
    for prompt in prompts:
        answer, of_answer = [], []
        for token, logprobs in generate_step(mx.array(prompt), model, max_tokens=NUM_TOKENS):
            answer.append(token)
            of_answer.append(logprobs[token].item())
            second, first = mx.topk(logprobs, 2)
            spreads.append(mx.std(mx.where(mx.isinf(logprobs), first, logprobs).astype(mx.float32)))
            margins.append((first - second) / spreads[-1])
        tokens.append(answer)
        of_tokens.append(of_answer)
    least = (float(mx.min(mx.stack(each))) for each in (margins, spreads))
    return StockAnswers(tokens, of_tokens, *least)


def answers_of(engine: Engine, prompts: Sequence[list[int]] = PROMPTS) -> Answers:
    """An engine's greedy answers to all prompts at once."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=0)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    completions = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            completions[int(output.request_id)] = output.outputs[0]
    answers = [completions[index] for index in range(len(prompts))]
    return Answers(
        [list(answer.token_ids) for answer in answers],
        [
            [of_step[token].logprob for token, of_step in zip(a.token_ids, a.logprobs, strict=True)]
            for a in answers
        ],
    )
