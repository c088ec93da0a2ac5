"""What `approaches.py` measures of an approach: the longest context in a budget, tokens per second,
times to first token, bytes, and how well it predicts held-out text.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.cache.approach_sides import Approach, MlxLm, NoCache, Ours, nbytes_per_token
from benchmarks.serving.throughput import Serving, forget, serve
from benchmarks.serving.throughput_scenarios import SampleRequest, Scenario
from benchmarks.serving.throughput_sides import BLOCK_SIZE, PagedEngine, Side
from mlx_paged.errors import PromptTooLongError

MLX_LM_STEP = 256  # tokens by which mlx-lm's KVCache grows


# The longest context


@dataclass(frozen=True)
class LongestContext:
    """Of one sequence whose K/V take no more than a budget.

    Attributes:
        num_tokens: what the budget allows; ``None`` where it sets no limit.
        num_run: tokens of the prompt that was run to prove it.
        nbytes_held: of K/V, after that run.
        refused_beyond: whether one token more was refused, or took more than the budget; ``None``
            where the model's own context ends there, or nothing does.
    """

    num_tokens: int | None
    num_run: int
    nbytes_held: int
    refused_beyond: bool | None


def longest_context(
    approach: Approach, theirs: nn.Module, nbytes: int, most: int
) -> LongestContext:
    """The longest prompt that fits, found and run.

    Args:
        theirs: mlx-lm's model.
        nbytes: the budget.
        most: tokens to which an approach without a limit is run.
    """
    if isinstance(approach, Ours):
        return _longest_of_ours(approach, nbytes, most)
    if isinstance(approach, MlxLm):
        return _longest_of_mlx_lm(theirs, nbytes, nbytes_per_token(approach.ours))
    mx.eval(theirs(mx.array([_tokens(most)]))[:, -1])
    return LongestContext(None, most, 0, None)


def _tokens(count: int) -> list[int]:
    return [5 + index % 50 for index in range(count)]


def _longest_of_ours(approach: Ours, nbytes: int, most: int) -> LongestContext:
    side = approach.with_budget(nbytes)
    limit = side.engine.max_model_len
    end = most + 1 if limit is None else limit
    low, high = 0, end  # the engine takes a prompt of `low` tokens and none of `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _takes(side, middle) else (low, middle)
    request = SampleRequest("longest", _tokens(low), 1)
    held: list[int] = []
    serve(side, [request], lambda: held.append(side.kv_use().nbytes_held))
    approach.end(side)
    is_last = low == end - 1
    return LongestContext(None if is_last else low, low, max(held), None if is_last else True)


def _takes(side: PagedEngine, num_tokens: int) -> bool:
    """Whether the engine takes a prompt of so many tokens; it is not run."""
    try:
        side.add(SampleRequest("try", _tokens(num_tokens), 1))
    except PromptTooLongError:
        return False
    side.engine.abort("try")
    side.engine.step()
    side.num_given.pop("try", None)
    return True


def _longest_of_mlx_lm(model: nn.Module, nbytes: int, nbytes_each: int) -> LongestContext:
    longest = nbytes // (MLX_LM_STEP * nbytes_each) * MLX_LM_STEP

    def held(num_tokens: int) -> int:
        caches = make_prompt_cache(model)
        mx.eval(model(mx.array([_tokens(num_tokens)]), cache=caches)[:, -1])
        return sum(cache.nbytes for cache in caches)

    return LongestContext(longest, longest, held(longest), held(longest + 1) > nbytes)


# Speed


def run_workload(approach: Approach, scenario: Scenario) -> tuple[Serving, int]:
    """All requests served by a fresh side, and the most bytes of K/V held between two steps."""
    forget()
    side = approach.start(scenario)
    held = [0]
    serving = serve(side, scenario.requests, lambda: held.append(side.kv_use().nbytes_held))
    approach.end(side)
    return serving, max(held)


@dataclass(frozen=True)
class FirstTokens:
    """Seconds to the first token behind a long prefix."""

    cold: float
    warm: float  # after another request with the prefix
    restarted: float  # after such a request of a side that has ended


def times_to_first_token(approach: Approach, scenario: Scenario) -> FirstTokens:
    """Of the three requests of a scenario: cold, warm, and after a restart.

    Without anything that outlives the process, the third is a first request, which is cold.
    """
    first, second, third = scenario.requests

    def seconds(side: Side, request: SampleRequest) -> float:
        return serve(side, [request]).figures()["ttft_median"]

    forget()
    side = approach.start(scenario)
    cold, warm = seconds(side, first), seconds(side, second)
    approach.end(side)
    if not approach.survives:
        return FirstTokens(cold, warm, cold)
    side = approach.restart(scenario)
    restarted = seconds(side, third)
    approach.end(side)
    return FirstTokens(cold, warm, restarted)


# Held-out text


class TeacherForcing:
    """A logits processor that makes the next token the one of a text, and notes how likely the
    model found it.
    """

    def __init__(self, token_ids: Sequence[int]):
        self.token_ids = list(token_ids)
        self.losses: dict[int, float] = {}  # nats, by the place of the predicted token
        self.choices: dict[int, int] = {}  # the most likely token there

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        place = tokens.size
        target = self.token_ids[min(place, len(self.token_ids) - 1)]
        row = logits.astype(mx.float32)[0]
        loss, choice = mx.logsumexp(row) - row[target], row.argmax()
        mx.eval(loss, choice)
        # A draft that is taken back is verified again: what is noted last counts.
        self.losses[place], self.choices[place] = float(loss), int(choice)
        is_target = mx.arange(logits.shape[-1]) == target
        return mx.where(is_target, logits, -mx.inf)


@dataclass(frozen=True)
class Prediction:
    losses: list[float]  # nats per predicted token, over all texts
    choices: list[int]
    found_again: float = 0.0
    """Of the whole blocks of the documents' prompts, those that came from the prefix cache."""

    @property
    def perplexity(self) -> float:
        return math.exp(statistics.fmean(self.losses))

    def same_choice(self, other: Prediction) -> float:
        pairs = list(zip(self.choices, other.choices, strict=True))
        return sum(a == b for a, b in pairs) / len(pairs)


