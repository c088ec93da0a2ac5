"""Requests whose tokens leave a window: the same tokens however they are computed, and blocks that
are given back at once.
"""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from helpers.engine_runs import (
    CONFIG,
    ask,
    greedy,
    known_of,
    make_engine,
    make_engine_without_drafts,
    prompt,
    run,
    sampled,
)
from helpers.fast_lane import in_one_way, mostly_slow
from helpers.streaming_reference import streamed_logits, streaming
from helpers.windowed_models import lively_model_and_options, model_and_options
from helpers.workloads import Workload, assert_same, assert_same_logprobs

from mlx_paged.errors import ArgumentError, PromptTooLongError
from mlx_paged.models import qwen3

pytestmark = pytest.mark.usefixtures("run_ahead")
SLOW = pytest.mark.slow


@pytest.fixture
def windowed(request: pytest.FixtureRequest) -> tuple[qwen3.Model, dict]:
    return model_and_options(request.param)


# Each kind, and each way to step with a window with sinks and with several groups of layers.
WAYS = [
    ("streaming", "waiting"),
    ("streaming", "drafting"),
    ("no sinks", "ahead"),
    ("layers", "ahead"),
    ("layers", "drafting"),
    ("all layers", "drafting"),
    ("both", "waiting"),
    ("both", "drafting"),
]
in_many_ways = mostly_slow(("windowed", "run_ahead"), WAYS, indirect=True)


def requests(seed: int, count: int = 6) -> dict:
    rng = random.Random(seed)
    shared = prompt(150, seed=seed)
    return {
        str(number): (
            shared[: rng.choice([0, 16, 57, 96, 150])] + prompt(rng.randint(1, 60), seed=number),
            rng.choice([greedy(rng.randint(1, 60)), sampled(number, rng.randint(1, 60))]),
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


# Each kind and each way to step meet both.
@mostly_slow(
    ("windowed", "run_ahead", "swaps"),
    [
        ("streaming", "waiting", True),
        ("streaming", "drafting", False),
        ("no sinks", "ahead", True),
        ("no sinks", "waiting", False),
        ("layers", "ahead", False),
        ("layers", "drafting", True),
        ("all layers", "drafting", True),
        ("all layers", "ahead", False),
        ("both", "waiting", False),
        ("both", "drafting", True),
    ],
    indirect=["windowed", "run_ahead"],
)
def test_preempted_requests_go_on_with_the_same_tokens(windowed, is_drafting, swaps, monkeypatch):
    model, options = windowed
    # Short prompts, which are admitted together, and answers that grow.
    params = (greedy(44), sampled(1, 40), sampled(2, 50))
    asked = {str(i): (prompt(3 + 2 * i, seed=i), params[i % 3]) for i in range(6)}
    expected = alone(windowed, asked)
    roomy = make_engine(model, max_num_batched_tokens=16, max_num_seqs=6, **options)
    longest = max(len(tokens) + params.max_tokens for tokens, params in asked.values())
    num_blocks = roomy.manager.block_need.max_num_held_blocks(longest) + 2
    engine = make_engine(
        model,
        max_num_batched_tokens=16,
        max_num_seqs=6,
        watermark=0.0,
        enable_prefix_caching=not is_drafting,  # Most kinds meet both.
        swap_bytes=f"{4 * num_blocks}blocks" if swaps else 0,
        **{**options, "kv_cache_bytes": f"{num_blocks}blocks"},
    )
    written = []
    write_blocks = engine.cache.write_blocks
    monkeypatch.setattr(
        engine.cache, "write_blocks", lambda *args: (written.append(args), write_blocks(*args))
    )
    assert ask(engine, asked) == expected
    assert engine.scheduler.num_preemptions > 0
    assert bool(written) == swaps


@in_many_ways
def test_completions_of_one_prompt_are_those_of_requests_alone(windowed):
    model, options = windowed
    tokens = prompt(77)
    engine = make_engine(model, **options)
    engine.add_request("many", tokens, sampled(5, 30, n=3))
    many = run(engine)["many"]
    assert len({tuple(each.token_ids) for each in many.outputs}) == 3
    other = make_engine(
        model, enable_prefix_caching=False, max_num_batched_tokens=9, max_num_seqs=4, **options
    )
    other.add_request("many", tokens, sampled(5, 30, n=3))
    again = run(other)["many"]
    assert [each.token_ids for each in many.outputs] == [each.token_ids for each in again.outputs]


@mostly_slow(
    ("windowed", "run_ahead", "seed"),
    [(*way, number % 3) for number, way in enumerate(WAYS)],
    indirect=["windowed", "run_ahead"],
)
def test_random_requests_are_answered_as_on_a_large_engine_without_a_cache(windowed, seed):
    model, options = windowed
    workload = Workload(seed + 300, 12, model.args.vocab_size)
    own = {name: value for name, value in options.items() if name not in workload.options}
    roomy = Workload(seed + 300, 12, model.args.vocab_size)
    roomy.options |= {"swap_bytes": 0, "kv_cache_bytes": "900blocks"}
    roomy.options |= {"enable_prefix_caching": False}
    expected = roomy.run(model, **own, run_ahead=False).outputs
    tight = workload.run(model, **own)
    for name, output in expected.items():
        assert_same(tight.outputs[name], output)


@pytest.mark.slow
@pytest.mark.parametrize("run_ahead", ["ahead", "drafting"], indirect=True)
def test_a_sequence_without_end_takes_a_constant_number_of_blocks():
    mx.random.seed(3)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG | {"max_position_embeddings": 256}))
    engine = make_engine(
        model, block_size=8, kv_cache_bytes="20blocks", window=64, num_sink_tokens=4
    )
    assert engine.max_model_len is None
    tokens = prompt(300)
    num_tokens = 400  # as many as fill the budget more than twice
    engine.add_request("endless", tokens, greedy(num_tokens, ignore_eos=True))
    used = []
    outputs = run(engine, lambda: used.append(engine.stats().num_used_blocks))
    answer = outputs["endless"].outputs[0]
    assert (len(answer.token_ids), answer.finish_reason) == (num_tokens, "length")
    # 64 tokens, 16 that leave together, and the sinks twice.
    assert max(used) <= 8 + 2 + 2
    assert engine.cache.nbytes_held <= 21 * engine.cache.config.nbytes_per_block
    logits = streamed_logits(model, tokens + answer.token_ids[:100], streaming(64, 8, 16))
    assert logits.argmax(axis=-1)[299:-1].tolist() == answer.token_ids[:100]


