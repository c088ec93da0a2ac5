"""The engine: mlx-lm's tokens for any batch, and requests that come, go and fail without touching
the others.
"""

from __future__ import annotations

import mlx.core as mx
import pytest
from helpers.engine_runs import (
    ask,
    ask_alone,
    greedy,
    make_engine,
    make_engine_without_drafts,
    prompt,
    run,
    sampled,
    tiny_models,
)
from helpers.fast_lane import in_one_way, mostly_slow
from mlx_lm.generate import generate_step as mlx_lm_generate_step

from mlx_paged.cache import PromptTooLongError
from mlx_paged.engine.engine import Engine
from mlx_paged.models import qwen3
from mlx_paged.options.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("run_ahead")

LENGTHS = (1, 15, 16, 17, 200)


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    """What mlx-lm's own model generates greedily, without margins that rounding reaches."""
    ours, theirs = tiny_models()
    answers = {}
    for length in LENGTHS:
        steps = mlx_lm_generate_step(mx.array(prompt(length)), theirs, max_tokens=50)
        answers[length] = [int(token) for token, _ in steps]
        assert ask_alone(ours, prompt(length), greedy(50)) == answers[length]
    return answers


# Tokens


@mostly_slow(
    "options",
    [
        {"max_num_batched_tokens": 512},
        {"max_num_batched_tokens": 20, "max_num_seqs": 8},
        {"max_num_batched_tokens": 5, "max_num_seqs": 5},
        {"max_num_batched_tokens": 7, "max_num_seqs": 2, "block_size": 8},
        {"max_num_batched_tokens": 1, "max_num_seqs": 1, "block_size": 64},
        {"kv_cache_bytes": "17blocks", "max_num_batched_tokens": 33, "max_num_seqs": 8},
    ],
    ids=str,
    quick=(3,),
)
def test_a_ragged_batch_gets_the_greedy_tokens_of_mlx_lm(
    model: qwen3.Model, expected: dict, options: dict
):
    engine = make_engine(model, **options)
    answers = ask(engine, {str(length): (prompt(length), greedy(50)) for length in LENGTHS})
    assert answers == {str(length): expected[length] for length in LENGTHS}


def test_requests_that_come_one_after_the_other_get_the_same_tokens_as_together(
    model: qwen3.Model, expected: dict
):
    engine = make_engine(model, max_num_batched_tokens=16, max_num_seqs=3)
    answers = {}
    waiting = list(reversed(LENGTHS))
    for step in range(10_000):
        if step % 9 == 0 and waiting:
            engine.add_request(str(waiting[0]), prompt(waiting.pop(0)), greedy(50))
        for output in engine.step():
            answers[output.request_id] = output
        if not waiting and not engine.has_unfinished_requests():
            break
    assert {id: output.outputs[0].token_ids for id, output in answers.items()} == {
        str(length): expected[length] for length in LENGTHS
    }


@mostly_slow(
    "options",
    [
        {},
        {"top_p": 0.8},
        {"top_k": 7},
        {"min_p": 0.1, "temperature": 2.0},
        {"repetition_penalty": 1.5},
    ],
    ids=str,
    quick=(0, 3),
)
def test_a_sampled_request_gets_the_same_tokens_alone_as_in_a_crowd(
    model: qwen3.Model, options: dict
):
    params = sampled(seed=5, max_tokens=30, **options)
    alone = ask_alone(model, prompt(20), params)
    engine = make_engine(model, max_num_batched_tokens=11, max_num_seqs=6)
    crowd = {f"crowd {n}": (prompt(3 * n + 1), sampled(seed=n, max_tokens=5 + n)) for n in range(8)}
    crowd["greedy"] = prompt(40), greedy(30)
    requests = dict(list(crowd.items())[:5]) | {"it": (prompt(20), params)} | crowd
    answers = ask(engine, requests)
    assert answers["it"] == alone
    # The draws are its own: another seed gives another answer, and so does each of the crowd.
    assert ask_alone(model, prompt(20), sampled(seed=6, max_tokens=30, **options)) != alone
    assert len(set(map(tuple, answers.values()))) == len(answers)


