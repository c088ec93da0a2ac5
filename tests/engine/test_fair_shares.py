"""Several users share the places, the prompt tokens and the blocks of a scheduler: what one of them
asks for keeps no other waiting.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from helpers.fast_lane import mostly_slow
from helpers.scheduler_helpers import FakeEngine as CheckedEngine
from helpers.scheduler_helpers import names, of_kind, ran, tokens
from paged_testing.integrity import check_scheduler

from mlx_paged.engine.request import Completion
from mlx_paged.engine.scheduling import request_queues
from mlx_paged.engine.scheduling.batch import Batch, SwapIn, SwapOut
from mlx_paged.engine.scheduling.request_queues import MAX_PASSING

MAX_LAG, MIN_LEAD = 200, 100


@pytest.fixture
def small_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the lead that a user may have, so that few steps show it."""
    monkeypatch.setattr(request_queues, "MAX_LAG", MAX_LAG)
    monkeypatch.setattr(request_queues, "MIN_LEAD", MIN_LEAD)


class FakeEngine(CheckedEngine):
    """Without the rows of a cache, which take long for many tokens; the random tests check them."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.cache.move = self._move
        self.cache.compute = lambda batch: None

    def _move(self, batch: Batch, swap_space) -> None:
        for swap_in in of_kind(batch, SwapIn):
            swap_space.release(swap_in.seq_id)

    def check(self) -> None:
        check_scheduler(self.scheduler)


def chat(engine: FakeEngine, number: int = 0, user: str = "bob") -> int:
    """The number of steps until the first token of a small request, which is then finished."""
    first = 10**6 + 100 * number
    request = engine.add(f"chat {user} {number}", tokens(20, first), max_tokens=3, user=user)
    num_steps = 0
    while not request.num_output_tokens:
        engine.step()
        num_steps += 1
    while not request.is_finished:
        engine.step()
    engine.step()  # Whoever made way returns.
    return num_steps


def crowd(load: str, **options) -> FakeEngine:
    """All places are taken by one user, and more of that user's requests wait."""
    config = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "max_num_mixed_tokens": 128}
    engine = FakeEngine(**{"num_blocks": 17_000, **config, **options})
    if load == "n":
        for number in range(2):
            prompt = tokens(9, 1000 * number)
            engine.add(f"n{number}", prompt, max_tokens=500, n=64, user="ann")
    elif load == "urgent":
        for number in range(80):
            prompt = tokens(9, 1000 * number)
            engine.add(f"u{number}", prompt, max_tokens=500, priority=-(2**31 - 1), user="ann")
    else:
        for number in range(100):
            engine.add(f"p{number}", tokens(300, 1000 * number), max_tokens=30, user="ann")
    for _ in range(30):
        engine.step()
    return engine


@pytest.mark.parametrize("swap_blocks", [0, 10_000])
@pytest.mark.parametrize("load", ["n", "urgent", "long prompts"])
def test_whatever_one_user_asks_for_the_small_request_of_another_has_its_token_in_the_next_step(
    load: str, swap_blocks: int
):
    engine = crowd(load, swap_blocks=swap_blocks)
    assert [chat(engine, number) for number in range(5)] == [1] * 5
    # One sequence made way for each where no place was free, and returned.
    assert engine.counts["preempted"] == (0 if load == "long prompts" else 5)
    assert max(each.num_preemptions for each in engine.scheduler.completions.values()) <= 2
    for name in list(engine.completions):
        engine.abort(name)
    engine.check_whole()
    engine.check_answers()


def test_it_has_its_token_in_the_next_step_where_blocks_are_short_and_places_are_not():
    # Three prompts of 300 tokens fit, with the watermark.
    engine = crowd("long prompts", num_blocks=250, watermark=0.05)
    assert len(engine.scheduler.running) == 3
    assert [chat(engine, number) for number in range(4)] == [1] * 4
    # It fits into the watermark, without which the others could not grow.
    assert engine.counts["preempted"] <= 4


def test_a_step_of_several_users_is_as_short_as_one_beside_answers():
    engine = FakeEngine(400, max_num_batched_tokens=64, max_num_mixed_tokens=24)
    engine.add("a", tokens(500), max_tokens=1, user="ann")
    assert ran(engine.step()) == {"a": 64}
    engine.add("b", tokens(20, 10**6), max_tokens=2, user="bob")
    assert [ran(engine.step()) for _ in range(3)] == [
        {"b": 20, "a": 4},
        {"b": 1, "a": 23},
        {"a": 64},
    ]


def test_a_step_in_flight_is_read_before_a_place_is_taken():
    engine = crowd("n")
    running = list(engine.scheduler.running)
    engine.add("chat", tokens(20, 10**6), max_tokens=3, user="bob")
    assert engine.scheduler.schedule_ahead(running) is None
    assert engine.scheduler.running == running and not any(each.awaits_token for each in running)


