"""Drafts whether they pay or not, right and wrong ones, in requests and steps of every kind."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from helpers.engine_runs import known_of
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.request import Completion
from mlx_paged.engine.speculation.speculation import Drafter, PromptLookup, Speculation
from mlx_paged.errors import PromptTooLongError
from mlx_paged.request import SeqId

# The tokens of an answer, as far as somebody knows them.
Knows: TypeAlias = Callable[[Completion], Sequence[int]]


def knows(answers: Mapping[SeqId, Sequence[int]]) -> Knows:
    return lambda completion: answers.get(completion.seq_id, ())


class Oracle:
    """Asks an engine of its own how a request will be answered, as far as its settings tell; all
    oracles of a model share what they were told.
    """

    def __init__(self, model: Any):
        self._model = model
        self._answers = known_of(model)

    def __call__(self, completion: Completion) -> Sequence[int]:
        limit = completion.request.params.max_tokens
        max_tokens = 60 if limit is None or limit < 0 else min(limit, 60)
        params = dataclasses.replace(
            completion.request.params,
            logits_processors=(),
            sampler=None,
            stop=(),
            max_tokens=max_tokens,
        )
        prompt = completion.token_ids[: completion.num_prompt_tokens]
        key = "oracle", tuple(prompt), repr(params), completion.request.seed
        if key not in self._answers:
            engine = Engine(self._model, kv_cache_bytes="400blocks", seed=0, run_ahead=False)
            engine.scheduler.speculation = Speculation()
            self._answers[key] = ()
            # Without a window, some prompts are too long.
            with contextlib.suppress(PromptTooLongError):
                engine.add_request(
                    "a", prompt, dataclasses.replace(params, seed=completion.request.seed)
                )
            while engine.has_unfinished_requests():
                for output in engine.step():
                    self._answers[key] = [each.token_ids for each in output.outputs]
        answers: Sequence[Sequence[int]] = self._answers[key]
        return answers[completion.index] if completion.index < len(answers) else ()


def looks_up(completion: Completion) -> Sequence[int]:
    """The answer so far, as the look-up goes on with it."""
    return [*completion.output_token_ids, *PromptLookup().propose(completion, 7)]


def nothing(completion: Completion) -> Sequence[int]:
    return ()


class RandomDrafter(Drafter):
    """Drafts that are right up to a random token, as far as the answer is known; else random ones.

    Args:
        answer: what is known.
    """

    def __init__(self, vocab_size: int, answer: Knows = nothing, seed: int = 0):
        self.vocab_size = vocab_size
        self.answer = answer
        self.seed = seed

    def propose(self, completion: Completion, num_drafts: int) -> list[int]:
        # No state: a request that comes again gets the same ones.
        rng = random.Random(f"{self.seed} {completion.seq_id} {completion.num_tokens}")
        begin = completion.num_output_tokens
        right = list(self.answer(completion))[begin : begin + num_drafts]
        if rng.random() < 0.4:
            right = right[: rng.randrange(num_drafts)]
        wrong = rng.choices(range(self.vocab_size), k=num_drafts)
        return right + wrong[len(right) :]

    def note(self, completion: Completion, num_drafts: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafts


@dataclass(frozen=True)
class EagerSpeculation(Speculation):
    """Any number of drafts, in three of four steps of a request."""

    num_draft_tokens: int = 7
    seed: int = 0

    def num_drafts(self, completions: Sequence[Completion], *_: Any) -> Sequence[int]:
        counts = []
        for completion in completions:
            rng = random.Random(f"{self.seed} {completion.seq_id} {completion.num_tokens}")
            counts.append(rng.randint(1, self.num_draft_tokens) * (rng.random() < 0.75))
        return counts


def eager_speculation(vocab_size: int, answer: Knows = nothing, seed: int = 0) -> EagerSpeculation:
    return EagerSpeculation(RandomDrafter(vocab_size, answer, seed), seed=seed)


def eager_drafts(engine: Engine, num_draft_tokens: int = 5) -> EagerSpeculation:
    """Drafts of an engine's draft model."""
    assert engine.runner.draft_model is not None
    return EagerSpeculation(engine.runner.draft_model, num_draft_tokens)
