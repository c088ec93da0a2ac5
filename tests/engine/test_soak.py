"""Hundreds of requests of every kind: after each step everything adds up, and memory stays inside
the budget.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from helpers.engine_runs import CONFIG, livelier_model, load_demo
from paged_testing.async_soak import MemoryInUse, memory_in_use, run_requests
from paged_testing.soak import Soak, make_request

from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.models import qwen3

# K/V that outweigh the activations: 4 KiB a token.
LARGE_KV = CONFIG | {"num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 32}


@pytest.fixture(scope="module")
def large_kv_model() -> qwen3.Model:
    return livelier_model(LARGE_KV)


@pytest.mark.slow
# Each way to step, without drafts and with them, meets swapping and computing again.
@pytest.mark.parametrize(
    ("kind", "swap"),
    [("waiting", True), ("ahead", False), ("look-up", True), ("draft model", False)],
)
def test_a_soak_leaves_nothing_behind_and_every_request_gets_its_own_tokens(
    large_kv_model: qwen3.Model, monkeypatch: pytest.MonkeyPatch, swap: bool, kind: str
):
    options = {"swap_bytes": "60blocks" if swap else 0, "run_ahead": kind != "waiting"}
    if kind == "draft model":
        options["draft_model"] = large_kv_model
    num_drafts = 5 if kind in ("look-up", "draft model") else 0
    soak = Soak(large_kv_model, int(swap), num_drafts=num_drafts, engine_options=options)
    soak.run(0, 50)
    soak.run(50, 50)
    soak.check_end()
    counts, stats = soak.counts, soak.engine.stats()
    assert counts["requests"] == len(soak.outputs) == 100
    # All that it is about has happened.
    for kind in (
        "length",
        "stop",
        "abort",
        "error",
        "forked",
        "interruptions",
        "failed steps",
        "shrunk bytes",
    ):
        assert counts[kind] > 0, kind
    assert (stats.spec_decoding.num_accepted_tokens > 20) == (num_drafts > 0)
    assert (
        stats.num_preemptions > (1 if num_drafts else 5)
        and stats.num_evictions > 10
        and stats.num_hit_tokens > 1000
    )
    for number in random.Random(0).sample(range(100), 6):
        soak.check_tokens(make_request(soak.seed, number, 61))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_formats_windows_and_drafts_go_together(large_kv_model: qwen3.Model, seed: int):
    rng = random.Random(seed)
    window = rng.choice([24, 40, 64])
    options = {
        "kv_format": rng.choice(["8", "4", "K:8,V:4", "K:4,V:8"]),
        "window": window,
        "num_sink_tokens": rng.choice([0, 4, 16]),
        "kv_cache_bytes": f"{16 + window // 2}blocks",
        "run_ahead": rng.random() < 0.5,
    }
    soak = Soak(large_kv_model, 10 + seed, num_drafts=5, engine_options=options)
    soak.run(0, 80)
    soak.check_end()
    counts, stats = soak.counts, soak.engine.stats()
    for kind in ("length", "abort", "error", "forked", "interruptions", "failed steps"):
        assert counts[kind] > 0, kind
    assert stats.spec_decoding.num_accepted_tokens > 0
    assert stats.num_preemptions > 0 and stats.num_hit_tokens > 200
    for number in random.Random(0).sample(range(80), 6):
        soak.check_tokens(make_request(soak.seed, number, 61))


@pytest.mark.slow
def test_the_budget_is_grown_into_and_given_back(large_kv_model: qwen3.Model):
    soak = Soak(large_kv_model, seed=2, engine_options={"kv_cache_bytes": "1000blocks"})
    config = soak.engine.cache.config
    held = [soak.engine.stats().nbytes_held]
    assert held[0] == 65 * config.nbytes_per_block < config.nbytes // 10
    soak.rng.random = lambda: 0.5  # no shrinking, no interruption
    soak.counts["steps"] = 0
    for number in range(40):
        request = make_request(2, number, 61)
        soak.engine.add_request(str(number), request.prompt, request.params)
        soak.in_flight[str(number)] = request, 0
        soak.step()
        held.append(soak.engine.stats().nbytes_held)
    while soak.engine.has_unfinished_requests():
        soak.step()
    assert held == sorted(held) and held[-1] > 1.5 * held[0]
    assert held[-1] < config.nbytes, "the budget is more than they need"
    soak.check_end()
    assert soak.engine.stats().nbytes_held == held[0]


@pytest.mark.slow
def test_small_requests_of_every_kind_leave_next_to_nothing_in_memory():
    async def run() -> tuple[MemoryInUse, MemoryInUse]:
        async with AsyncEngine(*load_demo(), kv_cache_bytes="200blocks") as engine:
            # What fills up does: the pool, and what tokenizers and grammars remember.
            await run_requests(engine, 0, 700)
            before = memory_in_use()
            await run_requests(engine, 700, 300)
            return before, memory_in_use()

    before, after = asyncio.run(run())
    assert abs(after.num_objects - before.num_objects) < 300
    assert abs(after.mlx - before.mlx) < 4096
    # A tokenizer that remembers all texts keeps some 3 KB of each.
    assert after.malloc - before.malloc < 300 * 1000
