"""A more urgent request takes the place of one that runs: whose, when, how often, and that
no request starves.
"""

from __future__ import annotations

import random
from bisect import insort
from dataclasses import dataclass, field

import pytest
from helpers.fast_lane import mostly_slow
from helpers.scheduler_helpers import FakeEngine, names, of_kind, ran, tokens

from mlx_paged.engine.request import Completion, CompletionStatus
from mlx_paged.engine.scheduling.batch import SwapIn, SwapOut
from mlx_paged.engine.scheduling.request_queues import MAX_PREEMPTIONS


def beside_sixteen(num_blocks: int, **options) -> tuple[FakeEngine, Completion]:
    """Sixteen answers of 300 tokens run, as many as may, and an urgent request has come."""
    engine = FakeEngine(
        num_blocks, max_num_seqs=16, max_num_batched_tokens=64, watermark=0.05, **options
    )
    for index in range(16):
        engine.add(f"a{index}", tokens(4, 100 * index), max_tokens=300)
    for _ in range(40):
        engine.step()
    assert len(engine.scheduler.running) == 16
    return engine, engine.add("urgent", tokens(20, 5000), max_tokens=4, priority=-100)


@mostly_slow("swap_blocks", [0, 50], quick=(1,))
@mostly_slow("num_blocks", [2000, 177], quick=(1,))
def test_beside_as_many_long_answers_as_may_run_an_urgent_request_has_its_token_at_once(
    num_blocks: int, swap_blocks: int
):
    engine, urgent = beside_sixteen(num_blocks, swap_blocks=swap_blocks)
    # A full pool: 16 answers of 43 tokens have 176 blocks, and 9 are the watermark.
    num_preempted = 2 if num_blocks == 177 else 1
    output = engine.step()
    last = [f"a{15 - index}" for index in range(num_preempted)]
    assert names(output.preempted) == last and urgent.num_output_tokens == 1
    assert len(of_kind(output, SwapOut)) == (num_preempted if swap_blocks else 0)
    assert ran(output) == {"urgent": 20} | {f"a{index}": 1 for index in range(16 - num_preempted)}
    # They go on when it ends: those that came first, first.
    for _ in range(3):
        engine.step()
    assert urgent.is_finished and names(engine.scheduler.waiting) == last[::-1]
    if num_blocks == 2000:
        output = engine.step()
        # The prefix cache has its full blocks.
        assert ran(output)["a15"] == (1 if swap_blocks else 4)
        assert len(of_kind(output, SwapIn)) == bool(swap_blocks)
    engine.run(max_steps=10_000)
    engine.check_answers()


def test_equal_levels_never_take_each_others_place():
    engine = FakeEngine(100, max_num_seqs=1, priority_steps=5)
    engine.add("aged", tokens(2), max_tokens=1, priority=3)
    engine.add("a", tokens(2, 100), max_tokens=20)
    engine.step()
    engine.add("b", tokens(2, 200), max_tokens=2)
    for _ in range(17):
        engine.step()
    # It came 17 steps later and is one level up, so it comes after them by age.
    engine.add("young", tokens(2, 300), max_tokens=1, priority=-1)
    assert engine.scheduler.running[0].order < engine.completions["young"][0].order
    assert engine.run() == [{"a": 1}, {"a": 1}, {"b": 2}, {"b": 1}, {"young": 2}, {"aged": 2}]
    assert engine.scheduler.num_preemptions == 0


def test_no_request_is_preempted_for_one_that_has_too_few_blocks_all_the_same():
    engine = FakeEngine(10, max_num_seqs=3)
    engine.add("first", tokens(15), max_tokens=4, priority=-1)
    engine.add("second", tokens(8, 100), max_tokens=4)
    engine.step()
    engine.step()
    # Five blocks are held by one of its own level, and it needs six.
    engine.add("urgent", tokens(24, 200), max_tokens=1, priority=-1)
    assert ran(engine.step()) == {"first": 1, "second": 1}
    assert engine.scheduler.num_preemptions == 0
    engine.run()
    engine.check_answers()


def test_an_urgent_request_that_is_left_alone_may_use_every_block():
    """The watermark is for those that run beside it, and the last of them makes way."""
    engine = FakeEngine(10, watermark=0.2)
    engine.add("a", tokens(14), max_tokens=20)
    engine.step()
    engine.add("urgent", tokens(38, 200), max_tokens=2, priority=-1)
    output = engine.step()
    assert (names(output.preempted), ran(output)) == (["a"], {"urgent": 16})
    engine.run()
    engine.check_answers()


def test_the_watermark_stays_free_beside_those_that_are_not_preempted():
    engine = FakeEngine(10, watermark=0.2)
    for name, seed in (("a", 0), ("b", 100)):
        engine.add(name, tokens(9, seed), max_tokens=20)
    for _ in range(2):
        engine.step()
    # Six blocks: without b seven are free, but then one is left beside a, and not two.
    engine.add("urgent", tokens(23, 200), max_tokens=1, priority=-1)
    output = engine.step()
    assert (names(output.preempted), ran(output)) == (["b", "a"], {"urgent": 16})
    engine.run()
    engine.check_answers()