def test_a_request_without_a_seed_gets_fresh_draws_and_an_engine_with_a_seed_repeats_them(
    model: qwen3.Model,
):
    params = SamplingParams(temperature=1.0, max_tokens=20)
    requests = {str(n): (prompt(9), params) for n in range(3)}
    first, again = (ask(make_engine(model, seed=1), requests) for _ in range(2))
    fresh = ask(make_engine(model, seed=None), requests)
    assert first == again
    assert len({*map(tuple, first.values()), *map(tuple, fresh.values())}) == 6


# Outputs


def test_each_step_reports_the_requests_that_it_brought_on(model: qwen3.Model):
    engine = make_engine(model, max_num_batched_tokens=16, max_num_seqs=4)
    engine.add_request("long", prompt(40), greedy(2))
    engine.add_request("short", prompt(5), greedy(4))
    seen = []
    while engine.has_unfinished_requests():
        seen.append(
            [(out.request_id, len(out.outputs[0].token_ids), out.finished) for out in engine.step()]
        )
    assert seen == [
        [],
        [],
        [("long", 1, False), ("short", 1, False)],
        [("long", 2, True), ("short", 2, False)],
        [("short", 3, False)],
        [("short", 4, True)],
    ]
    assert engine.step() == []


def test_progress_of_a_long_prompt_is_counted_in_tokens(model: qwen3.Model):
    engine = make_engine(model, max_num_batched_tokens=64)
    engine.add_request("a", prompt(200), greedy(1))
    seen = [engine.prompt_progress("a")]
    while engine.has_unfinished_requests():
        engine.step()
        seen.append(engine.prompt_progress("a"))
    assert seen == [(0, 200), (64, 200), (128, 200), (192, 200), (0, 0)]
    assert engine.prompt_progress("unknown") == (0, 0)


def test_an_output_says_what_was_asked_and_when_its_tokens_came(model: qwen3.Model):
    engine = make_engine(model)
    engine.add_request("a", prompt(20), greedy(3))
    output = run(engine)["a"]
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("a", None, prompt(20))
    assert output.finished and output.error is None and output.num_cached_tokens == 0
    assert 0 < output.queue_time < output.time_to_first_token < 60
    assert 0 < output.decode_time < 60
    (completion,) = output.outputs
    assert (
        completion.index,
        completion.text,
        completion.finish_reason,
        completion.stop_reason,
    ) == (0, "", "length", None)


# Bad requests


@in_one_way
@pytest.mark.parametrize(
    ("tokens", "params", "error", "message"),
    [
        ([], None, ValueError, "the prompt is empty"),
        ("", None, ValueError, "a text prompt needs a tokenizer"),
        ("text", None, ValueError, "a text prompt needs a tokenizer"),
        ([61], None, ValueError, "token id 61 is outside the model's vocabulary of 61"),
        ([1, -1], None, ValueError, "token id -1 is outside"),
        ([1, 2.5], None, ValueError, "token ids are integers, got 2.5"),
        ([1, None], None, ValueError, "token ids are integers, got None"),
        (None, None, ValueError, "a prompt is text or token ids, got NoneType"),
        (7, None, ValueError, "a prompt is text or token ids, got int"),
        ({1: 2}, None, ValueError, "a prompt is text or token ids, got dict"),
        ([1], {"max_tokens": 3}, ValueError, "params must be SamplingParams, got dict"),
        (
            [1],
            SamplingParams(stop="x"),
            ValueError,
            "stop texts need a tokenizer; use stop_token_ids",
        ),
        (
            [1],
            SamplingParams(n=65),
            ValueError,
            "65 completions of one request are more than may run at once, 64",
        ),
        (
            prompt(1601),
            None,
            PromptTooLongError,
            "1601 tokens needs 101 blocks of 16, the budget holds 100",
        ),
    ],
    ids=str,
)
def test_a_bad_request_is_refused_at_once_and_leaves_nothing_behind(
    model: qwen3.Model, tokens: object, params: object, error: type[Exception], message: str
):
    engine = make_engine(model)
    engine.add_request("good", prompt(5), greedy(3))
    with pytest.raises(error, match=message):
        engine.add_request("bad", tokens, params)
    assert list(run(engine)) == ["good"]
    # Its id is free for another one.
    engine.add_request("bad", prompt(5), greedy(1))
    assert list(run(engine)) == ["bad"]