@in_many_ways
def test_a_prompt_is_measured_by_what_it_holds_at_a_time(windowed):
    model, options = windowed
    streams = "window" in options
    small = {**options, "kv_cache_bytes": "24blocks", "max_num_batched_tokens": 16}
    engine = make_engine(model, max_num_seqs=2, **small)
    tokens = prompt(400)
    if not streams and model.args.windows[0] is None:
        with pytest.raises(PromptTooLongError, match=r"400 tokens needs 54 blocks .* holds 24"):
            engine.add_request("a", tokens, greedy(5))
    else:
        assert len(ask(engine, {"a": (tokens, greedy(5))})["a"]) == 5


@in_one_way
def test_a_basic_cache_refuses_a_window_by_name():
    model, options = model_and_options("streaming")
    with pytest.raises(ArgumentError, match=r"window=.* needs the paged cache"):
        make_engine(model, kv="basic", **options)


def logprobs_of(engine, asked: dict) -> dict:
    """Of each request, all asked at once, the three best tokens at each place of its answer."""
    for name, question in asked.items():
        engine.add_request(name, *question)
    outputs = {name: output.outputs[0] for name, output in run(engine).items()}
    return {name: outputs[name].logprobs for name in asked}


@pytest.mark.parametrize("run_ahead", ["waiting"], indirect=True)
def test_a_hit_on_blocks_of_the_same_step_moves_no_sinks_before_they_are_written(
    demo: tuple[Any, Any],
):
    model, tokenizer = demo
    rng = random.Random(0)
    tokens = [rng.randrange(model.args.vocab_size) for _ in range(200)]
    params = greedy(5, logprobs=3, ignore_eos=True)
    asked = {"a": (tokens, params), "b": ([*tokens[:150], 7, 8, 9], params)}
    options = {"window": 64, "num_sink_tokens": 4, "max_num_batched_tokens": 2048}
    plain = make_engine(model, tokenizer, enable_prefix_caching=False, **options)
    engine = make_engine(model, tokenizer, **options)
    for _ in range(2):  # The second time, all of both is cached.
        for name, entries in logprobs_of(engine, asked).items():
            (expected,) = logprobs_of(plain, {name: asked[name]}).values()
            assert_same_logprobs(entries, expected, atol=2e-5)
    assert engine.stats().num_hit_tokens >= 96 + 144 + 192


