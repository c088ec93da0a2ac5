"""Every argument of a request is checked before anything remembers the request; bad ones harm no
good ones.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from helpers.engine_runs import (
    answer,
    ask_alone,
    assert_nothing_held,
    greedy,
    make_engine,
    prompt,
    run,
)
from paged_testing.integrity import check_scheduler

from mlx_paged import LLM, AsyncEngine
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.request import Request
from mlx_paged.models import qwen3
from mlx_paged.options.sampling_params import MAX_COMPLETIONS, SamplingParams


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"priority": "1"}, "priority must be a whole number within"),
    ({"priority": None}, "priority must be a whole number within .*, got None"),
    ({"priority": 1.0}, "priority must be a whole number within .*, got 1.0"),
    ({"priority": True}, "priority must be a whole number within .*, got True"),
    ({"priority": 2**31}, "priority must be a whole number within"),
    ({"priority": float("nan")}, "priority must be a whole number within .*, got nan"),
    ({"priority": Unprintable()}, "priority must be .*, got a Unprintable that has no repr"),
    ({"cache_salt": True}, "cache_salt must be a text that is not empty, or None, got True"),
    ({"cache_salt": 1.5}, "cache_salt must be a text that is not empty, or None, got 1.5"),
    ({"cache_salt": ""}, "cache_salt must be a text that is not empty, or None, got ''"),
    ({"cache_salt": b"salt"}, "cache_salt must be a text that is not empty, or None, got b'salt'"),
    ({"cache_salt": ["salt"]}, "cache_salt must be a text"),
    ({"user": ""}, "user must be a text that is not empty, or None, got ''"),
    ({"user": 7}, "user must be a text that is not empty, or None, got 7"),
    ({"no_store": 1}, "no_store must be True or False, got 1"),
    ({"no_store": None}, "no_store must be True or False, got None"),
    ({"no_store": "false"}, "no_store must be True or False, got 'false'"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_a_bad_option_is_refused_and_the_requests_beside_it_give_their_tokens(
    model: qwen3.Model, options: dict[str, Any], message: str
):
    engine = make_engine(model)
    engine.add_request("before", prompt(20), greedy(5))
    engine.step()
    with pytest.raises(ValueError, match=message) as caught:
        engine.add_request("bad", prompt(20), greedy(5), **options)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250
    engine.abort("bad")
    engine.add_request("after", prompt(30), greedy(5), priority=np.int64(-1), cache_salt="\udcff")
    outputs = run(engine)
    assert outputs["before"].outputs[0].token_ids == ask_alone(model, prompt(20), greedy(5))
    assert outputs["after"].outputs[0].token_ids == ask_alone(model, prompt(30), greedy(5))


@pytest.mark.parametrize("request_id", [None, 7, b"a", ["a"], {}, float("nan")], ids=str)
def test_a_request_id_is_a_text(model: qwen3.Model, request_id: Any):
    engine = make_engine(model)
    with pytest.raises(ValueError, match="request_id must be a text, got"):
        engine.add_request(request_id, prompt(5))


def test_bad_options_do_not_reach_the_thread_of_an_async_engine(model: qwen3.Model):
    async def ask(options: dict[str, Any]) -> None:
        async for _ in engine.generate(prompt(20), greedy(2), **options):
            pass

    with AsyncEngine(model, kv_cache_bytes="100blocks") as engine:
        good = engine.stream(prompt(20), greedy(30))
        next(good)
        for options, message in BAD_OPTIONS:
            with pytest.raises(ValueError, match=message):
                engine.stream(prompt(20), greedy(2), **options)
            with pytest.raises(ValueError, match=message):
                asyncio.run(ask(options))
        *_, last = good
        assert last.outputs[0].token_ids == ask_alone(model, prompt(20), greedy(30))
        assert not engine._receivers


@pytest.mark.parametrize("request_id", [7, ["a"], None])
def test_an_async_engine_takes_no_request_id_that_is_no_text(model: qwen3.Model, request_id: Any):
    with AsyncEngine(model, kv_cache_bytes="100blocks") as engine:
        if request_id is None:  # a number of the engine's own
            assert list(engine.stream(prompt(5), greedy(2), request_id=None))
            return
        with pytest.raises(ValueError, match="request_id must be a text"):
            engine.stream(prompt(5), greedy(2), request_id=request_id)


def test_an_id_that_the_engine_gives_is_none_that_a_user_gave(model: qwen3.Model):
    with AsyncEngine(model, kv_cache_bytes="100blocks") as engine:
        named = engine.stream(prompt(20), greedy(100), request_id="request-0")
        *_, unnamed = engine.stream(prompt(5), greedy(2))
        assert unnamed.request_id == "request-1"
        assert len([*named][-1].outputs[0].token_ids) == 100


def test_priorities_of_a_batch_that_are_no_numbers_do_not_hang_it(model: qwen3.Model):
    llm = LLM(model, kv_cache_bytes="100blocks")
    with pytest.raises(ValueError, match="priority"):
        llm.generate([prompt(5), prompt(6)], greedy(2), priority=["1", "2"])
    outputs = llm.generate([prompt(5), prompt(6)], greedy(2), priority=[1, 0])
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "length"]
    assert_nothing_held(llm.engine)


def test_a_number_of_completions_that_no_machine_holds_is_refused_before_they_are_made():
    with pytest.raises(ValueError, match=f"n must be within 1..{MAX_COMPLETIONS}"):
        SamplingParams(n=10**12)


def test_finishing_a_request_that_was_never_added_takes_out_no_other(model: qwen3.Model):
    scheduler = Engine(model, kv_cache_bytes="100blocks").scheduler
    requests = [Request(name, prompt(5), greedy(2)) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    waiting = [request.completions[0] for request in requests]
    (stranger,) = Request("stranger", prompt(5), greedy(2)).completions
    scheduler.finish(stranger, "abort")
    assert scheduler.waiting == waiting and stranger.is_finished
    # The same name, but not the one that is there.
    (twin,) = Request("b", prompt(5), greedy(2)).completions
    scheduler.finish(twin, "abort")
    assert scheduler.waiting == waiting and not waiting[1].is_finished
    # And it is not taken on when its turn in the inbox comes.
    scheduler.add(stranger.request)
    assert scheduler.waiting == waiting
    check_scheduler(scheduler)


# The context limit


@pytest.mark.parametrize("num_tokens", [10, 11, 4000])
def test_a_prompt_that_leaves_no_room_within_the_context_is_refused_with_the_sum(
    model: qwen3.Model, num_tokens: int
):
    engine = make_engine(model, max_model_len=10, kv_cache_bytes="1000blocks")
    message = f"a prompt of {num_tokens} tokens leaves no room .* at most 10 tokens together"
    with pytest.raises(RuntimeError, match=message):
        engine.add_request("long", prompt(num_tokens), greedy(1))


@pytest.mark.parametrize(("num_tokens", "n"), [(9, 1), (1, 1), (5, 3)])
def test_an_answer_that_reaches_the_context_ends_with_length(
    model: qwen3.Model, num_tokens: int, n: int
):
    engine = make_engine(model, max_model_len=10)
    for completion in answer(engine, prompt(num_tokens), greedy(-1, n=n)).outputs:
        assert completion.finish_reason == "length"
        expected = ask_alone(model, prompt(num_tokens), greedy(10 - num_tokens))
        assert completion.token_ids == expected


def test_the_context_of_a_model_is_the_limit_unless_a_lower_one_is_given(model: qwen3.Model):
    context = model.args.max_position_embeddings
    assert make_engine(model).max_model_len == context
    for length in (2, 100, context):
        assert make_engine(model, max_model_len=length).max_model_len == length
    for limit in (context + 1, 1, 0, -1, "100", 1.5, True):
        with pytest.raises(
            ValueError, match=f"max_model_len must be a whole number within 2..{context}"
        ):
            make_engine(model, max_model_len=limit)
