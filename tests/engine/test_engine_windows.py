"""Requests whose tokens leave a window: the same tokens however they are computed, and blocks that
are given back at once.
"""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
from helpers.engine_helpers import CONFIG
from helpers.engine_runs import (
    ask,
    assert_nothing_held,
    greedy,
    known_of,
    make_engine,
    make_engine_without_drafts,
    prompt,
    run,
    sampled,
)
from helpers.streaming_reference import streamed_logits, streaming
from helpers.windowed_models import model_and_options
from helpers.workloads import Workload, assert_same

from mlx_paged.errors import ArgumentError, PromptTooLongError
from mlx_paged.models import qwen3

pytestmark = pytest.mark.usefixtures("run_ahead")


@pytest.fixture
def windowed(request: pytest.FixtureRequest) -> tuple[qwen3.Model, dict]:
    return model_and_options(request.param)


# Each kind, and each way to step with a window with sinks and with several groups of layers.
in_many_ways = pytest.mark.parametrize(
    ("windowed", "run_ahead"),
    [
        ("streaming", "waiting"),
        ("streaming", "drafting"),
        ("no sinks", "ahead"),
        ("layers", "ahead"),
        ("layers", "drafting"),
        ("all layers", "drafting"),
        ("both", "waiting"),
        ("both", "drafting"),
    ],
    indirect=True,
)


def requests(seed: int, count: int = 7) -> dict:
    rng = random.Random(seed)
    shared = prompt(150, seed=seed)
    return {
        str(number): (
            shared[: rng.choice([0, 16, 57, 96, 150])] + prompt(rng.randint(1, 60), seed=number),
            rng.choice([greedy(rng.randint(1, 90)), sampled(number, rng.randint(1, 90))]),
        )
        for number in range(count)
    }


def alone(windowed, asked: dict) -> dict:
    """The tokens of each request on an engine of its own, the same in all ways to step."""
    model, options = windowed
    key = repr((options, asked))
    known = known_of(model)
    if key not in known:
        plainest = {**options, "enable_prefix_caching": False, "run_ahead": False}
        known[key] = {
            name: ask(make_engine_without_drafts(model, **plainest), {name: question})[name]
            for name, question in asked.items()
        }
    return known[key]


@in_many_ways
def test_tokens_do_not_depend_on_the_batch_its_chunks_or_what_is_cached(windowed, is_drafting):
    model, options = windowed
    asked = requests(1)
    expected = alone(windowed, asked)
    # Most kinds meet both.
    chunk, num_seqs = (300, 9) if is_drafting else (16, 3)
    engine = make_engine(
        model,
        max_num_batched_tokens=chunk,
        max_num_mixed_tokens=min(chunk, 40),
        max_num_seqs=num_seqs,
        **{**options, "kv_cache_bytes": "400blocks"},
    )
    assert ask(engine, asked) == expected
    num_hits = engine.stats().num_hit_tokens
    assert ask(engine, asked) == expected, "warm as cold"
    assert engine.stats().num_hit_tokens > num_hits + 100
    assert_nothing_held(engine)


@in_many_ways
def test_preempted_requests_go_on_with_the_same_tokens(windowed, is_drafting):
    model, options = windowed
    # Short prompts, which are admitted together, and answers that grow.
    params = (greedy(50), sampled(1, 45), sampled(2, 60))
    asked = {str(i): (prompt(3 + 2 * i, seed=i), params[i % 3]) for i in range(8)}
    expected = alone(windowed, asked)
    roomy = make_engine(model, max_num_batched_tokens=16, max_num_seqs=6, **options)
    longest = max(len(tokens) + params.max_tokens for tokens, params in asked.values())
    num_blocks = roomy.cache.manager.max_num_held_blocks(longest) + 2
    engine = make_engine(
        model,
        max_num_batched_tokens=16,
        max_num_seqs=6,
        watermark=0.0,
        enable_prefix_caching=not is_drafting,  # Most kinds meet both.
        **{**options, "kv_cache_bytes": f"{num_blocks}blocks"},
    )
    assert ask(engine, asked) == expected
    assert engine.scheduler.num_preemptions > 0
    assert_nothing_held(engine)


