"""``Engine.view``: every block of the pool and every request, as they are now."""

from __future__ import annotations

import threading
from collections import Counter

import mlx.nn as nn
import pytest
from helpers.engine_runs import greedy, make_engine, prompt, run, sampled

from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.stats import CACHED, MAX_HOLDERS, EngineView


def tally(view: EngineView) -> dict[int, int]:
    return dict(Counter(view.blocks))


def assert_agrees(engine: Engine) -> EngineView:
    """The view's blocks are those of the pool, and its requests hold what the tables say."""
    view, pool = engine.view(), engine.manager.pool
    assert list(view.blocks) == [
        min(block.ref_cnt, MAX_HOLDERS) | (CACHED if block.block_hash is not None else 0)
        for block in pool.blocks[1:]
    ]
    stats = engine.stats()
    assert sum(byte & MAX_HOLDERS > 0 for byte in view.blocks) == stats.num_used_blocks
    assert sum(byte & CACHED > 0 for byte in view.blocks) == stats.num_cached_blocks
    for request in view.requests:
        held = {
            block_id
            for (request_id, _), tables in engine.manager.groups.items()
            if request_id == request.request_id
            for table in tables
            for block_id in table.block_ids
        }
        assert request.num_blocks == len(held)
    return view


def test_blocks_are_empty_held_shared_and_cached(model: nn.Module):
    engine = make_engine(model)
    assert set(engine.view().blocks) == {0} and engine.view().requests == []
    engine.add_request("a", prompt(40), greedy(20))
    engine.step()
    num_blocks = len(engine.view().blocks)
    # Two full blocks, which others may find, and a third.
    assert tally(assert_agrees(engine)) == {1 | CACHED: 2, 1: 1, 0: num_blocks - 3}
    engine.add_request("b", prompt(40), greedy(20))
    engine.step()
    assert tally(assert_agrees(engine)) == {2 | CACHED: 2, 1: 2, 0: num_blocks - 4}
    engine.abort_all()
    run(engine)
    assert tally(assert_agrees(engine)) == {CACHED: 2, 0: num_blocks - 2}


def test_requests_are_seen_from_their_arrival_to_their_last_output(model: nn.Module):
    engine = make_engine(model, max_num_seqs=2)
    engine.add_request("a", prompt(40), greedy(20), priority=-1)
    engine.add_request("b", prompt(40), sampled(1, 20, n=2, ignore_eos=True))
    engine.step()
    first, second = assert_agrees(engine).requests
    assert (first.request_id, first.state, first.priority) == ("a", "running", -1)
    assert (first.num_prompt_tokens, first.num_computed_tokens, first.num_blocks) == (40, 40, 3)
    assert (first.num_cached_tokens, first.num_output_tokens, first.num_preemptions) == (0, 1, 0)
    assert (second.state, second.num_computed_tokens, second.num_blocks) == ("waiting", 0, 0)
    assert first.age >= second.age > 0
    engine.abort("a")
    engine.step()
    engine.step()
    (second,) = assert_agrees(engine).requests
    # Two completions: they share two full blocks, and each writes a third.
    assert (second.state, second.num_cached_tokens, second.num_blocks) == ("running", 32, 4)
    assert second.num_output_tokens == 4
    run(engine)
    assert engine.view().requests == []


@pytest.mark.parametrize("options", [{"kv": "basic"}, {"window": 32}, {"swap_bytes": 0}])
def test_the_view_agrees_at_every_step_of_every_kind_of_cache(
    model: nn.Module, options: dict[str, object]
):
    engine = make_engine(model, kv_cache_bytes="7blocks", **options)
    for index in range(3):
        engine.add_request(str(index), prompt(20, seed=index), greedy(40, ignore_eos=True))
    states = set()

    def look() -> None:
        states.update(request.state for request in assert_agrees(engine).requests)

    run(engine, look)
    assert "running" in states
    if "window" not in options:
        assert "preempted" in states


def test_more_holders_than_fit_are_the_most_that_do(model: nn.Module):
    engine = make_engine(model, max_num_seqs=200, kv_cache_bytes="400blocks")
    engine.add_request("a", prompt(16), sampled(1, 2, n=150, ignore_eos=True))
    engine.step()
    assert max(assert_agrees(engine).blocks) == MAX_HOLDERS | CACHED


def test_other_threads_look_while_steps_run(model: nn.Module):
    failures: list[BaseException] = []
    with AsyncEngine(model, kv_cache_bytes="40blocks", seed=0) as engine:
        is_done = threading.Event()

        def look() -> None:
            try:
                while not is_done.is_set():
                    view = engine.view()
                    assert all(0 <= request.num_blocks <= 40 for request in view.requests)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=look)
        thread.start()
        streams = [
            engine.stream(prompt(30, seed=index), greedy(40, ignore_eos=True)) for index in range(8)
        ]
        for stream in streams:
            for _ in stream:
                pass
        is_done.set()
        thread.join()
    assert failures == []
