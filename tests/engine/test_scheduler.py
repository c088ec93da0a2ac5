"""Who runs in each step, with how many tokens: budgets, chunks, order, priorities, watermark."""

from __future__ import annotations

import pytest
from helpers.scheduler_helpers import (
    FakeEngine,
    FakeSupply,
    names,
    of_kind,
    predicted_tokens,
    ran,
    tokens,
)

from mlx_paged.core import KEEP_ALL, BlockPool, KVCacheManager, Retention
from mlx_paged.engine.request import CompletionStatus, Request
from mlx_paged.engine.scheduling.batch import Batch, CopyBlocks
from mlx_paged.engine.scheduling.scheduler import Scheduler
from mlx_paged.options.config import SchedulerConfig
from mlx_paged.options.sampling_params import SamplingParams

# Chunks and budgets


def test_a_prompt_is_computed_in_chunks_beside_a_running_decode():
    engine = FakeEngine(100, max_num_batched_tokens=8)
    engine.add("a", tokens(3), max_tokens=6)
    assert ran(engine.step()) == {"a": 3}
    engine.add("long", tokens(20, 200), max_tokens=2)
    assert engine.run() == [
        {"a": 1, "long": 7},
        {"a": 1, "long": 7},
        {"a": 1, "long": 6},
        {"a": 1, "long": 1},
        {"a": 1},
    ]
    engine.check_answers()


def test_a_prompt_in_front_leaves_a_token_to_each_decode_behind_it():
    engine = FakeEngine(100, max_num_batched_tokens=8)
    engine.add("a", tokens(2), max_tokens=6)
    engine.add("b", tokens(2, 200), max_tokens=5)
    engine.step()
    engine.add("urgent", tokens(20, 300), max_tokens=1, priority=-1)
    assert engine.run() == [
        {"a": 1, "b": 1, "urgent": 6},
        {"urgent": 6, "a": 1, "b": 1},
        {"urgent": 6, "a": 1, "b": 1},
        {"urgent": 2, "a": 1, "b": 1},
        {"a": 1},
    ]


def test_several_prompts_share_a_step_and_the_last_one_is_cut_to_the_budget():
    engine = FakeEngine(100, max_num_batched_tokens=16)
    for index, name in enumerate("abcd"):
        engine.add(name, tokens(6, 100 * index), max_tokens=2)
    assert engine.run() == [
        {"a": 6, "b": 6, "c": 4},
        {"a": 1, "b": 1, "c": 2, "d": 6},
        {"c": 1, "d": 1},
    ]


def test_as_many_decodes_as_the_budget_has_tokens_all_run_in_every_step():
    engine = FakeEngine(100, max_num_batched_tokens=4, max_num_seqs=4)
    for index in range(5):
        engine.add(f"r{index}", tokens(1, 100 * index), max_tokens=4)
    steps = engine.run()
    assert steps == [{"r0": 1, "r1": 1, "r2": 1, "r3": 1}] * 4 + [{"r4": 1}] * 4


def test_no_more_sequences_run_at_once_than_may_and_the_next_comes_when_one_ends():
    engine = FakeEngine(100, max_num_seqs=2)
    for index, name in enumerate("abc"):
        engine.add(name, tokens(2, 100 * index), max_tokens=2 + index)
    assert engine.run() == [{"a": 2, "b": 2}, {"a": 1, "b": 1}, {"b": 1, "c": 2}] + [{"c": 1}] * 3


def test_an_empty_scheduler_has_nothing_to_do():
    engine = FakeEngine(4)
    assert engine.step() == Batch()
    assert (engine.step().num_tokens, engine.step().shares_new_blocks) == (0, False)


# Order


def test_requests_are_served_in_the_order_in_which_they_come():
    engine = FakeEngine(100, max_num_seqs=1)
    for name in "cab":
        engine.add(name, tokens(2), max_tokens=1)
    assert engine.run() == [{"c": 2}, {"a": 2}, {"b": 2}]


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_blocks():
    engine = FakeEngine(10)
    engine.add("a", tokens(20), max_tokens=3)  # 5 blocks, 6 with its answer
    engine.add("large", tokens(21, 200), max_tokens=1)  # 6 blocks: 5 are left
    engine.step()
    engine.step()
    engine.add("small", tokens(1, 300), max_tokens=1)
    assert names(engine.scheduler.running) == ["a"]
    assert engine.run() == [{"a": 1}, {"a": 1}, {"large": 16}, {"large": 5, "small": 1}]


