"""A user alone is served as if there were no users: the plans are those of the version before."""

from __future__ import annotations

import hashlib
import random
import zlib
from collections.abc import Sequence
from typing import Any

import pytest
from helpers.drafting import eager_speculation
from helpers.fast_lane import mostly_slow
from helpers.scheduler_helpers import VOCAB_SIZE, FakeSupply
from paged_testing.integrity import check_scheduler

from mlx_paged.engine.request import Completion, Request
from mlx_paged.engine.scheduling.batch import Batch, Scheduled
from mlx_paged.engine.scheduling.prefix_cache import SwapSpace
from mlx_paged.engine.scheduling.scheduler import Scheduler
from mlx_paged.engine.scheduling.step_budget import TokenBudgets
from mlx_paged.engine.speculation.speculation import NO_SPECULATION
from mlx_paged.errors import PromptTooLongError
from mlx_paged.options.config import SchedulerConfig
from mlx_paged.options.sampling_params import SamplingParams

NUM_ACTIONS = 1500

# Each is a budget of blocks, the most blocks in host memory, whether requests come with drafts,
# whether steps are planned ahead, and fields of `SchedulerConfig`.
WORKLOADS: dict[str, dict[str, Any]] = {
    "a small pool": {"num_blocks": 9},
    "a small pool and a swap space": {"num_blocks": 9, "swap_blocks": 10},
    "steps ahead": {"num_blocks": 30, "is_ahead": True, "watermark": 0.1},
    "steps ahead, few places": {"num_blocks": 200, "is_ahead": True, "max_num_seqs": 3},
    "steps of few tokens": {
        "num_blocks": 14,
        "max_num_batched_tokens": 5,
        "max_num_seqs": 5,
        "swap_blocks": 13,
    },
    "a watermark, and growth": {"num_blocks": 20, "watermark": 0.2, "initial_blocks": 2},
    "drafts": {"num_blocks": 30, "has_drafts": True, "swap_blocks": 6},
    "no prefix cache": {"num_blocks": 12, "enable_prefix_caching": False},
    "all fit": {"num_blocks": 400, "max_num_batched_tokens": 64, "max_num_seqs": 24},
}
# Digests of the plans of `Planner(0, **workload)`, made before there were users.
RECORDED = {
    "a small pool": "6beeffa02a822e1db922ca7ef3604dd0",
    "a small pool and a swap space": "b30100767b4e1211322170a27c4bb910",
    "steps ahead": "23e1105b9a56520445a21944852be908",
    "steps ahead, few places": "9315a6c892631eb51408f92f58998265",
    "steps of few tokens": "393a93a207716eab65848dbe83699a0f",
    "a watermark, and growth": "b19b4cec36e11830c94c7052b4492533",
    "drafts": "cb784431a9a102cc6c17edeb69663350",
    "no prefix cache": "ec2343b160d599e527e7bfb564a73d1d",
    "all fit": "e4643532f818aba054824a6919eaca69",
}


