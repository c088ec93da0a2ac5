"""Who goes when blocks run out, what becomes of its K/V, and where it goes on."""

from __future__ import annotations

import pytest
from helpers.scheduler_helpers import FakeEngine, names, of_kind, ran, tokens

from mlx_paged.engine.request import CompletionStatus
from mlx_paged.engine.scheduling.batch import Batch, SwapIn, SwapOut
from mlx_paged.engine.scheduling.request_queues import MAX_PREEMPTIONS


def until_preempted(engine: FakeEngine) -> Batch:
    return engine.step_until(lambda output: output.preempted)


def test_the_newest_is_preempted_and_goes_on_before_those_that_came_later():
    engine = FakeEngine(6, enable_prefix_caching=False)
    for index, name in enumerate("abc"):
        engine.add(name, tokens(7, 100 * index), max_tokens=6)
    assert ran(engine.step()) == {"a": 7, "b": 7, "c": 2}
    # The ninth token of a needs a block, and all 6 are taken.
    assert ran(engine.step()) == {"a": 1, "b": 1, "c": 5}
    engine.add("d", tokens(3, 400), max_tokens=1)
    output = engine.step()
    assert (ran(output), names(output.preempted)) == ({"a": 1, "b": 1}, ["c"])
    (request,) = engine.completions["c"]
    assert (request.status, request.num_computed_tokens, request.num_preemptions) == (
        CompletionStatus.PREEMPTED,
        0,
        1,
    )
    assert request.num_output_tokens == 1 and request.seq_id not in engine.manager.tables
    assert names(engine.scheduler.waiting) == ["c", "d"], "before d, which would fit"
    # a and b end after 6 tokens; c is computed again: its prompt and the token that it has.
    assert engine.run() == [{"a": 1, "b": 1}] * 3 + [{"c": 8, "d": 3}] + [{"c": 1}] * 4
    assert engine.scheduler.num_preemptions == 1
    engine.check_answers()


def test_the_lowest_priority_is_preempted_first_though_it_came_first():
    engine = FakeEngine(6, enable_prefix_caching=False)
    engine.add("low", tokens(7), max_tokens=6, priority=1)
    engine.add("a", tokens(7, 200), max_tokens=6)
    engine.add("b", tokens(7, 300), max_tokens=6)
    engine.step()
    engine.step()
    output = engine.step()
    assert (ran(output), names(output.preempted)) == ({"a": 1, "b": 1}, ["low"])
    engine.run()
    engine.check_answers()


def test_as_many_are_preempted_as_it_takes_and_the_last_may_be_the_one_that_asks():
    engine = FakeEngine(4, enable_prefix_caching=False, max_num_batched_tokens=16)
    for index, name in enumerate("abcd"):
        engine.add(name, tokens(4, 100 * index), max_tokens=3)
    assert ran(engine.step()) == {"a": 4, "b": 4, "c": 4, "d": 4}
    # a takes d's block, b takes c's.
    output = engine.step()
    assert (ran(output), names(output.preempted)) == ({"a": 1, "b": 1}, ["d", "c"])
    assert names(engine.scheduler.waiting) == ["c", "d"]
    assert engine.run() == [{"a": 1, "b": 1}, {"c": 5, "d": 5}, {"c": 1, "d": 1}]
    assert engine.scheduler.num_preemptions == 2
    engine = FakeEngine(3, enable_prefix_caching=False)
    engine.add("a", tokens(5), max_tokens=3)
    engine.add("b", tokens(4, 200), max_tokens=3)
    engine.step()
    output = engine.step()
    assert (ran(output), names(output.preempted)) == ({"a": 1}, ["b"])
    engine.run()
    engine.check_answers()


def test_a_preempted_request_waits_in_its_place_behind_more_urgent_ones():
    engine = FakeEngine(6, enable_prefix_caching=False)
    for index, (name, priority) in enumerate((("a", -1), ("b", -1), ("c", 0))):
        engine.add(name, tokens(7, 100 * index), max_tokens=6, priority=priority)
    engine.step()
    engine.step()
    # Three blocks: c has two.
    engine.add("urgent", tokens(12, 400), max_tokens=1, priority=-1)
    assert names(engine.step().preempted) == ["c"]
    assert names(engine.scheduler.waiting) == ["urgent", "c"]
    engine.run()
    engine.check_answers()