def test_small_ones_that_keep_coming_do_not_starve_a_large_one():
    engine = FakeEngine(10)
    for index in range(4):
        engine.add(f"before{index}", tokens(7, 100 * index), max_tokens=index + 2)
    engine.step()
    engine.step()
    engine.add("large", tokens(40, 1000), max_tokens=1)  # all blocks
    steps = []
    for index in range(12):
        engine.add(f"after{index}", tokens(1, 2000 + 100 * index), max_tokens=1)
        steps.append(ran(engine.step()))
    first = next(index for index, step in enumerate(steps) if "large" in step)
    # As soon as those before it are done, and not one of those after it before.
    assert [list(step) for step in steps[:first]] == [
        ["before1", "before2", "before3"],
        ["before2", "before3"],
        ["before2", "before3"],
        ["before3"],
    ]
    assert steps[first : first + 3] == [{"large": 16}, {"large": 16}, {"large": 8}]


def test_an_urgent_request_overtakes_those_that_wait_and_one_of_its_level_waits_behind_it():
    engine = FakeEngine(100, max_num_seqs=1)
    engine.add("runs", tokens(2), max_tokens=3, priority=-1)
    engine.add("waits", tokens(2, 200), max_tokens=1)
    engine.add("later", tokens(2, 300), max_tokens=1, priority=1)
    engine.step()
    engine.add("urgent", tokens(2, 400), max_tokens=1, priority=-1)
    engine.add("urgent too", tokens(2, 500), max_tokens=1, priority=-1)
    assert engine.run() == [
        {"runs": 1},
        {"runs": 1},
        {"urgent": 2},
        {"urgent too": 2},
        {"waits": 2},
        {"later": 2},
    ]


@pytest.mark.parametrize(
    ("priority", "priority_steps", "num_per_step"), [(1, 5, 1), (2, 4, 1), (1, 7, 2), (3, 2, 3)]
)
def test_urgent_requests_that_keep_coming_are_ahead_for_so_many_steps_and_no_longer(
    priority: int, priority_steps: int, num_per_step: int
):
    engine = FakeEngine(100, max_num_seqs=1, priority_steps=priority_steps)
    engine.add("low", tokens(1), max_tokens=1, priority=priority)
    first = None
    for step in range(100):
        for index in range(num_per_step):
            engine.add(f"urgent {step} {index}", tokens(1), max_tokens=1)
        if "low" in ran(engine.step()):
            first = step
            break
    # All that came within priority * priority_steps steps are before it, at one each step.
    assert first == priority * priority_steps * num_per_step


# The watermark


@pytest.mark.parametrize(
    ("num_prompt_tokens", "is_admitted"), [(40, True), (41, False), (44, False)]
)
def test_beside_others_a_request_comes_only_if_the_watermark_stays_free(
    num_prompt_tokens: int, is_admitted: bool
):
    engine = FakeEngine(20, watermark=0.2, max_num_batched_tokens=100)  # 4 of 20 blocks
    engine.add("a", tokens(21), max_tokens=2)  # 6 blocks: with 10 more, 4 are free
    engine.step()
    engine.add("b", tokens(num_prompt_tokens, 200), max_tokens=1)
    assert ran(engine.step()) == ({"a": 1, "b": num_prompt_tokens} if is_admitted else {"a": 1})
    engine.run()


def test_a_watermark_of_less_than_a_block_is_one():
    engine = FakeEngine(20, watermark=0.01, max_num_batched_tokens=100)
    engine.add("a", tokens(21), max_tokens=2)
    engine.step()
    engine.add("b", tokens(56, 200), max_tokens=1)  # exactly the other 14 blocks
    assert ran(engine.step()) == {"a": 1}
    engine.run()