@in_one_way
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 12}, "block_size must be one of"),
        ({"kv_cache_bytes": 100}, "a budget of 100 bytes holds no block"),
        ({"kv_cache_bytes": "much"}, "kv_cache_bytes must be bytes .*, got 'much'"),
        ({"kv": "ring"}, "unknown cache mode 'ring'; supported: basic, paged"),
        ({"kv": "basic", "backend": "vulkan"}, "unknown backend 'vulkan'"),
        ({"kv": "basic", "swap_bytes": "1G"}, "swap_bytes='1G' needs kv='paged'"),
        ({"swap_bytes": "much"}, "swap_bytes must be bytes .*, got 'much'"),
        ({"backend": "vulkan"}, "unknown backend 'vulkan'"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a positive integer, got 0"),
        (
            {"max_num_batched_tokens": 8},
            "max_num_batched_tokens 8 must be at least max_num_seqs 64",
        ),
        ({"watermark": 1.0}, "watermark must be within"),
        ({"priority_steps": -1}, "priority_steps must be a positive integer"),
    ],
    ids=str,
)
def test_an_engine_refuses_settings_out_of_their_range(
    model: qwen3.Model, options: dict, message: str
):
    with pytest.raises(ValueError, match=message):
        Engine(model, **options)


def test_the_longest_prompt_that_fits_gets_one_token_and_a_longer_one_is_refused(
    model: qwen3.Model,
):
    engine = make_engine(model, kv_cache_bytes="3blocks")
    engine.add_request("full", prompt(48), greedy(20))
    with pytest.raises(
        PromptTooLongError, match="a prompt of 49 tokens needs 4 blocks of 16, the budget holds 3"
    ):
        engine.add_request("too long", prompt(49), greedy(20))
    (completion,) = run(engine)["full"].outputs
    assert completion.finish_reason == "length"
    assert completion.token_ids == ask_alone(model, prompt(48), greedy(1))


def test_a_request_in_use_is_refused_and_free_again_when_its_end_was_reported(model: qwen3.Model):
    engine = make_engine(model)
    engine.add_request("a", prompt(5), greedy(3))
    for _ in range(2):
        with pytest.raises(ValueError, match="request 'a' exists already"):
            engine.add_request("a", prompt(7), greedy(3))
        engine.step()
    assert run(engine)["a"].outputs[0].token_ids == ask_alone(model, prompt(5), greedy(3))
    engine.add_request("a", prompt(7), greedy(3))
    assert run(engine)["a"].outputs[0].token_ids == ask_alone(model, prompt(7), greedy(3))


# Aborts


def test_an_abort_before_the_first_step_computes_nothing(model: qwen3.Model):
    engine = make_engine(model)
    engine.add_request("a", prompt(50), greedy())
    engine.abort("a")
    assert engine.has_unfinished_requests(), "its end is still to be reported"
    (output,) = engine.step()
    assert (
        output.finished
        and output.outputs[0].finish_reason == "abort"
        and output.outputs[0].token_ids == []
    )
    assert engine.cache.pool.num_cached_blocks == 0


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_an_abort_between_steps_frees_at_once_and_affects_no_other_request(
    model: qwen3.Model, num_steps: int
):
    engine = make_engine_without_drafts(model, max_num_batched_tokens=64)
    engine.add_request("stays", prompt(10), greedy(12))
    engine.add_request("goes", prompt(100), greedy(12))
    for _ in range(num_steps):
        engine.step()
    engine.abort("goes")
    assert list(engine.manager.tables) == [("stays", 0)]
    outputs = run(engine)
    assert outputs["goes"].outputs[0].finish_reason == "abort"
    # What it had by then is its answer.
    expected = ask_alone(model, prompt(100), greedy(12))
    assert outputs["goes"].outputs[0].token_ids == expected[: max(0, num_steps - 1)]
    assert outputs["stays"].outputs[0].token_ids == ask_alone(model, prompt(10), greedy(12))


