"""An engine with basic K/V goes on from the last sequence that ended, as far as a prompt begins
like it, and says the same tokens as mlx-lm.
"""

from __future__ import annotations

import mlx.core as mx
import pytest
from helpers.engine_runs import greedy, make_engine, prompt, run, tiny_models
from mlx_lm.generate import generate_step
from paged_testing.integrity import check_scheduler

from mlx_paged.engine.engine import Engine
from mlx_paged.models import qwen3
from mlx_paged.request import RequestOutput


def answer(
    engine: Engine, token_ids: list[int], max_tokens: int = 20, **options: str
) -> RequestOutput:
    engine.add_request("a", token_ids, greedy(max_tokens), **options)
    return run(engine)["a"]


def stock_tokens(token_ids: list[int], num_tokens: int = 20) -> list[int]:
    tokens = generate_step(mx.array(token_ids), tiny_models()[1], max_tokens=num_tokens)
    return [int(token) for token, _ in tokens]


@pytest.mark.parametrize("run_ahead", [False, True])
def test_each_turn_computes_what_is_new(model: qwen3.Model, run_ahead: bool):
    engine = make_engine(model, kv="basic", run_ahead=run_ahead)
    told: list[int] = []
    for turn in range(4):
        held = max(0, len(told) - 1) // 16 * 16  # the last token was sampled and not computed
        told += prompt(13 + turn, seed=turn)
        output = answer(engine, told)
        assert output.num_cached_tokens == held
        assert output.outputs[0].token_ids == stock_tokens(told)
        told += output.outputs[0].token_ids
        check_scheduler(engine.scheduler)
    stats = engine.stats()
    assert 0 < stats.num_hit_tokens < stats.num_queried_tokens


def test_requests_that_run_share_nothing_and_the_last_to_end_is_kept(model: qwen3.Model):
    engine, told = make_engine(model, kv="basic"), prompt(40)
    expected = stock_tokens(told)
    for name in ("a", "b", "c"):
        engine.add_request(name, told, greedy(20))
    outputs = run(engine)
    assert [output.num_cached_tokens for output in outputs.values()] == [0, 0, 0]
    assert all(output.outputs[0].token_ids == expected for output in outputs.values())
    for name in ("d", "e"):
        engine.add_request(name, told, greedy(20))
    outputs = run(engine)
    assert [outputs[name].num_cached_tokens for name in ("d", "e")] == [32, 0]
    assert all(output.outputs[0].token_ids == expected for output in outputs.values())


def test_a_salt_keeps_what_is_kept_from_others(model: qwen3.Model):
    engine, told = make_engine(model, kv="basic"), prompt(40)
    answer(engine, told, cache_salt="mine")
    assert answer(engine, told).num_cached_tokens == 0
    answer(engine, told, cache_salt="mine")
    assert answer(engine, told, cache_salt="mine").num_cached_tokens == 32


@pytest.mark.parametrize(
    "options", [{"enable_prefix_caching": False}, {"kv_cache_bytes": "4blocks"}]
)
def test_nothing_is_kept_where_it_is_not_wanted_or_does_not_fit(
    model: qwen3.Model, options: dict[str, object]
):
    engine, told = make_engine(model, kv="basic", **options), prompt(40)
    first = answer(engine, told, max_tokens=10)
    answer(engine, prompt(40, seed=7), max_tokens=10)
    again = answer(engine, told, max_tokens=10)
    assert again.num_cached_tokens == 0
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_the_memory_held_stays_within_the_budget(model: qwen3.Model):
    engine = make_engine(model, kv="basic", kv_cache_bytes="9blocks")
    budget = 9 * engine.cache.config.nbytes_per_block
    for index in range(5):
        engine.add_request(str(index), prompt(20 + index, seed=index), greedy(40, n=1 + index % 3))
    while engine.has_unfinished_requests():
        engine.step()
        assert engine.cache.nbytes_held <= budget
    assert engine.stats().num_preemptions > 0


def test_a_reset_of_the_prefix_cache_forgets_the_last_sequence(model: qwen3.Model):
    engine, told = make_engine(model, kv="basic"), prompt(40)
    for num_held in (0, 32):
        assert answer(engine, told).num_cached_tokens == num_held
    engine.add_request("b", told, greedy(20))
    engine.step()
    assert not engine.reset_prefix_cache()
    run(engine)
    assert engine.reset_prefix_cache()
    output = answer(engine, told)
    assert output.num_cached_tokens == 0 and output.outputs[0].token_ids == stock_tokens(told)
