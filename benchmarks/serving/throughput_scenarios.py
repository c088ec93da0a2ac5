"""The demands that `throughput.py` measures, as values: lists of requests, the same for every side.

Lengths are spread evenly over the quantiles of their distribution and then shuffled (seed 0), so
that both ends are there whatever the number of requests. "Skewed" is a Pareto tail of index 1 cut
at both ends, density ~ 1 / length^2: between 64 and 1,024 tokens half of the requests are shorter
than 121, and the mean is 188.

Arrivals are counted in tokens generated in all, not in seconds: every side then meets a request at
the same point of its work, on any machine. With gaps of the mean answer's length as many requests
join as leave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np


@dataclass(frozen=True)
class SampleRequest:
    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    arrival: int = 0  # when this number of tokens was generated in all
    logits_processors: tuple[Callable[[mx.array, mx.array], mx.array], ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.max_tokens


@dataclass(frozen=True)
class Scenario:
    number: int
    name: str
    what: str
    requests: list[SampleRequest]
    warm_up: list[SampleRequest] = field(default_factory=list)  # served before the clock starts
    pool_over_demand: float = (
        1.1  # our pool over what could be live at once: our engine keeps a twentieth free
    )
    sides: tuple[str, ...] = ("mlx-lm one by one",)  # besides ours and mlx-lm's BatchGenerator

    def num_pool_tokens(self, max_num_seqs: int, block_size: int) -> int:
        """Slots of our pool, in whole blocks: `pool_over_demand` times the longest requests that
        can run at once.
        """
        demands = sorted(
            (-(-request.num_tokens // block_size) for request in self.requests), reverse=True
        )
        return int(sum(demands[:max_num_seqs]) * self.pool_over_demand) * block_size


@dataclass(frozen=True)
class Scale:
    """The same scenarios, as large as the issue says or as small as a smoke test wants them."""

    num_requests: int = 32
    equal_prompt: int = 256
    shortest: int = 64
    longest: int = 1024
    max_tokens: int = 64
    shortest_answer: int = 16
    longest_answer: int = 192
    prefix: int = 512
    shortest_suffix: int = 16
    longest_suffix: int = 64


QUICK = Scale(8, 48, 16, 128, 8, 4, 16, 64, 4, 8)


def make_scenarios(vocab_size: int, scale: Scale) -> list[Scenario]:
    n = scale.num_requests
    rng = np.random.default_rng(0)

    def prompt(num_tokens: int) -> list[int]:
        token_ids: list[int] = rng.integers(0, vocab_size, num_tokens).tolist()
        return token_ids

    def shuffled(lengths: np.ndarray) -> list[int]:
        mixed: list[int] = rng.permutation(np.rint(lengths).astype(int)).tolist()
        return mixed

    def requests(
        prompts: list[list[int]], answers: list[int], arrivals: list[int] | None = None
    ) -> list[SampleRequest]:
        arrivals = arrivals or [0] * len(prompts)
        named = enumerate(zip(prompts, answers, arrivals, strict=True))
        return [SampleRequest(f"r{i}", p, answer, arrival) for i, (p, answer, arrival) in named]

    def skewed(num: int, longest: int = scale.longest) -> list[int]:
        quantiles = np.linspace(0, 1, num)
        return shuffled(scale.shortest / (1 - quantiles * (1 - scale.shortest / longest)))

    equal = requests([prompt(scale.equal_prompt) for _ in range(n)], [scale.max_tokens] * n)
    mixed = requests([prompt(length) for length in skewed(n)], [scale.max_tokens] * n)

    # Half a batch is there from the start; one and a half further batches come as places become
    # free.
    num_first, num_later = n // 2, n
    answers = shuffled(
        np.geomspace(scale.shortest_answer, scale.longest_answer, num_first + num_later)
    )
    gaps = rng.exponential(np.mean(answers), num_later)
    arrivals = [0] * num_first + np.rint(np.cumsum(gaps)).astype(int).tolist()
    coming = requests(
        [prompt(length) for length in skewed(num_first + num_later)], answers, arrivals
    )

    prefix = prompt(scale.prefix)
    suffixes = shuffled(np.linspace(scale.shortest_suffix, scale.longest_suffix, n))
    shared = requests([prefix + prompt(length) for length in suffixes], [scale.max_tokens // 2] * n)
    seen = [SampleRequest("seen", prefix + prompt(scale.shortest_suffix), 1)]

    # Answers as long as most prompts: what fits at first outgrows the pool later.
    growing = requests(
        [prompt(length) for length in skewed(n, scale.longest // 2)], [2 * scale.max_tokens] * n
    )

    spread = f"{scale.shortest}..{scale.longest} tokens, skewed"
    own = f"{scale.shortest_suffix}..{scale.longest_suffix}"
    suffix = f"{scale.prefix} shared tokens and {own} of its own"
    return [
        Scenario(
            1,
            "equal lengths",
            f"{n} prompts of {scale.equal_prompt} tokens, {scale.max_tokens} more each",
            equal,
        ),
        Scenario(
            2, "skewed lengths", f"{n} prompts of {spread}, {scale.max_tokens} more each", mixed
        ),
        Scenario(
            3,
            "arrivals and departures",
            f"{num_first} prompts of {spread}, then {num_later} one by one, "
            f"{scale.shortest_answer}.."
            f"{scale.longest_answer} more each",
            coming,
        ),
        Scenario(
            4,
            "shared prefix, never seen",
            f"{n} prompts: {suffix}; {scale.max_tokens // 2} more each",
            shared,
        ),
        Scenario(
            4,
            "shared prefix, seen before",
            "the same, after one request with the prefix",
            shared,
            warm_up=seen,
            sides=("mlx-lm + prompt cache",),
        ),
        Scenario(
            5,
            "more demand than the pool holds",
            f"{n} prompts of {scale.shortest}..{scale.longest // 2} tokens, skewed, "
            f"{2 * scale.max_tokens} more each, "
            "a pool for a quarter of them",
            growing,
            pool_over_demand=0.25,
            sides=("mlx-lm one by one", "mlx-lm in the budget"),
        ),
    ]