def test_no_request_is_preempted_where_the_watermark_would_not_stay_free():
    engine = FakeEngine(10, watermark=0.2)
    engine.add("a", tokens(9), max_tokens=20, priority=-1)
    engine.add("b", tokens(9, 100), max_tokens=20)
    for _ in range(2):
        engine.step()
    engine.add("urgent", tokens(23, 200), max_tokens=1, priority=-1)
    assert ran(engine.step()) == {"a": 1, "b": 1}
    assert engine.scheduler.num_preemptions == 0
    engine.run()
    engine.check_answers()


def test_only_as_many_are_preempted_as_it_takes_and_blocks_that_others_share_do_not_count():
    engine = FakeEngine(12)
    engine.add("small", tokens(3, 500), max_tokens=30)
    engine.add("a", tokens(16), max_tokens=30, n=2)
    for _ in range(3):
        engine.step()
    assert engine.pool.num_free_blocks == 12 - 2 - 4 - 2
    engine.add("urgent", tokens(24, 900), max_tokens=1, priority=-5)
    # Six blocks: four are free, one is a1's alone, and the others are free when a0 goes, too.
    output = engine.step()
    assert names(output.preempted) == ["a1", "a0"] and ran(output) == {"urgent": 15, "small": 1}
    engine.run()
    engine.check_answers()


def test_blocks_that_an_urgent_request_finds_with_the_preempted_one_are_not_lost():
    engine = FakeEngine(6)
    engine.add("a", tokens(17), max_tokens=30)
    for _ in range(3):
        engine.step()
    engine.add("urgent", [*tokens(16), 900, 901, 902, 903, 904], max_tokens=3, priority=-1)
    # It needs six blocks, of which it finds four: one is free, and a's fifth one becomes so.
    output = engine.step()
    assert (names(output.preempted), ran(output)) == (["a"], {"urgent": 5})
    engine.run()
    engine.check_answers()


def test_a_request_for_several_completions_takes_several_places():
    engine = FakeEngine(100, max_num_seqs=4)
    for index, name in enumerate("abcd"):
        engine.add(name, tokens(3, 100 * index), max_tokens=6)
    engine.step()
    engine.add("urgent", tokens(3, 900), max_tokens=2, n=3, priority=-1)
    output = engine.step()
    assert names(output.preempted) == ["d", "c", "b"]
    assert ran(output) == {"urgent0": 3, "a": 1}
    engine.run()
    engine.check_answers()


def test_a_prompt_that_is_half_computed_makes_way_and_goes_on_where_it_was():
    engine = FakeEngine(100, max_num_seqs=2, max_num_batched_tokens=8, swap_blocks=20)
    engine.add("a", tokens(3), max_tokens=30)
    engine.step()
    long = engine.add("long", tokens(40, 200), max_tokens=2)
    engine.step()
    engine.step()
    assert long.num_computed_tokens == 14
    engine.add("urgent", tokens(9, 900), max_tokens=2, priority=-1)
    assert [ran(engine.step()) for _ in range(3)] == [
        {"urgent": 7, "a": 1},
        {"urgent": 2, "a": 1},
        {"urgent": 1, "a": 1},
    ]
    assert ran(engine.step()) == {"a": 1, "long": 7} and long.num_computed_tokens == 21
    engine.run()
    engine.check_answers()


def test_an_urgent_prompt_is_computed_before_the_rest_of_a_long_one_that_may_go_on_beside_it():
    engine = FakeEngine(100, max_num_seqs=2, max_num_batched_tokens=8)
    engine.add("long", tokens(60), max_tokens=2)
    engine.step()
    urgent = engine.add("urgent", tokens(14, 900), max_tokens=2, priority=-1)
    assert ran(engine.step()) == {"urgent": 7, "long": 1}
    assert ran(engine.step()) == {"urgent": 7, "long": 1}
    assert ran(engine.step()) == {"urgent": 1, "long": 7} and urgent.is_finished
    assert engine.scheduler.num_preemptions == 0


def test_for_a_step_ahead_no_request_makes_way_and_the_tokens_are_read_first():
    engine, urgent = beside_sixteen(2000)
    running = list(engine.scheduler.running)
    assert engine.scheduler.schedule_ahead(running) is None
    assert urgent.status is CompletionStatus.WAITING and engine.scheduler.running == running
    assert not any(request.awaits_token for request in running)
    # Where it takes no other's place, it comes in a step ahead, too.
    engine.abort("a15")
    batch = engine.scheduler.schedule_ahead(running[:15])
    assert batch is not None and batch.completions == [urgent, *running[:15]]


