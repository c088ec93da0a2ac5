"""Thousands of random requests, steps, aborts and failures: no sequence reads blocks of another,
and everybody ends.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from helpers.drafting import eager_speculation
from helpers.fast_lane import mostly_slow
from helpers.scheduler_helpers import VOCAB_SIZE, FakeEngine, predicted_tokens

from mlx_paged.cache import PromptTooLongError
from mlx_paged.engine.request import Completion

# Prompts begin with one of these, so that prefixes are shared in whole and in part.
STEMS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [1, 2, 3, 4, 5, 6, 30, 31], [20, 21, 22, 23, 24]]


class Driver:
    """Asks of an engine whatever comes to a random mind."""

    def __init__(self, seed: int, users: Sequence[str | None] = (None,), **options):
        self.random = random.Random(seed)
        self.users = users
        self.engine = FakeEngine(eos_token_ids=frozenset([0]), **options)
        self.num_added = self.num_aborted = self.num_too_long = self.num_only = 0

    def add(self, stem: list[int]) -> None:
        choice = self.random.choice
        prompt = stem[: self.random.randint(1, len(stem))] + [
            choice([13, 14]) for _ in range(choice([0, 1, 3, 9, 25]))
        ]
        self.num_added += 1
        try:
            self.engine.add(
                f"r{self.num_added}",
                prompt,
                max_tokens=choice([1, 2, 5, 5, 12, 30, -1]),
                n=choice([1, 1, 1, 2, 3]),
                priority=choice([0, 0, 0, 1, 2, -1]),
                cache_salt=choice([None, None, "salt"]),
                user=choice(self.users),
            )
        except PromptTooLongError:
            self.num_too_long += 1

    def step(self, fails: str | None = None) -> None:
        suspects = self.engine.suspects
        while suspects and suspects[0].is_finished:
            suspects.popleft()
        only = suspects.popleft() if suspects else None
        self.num_only += only is not None
        self.engine.step(only, fails)

    def act(self) -> None:
        action = self.random.random()
        unfinished: list[Completion] = list(self.engine.scheduler.completions.values())
        if action < 0.12 and len(unfinished) < 20:
            # Of those that come at once, some share a new beginning.
            new_stem = [100 + self.num_added] * 17
            for _ in range(self.random.choice([1, 1, 2, 4])):
                self.add(self.random.choice([*STEMS, new_stem, new_stem]))
        elif action < 0.23 and unfinished:
            self.engine.abort(self.random.choice(unfinished).request_id)
            self.num_aborted += 1
            self.engine.check()
        else:
            self.step(self.random.choice(["at once", "computing"]) if action > 0.95 else None)

    def drain(self) -> None:
        """No more requests come: those that are there end within bounds."""
        unfinished = list(self.engine.scheduler.completions.values())
        limit = self.engine.scheduler.max_num_blocks * self.engine.pool.block_size + 1
        # In every step, the first in order goes on by a token at least, and it is not preempted.
        longest = [
            min(limit, completion.num_prompt_tokens + completion.request.params.max_tokens)
            if completion.request.params.max_tokens > 0
            else limit
            for completion in unfinished
            for _ in range(completion.num_seqs)
        ]
        for _ in range(2 * sum(longest) + 10):
            if not self.engine.scheduler.completions:
                break
            self.step()
        self.engine.check_whole()
        self.engine.check_answers()


def answer_of(completion: Completion) -> list[int]:
    prompt = completion.token_ids[: completion.num_prompt_tokens]
    num_tokens = completion.num_output_tokens + 7
    return predicted_tokens(prompt, num_tokens, completion.index, completion.request.cache_salt)


DRAFTS = eager_speculation(VOCAB_SIZE, answer_of)

TINY = {
    "a pool that is always too small": {"num_blocks": 9},
    "a swap space": {"num_blocks": 9, "swap_blocks": 10},
    "large blocks, few at once": {
        "num_blocks": 6,
        "block_size": 8,
        "max_num_seqs": 3,
        "swap_blocks": 25,
    },
    "a step of few tokens": {
        "num_blocks": 14,
        "max_num_batched_tokens": 5,
        "max_num_seqs": 5,
        "swap_blocks": 13,
    },
    "a watermark, and growth": {
        "num_blocks": 20,
        "watermark": 0.2,
        "supply": {"initial_blocks": 2},
    },
    "blocks of one token": {"num_blocks": 40, "block_size": 1, "swap_blocks": 30},
    "no prefix cache": {"num_blocks": 12, "swap_blocks": 8, "enable_prefix_caching": False},
    "drafts, little room": {"num_blocks": 9, "swap_blocks": 10, "speculation": DRAFTS},
    "drafts, few tokens": {
        "num_blocks": 30,
        "block_size": 2,
        "max_num_batched_tokens": 9,
        "speculation": DRAFTS,
    },
    "drafts, room for all": {
        "num_blocks": 200,
        "max_num_batched_tokens": 64,
        "supply": {"initial_blocks": 4},
        "speculation": DRAFTS,
    },
    "room for all": {
        "num_blocks": 200,
        "max_num_batched_tokens": 64,
        "supply": {"initial_blocks": 4},
    },
}


@mostly_slow("name", TINY, quick=(0, 6, 7))
@mostly_slow("seed", range(2))
def test_every_answer_is_as_predicted_and_everything_is_given_back(seed: int, name: str):
    driver = Driver(seed, priority_steps=6, **TINY[name])
    for _ in range(1500):
        driver.act()
    driver.drain()
    counts = driver.engine.counts
    expected = {"steps", "failed", "forks"}
    if name != "blocks of one token":
        expected |= {"copies"}
    if "speculation" in TINY[name]:
        assert 20 < counts["accepted"] < counts["drafted"]
    if "room for all" not in name:
        expected |= {"preempted"}
    if name != "no prefix cache":
        expected |= {"hit_tokens"}
    if name in ("a pool that is always too small", "blocks of one token", "room for all"):
        expected |= {"shared_steps"}
    if "swap_blocks" in TINY[name]:
        expected |= {"swap_outs", "swap_ins"}
    assert {key for key in expected if counts[key] < 5} == set(), counts
    assert min(driver.num_aborted, driver.num_only) > 5


@pytest.mark.parametrize("seed", range(12))
def test_on_a_device_that_gives_less_than_the_budget_no_request_waits_for_ever(seed: int):
    driver = Driver(
        seed,
        num_blocks=16,
        swap_blocks=8 * (seed % 2),
        supply={"initial_blocks": 2, "device_blocks": 8},
    )
    for _ in range(100):
        driver.act()
    assert driver.engine.scheduler.max_num_blocks <= 8
    driver.drain()
    for completions in driver.engine.completions.values():
        for completion in completions:
            assert completion.finish_reason in ("stop", "length", "abort", "error")
            assert (completion.finish_reason == "error") == (completion.error is not None)


@mostly_slow("name", TINY, quick=(1, 3, 10))
def test_it_is_the_same_with_several_users(name: str):
    users = ["a", "a", "a", "b", "c", None]
    driver = Driver(0, users, priority_steps=6, **TINY[name])
    for _ in range(2500):
        driver.act()
    driver.drain()
    counts = driver.engine.counts
    if TINY[name]["num_blocks"] < 100 and "drafts" not in name:
        assert counts["taken"] > 5, counts
    assert min(driver.num_aborted, driver.num_only, counts["forks"]) > 5
