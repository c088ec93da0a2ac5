"""Requests that can never run: refused at once, or as soon as the device gives less than its
budget. With the sum.
"""

from __future__ import annotations

import pytest
from helpers.scheduler_helpers import FakeEngine, names, ran, tokens

from mlx_paged.cache import PromptTooLongError


@pytest.mark.parametrize("supply", [{}, {"initial_blocks": 1}])
def test_a_prompt_that_can_never_fit_is_refused_at_once_with_the_sum(supply: dict):
    engine = FakeEngine(5, supply=supply)
    engine.add("fits", tokens(20), max_tokens=1)
    with pytest.raises(PromptTooLongError) as caught:
        engine.add("does not", tokens(21), max_tokens=1)
    assert str(caught.value) == (
        "[kv cache] a prompt of 21 tokens needs 6 blocks of 4, the budget holds 5; "
        "raise kv_cache_bytes or shorten the prompt"
    )
    assert list(engine.scheduler.completions) == [("fits", 0)]
    engine.run()


def test_what_is_in_use_does_not_count_against_what_can_ever_fit():
    engine = FakeEngine(5)
    engine.add("a", tokens(18), max_tokens=2)
    engine.step()
    engine.add("b", tokens(20, 200), max_tokens=1)
    assert engine.run() == [{"a": 2}, {"a": 1}, {"b": 16}, {"b": 4}]


def test_a_prompt_that_the_device_has_no_room_for_fails_with_what_there_really_is():
    engine = FakeEngine(
        20, supply={"initial_blocks": 2, "device_blocks": 4}, max_num_batched_tokens=64
    )
    request = engine.add("a", tokens(40), max_tokens=1)
    engine.add("b", tokens(8, 200), max_tokens=1)
    output = engine.step()
    assert (names(output.finished), ran(output)) == (["a"], {"b": 8})
    assert request.finish_reason == "error" and isinstance(request.error, PromptTooLongError)
    assert str(request.error) == (
        "[kv cache] a prompt of 40 tokens needs 10 blocks of 4, the budget holds 2; "
        "raise kv_cache_bytes or shorten the prompt"
    )
    engine.run()
    with pytest.raises(PromptTooLongError, match="needs 3 blocks of 4, the budget holds 2"):
        engine.add("c", tokens(9))


def test_beside_others_it_waits_for_them_before_it_fails():
    engine = FakeEngine(
        20, supply={"initial_blocks": 4, "device_blocks": 4}, max_num_batched_tokens=64
    )
    engine.add("a", tokens(8), max_tokens=3)
    fits = engine.add("b", tokens(16, 200), max_tokens=1)
    too_long = engine.add("c", tokens(17, 300), max_tokens=1)
    assert engine.run() == [{"a": 8}, {"a": 1}, {"a": 1}, {"b": 16}, {}]
    assert (fits.finish_reason, too_long.finish_reason) == ("length", "error")


def test_a_prompt_that_stops_fitting_half_way_ends_and_the_next_one_runs():
    engine = FakeEngine(
        20, supply={"initial_blocks": 4, "device_blocks": 6}, max_num_batched_tokens=8
    )
    request = engine.add("a", tokens(40), max_tokens=1)
    engine.add("b", tokens(12, 200), max_tokens=1)
    engine.run()
    assert (
        request.is_finished
        and request.num_output_tokens == 0
        and request.finish_reason in ("length", "error")
    )
    assert engine.completions["b"][0].num_output_tokens == 1
    engine.check_answers()


def test_answers_end_with_length_when_the_device_has_no_more():
    engine = FakeEngine(20, supply={"initial_blocks": 2, "device_blocks": 5})
    for index in range(4):
        engine.add(f"r{index}", tokens(3, 100 * index), max_tokens=-1)
    engine.run(max_steps=200)
    ends = {
        (request.finish_reason, request.num_tokens) for (request,) in engine.completions.values()
    }
    assert ends == {("length", 4 * engine.scheduler.max_num_blocks + 1)}


def test_one_scheduled_alone_that_can_not_run_ends_and_the_others_wait_their_turn():
    engine = FakeEngine(
        20, supply={"initial_blocks": 2, "device_blocks": 2}, max_num_batched_tokens=64
    )
    waits = engine.add("a", tokens(40), max_tokens=1)
    engine.add("b", tokens(4, 200), max_tokens=1)
    output = engine.step(only=waits)
    assert (names(output.finished), ran(output)) == (["a"], {})
    assert ran(engine.step()) == {"b": 4}
    engine.run()


def test_one_that_runs_alone_and_finds_no_block_ends_and_the_others_wait_their_turn():
    engine = FakeEngine(20, supply={"initial_blocks": 2, "device_blocks": 2}, max_num_seqs=1)
    runs = engine.add("a", tokens(8), max_tokens=9)
    engine.step()
    assert engine.scheduler.running == [runs]
    engine.add("b", tokens(4, 200), max_tokens=1)
    output = engine.step(only=runs)
    assert (names(output.finished), ran(output), runs.finish_reason) == (["a"], {}, "length")
    assert ran(engine.step()) == {"b": 4}
    engine.run()