class Planner:
    """Random requests, aborts, failed steps and steps on a scheduler, with a digest of all plans.

    Args:
        users: each request is of one of these, at random.
    """

    def __init__(
        self,
        seed: int,
        users: Sequence[str | None] | None = None,
        *,
        num_blocks: int,
        swap_blocks: int = 0,
        has_drafts: bool = False,
        is_ahead: bool = False,
        initial_blocks: int | None = None,
        **config: Any,
    ):
        self.random = random.Random(seed)
        supply = FakeSupply(num_blocks, 4, initial_blocks)
        defaults = {"max_num_seqs": 6, "max_num_batched_tokens": 16, "watermark": 0.0}
        self.scheduler = Scheduler(
            supply.manager,
            supply,
            SchedulerConfig(**{**defaults, "priority_steps": 6, **config}),
            frozenset([0]),
            SwapSpace(swap_blocks),
            eager_speculation(VOCAB_SIZE) if has_drafts else NO_SPECULATION,
        )
        self.lines: list[str] = []
        self._users = users
        self._is_ahead = is_ahead
        self._in_flight: Batch | None = None
        self._drawn: list[Completion] = []  # of the step in flight
        self._num_added = 0

    def run(self, num_actions: int = NUM_ACTIONS) -> str:
        """The digest of all plans."""
        for _ in range(num_actions):
            self.act()
        for _ in range(3000):
            if not self.scheduler.completions:
                break
            self.step()
        assert not self.scheduler.completions
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()[:32]

    def act(self) -> None:
        action, unfinished = self.random.random(), list(self.scheduler.completions.values())
        if action < 0.14 and len(unfinished) < 20:
            for _ in range(self.random.choice([1, 1, 2, 5])):
                self.add()
        elif action < 0.18 and unfinished and self._in_flight is None:
            name = self.random.choice(unfinished).request_id
            for completion in unfinished:
                if completion.request_id == name:
                    self.scheduler.finish(completion, "abort")
        else:
            self.step(fails=action > 0.97)

    def add(self) -> None:
        rng, self._num_added = self.random, self._num_added + 1
        stem = rng.choice([range(1, 13), range(20, 25), [100 + self._num_added] * 9])
        prompt = [*stem[: rng.randint(1, len(stem))], *rng.choices([13, 14], k=rng.choice([0, 9]))]
        params = SamplingParams(
            max_tokens=rng.choice([1, 2, 5, 12, 30]), n=rng.choice([1, 1, 1, 2, 3])
        )
        options: dict[str, Any] = {
            "priority": rng.choice([0, 0, 0, 1, 2, -1]),
            "cache_salt": rng.choice([None, None, "salt"]),
        }
        if self._users is not None:
            # Not of the same generator, so that all else stays as it is.
            number = zlib.crc32(str(self._num_added).encode())
            options["user"] = self._users[number % len(self._users)]
        request = Request(f"r{self._num_added}", prompt, params, **options)
        try:
            self.scheduler.check(request)
        except PromptTooLongError:
            return
        self.scheduler.add(request)

    def step(self, fails: bool = False) -> None:
        budgets = TokenBudgets(*self.random.choices([5, 9, 16, 64], k=2))
        batch = self._in_flight
        if batch is None:
            batch = self.scheduler.schedule(budgets=budgets)
            self._note(batch)
            if not batch.scheduled or fails:
                self.scheduler.discard(batch)
                return
            self._fork(batch)
        ahead = None
        if self._is_ahead and not batch.drafted:
            ahead = self.scheduler.schedule_ahead(self._drawn, budgets)
            self.lines.append(f"ahead: {ahead is not None}")
            if ahead is not None:
                self._note(ahead)
                if not ahead.scheduled:
                    self.scheduler.discard(ahead)
                    ahead = None
        self._append(batch, ahead)
        self._in_flight = ahead
        if ahead is not None:
            self._fork(ahead)
        check_scheduler(self.scheduler)

    def _fork(self, batch: Batch) -> None:
        """Sample the tokens of a step, without reading them."""
        self._drawn = []
        for part in batch.scheduled:
            completion = part.completion
            if part.num_logit_rows and not completion.is_finished:
                self._drawn += [completion, *map(completion.fork, range(1, completion.num_seqs))]
        for completion in self._drawn:
            if completion.seq_id not in self.scheduler.completions:
                self.scheduler.add_fork(completion)

    def _append(self, batch: Batch, ahead: Batch | None) -> None:
        for part in batch.drafted:
            self._verify(part)
        drafted = {part.completion for part in batch.drafted}
        for completion in self._drawn:
            if completion not in drafted and not completion.is_finished:
                self.scheduler.append_token(completion, _next_token(completion), ahead)

    def _verify(self, part: Scheduled) -> None:
        completion, verification = part.completion, self.scheduler.verification
        verification.begin(part)
        for draft in (*part.draft_token_ids, None):
            token = _next_token(completion)
            is_accepted = draft is not None and zlib.crc32(f"{token} {draft}".encode()) % 2 == 0
            if is_accepted:
                verification.accept(completion)
            self.scheduler.append_token(completion, draft if is_accepted else token)
            if not is_accepted or completion.is_finished:
                break
        verification.end(completion)

    def _note(self, batch: Batch) -> None:
        parts = [
            (*part.completion.seq_id, *part[1:5], *part.draft_token_ids) for part in batch.scheduled
        ]
        others = [
            [completion.seq_id for completion in completions]
            for completions in (batch.preempted, batch.finished, batch.begun)
        ]
        blocks = [sorted(each) for each in (batch.new_block_ids, batch.hit_block_ids)]
        queue = [completion.seq_id for completion in self.scheduler.waiting]
        line = repr((parts, others, batch.transfers, blocks, queue))
        # The recorded digests are older than this name of the field.
        self.lines.append(line.replace("(seq_id=", "(name="))


def _next_token(completion: Completion) -> int:
    token_ids = [each for each in completion.token_ids if each >= 0]
    return zlib.crc32(repr((token_ids, completion.index)).encode()) % VOCAB_SIZE


@mostly_slow("name", RECORDED, quick=(1, 2, 6))
@pytest.mark.parametrize("users", [None, [None], ["ann"]], ids=["none", "None", "one"])
def test_one_user_alone_sees_the_plans_and_the_order_of_the_version_before(
    name: str, users: list[str | None] | None
):
    planner = Planner(0, users, **WORKLOADS[name])
    assert planner.run() == RECORDED[name]
    if name not in ("all fit", "steps ahead, few places"):
        assert planner.scheduler.num_preemptions > 20


def test_with_several_users_the_plans_are_others_and_all_requests_end():
    planner = Planner(0, ["ann", "bob"], **WORKLOADS["a small pool and a swap space"])
    assert planner.run() != RECORDED["a small pool and a swap space"]


@mostly_slow("name", [name for name in WORKLOADS if "ahead" in name], quick=(0, 1))
def test_steps_ahead_end_all_requests_of_several_users(name: str):
    planner = Planner(1, ["ann", "ann", "bob", None], **WORKLOADS[name])
    planner.run()
    assert planner.scheduler.num_preemptions > 10