def test_a_place_is_taken_from_the_user_with_most_by_the_one_that_was_preempted_least():
    engine = FakeEngine(2000, max_num_seqs=6, max_num_batched_tokens=64, swap_blocks=500)
    for number in range(4):
        engine.add(f"a{number}", tokens(5, 100 * number), max_tokens=200, user="ann")
    for number in range(2):
        engine.add(f"b{number}", tokens(5, 1000 + 100 * number), max_tokens=200, user="bob")
    engine.step()
    preempted = []
    for number in range(6):
        request = engine.add(f"c{number}", tokens(5, 5000 + 10 * number), max_tokens=2, user="cid")
        output = engine.step()
        assert ran(output)[f"c{number}"] == 5 and len(of_kind(output, SwapOut)) == 1
        preempted += names(output.preempted)
        while not request.is_finished:
            engine.step()
        engine.step()
    assert preempted == ["a3", "a2", "a1", "a0", "a3", "a2"]


def test_no_place_is_taken_from_a_user_with_an_equal_share_or_by_one_of_whom_something_runs():
    engine = FakeEngine(2000, max_num_seqs=6, max_num_batched_tokens=64)
    for number in range(6):
        user = ("ann", "bob")[number % 2]
        engine.add(f"{user}{number}", tokens(5, 100 * number), max_tokens=50, user=user)
    engine.step()
    engine.add("c0", tokens(5, 1000), max_tokens=90, user="cid")
    engine.add("c1", tokens(5, 2000), max_tokens=90, user="cid")
    assert names(engine.step().preempted) == ["ann4"]
    for _ in range(20):
        assert engine.step().preempted == []
    counts = Counter(each.request.user for each in engine.scheduler.running)
    assert counts == {"ann": 2, "bob": 3, "cid": 1}
    engine.run()
    engine.check_answers()


def test_places_that_become_free_go_to_the_user_who_had_less():
    engine = FakeEngine(4000, max_num_seqs=8, max_num_batched_tokens=64)
    for number in range(60):
        engine.add(f"a{number}", tokens(5, 100 * number), max_tokens=20, user="ann")
    for _ in range(10):
        engine.step()
    for number in range(60):
        engine.add(f"b{number}", tokens(5, 9000 + 100 * number), max_tokens=20, user="bob")
    counts: Counter[str | None] = Counter()
    for step in range(150):
        engine.step()
        if step > 25:
            counts.update(each.request.user for each in engine.scheduler.running)
    assert counts["ann"] == pytest.approx(counts["bob"], rel=0.1)
    engine.run()
    engine.check_answers()


@pytest.mark.usefixtures("small_lag")
def test_prompt_tokens_are_shared_equally_in_whatever_order_users_come():
    engine = FakeEngine(4000, max_num_seqs=8, max_num_batched_tokens=16)
    num_tokens = MAX_LAG + 800
    anns = [
        engine.add(f"a{number}", tokens(num_tokens, 10**5 * number), user="ann")
        for number in range(3)
    ]
    for _ in range(10):
        engine.step()
    bobs = [
        engine.add(f"b{number}", tokens(num_tokens, 10**6 + 10**5 * number), user="bob")
        for number in range(3)
    ]
    before = sum(each.num_computed_tokens for each in anns)
    for _ in range(200):
        engine.step()
    done = [sum(each.num_computed_tokens for each in group) for group in (anns, bobs)]
    # Bob begins with a lead.
    assert done[1] - (done[0] - before) == pytest.approx(MAX_LAG, abs=2 * 16)


@pytest.mark.usefixtures("small_lag")
def test_a_user_of_less_than_a_share_saves_up_a_bounded_lead():
    engine = FakeEngine(4000, max_num_seqs=10, max_num_batched_tokens=16)
    ann = engine.add("a", tokens(3000), max_tokens=1, user="ann")
    bob = engine.add("b", tokens(3, 10**6), max_tokens=1000, user="bob")
    for _ in range(60):  # Ann has 15 tokens of each step, and Bob has one.
        engine.step()
    begin = ann.num_computed_tokens
    late = engine.add("late", tokens(900, 2 * 10**6), max_tokens=1, user="bob")
    for _ in range(60):
        engine.step()
    lead = late.num_computed_tokens - (ann.num_computed_tokens - begin)
    assert MAX_LAG - 80 < lead <= MAX_LAG + 16 and bob.num_output_tokens > 100


@pytest.mark.usefixtures("small_lag")
def test_a_user_who_leaves_and_returns_begins_where_the_work_was():
    engine = FakeEngine(4000, max_num_seqs=10, max_num_batched_tokens=17)
    engine.add("a", tokens(4000), max_tokens=1, user="ann")
    work = []
    for number in range(8):
        request = engine.add(
            f"b{number}", tokens(160, 10**5 * (9 + number)), max_tokens=1, user="bob"
        )
        num_steps = 0
        while not request.is_finished:
            engine.step()
            num_steps += 1
        work.append(num_steps)
    # With all tokens but one it takes 10 steps, and with half of them 20. The first one uses the
    # lead up.
    assert work[0] <= 11 and min(work[2:]) > 16