def test_aborting_what_is_unknown_or_done_does_nothing(model: qwen3.Model):
    engine = make_engine(model)
    engine.abort("unknown")
    assert not engine.has_unfinished_requests() and engine.step() == []
    engine.add_request("a", prompt(5), greedy(2))
    assert run(engine)["a"].outputs[0].finish_reason == "length"
    engine.abort("a")
    assert engine.step() == []


def test_a_second_abort_changes_nothing(model: qwen3.Model):
    engine = make_engine(model)
    engine.add_request("a", prompt(5), greedy(20))
    engine.step()
    engine.abort("a")
    engine.abort("a")
    (output,) = engine.step()
    assert output.outputs[0].finish_reason == "abort"


def test_a_logits_processor_may_abort_its_own_request_and_others(
    model: qwen3.Model, run_ahead: bool, is_drafting: bool
):
    engine = make_engine(model)

    def abort_both(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size == 12:
            engine.abort("aborts")
            engine.abort("other")
        return logits

    engine.add_request("aborts", prompt(10), greedy(20, logits_processors=[abort_both]))
    engine.add_request("other", prompt(30), greedy(20))
    engine.add_request("third", prompt(20), greedy(20))
    outputs = run(engine)
    assert {id: output.outputs[0].finish_reason for id, output in outputs.items()} == {
        "aborts": "abort",
        "other": "abort",
        "third": "length",
    }
    # The step in which it was asked for is done first: 12 tokens were there, this made the 13th.
    # One step ahead, the 13th is being sampled when the step that made the 12th is done.
    num_tokens = [len(outputs[name].outputs[0].token_ids) for name in ("aborts", "other")]
    assert num_tokens == ([2, 2] if run_ahead else [3, 3]) or is_drafting
    assert outputs["third"].outputs[0].token_ids == ask_alone(model, prompt(20), greedy(20))


def test_a_logits_processor_may_add_requests(model: qwen3.Model):
    engine = make_engine(model)

    def add_another(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size == 11:
            engine.add_request("added", prompt(30), greedy(5))
        return logits

    engine.add_request("adds", prompt(10), greedy(4, logits_processors=[add_another]))
    outputs = run(engine)
    assert outputs["adds"].outputs[0].token_ids == ask_alone(model, prompt(10), greedy(4))
    assert outputs["added"].outputs[0].token_ids == ask_alone(model, prompt(30), greedy(5))


def test_an_abort_during_a_step_does_not_reach_a_request_of_the_same_id_that_comes_after_it(
    model: qwen3.Model,
):
    engine = make_engine(model)

    def abort_then_add(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size == 11:
            engine.abort("new")
            engine.add_request("new", prompt(30), greedy(5))
        return logits

    engine.add_request("asks", prompt(10), greedy(4, logits_processors=[abort_then_add]))
    engine.add_request("waits", prompt(12), greedy(4))
    outputs = run(engine)
    assert {id: output.outputs[0].finish_reason for id, output in outputs.items()} == dict.fromkeys(
        ("asks", "waits", "new"), "length"
    )
    assert outputs["new"].outputs[0].token_ids == ask_alone(model, prompt(30), greedy(5))


def test_a_request_that_comes_and_goes_while_a_step_runs_is_reported_once(model: qwen3.Model):
    engine = make_engine(model)

    def add_then_abort(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size == 11:
            engine.add_request("new", prompt(30), greedy(5))
            engine.abort("new")
        return logits

    engine.add_request("asks", prompt(10), greedy(4, logits_processors=[add_then_abort]))
    outputs = run(engine)
    assert (
        outputs["new"].outputs[0].finish_reason == "abort"
        and outputs["new"].outputs[0].token_ids == []
    )


def test_abort_all_ends_everything_that_runs_and_waits(model: qwen3.Model):
    engine = make_engine(model, max_num_seqs=2, max_num_batched_tokens=16)
    for n in range(5):
        engine.add_request(str(n), prompt(20, seed=n), greedy(20))
    engine.step()
    engine.abort_all()
    outputs = {output.request_id: output for output in engine.step()}
    assert [outputs[str(n)].outputs[0].finish_reason for n in range(5)] == ["abort"] * 5
