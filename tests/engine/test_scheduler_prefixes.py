"""What requests share: hits in whole blocks, blocks of the same step, salts, and what a failed step
takes back.
"""

from __future__ import annotations

import pytest
from helpers.scheduler_helpers import FakeEngine, names, of_kind, ran, tokens

from mlx_paged.engine.request import CompletionStatus
from mlx_paged.engine.scheduling.batch import SwapIn, SwapOut


def num_cached(engine: FakeEngine) -> dict[str, int]:
    return {
        name: requests[0].request.num_cached_tokens for name, requests in engine.completions.items()
    }


def test_equal_beginnings_are_computed_once_in_whole_blocks():
    engine = FakeEngine(100)
    engine.add("a", tokens(11), max_tokens=2)
    engine.run()
    engine.add("same", tokens(11), max_tokens=1)
    engine.add("longer", tokens(14), max_tokens=1)
    engine.add("differs in the second block", [*tokens(7), 7], max_tokens=1)
    engine.add("other", tokens(11, 500), max_tokens=1)
    # a's third block is full with the first token of its answer, which no prompt here has.
    assert ran(engine.step()) == {
        "same": 3,
        "longer": 6,
        "differs in the second block": 4,
        "other": 3,
    }
    engine.run()
    assert num_cached(engine) == {
        "a": 0,
        "same": 8,
        "longer": 8,
        "differs in the second block": 4,
        "other": 0,
    }
    engine.check_answers()


def test_the_last_token_is_computed_even_on_a_full_hit():
    engine = FakeEngine(100)
    engine.add("a", tokens(8), max_tokens=1)
    engine.run()
    engine.add("b", tokens(8), max_tokens=1)
    assert ran(engine.step()) == {"b": 4}
    engine.add("c", tokens(9), max_tokens=1)
    assert ran(engine.step()) == {"c": 1}
    assert num_cached(engine) == {"a": 0, "b": 4, "c": 8}


def test_answers_are_found_again_as_prompts_are():
    engine = FakeEngine(100)
    first = engine.add("a", tokens(6), max_tokens=7)
    engine.run()
    engine.add("b", [*first.token_ids, 1], max_tokens=1)
    assert ran(engine.step()) == {"b": 2}  # 13 tokens, and one: the 13th has no K/V
    engine.check_answers()


def test_requests_that_come_together_share_the_blocks_of_the_step_under_way():
    engine = FakeEngine(100)
    engine.add("a", tokens(9), max_tokens=2)
    engine.add("b", tokens(9), max_tokens=2)
    engine.add("c", tokens(6), max_tokens=1)
    output = engine.step()
    assert ran(output) == {"a": 9, "b": 1, "c": 2}
    assert output.shares_new_blocks and output.new_block_ids == {1, 2} == output.hit_block_ids
    assert engine.manager.tables["a", 0].block_ids == [1, 2, 3]
    assert engine.manager.tables["b", 0].block_ids == [1, 2, 4]
    output = engine.step()
    assert ran(output) == {"a": 1, "b": 1} and not output.shares_new_blocks
    engine.run()
    engine.add("d", tokens(9), max_tokens=1)
    output = engine.step()
    assert output.hit_block_ids == {1, 2} and not output.shares_new_blocks, (
        "filled before this step"
    )
    engine.check_answers()


def test_blocks_of_a_chunk_are_shared_and_those_still_to_come_are_not():
    engine = FakeEngine(100, max_num_batched_tokens=14)
    engine.add("runs", tokens(1, 500), max_tokens=9)
    engine.step()
    engine.add("long", tokens(24), max_tokens=1)
    engine.step()  # 13 tokens of it
    engine.add("b", tokens(24), max_tokens=1)
    output = engine.step()
    assert ran(output) == {"runs": 1, "long": 11, "b": 2}
    # All blocks of long, which are full now, but the last.
    assert engine.completions["b"][0].request.num_cached_tokens == 20 and output.shares_new_blocks
    engine.run()
    engine.check_answers()


