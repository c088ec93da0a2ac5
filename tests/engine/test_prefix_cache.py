"""A prefix hit changes speed and nothing else: warm tokens are cold ones, and hits are as many as
they should be.
"""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
from helpers.engine_runs import (
    answer,
    ask,
    ask_alone,
    greedy,
    make_engine,
    prompt,
    run,
    sampled,
    tiny_models,
)
from helpers.fast_lane import mostly_slow
from mlx_lm.generate import generate_step as mlx_lm_generate_step

from mlx_paged.models import qwen3

pytestmark = pytest.mark.usefixtures("run_ahead")

MAX_TOKENS = 12


def family(rng: random.Random, num_prompts: int) -> list[list[int]]:
    """Prompts that share beginnings: each is a beginning of an earlier one with something else
    behind it.
    """
    prompts = [prompt(rng.randint(30, 90), seed=rng.randrange(1000))]
    while len(prompts) < num_prompts:
        parent = rng.choice(prompts)
        # At block borders and one beside them more often than not.
        cut = rng.choice(
            [
                rng.randint(0, len(parent)),
                16 * rng.randint(0, len(parent) // 16) + rng.randint(-1, 1),
            ]
        )
        tail = prompt(rng.randint(0, 40), seed=rng.randrange(1000))
        prompts.append((parent[: max(0, cut)] + tail)[:120] or [rng.randrange(61)])
    return prompts


def expected_hits(tokens: list[int], cached: list[list[int]], block_size: int) -> int:
    """Of what was computed before, the longest common beginning in whole blocks, less the last
    token.
    """
    longest = 0
    for other in cached:
        common = next(
            (i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), None
        )
        longest = max(longest, min(len(tokens), len(other)) if common is None else common)
    return min(longest, len(tokens) - 1) // block_size * block_size


# A seed decides about sizes and prompts; each is stepped in one way, and each way has several.
@mostly_slow(
    ("run_ahead", "seed"),
    [
        (way, seed)
        for seed, way in enumerate(["waiting", "ahead", "drafting", "drafting", "waiting"])
    ],
    quick=(1,),
    indirect=["run_ahead"],
)
def test_warm_tokens_are_those_of_a_cold_engine_and_of_mlx_lm(seed: int):
    ours, theirs = tiny_models()
    rng = random.Random(seed)
    block_size = rng.choice([8, 16, 32])
    budget = rng.choice([1, 2, 5, 17, 64, 500])
    engine = make_engine(
        ours,
        block_size=block_size,
        max_num_batched_tokens=max(budget, 4),
        max_num_seqs=min(4, budget) if budget > 1 else 1,
        # From little more than one request to all of them; the smaller ones evict and preempt.
        kv_cache_bytes=f"{rng.choice([140, 200, 400, 2000]) // block_size}blocks",
    )
    prompts = family(rng, 12)
    alone: dict[int, list[int]] = {}
    for round in range(2):
        # Most of them come together; some hit what others of the same step are about to write.
        asked = rng.sample(range(len(prompts)), 9)
        answers = ask(engine, {f"{round} {n}": (prompts[n], greedy(MAX_TOKENS)) for n in asked})
        for n in asked:
            if n not in alone:
                alone[n] = ask_alone(ours, prompts[n], greedy(MAX_TOKENS))
                steps = mlx_lm_generate_step(mx.array(prompts[n]), theirs, max_tokens=MAX_TOKENS)
                assert alone[n] == [int(token) for token, _ in steps]
            assert answers[f"{round} {n}"] == alone[n], (round, n)
    assert engine.stats().num_hit_tokens > 0


# Every two of a way to step, a size of blocks and a size of chunks meet once.
@mostly_slow(
    ("run_ahead", "block_size", "chunk"),
    [
        (way, block_size, chunk)
        for i, way in enumerate(["waiting", "ahead", "drafting"])
        for j, block_size in enumerate([8, 16, 32])
        for chunk in [[8, 33, 500][(i + j) % 3]]
    ],
    indirect=["run_ahead"],
    quick=(4,),
)
def test_hits_are_all_whole_blocks_that_were_computed_before(
    model: qwen3.Model, block_size: int, chunk: int
):
    rng = random.Random(block_size + chunk)
    engine = make_engine(
        model,
        block_size=block_size,
        max_num_batched_tokens=chunk,
        max_num_seqs=2,
        kv_cache_bytes="1000blocks",
    )
    cached: list[list[int]] = []
    total = 0
    for n, tokens in enumerate(family(rng, 12)):
        engine.add_request(str(n), tokens, greedy(MAX_TOKENS))
        output = run(engine)[str(n)]
        assert output.num_cached_tokens == expected_hits(tokens, cached, block_size)
        total += output.num_cached_tokens
        answer = output.outputs[0].token_ids
        assert answer == ask_alone(model, tokens, greedy(MAX_TOKENS))
        # The last token's K/V were never computed.
        cached.append(tokens + answer[:-1])
    assert engine.stats().num_hit_tokens == total > 0
    assert engine.stats().num_evictions == 0


def test_a_prompt_asked_again_is_computed_but_for_its_last_token_in_whole_blocks(
    model: qwen3.Model,
):
    engine = make_engine(model)
    for num_tokens, num_cached in ((15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (200, 192)):
        params = greedy(1)
        assert answer(engine, prompt(num_tokens), params).num_cached_tokens == 0
        assert answer(engine, prompt(num_tokens), params).num_cached_tokens == num_cached


def test_requests_that_come_together_share_what_the_first_is_about_to_compute(model: qwen3.Model):
    engine = make_engine(model)
    shared = prompt(64)
    tails = [prompt(n, seed=1) for n in (1, 16, 20)]
    for n, tail in enumerate(tails):
        engine.add_request(str(n), shared + tail, greedy(MAX_TOKENS))
    engine.step()
    tables = engine.manager.tables
    assert {tuple(tables[str(n), 0].block_ids[:4]) for n in range(3)} == {
        tuple(tables["0", 0].block_ids[:4])
    }
    assert engine.stats().num_hit_tokens == 2 * 64
    outputs = run(engine)
    assert [outputs[str(n)].num_cached_tokens for n in range(3)] == [0, 64, 64]
    for n, tail in enumerate(tails):
        assert outputs[str(n)].outputs[0].token_ids == ask_alone(
            model, shared + tail, greedy(MAX_TOKENS)
        )


def test_the_next_turn_hits_the_blocks_of_the_answer_before(model: qwen3.Model):
    engine = make_engine(model)
    conversation = prompt(20)
    for turn in range(4):
        output = answer(engine, conversation, greedy(40))
        # All but the last token of the last answer, and the new question.
        num_known = 0 if turn == 0 else len(conversation) - 7 - 1
        assert output.num_cached_tokens == num_known // 16 * 16
        answered = output.outputs[0].token_ids
        assert answered == ask_alone(model, conversation, greedy(40))
        conversation = conversation + answered + prompt(7, seed=turn)
    assert engine.stats().num_hit_tokens > 200


def test_requests_of_another_salt_share_nothing(model: qwen3.Model):
    engine = make_engine(model)
    cached = {}
    for request_id, salt in (
        ("none", None),
        ("a", "A"),
        ("b", "B"),
        ("a again", "A"),
        ("none again", None),
    ):
        engine.add_request(request_id, prompt(50), greedy(3), cache_salt=salt)
        cached |= {id: output.num_cached_tokens for id, output in run(engine).items()}
    assert cached == {"none": 0, "a": 0, "b": 0, "a again": 48, "none again": 48}


def test_an_engine_without_prefix_caching_finds_nothing_and_forgets_everything(model: qwen3.Model):
    engine = make_engine(model, enable_prefix_caching=False)
    for _ in range(2):
        assert answer(engine, prompt(50), greedy(3)).num_cached_tokens == 0
    stats = engine.stats()
    assert (stats.num_hit_tokens, stats.num_cached_blocks, stats.num_queried_tokens) == (0, 0, 0)


def test_the_prefix_cache_can_be_forgotten_when_no_request_runs(model: qwen3.Model):
    engine = make_engine(model)
    engine.add_request("a", prompt(50), greedy(3))
    engine.step()
    assert not engine.reset_prefix_cache()
    run(engine)
    assert engine.stats().num_cached_blocks == 3
    assert engine.reset_prefix_cache()
    engine.add_request("a", prompt(50), greedy(3))
    assert run(engine)["a"].num_cached_tokens == 0


def test_sampled_and_penalised_requests_draw_the_same_from_a_warm_cache(model: qwen3.Model):
    params = sampled(
        seed=1, max_tokens=30, repetition_penalty=1.3, presence_penalty=0.5, top_p=0.95
    )
    engine = make_engine(model)
    cold, warm = (ask(engine, {"a": (prompt(70), params)})["a"] for _ in range(2))
    assert cold == warm == ask_alone(model, prompt(70), params)
    assert engine.stats().num_hit_tokens == 64


def test_logprobs_of_a_warm_run_are_those_of_a_cold_one(model: qwen3.Model):
    engine = make_engine(model)
    entries = []
    for _ in range(2):
        entries.append(answer(engine, prompt(70), greedy(10, logprobs=3)).outputs[0].logprobs)
    for cold, warm in zip(*entries, strict=True):
        assert list(cold) == list(warm)
        for token, entry in cold.items():
            assert warm[token].logprob == pytest.approx(entry.logprob, abs=1e-5)
