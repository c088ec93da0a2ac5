"""``Engine.set_budget``: a budget of K/V and states that changes while the engine lives."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.adapted_models import adapted_model, greedy_answer
from helpers.disk_tiers import tier_stats, tiered
from helpers.engine_runs import answer, greedy, make_engine, prompt, small_model
from paged_testing.integrity import check_scheduler

from mlx_paged.errors import ArgumentError, PromptTooLongError


@pytest.mark.parametrize("kv", ["paged", "basic"])
def test_a_lowered_budget_evicts_what_was_used_first_and_a_raised_one_admits_again(kv: str):
    engine = make_engine(small_model(), kv=kv, block_size=8, kv_cache_bytes="200blocks")
    first, last, long = prompt(400, 1), prompt(400, 2), prompt(900, 3)
    for tokens in (last, first):
        expected = answer(engine, tokens, greedy(3)).outputs[0].token_ids
    block, whole = engine.cache.config.nbytes_per_block, engine.stats().nbytes_budget
    assert whole == 201 * block
    assert engine.set_budget(101 * block) == 101 * block == engine.stats().nbytes_budget
    check_scheduler(engine.scheduler)
    assert engine.cache.nbytes_held <= 101 * block
    # The last one that was used is still there, and gives the same tokens.
    again = answer(engine, first, greedy(3))
    assert again.num_cached_tokens == (392 if kv == "paged" else 0)
    assert again.outputs[0].token_ids == expected
    with pytest.raises(PromptTooLongError, match="needs 113 blocks of 8, the budget holds 100"):
        answer(engine, long, greedy(3))
    assert engine.set_budget(10**12) == whole
    assert len(answer(engine, long, greedy(3)).outputs[0].token_ids) == 3
    with pytest.raises(ArgumentError, match="nbytes must be a whole number, at least 0"):
        engine.set_budget(-1)
    assert engine.set_budget(0) == 2 * block
    assert answer(engine, prompt(5), greedy(2)).error is None


def test_unfinished_requests_keep_the_budget_that_they_were_admitted_to():
    engine = make_engine(small_model(), block_size=8, kv_cache_bytes="100blocks")
    whole = engine.stats().nbytes_budget
    engine.add_request("a", prompt(300), greedy(2))
    assert engine.set_budget(whole // 4) == whole
    engine.step()
    assert engine.set_budget(whole // 4) == whole
    engine.abort("a")
    engine.step()
    assert engine.set_budget(whole // 4) <= whole // 4


def test_evicted_blocks_come_back_from_the_folder(tmp_path: Path):
    options = {"block_size": 8, "kv_cache_bytes": "100blocks"}
    with tiered(small_model(), tmp_path, **options) as engine:
        tokens = answer(engine, prompt(500), greedy(3)).outputs[0].token_ids
        assert engine.set_budget(0) == 2 * engine.cache.config.nbytes_per_block
        engine.set_budget(10**12)
        again = answer(engine, prompt(500), greedy(3))
        assert again.num_read_tokens > 480 and again.outputs[0].token_ids == tokens
        assert tier_stats(engine).num_dropped_blocks == 0


def test_states_and_kv_are_within_a_lowered_budget():
    engine = make_engine(
        adapted_model("falcon_h1"), block_size=8, max_num_seqs=2, kv_cache_bytes=2**22
    )
    for seed in range(20):
        answer(engine, prompt(60, seed), greedy(3))
    budget = engine.cache.shared_budget
    assert budget is not None
    before, used = engine.cache.pool.num_blocks, budget.nbytes_used
    assert engine.set_budget(used // 2) == used // 2
    check_scheduler(engine.scheduler)
    assert budget.nbytes_used <= used // 2
    # K/V and checkpoints lose about the same share.
    assert engine.cache.pool.num_blocks >= before // 4
    assert 0 < len(engine.manager.states.checkpoints) < 40
    again = answer(engine, prompt(60, 19), greedy(3))
    assert again.num_cached_tokens == 56
    assert again.outputs[0].token_ids == greedy_answer("falcon_h1", prompt(60, 19), 3)
    assert engine.set_budget(2**30) == 2**22