def test_only_equal_salts_share():
    engine = FakeEngine(100, max_num_batched_tokens=64)
    for name, salt in [("a", None), ("b", "x"), ("c", "y"), ("d", "x"), ("e", None), ("f", "")]:
        engine.add(name, tokens(9), max_tokens=1, cache_salt=salt)
    assert ran(engine.step()) == {"a": 9, "b": 9, "c": 9, "d": 1, "e": 1, "f": 9}
    assert num_cached(engine) == {"a": 0, "b": 0, "c": 0, "d": 8, "e": 8, "f": 0}


def test_nothing_is_shared_where_prefix_caching_is_off():
    engine = FakeEngine(100, enable_prefix_caching=False)
    engine.add("a", tokens(9), max_tokens=2, n=2)
    engine.run()
    engine.add("b", tokens(9), max_tokens=1)
    assert ran(engine.step()) == {"b": 9}
    assert engine.pool.num_cached_blocks == 0
    assert num_cached(engine) == {"a": 0, "b": 0}
    assert engine.completions["a"][0].block_hashes == []
    engine.check_answers()


def test_a_hit_takes_no_more_blocks_than_it_needs():
    engine = FakeEngine(5)
    engine.add("a", tokens(12), max_tokens=20)
    engine.step()
    engine.add("b", tokens(14), max_tokens=1)  # 4 blocks, 3 of them a's
    assert ran(engine.step()) == {"a": 1, "b": 2}
    assert engine.manager.stats().num_used_blocks == 4 and engine.counts["preempted"] == 0
    engine.run()


def test_free_blocks_that_are_hit_count_as_taken():
    engine = FakeEngine(5)
    engine.add("first", tokens(13), max_tokens=1)
    engine.run()  # 3 cached, 2 empty
    engine.add("a", tokens(8, 200), max_tokens=2)
    engine.step()
    engine.add("b", tokens(13), max_tokens=1)  # 3 cached ones and one more
    assert ran(engine.step()) == {"a": 1}
    assert engine.run() == [{"b": 5}]  # a took the last of the cached ones
    engine.check_answers()


# Failed steps


def state(engine: FakeEngine) -> dict:
    """What a failed step must leave behind: nothing."""
    return {
        "tables": dict(engine.manager.tables),
        "used": engine.pool.num_used_blocks,
        "swapped": engine.swap_space.num_used_tokens,
    }


NOTHING = {"tables": {}, "used": 0, "swapped": 0}
FAILURES = ["at once", "computing"]


@pytest.mark.parametrize("fails", FAILURES)
def test_a_failed_step_gives_everything_back_and_its_requests_begin_again(fails: str):
    engine = FakeEngine(100)
    engine.add("a", tokens(9), max_tokens=3)
    engine.step()
    engine.add("b", tokens(9, 200), max_tokens=2, n=2)
    engine.add("c", tokens(9, 300), max_tokens=2)
    output = engine.step(fails=fails)
    assert ran(output) == {"a": 1, "b0": 9, "c": 6}
    assert state(engine) == NOTHING
    requests = [engine.completions[name][0] for name in "abc"]
    assert [request.status for request in requests] == [CompletionStatus.PREEMPTED] * 3
    assert [request.num_computed_tokens for request in requests] == [0, 0, 0]
    assert [request.num_preemptions for request in requests] == [1, 1, 1]
    assert names(engine.scheduler.waiting) == ["a", "b0", "c"]
    assert engine.scheduler.num_preemptions == 0, "nobody was short of blocks"
    # What a computed before is cached still; nothing is of what was not written.
    assert ran(engine.step()) == {"a": 2, "b0": 9, "c": 5}
    engine.run()
    engine.check_answers()