@pytest.mark.parametrize("swap_blocks", [0, 40])
@pytest.mark.parametrize("levels", [(-1,), (-100,), (-1, -2, -3, -4, -5, -6, -7, -8, -9, -10)])
def test_no_request_starves_and_each_is_preempted_a_few_times_though_urgent_ones_never_end(
    levels: tuple[int, ...], swap_blocks: int
):
    engine = FakeEngine(
        200, max_num_seqs=4, swap_blocks=swap_blocks, priority_steps=40, max_num_batched_tokens=32
    )
    patient = [engine.add(f"p{index}", tokens(9, 100 * index), max_tokens=40) for index in range(4)]
    engine.step()
    num_steps = 0
    while not all(request.is_finished for request in patient):
        # All places are taken for three of six steps.
        for index in range(4 if num_steps % 6 == 0 else 0):
            first = 10**4 + 40 * num_steps + 10 * index
            level = levels[num_steps // 6 % len(levels)]
            engine.add(f"u{first}", tokens(3, first), max_tokens=3, priority=level)
        engine.step()
        num_steps += 1
        assert all(request.num_preemptions <= MAX_PREEMPTIONS for request in patient)
    most = max(request.num_preemptions for request in patient)
    assert most == (7 if levels == (-1,) else MAX_PREEMPTIONS)
    window = -min(levels) * 40
    # No more than one comes for each step of the window. None has more than 49 tokens.
    assert num_steps <= window + (window + 4) * (4 + 1) * 49
    # Much less in fact: as soon as they make way no more they run to their end.
    assert num_steps <= 6 * MAX_PREEMPTIONS + 40
    for name in [name for name in engine.completions if name.startswith("u")]:
        engine.abort(name)
    engine.check_whole()
    engine.check_answers()


@dataclass
class Modelled:
    """A request as the rule sees it, with a number of steps to run."""

    name: str
    priority: int
    order: tuple[int, int]
    num_steps_left: int
    num_preemptions: int = 0


@dataclass
class Rule:
    """Who runs, by the rule alone: places, and no blocks. A step of a prompt is one step."""

    num_places: int
    priority_steps: int
    num_steps: int = 0
    num_added: int = 0
    running: list[Modelled] = field(default_factory=list)
    waiting: list[Modelled] = field(default_factory=list)

    def add(self, name: str, priority: int, num_steps: int) -> None:
        order = (self.num_steps + priority * self.priority_steps, self.num_added)
        self.num_added += 1
        self.waiting.append(Modelled(name, priority, order, num_steps))

    def step(self) -> tuple[set[str], list[str]]:
        """Who runs, and who was preempted for it."""
        self.num_steps += 1
        preempted: list[Modelled] = []
        while self.waiting:
            first = min(self.waiting, key=lambda each: each.order)
            behind = [
                each
                for each in self.running
                if each.order > first.order
                and each.priority > first.priority
                and each.num_preemptions < MAX_PREEMPTIONS
            ]
            is_full = len(self.running) == self.num_places
            if (is_full and not behind) or (preempted and not behind):
                break
            if is_full:
                last = max(behind, key=lambda each: each.order)
                last.num_preemptions += 1
                self.running.remove(last)
                preempted.append(last)
            self.waiting.remove(first)
            insort(self.running, first, key=lambda each: each.order)
            self.waiting += preempted[len(preempted) - is_full :]
        names_of_all = {each.name for each in self.running}
        for each in self.running:
            each.num_steps_left -= 1
        self.running = [each for each in self.running if each.num_steps_left]
        return names_of_all, [each.name for each in preempted]


@mostly_slow("num_places", [1, 3, 8])
@mostly_slow("priority_steps", [4, 50])
def test_who_runs_is_who_the_rule_says(num_places: int, priority_steps: int):
    rng = random.Random(num_places * 100 + priority_steps)
    engine = FakeEngine(
        4000,
        max_num_seqs=num_places,
        priority_steps=priority_steps,
        max_num_batched_tokens=2000,
        max_num_mixed_tokens=2000,
        swap_blocks=rng.choice([0, 300]),
    )
    rule = Rule(num_places, priority_steps)
    num_preempted = 0
    for step in range(600):
        # As many come as may run, 5 steps each on average, and now and then more.
        for index in range(rng.choice([0, 2]) if rng.random() < num_places / 5 else 0):
            name, priority = f"r{step}.{index}", rng.choice([0, 0, 1, 2, -1, -3])
            num_tokens = rng.choice([1, 2, 3, 4, 15])
            prompt = tokens(rng.randint(1, 9), 10 * rule.num_added)
            engine.add(name, prompt, max_tokens=num_tokens, priority=priority)
            rule.add(name, priority, num_tokens)
        output = engine.step()
        expected, preempted = rule.step()
        assert (set(ran(output)), names(output.preempted)) == (expected, preempted), step
        num_preempted += len(preempted)
    assert num_preempted > 4
    engine.run(max_steps=10**5)
    engine.check_answers()