def predict(approach: Approach, texts: list[list[int]], num_predicted: int) -> Prediction:
    """How likely the last ``num_predicted`` tokens of each text are, each decoded behind K/V that
    the approach holds of all before.

    The texts' beginnings are asked for once before, and where they outlive the process, the side
    restarts: what can be found again is found again, and counts here. Without a cache, a text is
    one call of the model.
    """
    if isinstance(approach, NoCache):
        return _predict_at_once(approach.model, texts, num_predicted)
    forced = [TeacherForcing(text) for text in texts]
    prompts = [text[: len(text) - num_predicted] for text in texts]
    first = [SampleRequest(f"first {i}", prompt, 1) for i, prompt in enumerate(prompts)]
    requests = [
        SampleRequest(str(i), prompt, num_predicted, logits_processors=(processor,))
        for i, (prompt, processor) in enumerate(zip(prompts, forced, strict=True))
    ]
    scenario = Scenario(0, "text", "", requests, pool_over_demand=1.5)
    forget()
    side = approach.start(scenario)
    if approach.keeps_prefixes:
        serve(side, first)
        if approach.survives:
            approach.end(side)
            side = approach.restart(scenario)
    before = _num_cached(side)
    serving = serve(side, requests)
    num_cached = _num_cached(side) - before
    approach.end(side)
    for request, text in zip(requests, texts, strict=True):
        if serving.tokens[request.request_id] != text[len(request.prompt_token_ids) :]:
            raise RuntimeError(f"[approaches] {approach.name} left the text that it was given")
    places = [range(len(text) - num_predicted, len(text)) for text in texts]
    pairs = [(each, place) for each, span in zip(forced, places, strict=True) for place in span]
    return Prediction(
        [each.losses[place] for each, place in pairs],
        [each.choices[place] for each, place in pairs],
        num_cached / sum((len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts),
    )


def _num_cached(side: Side) -> int:
    """Tokens of prompts so far that came from the prefix cache."""
    return side.engine.stats().num_cached_prompt_tokens if isinstance(side, PagedEngine) else 0


def _predict_at_once(model: nn.Module, texts: list[list[int]], num_predicted: int) -> Prediction:
    losses: list[float] = []
    choices: list[int] = []
    for text in texts:
        logits = model(mx.array([text[:-1]]))[0, -num_predicted:].astype(mx.float32)
        targets = mx.array(text[-num_predicted:])[:, None]
        found = mx.logsumexp(logits, axis=-1) - mx.take_along_axis(logits, targets, -1)[:, 0]
        losses += found.tolist()  # type: ignore[arg-type]
        choices += logits.argmax(-1).tolist()
    return Prediction(losses, choices)