def test_the_priority_of_one_user_is_nothing_to_another():
    engine = FakeEngine(2000, max_num_seqs=2, max_num_batched_tokens=16)
    engine.add("a0", tokens(3), max_tokens=12, user="ann")
    engine.add("b0", tokens(3, 1000), max_tokens=12, user="bob")
    engine.step()
    for number in range(1, 4):
        engine.add(f"b{number}", tokens(3, 1000 + 100 * number), 4, user="bob", priority=5 - number)
        engine.add(f"a{number}", tokens(3, 100 * number), 4, user="ann", priority=-(2**31 - 1))
    order = []
    while engine.scheduler.completions:
        output = engine.step()
        order += [each for each in ran(output) if each not in order]
        assert all(each.request.user == "ann" for each in output.preempted)
    # Ann's urgent ones preempt her own; Bob's come in his order, one place each.
    assert [name for name in order if name[0] == "b"] == ["b0", "b3", "b2", "b1"]
    assert engine.completions["b0"][0].num_preemptions == 0
    engine.check_answers()


def test_completions_without_a_place_wait_while_others_have_requests():
    engine = FakeEngine(2000, max_num_seqs=8, max_num_batched_tokens=64)
    engine.add("a", tokens(5), max_tokens=40, n=6, user="ann")
    for _ in range(3):
        engine.step()
    engine.add("b", tokens(6, 900), max_tokens=40, n=8, user="bob")
    output = engine.step()
    assert ran(output)["b0"] == 6
    # Two have a place; the others have their first token.
    counts = Counter(each.request.user for each in engine.scheduler.running)
    assert counts == {"ann": 6, "bob": 2}
    assert [each.num_output_tokens for each in engine.completions["b"]] == [1] * 8
    steps = engine.run()
    assert max(map(len, steps)) == 8
    assert all(len(each.output_token_ids) == 40 for each in engine.completions["b"])
    engine.check_answers()


@pytest.mark.usefixtures("small_lag")
def test_more_users_than_places_take_turns_of_many_steps():
    engine = FakeEngine(9000, max_num_seqs=1, max_num_batched_tokens=64)
    engine.add("a", tokens(3), max_tokens=900, user="ann")
    for _ in range(50):
        engine.step()
    engine.add("b", tokens(3, 10**6), max_tokens=900, user="bob")
    turns: list[list] = []
    for _ in range(750):
        (name,) = ran(engine.step())
        if not turns or turns[-1][0] != name:
            turns.append([name, 0])
        turns[-1][1] += 1
    assert [name for name, _ in turns[:4]] == ["b", "a", "b", "a"]
    lengths = [length for _, length in turns]
    # Bob begins with a lead.
    assert lengths[0] == pytest.approx(MAX_LAG + MIN_LEAD, abs=5)
    assert lengths[1:-1] == [pytest.approx(2 * MIN_LEAD, abs=5)] * (len(lengths) - 2)


def test_requests_that_do_not_fit_are_passed_by_a_bounded_number_of_others():
    engine = FakeEngine(500, max_num_seqs=8, max_num_batched_tokens=64)
    engine.add("a", tokens(100), max_tokens=2000, user="ann")
    for _ in range(5):
        engine.step()
    # It needs 480 of 500 blocks.
    large = engine.add("large", tokens(1920, 5000), max_tokens=3, user="cid")
    engine.step()
    num_passed = 0
    for number in range(MAX_PASSING + 20):
        request = engine.add("bob" + str(number), tokens(3, 9000 + 9 * number), 1, user="bob")
        while not request.is_finished and not large.num_computed_tokens:
            if not engine.completions["a"][0].is_finished and number > MAX_PASSING:
                engine.abort("a")
            engine.step()
        num_passed += request.is_finished
        if large.num_computed_tokens:
            break
    assert 20 < num_passed <= MAX_PASSING
    for name in list(engine.completions):
        engine.abort(name)
    engine.check_whole()


@mostly_slow("seed", range(4), quick=(0, 3))
def test_no_user_starves_and_none_has_more_than_a_share_for_long(seed: int):
    rng = random.Random(seed)
    engine = FakeEngine(
        rng.choice([60, 400]),
        max_num_seqs=rng.choice([3, 8]),
        max_num_batched_tokens=32,
        swap_blocks=rng.choice([0, 40]),
        watermark=0.05,
    )
    patient: list[Completion] = []
    done: Counter[str] = Counter()
    for step in range(1500):
        if len(engine.scheduler.waiting) < 12:
            n = rng.choice([1, 1, 3])
            engine.add(f"h{step}", tokens(rng.randint(1, 30), 50 * step), 25, n, user="heavy")
        for user in ("bob", "cid"):
            own = [
                each for each in engine.scheduler.completions.values() if each.request.user == user
            ]
            if not own:
                first = 10**6 + 100 * step + 50 * (user == "bob")
                patient.append(engine.add(f"{user}{step}", tokens(10, first), 5, user=user))
        output = engine.step()
        done.update(part.completion.request.user for part in output.scheduled)
    finished = [each for each in patient if each.is_finished]
    # 5 tokens take 5 steps and few of waiting.
    assert len(finished) > 1500 / 5 * 2 * 0.6
    assert done["heavy"] >= 1500 - 3  # And the heavy user goes on in each step.
    engine.run(max_steps=5000)
    engine.check_answers()