def test_the_first_chunk_of_a_windowed_request_leaves_the_watermark_free():
    """It holds few blocks at a time, but a step needs one for each of its tokens."""
    supply = FakeSupply(20, 4)
    supply.manager = KVCacheManager(BlockPool(21, 4), retentions=[Retention.sliding_window(8, 4)])
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=100, max_num_mixed_tokens=100, watermark=0.2
    )
    scheduler = Scheduler(supply.manager, supply, config)
    scheduler.add(Request("a", tokens(3), SamplingParams(max_tokens=9)))
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.append_token(batch.completions[0], 0)
    scheduler.add(Request("b", tokens(90, 200), SamplingParams(max_tokens=1)))
    batch = scheduler.schedule()
    assert batch is not None
    # One block is a's, and four of twenty stay free.
    assert ran(batch) == {"a": 1, "b": 4 * (20 - 1 - 4)}
    assert supply.manager.pool.num_free_blocks == 4


def test_alone_a_request_may_use_every_block():
    engine = FakeEngine(5, watermark=0.9, max_num_batched_tokens=100)
    engine.add("a", tokens(20), max_tokens=1)
    assert engine.run() == [{"a": 20}]


def test_blocks_that_the_budget_still_allows_are_free_ones_for_the_watermark():
    engine = FakeEngine(20, watermark=0.2, supply={"initial_blocks": 1}, max_num_batched_tokens=100)
    engine.add("a", tokens(21), max_tokens=2)
    engine.add("b", tokens(40, 200), max_tokens=1)
    assert ran(engine.step()) == {"a": 21, "b": 40}


def test_a_request_comes_when_all_of_its_prompt_fits_not_only_the_first_chunk():
    engine = FakeEngine(10, max_num_batched_tokens=8)
    engine.add("a", tokens(16), max_tokens=3)  # 4 blocks, 5 with its answer
    engine.step()
    engine.step()
    engine.add("b", tokens(28, 200), max_tokens=1)  # 7 blocks, the first chunk 2
    assert engine.run() == [{"a": 1}, {"a": 1}, {"b": 8}, {"b": 8}, {"b": 8}, {"b": 4}]


def test_the_pool_grows_before_anything_cached_is_evicted():
    engine = FakeEngine(20, supply={"initial_blocks": 4})
    engine.add("a", tokens(12), max_tokens=1)
    engine.run()
    engine.add("b", tokens(16, 200), max_tokens=6)
    engine.run()
    assert engine.pool.num_evictions == 0 and engine.pool.num_blocks > 5
    # 3 of a's, and 5 full ones of 16 + 5 tokens.
    assert engine.pool.num_cached_blocks == 8


def test_a_chunk_of_a_prompt_leaves_room_for_the_decodes_behind_it_before_they_evict():
    engine = FakeEngine(100, supply={"initial_blocks": 1}, max_num_batched_tokens=8)
    engine.add("cached", tokens(12), max_tokens=1)
    engine.run()
    engine.add("a", tokens(7, 200), max_tokens=4)
    engine.step()
    engine.add("urgent", tokens(14, 300), max_tokens=1, priority=-1)
    # a's ninth token needs a block in the step in which urgent, before it, takes two.
    assert engine.run() == [{"a": 1, "urgent": 7}, {"urgent": 7, "a": 1}, {"a": 1}]
    assert engine.pool.num_evictions == 0


def test_the_pool_does_not_grow_for_blocks_that_are_found_in_it():
    engine = FakeEngine(100, supply={"initial_blocks": 12}, max_num_batched_tokens=64)
    engine.add("a", tokens(40), max_tokens=1)
    engine.run()
    engine.add("b", tokens(41), max_tokens=1)
    assert ran(engine.step()) == {"b": 1}
    assert engine.pool.num_usable_blocks == 12 and engine.pool.num_evictions == 0


# Several completions