def test_no_request_is_admitted_in_a_step_in_which_blocks_run_out():
    engine = FakeEngine(6, enable_prefix_caching=False)
    engine.add("a", tokens(8), max_tokens=6, priority=-1)
    engine.add("b", tokens(16, 200), max_tokens=6).num_preemptions = MAX_PREEMPTIONS
    assert ran(engine.step()) == {"a": 8, "b": 8}
    engine.add("urgent", tokens(1, 300), max_tokens=1, priority=-1)
    output = until_preempted(engine)
    assert (names(output.preempted), ran(output)) == (["b"], {"a": 1})
    assert engine.run() == [{"a": 1, "urgent": 1}] + [{"a": 1}] * 3 + [{"b": 16}] + [{"b": 1}] * 5


def test_what_is_cached_of_a_preempted_request_is_not_computed_again():
    engine = FakeEngine(8)
    engine.add("a", tokens(14), max_tokens=8)
    engine.add("b", tokens(14, 200), max_tokens=8)
    output = until_preempted(engine)
    assert names(output.preempted) == ["b"]
    (completion,) = engine.completions["b"]
    num_tokens = completion.num_tokens
    step = ran(engine.step_until(lambda output: "b" in ran(output)))
    # Its blocks were freed tail first and a took the first of them.
    num_found = num_tokens - step["b"]
    assert num_found > 0 and num_found % 4 == 0
    assert completion.request.num_cached_tokens == 0, "of its first run"
    engine.run()
    engine.check_answers()


# Swapping


def swapped_in(output: Batch) -> list[tuple]:
    """By which name blocks are swapped in, and which ones of them."""
    return [
        (name, load.indices[0], load.indices[-1] + 1)
        for name, loads in of_kind(output, SwapIn)
        for load in loads
    ]


def swapping(num_blocks: int = 8, swap_blocks: int = 25, **options) -> FakeEngine:
    engine = FakeEngine(num_blocks, swap_blocks=swap_blocks, **options)
    engine.add("a", tokens(14), max_tokens=8)
    engine.add("b", tokens(14, 200), max_tokens=8)
    return engine


def test_a_swapped_request_goes_on_with_its_next_token():
    engine = swapping(enable_prefix_caching=False)
    assert [ran(engine.step()) for _ in range(2)] == [{"a": 14, "b": 2}, {"a": 1, "b": 12}]
    assert ran(engine.step()) == {"a": 1, "b": 1}
    block_ids = list(engine.manager.tables["b", 0].block_ids)
    output = engine.step()
    assert (ran(output), names(output.preempted)) == ({"a": 1}, ["b"])
    assert of_kind(output, SwapOut) == [SwapOut(("b", 0), [block_ids])]
    assert engine.swap_space.num_used_tokens == 15
    assert [ran(engine.step()) for _ in range(4)] == [{"a": 1}] * 4
    output = engine.step()
    assert ran(output) == {"b": 1}
    assert swapped_in(output) == [(("b", 0), 0, 4)]
    assert engine.swap_space.num_used_tokens == 0
    engine.run()
    engine.check_answers()


def test_only_what_is_not_cached_any_more_is_swapped_in():
    engine = swapping()
    until_preempted(engine)
    assert engine.swap_space.find(("b", 0)).num_tokens == 15
    output = engine.step_until(lambda output: of_kind(output, SwapIn))
    ((seq_id, start, end),) = swapped_in(output)
    assert (seq_id, end) == (("b", 0), 4) and 0 < start < 4
    assert ran(output) == {"b": 1}
    engine.run()
    engine.check_answers()