@in_many_ways
def test_completions_of_one_prompt_are_those_of_requests_alone(windowed):
    model, options = windowed
    tokens = prompt(77)
    engine = make_engine(model, **options)
    engine.add_request("many", tokens, sampled(5, 60, n=3))
    many = run(engine)["many"]
    assert len({tuple(each.token_ids) for each in many.outputs}) == 3
    other = make_engine(
        model,
        enable_prefix_caching=False,
        max_num_batched_tokens=9,
        max_num_seqs=4,
        **options,
    )
    other.add_request("many", tokens, sampled(5, 60, n=3))
    again = run(other)["many"]
    assert [each.token_ids for each in many.outputs] == [each.token_ids for each in again.outputs]
    assert_nothing_held(engine)


@in_many_ways
@pytest.mark.parametrize("seed", range(3))
def test_random_requests_are_answered_as_on_a_large_engine_without_a_cache(windowed, seed):
    model, options = windowed
    workload = Workload(seed + 300, 12, model.args.vocab_size)
    own = {name: value for name, value in options.items() if name not in workload.options}
    workload.options |= {"swap_bytes": 0}
    known = known_of(model)
    if ("roomy", seed) not in known:
        roomy = Workload(seed + 300, 12, model.args.vocab_size)
        roomy.options |= {
            "swap_bytes": 0,
            "kv_cache_bytes": "900blocks",
            "enable_prefix_caching": False,
        }
        known["roomy", seed] = roomy.run(model, **own, run_ahead=False).outputs
    tight = workload.run(model, **own)
    for name, output in known["roomy", seed].items():
        assert_same(tight.outputs[name], output)


def test_a_sequence_without_end_takes_a_constant_number_of_blocks():
    mx.random.seed(3)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG | {"max_position_embeddings": 256}))
    engine = make_engine(
        model, block_size=8, kv_cache_bytes="20blocks", window=64, num_sink_tokens=4
    )
    assert engine.max_model_len is None
    tokens = prompt(300)
    num_tokens = 700  # as many as fill the budget more than four times
    engine.add_request("endless", tokens, greedy(num_tokens, ignore_eos=True))
    used = []
    outputs = run(engine, lambda: used.append(engine.stats().num_used_blocks))
    answer = outputs["endless"].outputs[0]
    assert (len(answer.token_ids), answer.finish_reason) == (num_tokens, "length")
    # 64 tokens, 16 that leave together, and the sinks twice.
    assert max(used) <= 8 + 2 + 2
    assert engine.cache.nbytes_held <= 21 * engine.cache.config.nbytes_per_block
    logits = streamed_logits(model, tokens + answer.token_ids[:200], streaming(64, 8, 16))
    assert logits.argmax(axis=-1)[299:-1].tolist() == answer.token_ids[:200]


@in_many_ways
def test_a_prompt_is_measured_by_what_it_holds_at_a_time(windowed):
    model, options = windowed
    streams = "window" in options
    small = {**options, "kv_cache_bytes": "24blocks", "max_num_batched_tokens": 16}
    engine = make_engine(model, max_num_seqs=2, **small)
    tokens = prompt(400)
    if not streams and model.args.windows[0] is None:
        with pytest.raises(PromptTooLongError, match=r"400 tokens needs 56 blocks .* holds 24"):
            engine.add_request("a", tokens, greedy(5))
    else:
        assert len(ask(engine, {"a": (tokens, greedy(5))})["a"]) == 5


@in_many_ways
def test_what_can_not_go_with_windows_is_refused_by_name(windowed):
    model, options = windowed
    with pytest.raises(ArgumentError, match="swap_bytes='1M' needs kv='paged' and layers that"):
        make_engine(model, swap_bytes="1M", **options)
    if "window" in options:
        with pytest.raises(ArgumentError, match=r"window=.* needs the paged cache"):
            make_engine(model, kv="basic", **options)