def test_blocks_that_were_never_written_are_not_found():
    engine = FakeEngine(100)
    engine.add("a", tokens(8), max_tokens=1)
    engine.run()
    engine.add("b", tokens(14), max_tokens=1)
    assert ran(engine.step(fails="computing")) == {"b": 6}
    assert engine.pool.num_cached_blocks == 2
    engine.add("c", tokens(14), max_tokens=1)
    assert ran(engine.step()) == {"b": 6, "c": 2}
    engine.check_answers()


def test_blocks_shared_within_a_failed_step_are_not_found_either():
    engine = FakeEngine(100)
    for name in "abc":
        engine.add(name, tokens(14), max_tokens=2)
    assert engine.step(fails="computing").shares_new_blocks
    assert engine.pool.num_cached_blocks == 0 and state(engine) == NOTHING
    engine.run()
    engine.check_answers()


def test_a_failed_step_of_one_leaves_the_others_as_they_were():
    engine = FakeEngine(100)
    for name in "abc":
        engine.add(name, tokens(9), max_tokens=4)
    engine.step()
    before = {name: list(engine.manager.tables[name, 0].block_ids) for name in "ac"}
    engine.step(only=engine.completions["b"][0], fails="computing")
    assert names(engine.scheduler.running) == ["a", "c"] and names(engine.scheduler.waiting) == [
        "b"
    ]
    assert {name: engine.manager.tables[name, 0].block_ids for name in "ac"} == before
    assert ran(engine.step()) == {"a": 1, "c": 1, "b": 2}
    engine.run()
    engine.check_answers()


def test_a_request_that_ended_in_a_failed_step_stays_ended():
    engine = FakeEngine(100)
    engine.add("a", tokens(9), max_tokens=4)
    engine.add("b", tokens(5, 200), max_tokens=4)
    output = engine.scheduler.schedule()
    engine.abort("a")
    engine.scheduler.discard(output)
    assert engine.completions["a"][0].finish_reason == "abort" and state(engine) == NOTHING
    assert names(engine.scheduler.waiting) == ["b"]
    engine.check()
    # What it would have filled is not found, because it was not written.
    engine.add("c", tokens(9), max_tokens=1)
    assert ran(engine.step()) == {"b": 5, "c": 9}
    engine.run()
    engine.check_answers()


@pytest.mark.parametrize("fails", FAILURES)
def test_a_failed_step_that_swaps_out_forgets_what_it_may_not_have_copied(fails: str):
    engine = FakeEngine(8, swap_blocks=25, enable_prefix_caching=False)
    engine.add("a", tokens(14), max_tokens=8)
    engine.add("b", tokens(14, 200), max_tokens=8)
    for _ in range(3):
        engine.step()
    output = engine.step(fails=fails)
    assert (names(output.preempted), len(of_kind(output, SwapOut))) == (["b"], 1)
    assert state(engine) == NOTHING and names(engine.scheduler.waiting) == ["a", "b"]
    # Both fit again, and are computed again.
    assert ran(engine.step(only=engine.completions["b"][0])) == {"b": 16}
    engine.run()
    engine.check_answers()


@pytest.mark.parametrize("fails", FAILURES)
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_failed_step_that_swaps_in_leaves_nothing_of_it(fails: str, enable_prefix_caching: bool):
    engine = FakeEngine(8, swap_blocks=25, enable_prefix_caching=enable_prefix_caching)
    engine.add("a", tokens(14), max_tokens=8)
    engine.add("b", tokens(14, 200), max_tokens=8)
    engine.step_until(lambda output: output.preempted)
    while names(engine.scheduler.running) == ["a"]:
        engine.step()
    assert engine.swap_space.num_used_tokens == 15
    output = engine.step(fails=fails)
    ((_, ((_, indices, _),)),) = of_kind(output, SwapIn)
    start = indices[0] * 4
    assert indices[-1] == 3 and (start > 0) == enable_prefix_caching
    assert state(engine) == NOTHING
    # What was found in the cache is found again; what was swapped in is computed again.
    assert ran(engine.step()) == {"b": 16 - start}
    engine.run()
    engine.check_answers()