def test_all_completions_count_from_the_beginning_and_the_prompt_is_computed_once():
    engine = FakeEngine(100, max_num_seqs=4)
    engine.add("a", tokens(6), max_tokens=3, n=3)
    engine.add("b", tokens(2, 200), max_tokens=1, n=2)
    engine.add("c", tokens(2, 300), max_tokens=1)
    assert ran(engine.step()) == {"a0": 6}
    assert names(engine.scheduler.running) == ["a0", "a1", "a2"]
    assert engine.manager.stats().num_used_blocks == 2, "shared until one of them writes"
    output = engine.step()
    assert ran(output) == {"a0": 1, "a1": 1, "a2": 1}
    # The last holder writes in place.
    assert of_kind(output, CopyBlocks) == [CopyBlocks([(2, 3)]), CopyBlocks([(2, 4)])]
    assert engine.run() == [{"a0": 1, "a1": 1, "a2": 1}, {"b0": 2, "c": 2}]
    engine.check_answers()
    assert [len(engine.completions[name]) for name in "abc"] == [3, 2, 1]
    answers = [tuple(request.output_token_ids) for request in engine.completions["a"]]
    assert len(set(answers)) == 3


def test_a_place_is_free_as_soon_as_one_of_the_completions_ends():
    engine = FakeEngine(100, max_num_seqs=3)
    engine.add("a", tokens(6), max_tokens=4, n=3)
    engine.add("b", tokens(2, 200), max_tokens=1)
    engine.step()
    engine.scheduler.finish(engine.completions["a"][1], "stop")
    assert ran(engine.step()) == {"a0": 1, "a2": 1, "b": 2}
    engine.run()


def test_completions_that_end_with_their_first_token_leave_nothing():
    engine = FakeEngine(10)
    engine.add("a", tokens(6), max_tokens=1, n=4)
    assert engine.run() == [{"a0": 6}]
    assert [request.finish_reason for request in engine.completions["a"]] == ["length"] * 4


def test_more_completions_than_may_run_at_once_are_refused():
    engine = FakeEngine(10, max_num_seqs=3)
    with pytest.raises(
        ValueError, match=r"^\[scheduler\] 4 completions .* may run at once, 3; raise max_num_seqs$"
    ):
        engine.add("a", tokens(1), n=4)
    engine.add("a", tokens(1), n=3)


# The end


def test_a_completion_ends_with_a_stop_token_or_at_its_length():
    prompt = tokens(3, 2)
    answer = predicted_tokens(prompt, 8)
    assert len({*answer, 39}) == 9
    engine = FakeEngine(100, max_num_batched_tokens=64, eos_token_ids=frozenset([answer[2]]))
    engine.add("eos", prompt, max_tokens=8)
    engine.add("length", prompt, max_tokens=3, ignore_eos=True)
    engine.add("eos and length", prompt, max_tokens=3)
    engine.add("goes on", prompt, max_tokens=8, ignore_eos=True)
    engine.add("stop token", prompt, max_tokens=8, stop_token_ids=[39, answer[1]])
    engine.add("asked for", prompt, max_tokens=8, ignore_eos=True, stop_token_ids=[answer[2]])
    engine.run()
    ends = {
        name: (request.finish_reason, request.stop_reason, request.num_output_tokens)
        for name, (request,) in engine.completions.items()
    }
    assert ends == {
        "eos": ("stop", None, 3),
        "length": ("length", None, 3),
        "eos and length": ("stop", None, 3),
        "goes on": ("length", None, 8),
        "stop token": ("stop", answer[1], 2),
        "asked for": ("stop", answer[2], 3),
    }


def test_what_waits_runs_and_is_finished_is_told_by_its_status():
    engine = FakeEngine(10, max_num_seqs=1)
    first = engine.add("a", tokens(2), max_tokens=2)
    second = engine.add("b", tokens(2), max_tokens=2)
    assert (first.status, second.status) == (CompletionStatus.WAITING, CompletionStatus.WAITING)
    engine.step()
    assert (first.status, second.status) == (CompletionStatus.RUNNING, CompletionStatus.WAITING)
    assert list(engine.scheduler.completions) == [("a", 0), ("b", 0)]
    engine.step()
    assert (first.status, second.status) == (CompletionStatus.FINISHED, CompletionStatus.WAITING)
    assert list(engine.scheduler.completions) == [("b", 0)]


