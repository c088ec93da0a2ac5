"""Log-probabilities of prompts are the model's own, however a prompt is computed."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers.engine_runs import (
    answer,
    ask_alone,
    greedy,
    make_engine,
    prompt,
    run,
    sampled,
    tiny_models,
)

from mlx_paged import LLM
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.scheduling import scheduler
from mlx_paged.models import qwen3
from mlx_paged.request import RequestOutput

pytestmark = pytest.mark.usefixtures("run_ahead")


def exact_logprobs(tokens: list[int]) -> np.ndarray:
    """``[num_tokens, vocab_size]`` by mlx-lm's model, normalised in float64."""
    logits = np.array(tiny_models()[1](mx.array([tokens]))[0], np.float64)
    largest = logits.max(axis=-1, keepdims=True)
    return logits - largest - np.log(np.exp(logits - largest).sum(axis=-1, keepdims=True))


def check(output: RequestOutput, tokens: list[int], num_top: int) -> None:
    assert output.error is None
    exact, entries = exact_logprobs(tokens), output.prompt_logprobs
    assert entries is not None and len(entries) == len(tokens) and entries[0] is None
    for place in range(1, len(tokens)):
        row, token, entry = exact[place - 1], tokens[place], entries[place]
        assert entry is not None
        best = np.argsort(-row)[:num_top].tolist()
        rank = 1 + int((row > row[token]).sum())
        assert list(entry) == [*best, *([token] if token not in best else [])]
        assert [each.rank for each in entry.values()] == [
            *range(1, num_top + 1),
            *([rank] if token not in best else []),
        ]
        for each, logprob in entry.items():
            assert abs(logprob.logprob - row[each]) < 1e-4


@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize(
    "options", [{}, {"kv": "basic"}, {"max_num_seqs": 8, "max_num_batched_tokens": 16}], ids=str
)
def test_they_are_the_models_own_for_each_token_but_the_first(
    model: qwen3.Model, num_top: int, options: dict[str, Any]
):
    engine = make_engine(model, **options)
    params = greedy(6, prompt_logprobs=num_top, temperature=0.5, logit_bias={3: 9.0})
    engine.add_request("a", prompt(50), params)
    engine.add_request("b", prompt(37), sampled(1, 5, prompt_logprobs=num_top))
    engine.add_request("plain", prompt(20), greedy(6))
    outputs = run(engine)
    check(outputs["a"], prompt(50), num_top)
    check(outputs["b"], prompt(37), num_top)
    assert outputs["plain"].prompt_logprobs is None
    assert outputs["plain"].outputs[0].token_ids == ask_alone(model, prompt(20), greedy(6))


def test_a_prompt_of_one_token_has_none(model: qwen3.Model):
    engine = make_engine(model)
    assert answer(engine, [5], greedy(3, prompt_logprobs=2)).prompt_logprobs == [None]


def rows_of_logits(engine: Engine) -> list[tuple[int, ...]]:
    """The shape of the logits of each step that the engine runs from here on."""
    shapes: list[tuple[int, ...]] = []
    launch = engine.runner.launch

    def launch_and_look(*args: Any) -> Any:
        logits, pooled = launch(*args)
        shapes.append(logits.shape)
        return logits, pooled

    engine.runner.launch = launch_and_look  # type: ignore[method-assign]
    return shapes


def test_few_rows_of_logits_are_there_at_a_time(
    model: qwen3.Model, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scheduler, "MAX_SCORED_ROWS", 24)
    engine = make_engine(model)
    shapes = rows_of_logits(engine)
    for seed in range(3):
        engine.add_request(str(seed), prompt(100, seed), greedy(4, prompt_logprobs=1))
    outputs = run(engine)
    for seed in range(3):
        check(outputs[str(seed)], prompt(100, seed), 1)
    # One row of each request beside those that are scored.
    assert max(rows for rows, _ in shapes) <= 24 + 3 < sum(rows for rows, _ in shapes)


