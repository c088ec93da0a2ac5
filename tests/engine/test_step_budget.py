"""Budgets of steps by what steps take, on a device whose time is simulated."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.scheduler_helpers import FakeEngine

from mlx_paged.engine.scheduling.batch import Batch, Scheduled
from mlx_paged.engine.scheduling.step_budget import (
    Budgets,
    ChosenBudgets,
    ClockedBudgets,
    Measured,
    StepPrice,
    TokenBudgets,
    ladder,
    token_budget,
)

LIMITS = TokenBudgets(2048, 512)
Cost = Callable[[int, int], float]  # seconds, by the new tokens of a step and its context


def device(weights_seconds: float, per_token: float, per_context: float = 0.0) -> Cost:
    """A step reads the weights while it multiplies, and gathers the context before that."""
    return lambda num_tokens, context: (
        max(weights_seconds, num_tokens * per_token) + context * per_context
    )


# A 7B model of 3.8 GB on an M1, an M1 Max and an M5 Max, as `mixed_load` of the benchmarks has
# them, and one that is large for its bandwidth.
M1 = device(0.056, 1 / 118, 6.4e-6)
M1_MAX = device(0.0095, 1 / 530, 1.1e-6)
M5_MAX = device(0.0062, 1 / 3000, 0.7e-6)
WIDE = device(0.15, 0.0004, 1e-6)


def request(num_tokens: int, num_computed: int, num_output: int = 0) -> Any:
    """What budgets look at of a request."""
    return SimpleNamespace(
        num_tokens=num_tokens, num_computed_tokens=num_computed, num_output_tokens=num_output
    )


@dataclass
class Load:
    """Prompts one after the other, beside answers or alone, on a device of this cost.

    Args:
        noise: by which a step's time differs from its cost, at most.
        accidents: steps that take this many seconds more, by their number.
    """

    cost: Cost
    num_answers: int = 16
    noise: float = 0.0
    accidents: dict[int, float] = field(default_factory=dict)
    prefill_seconds: float = 1.0
    mixed_seconds: float = 0.2
    now: float = 0.0
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.seconds: list[float] = []  # of each step with a prompt
        self.seen: list[int] = []  # the budget of each of them
        self._rng = random.Random(0)
        self.budgets = ClockedBudgets(
            LIMITS, self.prefill_seconds, self.mixed_seconds, lambda: self.now
        )

    def prompt(self, num_tokens: int, num_cached: int = 0) -> None:
        """Compute a prompt, after some steps of the answers alone."""
        for _ in range(5 if self.num_answers else 0):
            self._step(0, 0)
        num_computed = num_cached
        self.waiting = [request(num_tokens, 0)]
        while num_computed < num_tokens:
            if num_computed > num_cached:
                self.waiting, self.running = [], [request(num_tokens, num_computed)]
            num_computed += self._step(num_tokens - num_computed, num_computed)
        self.waiting, self.running = [], []

    def _step(self, num_left: int, context: int) -> int:
        """One step; returns how many tokens of the prompt it had."""
        budget = self.budgets.begin_step(
            self.num_steps, self.running, bool(self.waiting), is_busy=False
        )[self.num_answers > 0]
        num_new = min(num_left, budget - self.num_answers)
        num_tokens = num_new + self.num_answers
        seconds = self.cost(num_tokens, context) * self._rng.uniform(1 - self.noise, 1 + self.noise)
        if num_new:
            seconds += self.accidents.get(len(self.seconds), 0.0)
            self.seconds.append(seconds)
            self.seen.append(budget)
        self.now += seconds
        self.num_steps += 1
        decodes = [Scheduled(request(9, 8, 4), 8, 1, 1)] * self.num_answers
        chunk = [Scheduled(request(num_left, 0), context, num_new, 0)] if num_new else []
        self.budgets.end_step(Batch(scheduled=[*decodes, *chunk]), num_tokens)
        return num_new

    @property
    def changes(self) -> list[tuple[int, int]]:
        """The number of each step before which the budget changed, and the new one."""
        pairs = enumerate(zip(self.seen[1:], self.seen, strict=False), 1)
        return [(number, after) for number, (after, before) in pairs if after != before]


def p99(values: Collection[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def test_the_ladder_has_powers_of_two_and_the_limit():
    assert ladder(2048) == [32, 64, 128, 256, 512, 1024, 2048]
    assert ladder(500) == [32, 64, 128, 256, 500]
    assert ladder(32) == [32]
    assert ladder(7) == [7]


@pytest.mark.parametrize(
    ("cost", "num_answers", "expected"),
    [
        (M1, 0, [128, 128, 128, 128, 128, 128, 128]),  # 1.1 s
        (M1, 16, [64, 32, 32, 32, 32, 32, 32]),  # 0.27 s: there is none below
        (M1_MAX, 0, [128, 256, 256, 256, 256, 256, 256]),  # 0.48 s; 512 take 0.97
        (M1_MAX, 16, [64, 64, 64, 64, 64, 64, 64]),  # 0.12 s; 128 take 0.24
        (M5_MAX, 0, [128, 256, 512, 1024, 2048, 2048, 2048]),  # 0.68 s
        (M5_MAX, 16, [64, 128, 256, 512, 512, 512, 512]),  # 0.17 s
    ],
    ids=["M1", "M1 mixed", "M1 Max", "M1 Max mixed", "M5 Max", "M5 Max mixed"],
)
def test_a_budget_moves_to_what_takes_its_time(cost: Cost, num_answers: int, expected: list[int]):
    load = Load(lambda num_tokens, context: cost(num_tokens, 0), num_answers)
    for _ in range(2):
        load.prompt(4000)
    assert load.seen[:7] == expected
    assert set(load.seen[7:]) == {expected[-1]}


@pytest.mark.parametrize("cost", [M1, M1_MAX, M5_MAX, WIDE])
@pytest.mark.parametrize("num_answers", [0, 1, 16])
def test_noise_of_a_fifth_does_not_make_a_budget_flap(cost: Cost, num_answers: int):
    load = Load(cost, num_answers, noise=0.2)
    for _ in range(4):
        load.prompt(4000)
    # It takes up to five changes to where it stays.
    assert len(load.changes) <= 5
    target = load.mixed_seconds if num_answers else load.prefill_seconds
    assert p99(load.seconds) <= 2 * target


def test_a_budget_rises_by_one_after_steps_that_filled_it():
    load = Load(M5_MAX, num_answers=0)
    for _ in range(20):
        load.prompt(60)
    assert set(load.seen) == {128}  # Half of it was never filled.
    load.prompt(4000)
    assert load.seen[20:24] == [128, 256, 512, 1024]


def test_steps_that_are_slow_by_accident_change_nothing():
    calm, shaken = (
        Load(M1_MAX),
        Load(M1_MAX, accidents={0: 5.0, 1: 3.0, 60: 30.0, 62: 2.0, 90: 9e4}),
    )
    for _ in range(3):
        calm.prompt(8000)
        shaken.prompt(8000)
    assert set(calm.seen) == {64}
    # The first steps compile kernels, and nothing is known of the device then.
    assert set(shaken.seen[5:]) == {64}
    assert shaken.seen[:5] == [64, 32, 32, 64, 64]


@pytest.mark.parametrize("factor", [5, 20])
@pytest.mark.parametrize("cost", [M1, M1_MAX, M5_MAX])
@pytest.mark.parametrize("num_answers", [0, 16])
def test_the_second_slow_step_in_a_row_is_believed(cost: Cost, num_answers: int, factor: int):
    load = Load(cost, num_answers, noise=0.1)
    for _ in range(3):
        load.prompt(8000)
    before = load.seen[-1]
    load.cost = lambda num_tokens, context: factor * cost(num_tokens, context)
    begin = len(load.seen)
    for _ in range(2):
        load.prompt(4000)
    # The third step is the first that may know of it. It has what such a device is given.
    slow = Load(load.cost, num_answers, noise=0.1)
    for _ in range(3):
        slow.prompt(4000)
    assert load.seen[begin : begin + 2] == [before] * 2
    target = load.mixed_seconds if num_answers else load.prefill_seconds
    for seconds, budget in zip(load.seconds[begin + 2 :], load.seen[begin + 2 :], strict=True):
        assert seconds <= 2 * target or budget <= max(32, slow.seen[-1])
    # It is as fast again, and that is believed as soon; budgets rise by one step after another.
    load.cost, begin = cost, len(load.seen)
    for _ in range(2):
        load.prompt(8000)
    assert all(before / 2 <= budget <= 2 * before for budget in load.seen[begin + 10 :])


def test_two_slow_steps_by_accident_are_made_up_for_after_few_others():
    load = Load(M1_MAX, accidents={60: 30.0, 61: 2.0})
    for _ in range(3):
        load.prompt(8000)
    # The smaller one counts: a step that took 17 times as long.
    assert load.seen[60:64] == [64, 64, 32, 32]
    assert set(load.seen[70:]) == {64}


def test_a_device_that_becomes_slower_or_faster_is_followed():
    load = Load(M1_MAX)
    load.prompt(8000)
    load.cost = lambda num_tokens, context: 3 * M1_MAX(num_tokens, context)
    begin = len(load.seen)
    load.prompt(8000)
    assert load.seen[begin - 1] == 64
    assert set(load.seen[begin + 12 :]) == {32}
    load.cost = M1_MAX
    begin = len(load.seen)
    load.prompt(8000)
    assert set(load.seen[begin + 12 :]) == {64}


def test_what_the_weights_leave_free_is_used():
    # Reading the weights takes 0.15 s of each step, so one of 512 tokens takes little longer than
    # one of 64: 0.2 s and the context.
    load = Load(WIDE)
    load.prompt(8000)
    assert load.seen[-1] == 512
    assert p99(load.seconds) <= 2 * load.mixed_seconds


def test_a_long_context_is_in_the_price_and_halves_no_chunk_below_what_it_costs_itself():
    # Gathering 100,000 tokens takes 0.6 s, in a chunk of any size.
    load = Load(device(0.02, 0.002, 6e-6), num_answers=4)
    load.prompt(100_000)
    assert load.seen[10] == 64  # 0.13 s
    assert load.seen[-1] >= 128  # 0.26 s and 0.6; a fifth of the time at 64 would be the tokens'
    assert max(load.seconds) <= 2 * 0.6 * 1.15
    # The next prompt, without that context.
    begin = len(load.seen)
    load.prompt(4000)
    assert load.seen[begin + 1] == 64


def test_a_step_after_a_hit_is_priced_with_its_context():
    load = Load(device(0.02, 0.0005, 6e-6), num_answers=4)
    load.prompt(20_000)
    load.prompt(50_000, num_cached=40_000)
    begin = len(load.seen)
    load.prompt(4000)
    # 256 tokens take 0.13 s without a context, and 0.37 s behind one of 40,000.
    assert load.seen[begin + 2] == 256 and load.seen[begin - 1] == 256


def test_times_of_0_leave_the_limits():
    load = Load(M1, prefill_seconds=0)
    load.prompt(8000)
    assert {each.prefill for each in load.budgets.chosen} == {2048}
    load = Load(M1, num_answers=0, mixed_seconds=0)
    load.prompt(8000)
    assert {each.mixed for each in load.budgets.chosen} == {512}


def test_prompts_get_tokens_beside_any_number_of_answers_and_drafts():
    running = [request(9, 8, 4)] * 40
    small = TokenBudgets(32, 32)
    assert token_budget(small, LIMITS, running[:17], 0) == 32
    assert token_budget(small, LIMITS, running[:18], 0) == 64
    assert token_budget(small, LIMITS, running, 0) == 64
    assert token_budget(small, LIMITS, running, 3) == 256
    assert token_budget(small, LIMITS, running, 7) == 512
    assert token_budget(small, TokenBudgets(100, 90), running, 7) == 90
    assert token_budget(TokenBudgets(999, 999), TokenBudgets(100, 90), running, 0) == 90
    assert token_budget(TokenBudgets(64, 32), LIMITS, [request(90, 20)], 0) == 64


@pytest.mark.parametrize("seed", range(3))
def test_requests_end_under_any_budgets(seed: int):
    """`FakeEngine` checks every invariant at every step."""
    rng = random.Random(seed)
    engine = FakeEngine(80, max_num_seqs=8, max_num_batched_tokens=64, max_num_mixed_tokens=24)
    schedule = engine.scheduler.schedule
    engine.scheduler.schedule = lambda only=None: schedule(  # type: ignore[method-assign]
        only, TokenBudgets(rng.randrange(1, 80), rng.randrange(1, 80))
    )
    for number in range(12):
        engine.add(str(number), [rng.randrange(9) for _ in range(rng.randrange(1, 90))])
    for _ in range(400):
        engine.step()
    assert not engine.scheduler.completions


def test_prices_are_found_from_steps_of_different_kinds():
    price, rng = StepPrice(), random.Random(0)
    for _ in range(300):
        num_tokens, context = rng.choice([16, 64, 512]), rng.randrange(20_000)
        seconds = 0.03 + 0.002 * num_tokens + 3e-6 * context
        price.note(Measured(num_tokens, context, seconds * rng.uniform(0.9, 1.1)))
    for num_tokens, context in ((32, 0), (32, 16_000), (256, 0), (256, 16_000)):
        expected = 0.03 + 0.002 * num_tokens + 3e-6 * context
        assert price.seconds(num_tokens, context) == pytest.approx(expected, rel=0.1)


# What is measured


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.num_readings = 0

    def __call__(self) -> float:
        self.num_readings += 1
        return self.now


def prompts(*num_computed: int) -> Batch:
    """A step with a chunk of 100 tokens of each prompt."""
    return Batch(scheduled=[Scheduled(request(9999, each), each, 100, 0) for each in num_computed])


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def measured(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> tuple[ClockedBudgets, list[tuple]]:
    budgets = ClockedBudgets(LIMITS, 1.0, 0.2, clock)
    noted: list[tuple] = []
    monkeypatch.setattr(budgets.price, "note", lambda step: noted.append(step) or True)
    monkeypatch.setattr(budgets.price, "correct", noted.append)
    return budgets, noted


def test_decodes_before_a_step_that_does_not_count_are_dropped(
    clock: Clock, measured: tuple[ClockedBudgets, list], monkeypatch: pytest.MonkeyPatch
):
    """They were slow as well, and would be taken for what is fixed."""
    budgets, noted = measured
    monkeypatch.setattr(budgets.price, "note", lambda step: False)
    decodes = Batch(scheduled=[Scheduled(request(9, 8, 4), 8, 1, 1)] * 3)
    for batch, num_tokens in ((decodes, 3), (prompts(0), 100), (prompts(100), 100)):
        begin(budgets, is_busy=False)
        clock.now += 0.5
        budgets.end_step(batch, num_tokens)
    assert noted == []


def begin(budgets: ClockedBudgets, *, is_busy: bool) -> None:
    budgets.begin_step(0, [], False, is_busy)


def test_a_step_that_was_waited_for_takes_from_its_launch_to_its_read(
    clock: Clock, measured: tuple[ClockedBudgets, list]
):
    budgets, noted = measured
    for seconds in (1.0, 2.0):
        clock.now += 50  # No request was there.
        begin(budgets, is_busy=False)
        clock.now += seconds
        budgets.end_step(prompts(300, 50), 200)
    assert noted == [(200, 350, 1.0), (200, 350, 2.0)]


def test_a_step_ahead_takes_from_the_read_before_to_its_own(
    clock: Clock, measured: tuple[ClockedBudgets, list]
):
    budgets, noted = measured
    begin(budgets, is_busy=False)
    clock.now += 0.5  # The first step is launched, and the second one behind it.
    budgets.end_step(prompts(0), 100)
    clock.now += 0.1  # The caller takes its outputs.
    begin(budgets, is_busy=True)
    clock.now += 0.6
    budgets.end_step(prompts(100), 100)
    assert noted == [(100, 0, 0.5), (100, 100, pytest.approx(0.7))]


def test_a_step_while_which_the_caller_was_away_is_not_counted(
    clock: Clock, measured: tuple[ClockedBudgets, list]
):
    budgets, noted = measured
    begin(budgets, is_busy=False)
    clock.now += 0.5
    budgets.end_step(prompts(0), 100)
    clock.now += 20.0
    begin(budgets, is_busy=True)
    clock.now += 0.001  # It was done long ago.
    budgets.end_step(prompts(100), 100)
    begin(budgets, is_busy=True)
    clock.now += 0.5
    budgets.end_step(prompts(200), 100)
    assert noted == [(100, 0, 0.5), (100, 200, 0.5)]
    for _ in range(2):
        clock.now += 20.0
        begin(budgets, is_busy=True)
        budgets.end_step(Batch(scheduled=[Scheduled(request(9, 8, 4), 8, 1, 1)]), 1)
    begin(budgets, is_busy=True)
    clock.now += 0.5
    budgets.end_step(prompts(300), 100)
    assert noted[2:] == [(100, 300, 0.5)]  # Nothing was learnt of those decodes.


def test_the_faster_of_the_last_two_steps_of_decodes_shows_what_is_fixed(
    clock: Clock, measured: tuple[ClockedBudgets, list]
):
    budgets, noted = measured
    decodes = Batch(scheduled=[Scheduled(request(9, 8, 4), 8, 1, 1)] * 3)
    for seconds in (0.01, 0.02, 7.0):
        begin(budgets, is_busy=False)
        clock.now += seconds
        budgets.end_step(decodes, 3)
    begin(budgets, is_busy=False)
    clock.now += 0.5
    budgets.end_step(prompts(0), 100)
    assert noted == [(100, 0, 0.5), (3, 0, pytest.approx(0.02))]


def test_a_step_of_decodes_reads_the_clock_twice_and_chooses_nothing(clock: Clock):
    budgets = ClockedBudgets(LIMITS, 1.0, 0.2, clock)
    decodes = Batch(scheduled=[Scheduled(request(9, 8, 4), 8, 1, 1)] * 3)
    for _ in range(10):
        budgets.begin_step(1, [], False, is_busy=True)
        clock.now += 0.1
        budgets.end_step(decodes, 3)
    assert clock.num_readings == 20
    assert budgets.chosen == [ChosenBudgets(0, 128, 64)]


# Given again


def test_budgets_that_were_chosen_come_again_at_the_same_steps():
    load = Load(M5_MAX, noise=0.2)
    chosen: list[TokenBudgets] = []
    own = load.budgets.begin_step
    load.budgets.begin_step = lambda *args, is_busy: (  # type: ignore[method-assign]
        chosen.append(own(*args, is_busy)) or chosen[-1]
    )
    for _ in range(3):
        load.prompt(8000)
    repeated = Budgets(LIMITS, load.budgets.chosen)
    again = []
    for step in range(load.num_steps):
        again.append(repeated.begin_step(step, [], False, is_busy=False))
    assert again == chosen
    assert len(set(again)) > 3


def test_of_two_changes_before_one_step_the_later_one_counts():
    repeated = Budgets(LIMITS, [ChosenBudgets(3, 64, 64), ChosenBudgets(3, 32, 32)])
    seen = []
    for step in (0, 2, 3, 9):
        seen.append(repeated.begin_step(step, [], False, is_busy=False))
    assert seen == [LIMITS, LIMITS, (32, 32), (32, 32)]