@pytest.mark.parametrize(
    "where", ["waiting", "running", "computing its prompt", "preempted", "swapped", "finished"]
)
def test_a_request_that_is_aborted_gives_back_everything_at_once_wherever_it_is(where: str):
    engine = FakeEngine(8, swap_blocks=25 if where == "swapped" else 0)
    engine.add("a", tokens(12), max_tokens=40)
    engine.step()
    request = engine.add(
        "b", tokens(30 if where == "computing its prompt" else 14, 200), max_tokens=40
    )
    if where != "waiting":
        engine.step()
    if where in ("preempted", "swapped"):
        while request.status is CompletionStatus.RUNNING:
            engine.step()
        assert (engine.swap_space.num_used_tokens > 0) == (where == "swapped")
    if where == "finished":
        engine.scheduler.finish(request, "stop", "its text")
    engine.abort("b")
    engine.check()
    assert (
        request.finish_reason == ("stop" if where == "finished" else "abort")
        and request.is_finished
    )
    assert list(engine.manager.tables) == [("a", 0)] and list(engine.scheduler.completions) == [
        ("a", 0)
    ]
    assert engine.pool.num_used_blocks == -(-engine.completions["a"][0].num_computed_tokens // 4)
    assert engine.swap_space.num_used_tokens == 0
    engine.abort("b")  # and again
    engine.run()
    engine.check_answers()


# One alone


def test_one_request_alone_is_scheduled_whether_it_runs_or_waits():
    engine = FakeEngine(100, max_num_batched_tokens=8)
    first, second = engine.add("a", tokens(2)), engine.add("b", tokens(12, 200))
    assert ran(engine.step(only=second)) == {"b": 8}
    assert ran(engine.step(only=second)) == {"b": 4}
    assert ran(engine.step(only=first)) == {"a": 2}
    assert ran(engine.step(only=first)) == {"a": 1}
    assert ran(engine.step()) == {"a": 1, "b": 1}
    assert names(engine.scheduler.running) == ["a", "b"], "in its place"
    engine.run()
    engine.check_answers()


def test_one_request_alone_is_not_admitted_beside_as_many_as_may_run():
    engine = FakeEngine(100, max_num_seqs=1)
    engine.add("a", tokens(2))
    waiting = engine.add("b", tokens(2, 200))
    engine.step()
    assert ran(engine.step(only=waiting)) == {}
    engine.run()


@pytest.mark.parametrize("num_prompt_tokens", [1, 5])
@pytest.mark.parametrize("num_blocks", [15, *range(18, 26), 40])
def test_a_step_ahead_has_all_that_run_where_tokens_leave_windows(
    num_blocks: int, num_prompt_tokens: int
):
    retentions = [KEEP_ALL, *(Retention.sliding_window(window, 4) for window in (7, 11))]
    supply = FakeSupply(num_blocks, 4)
    supply.manager = KVCacheManager(BlockPool(1 + num_blocks, 4), retentions=retentions)
    scheduler = Scheduler(supply.manager, supply, SchedulerConfig(4, 4, 4, watermark=0.0))
    for index in range(3):
        params = SamplingParams(max_tokens=16)
        scheduler.add(Request(str(index), tokens(num_prompt_tokens, 100 * index), params))
    ahead, num_ahead, num_short = None, 0, 0
    while scheduler.completions:
        batch = scheduler.schedule() if ahead is None else ahead
        awaited = [part.completion for part in batch.scheduled if part.num_logit_rows]
        ahead = scheduler.schedule_ahead(awaited)
        if ahead is None:
            num_short += 1
        else:
            # But one whose awaited token is its last.
            assert set(ahead.completions) >= {
                request
                for request in scheduler.running
                if request.awaits_token or request.num_computed_tokens < request.num_tokens
            }
            num_ahead += bool(ahead.completions)
        for request in awaited:
            scheduler.append_token(request, 0, ahead)
    assert num_ahead > 5
    # Three requests hold up to six blocks of all tokens each, and seven of the last ones.
    assert (num_short > 0) == (num_blocks < 40)