# Sinks, windows and groups of layers as they come. With most of these seeds, sinks once moved on
# before their step had written them.
@pytest.mark.parametrize(
    ("seed", "run_ahead"),
    [
        pytest.param(seed, ("waiting", "ahead", "drafting")[seed % 3], marks=marks)
        for marks, seeds in (((), (10,)), (SLOW, (2, 5, 17, 21)))
        for seed in seeds
    ],
    indirect=["run_ahead"],
)
def test_what_a_step_shares_with_others_of_the_same_step_is_what_it_would_compute(seed):
    rng = random.Random(seed)
    kind = rng.choice(["streaming", "layers", "both"])
    model, options = lively_model_and_options(kind)
    options |= {"block_size": rng.choice([8, 16]), "kv_cache_bytes": "900blocks"}
    if kind == "streaming" or rng.random() < 0.6:
        options |= {"window": rng.choice([24, 48, 64, 90])}
        options |= {"num_sink_tokens": rng.choice([0, 3, 8, 20])}
    stem = prompt(220, seed)
    asked = {
        str(number): (
            stem[: rng.choice([0, 97, 150, 220])] + prompt(rng.randint(1, 40), seed * 10 + number),
            greedy(rng.randint(1, 20), logprobs=3, ignore_eos=True),
        )
        for number in range(6)
    }
    plain = make_engine(model, enable_prefix_caching=False, **options)
    expected = {name: logprobs_of(plain, {name: asked[name]})[name] for name in asked}
    chunk = rng.choice([40, 100, 300, 2048])
    num_mixed = min(chunk, rng.choice([16, 64, 512]))
    engine = make_engine(
        model,
        max_num_seqs=8,
        max_num_batched_tokens=chunk,
        max_num_mixed_tokens=num_mixed,
        **options,
    )
    for _ in range(2):
        for name, entries in logprobs_of(engine, asked).items():
            assert_same_logprobs(entries, expected[name], atol=2e-5)


@pytest.mark.parametrize("run_ahead", ["ahead"], indirect=True)
@pytest.mark.parametrize(
    ("kind", "block_size", "num_blocks"),
    [
        ("layers", 8, 20),
        pytest.param("all layers", 32, 4, marks=SLOW),
        pytest.param("both", 8, 20, marks=SLOW),
        pytest.param("streaming", 8, 10, marks=SLOW),
    ],
)
def test_the_length_of_steps_decides_neither_what_fits_nor_where_an_answer_ends(
    kind, block_size, num_blocks
):
    model, options = model_and_options(kind)
    options |= {"block_size": block_size, "kv_cache_bytes": f"{num_blocks}blocks"}
    ends = []
    for chunk in (1, 17, 4096):
        engine = make_engine(
            model,
            max_num_seqs=1,
            max_num_batched_tokens=chunk,
            max_num_mixed_tokens=chunk,
            **options,
        )
        try:
            engine.add_request("a", prompt(87), greedy(110, ignore_eos=True))
        except PromptTooLongError as error:
            ends.append(str(error))
            continue
        answer = run(engine)["a"].outputs[0]
        ends.append((len(answer.token_ids), answer.finish_reason))
    assert ends == ends[:1] * 3


@pytest.mark.parametrize("run_ahead", ["ahead"], indirect=True)
def test_a_long_prompt_runs_in_steps_that_fit_beside_an_answer():
    """Of 24 blocks, an answer with a window of 20 holds 4; a step of 300 tokens would take 38."""
    model, options = model_and_options("all layers")
    options |= {"kv_cache_bytes": "24blocks"}
    asked = {"answer": (prompt(9), greedy(60)), "prompt": (prompt(300), greedy(20))}
    engine = make_engine(model, max_num_batched_tokens=2048, max_num_mixed_tokens=300, **options)
    assert ask(engine, asked) == alone((model, options | {"kv_cache_bytes": "100blocks"}), asked)
    assert engine.scheduler.num_preemptions == 0