def test_a_place_in_host_memory_is_given_back_when_everything_is_cached_still():
    engine = FakeEngine(8, swap_blocks=25, max_num_batched_tokens=32)
    engine.add("a", tokens(13), max_tokens=3)
    request = engine.add("b", tokens(16, 200), max_tokens=3)
    assert ran(engine.step()) == {"a": 13, "b": 16}
    # b finds no block for its 17th token and gives back 4, of which a needs none.
    output = engine.step()
    assert (ran(output), names(output.preempted)) == ({"a": 1}, ["b"])
    assert engine.swap_space.find(request.seq_id).num_tokens == 16
    assert ran(engine.step()) == {"a": 1}
    output = engine.step()
    assert (ran(output), of_kind(output, SwapIn)) == ({"b": 1}, [])
    assert engine.swap_space.num_used_tokens == 0
    engine.run()
    engine.check_answers()


@pytest.mark.parametrize(("swap_blocks", "is_swapped"), [(4, True), (3, False), (0, False)])
def test_what_does_not_fit_into_host_memory_is_computed_again(swap_blocks: int, is_swapped: bool):
    engine = swapping(swap_blocks=swap_blocks, enable_prefix_caching=False)
    output = until_preempted(engine)
    assert names(output.preempted) == ["b"]
    assert len(of_kind(output, SwapOut)) == is_swapped
    assert engine.swap_space.num_used_tokens == (15 if is_swapped else 0)
    step = ran(engine.step_until(lambda output: "b" in ran(output)))
    assert step == {"b": 1 if is_swapped else 16}
    engine.run()
    engine.check_answers()


def test_a_prompt_that_was_swapped_half_way_goes_on_there():
    engine = FakeEngine(
        10, swap_blocks=25, max_num_batched_tokens=4, max_num_seqs=2, enable_prefix_caching=False
    )
    engine.add("a", tokens(4), max_tokens=16)
    engine.step()
    engine.add("b", tokens(32, 200), max_tokens=2)
    output = until_preempted(engine)
    ((seq_id, ((*block_ids,),)),) = of_kind(output, SwapOut)
    num_tokens = engine.swap_space.find(seq_id).num_tokens
    assert len(block_ids) == -(-num_tokens // 4)
    assert seq_id == ("b", 0) and 0 < num_tokens < 32 and num_tokens % 3 == 0
    while not of_kind(output := engine.step(), SwapIn):
        assert ran(output) == {"a": 1}
    assert swapped_in(output) == [(("b", 0), 0, len(block_ids))]
    assert (
        engine.completions["b"][0].num_computed_tokens
        == num_tokens + output.scheduled[-1].num_new_tokens
    )
    engine.run()
    engine.check_answers()


def test_completions_that_share_their_prompt_are_swapped_one_by_one():
    engine = FakeEngine(6, swap_blocks=25)
    engine.add("a", tokens(14), max_tokens=8, n=3)
    engine.run()
    engine.check_answers()
    assert engine.counts["swap_outs"] > 0 and engine.counts["swap_ins"] > 0


# The end of the budget


def test_the_only_one_ends_with_length_when_the_budget_is_used_up():
    engine = FakeEngine(3)
    request = engine.add("a", tokens(5), max_tokens=-1)
    engine.run()
    # 12 slots, and a token after the last of them that needs none.
    assert (request.finish_reason, request.num_tokens) == ("length", 13)
    engine.check_answers()


def test_a_prompt_that_fills_the_budget_is_answered_with_one_token():
    engine = FakeEngine(3)
    request = engine.add("a", tokens(12), max_tokens=5)
    assert engine.run() == [{"a": 12}]
    assert (request.finish_reason, request.num_output_tokens) == ("length", 1)


def test_nothing_is_left_in_host_memory_of_a_step_that_has_no_requests():
    # Three completions share two full blocks of three; one of them takes the third.
    engine = FakeEngine(3, swap_blocks=25, supply={"initial_blocks": 2, "device_blocks": 2})
    engine.add("a", tokens(7), max_tokens=8, n=3)
    engine.run()
    engine.check_answers()
    assert [request.finish_reason for request in engine.completions["a"]] == ["length"] * 3


def test_everybody_ends_though_all_want_the_whole_budget():
    engine = FakeEngine(6)
    for index in range(5):
        engine.add(f"r{index}", tokens(3 + index, 100 * index), max_tokens=-1)
    engine.run(max_steps=5 * 25)
    engine.check_answers()
    assert {request.num_tokens for (request,) in engine.completions.values()} == {25}