def test_what_has_to_be_scored_is_computed_though_it_is_cached(model: qwen3.Model):
    engine = make_engine(model)
    expected = answer(engine, prompt(64), greedy(4)).outputs[0].token_ids
    scored = answer(engine, prompt(64), greedy(4, prompt_logprobs=2))
    check(scored, prompt(64), 2)
    assert (scored.num_cached_tokens, scored.outputs[0].token_ids) == (0, expected)
    again = answer(engine, prompt(64), greedy(4))
    assert (again.num_cached_tokens, again.outputs[0].token_ids) == (48, expected)


@pytest.mark.parametrize("swap_bytes", [0, "40blocks"])
def test_a_preempted_prompt_is_scored_once(model: qwen3.Model, swap_bytes: Any):
    engine = make_engine(
        model,
        kv_cache_bytes="12blocks",
        max_num_seqs=8,
        max_num_batched_tokens=16,
        swap_bytes=swap_bytes,
        watermark=0.0,
    )
    for name, priority in (("low", 5), ("high", 0)):
        engine.add_request(name, prompt(64, priority), greedy(60, prompt_logprobs=2))
        for _ in range(3):
            engine.step()
    outputs = run(engine)
    check(outputs["low"], prompt(64, 5), 2)
    check(outputs["high"], prompt(64, 0), 2)
    assert engine.stats().num_preemptions
    for name, priority in (("low", 5), ("high", 0)):
        expected = ask_alone(model, prompt(64, priority), greedy(60))
        assert outputs[name].outputs[0].token_ids == expected


def test_several_completions_share_one_scored_prompt(model: qwen3.Model):
    engine = make_engine(
        model, kv_cache_bytes="14blocks", max_num_seqs=8, max_num_batched_tokens=32
    )
    engine.add_request("a", prompt(50), sampled(3, 30, n=4, prompt_logprobs=3))
    output = run(engine)["a"]
    check(output, prompt(50), 3)
    alone = make_engine(model)
    alone.add_request("a", prompt(50), sampled(3, 30, n=4))
    expected = run(alone)["a"]
    assert [each.token_ids for each in output.outputs] == [
        each.token_ids for each in expected.outputs
    ]


def test_a_step_that_fails_is_scored_when_it_runs_again(model: qwen3.Model):
    engine = make_engine(model, max_num_seqs=8, max_num_batched_tokens=16)
    engine.add_request("a", prompt(60), greedy(4, prompt_logprobs=1))
    engine.add_request("b", prompt(40), greedy(4, prompt_logprobs=1))
    launch, num_calls = engine.runner.launch, 0

    def fails_at_times(*args: Any) -> mx.array:
        nonlocal num_calls
        num_calls += 1
        if num_calls in (2, 5) and len(args[0].scheduled) > 1:
            raise RuntimeError("out of memory")
        return launch(*args)

    engine.runner.launch = fails_at_times  # type: ignore[method-assign]
    outputs = run(engine)
    check(outputs["a"], prompt(60), 1)
    check(outputs["b"], prompt(40), 1)


def test_an_abort_while_the_prompt_is_computed_keeps_what_is_known(model: qwen3.Model):
    engine = make_engine(model, max_num_seqs=8, max_num_batched_tokens=16)
    engine.add_request("a", prompt(60), greedy(4, prompt_logprobs=0))
    engine.step()
    engine.step()
    engine.abort("a")
    known = run(engine)["a"].prompt_logprobs
    exact = exact_logprobs(prompt(60))
    assert known is not None and 16 <= len(known) < 60 and known[0] is None
    for place, entry in enumerate(known[1:], 1):
        token = prompt(60)[place]
        assert entry is not None and list(entry) == [token]
        assert abs(entry[token].logprob - exact[place - 1][token]) < 1e-4


def test_tokens_have_their_texts(demo: tuple[Any, Any], run_ahead: bool):
    model, tokenizer = demo
    llm = LLM(model, tokenizer, kv_cache_bytes="40blocks")
    (output,) = llm.generate("Hello, who are you?", greedy(3, prompt_logprobs=1))
    assert output.prompt_logprobs is not None
    for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entry is not None and entry[token].decoded_token == tokenizer.decode([token])
    (output,) = llm.generate("Hello", greedy(3, prompt_logprobs=1, logprobs=0, detokenize=False))
    assert output.prompt_logprobs is not None and output.outputs[0].logprobs is not None
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert all(each.decoded_token is None for entry in entries if entry for each in entry.values())
