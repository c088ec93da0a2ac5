"""One step ahead: the next step is launched before the tokens of the one before are read, and
nothing that a user gets shows it.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import mlx.core as mx
import pytest
from helpers.engine_runs import (
    VOCAB_SIZE,
    answer,
    ask_alone,
    assert_nothing_held,
    greedy,
    make_engine,
    prompt,
    run,
    sampled,
)
from helpers.fast_lane import mostly_slow
from helpers.workloads import Workload, assert_all_same, assert_same
from paged_testing.integrity import check_scheduler
from paged_testing.lazy_metal import lazy_metal

from mlx_paged.engine.engine import Engine
from mlx_paged.engine.request import PENDING_TOKEN
from mlx_paged.models import qwen3
from mlx_paged.request import RequestOutput


@mostly_slow("seed", range(3))
def test_requests_of_every_kind_get_the_same_as_without(model: qwen3.Model, seed: int):
    workload = Workload(seed, 25, VOCAB_SIZE)
    ahead, waiting = (workload.run(model, run_ahead=is_ahead) for is_ahead in (True, False))
    assert_all_same(ahead, waiting)


@pytest.mark.slow
def test_many_requests_on_lazy_kernels_get_the_same_as_on_plain_mlx(kernel_model: qwen3.Model):
    reasons: set[str | None] = set()
    preemptions = 0
    for seed in (101, 103):
        workload = Workload(seed, 25, VOCAB_SIZE)
        waiting = workload.run(kernel_model, run_ahead=False)
        with lazy_metal(computes=True):
            ahead = workload.run(kernel_model)
        assert ahead.engine.cache.backend.name == "metal"
        assert_all_same(ahead, waiting)
        preemptions += ahead.engine.stats().num_preemptions
        for output in ahead.outputs.values():
            reasons |= {completion.finish_reason for completion in output.outputs}
    assert preemptions > 10 and reasons == {"stop", "length", "abort", "error"}


@pytest.mark.slow
def test_texts_and_stop_texts_are_the_same_as_without(demo: tuple[Any, Any]):
    model, tokenizer = demo
    workload, rng = Workload(0, 20, model.args.vocab_size), random.Random(0)
    for ask in workload.asks.values():
        ask.params["stop"] = rng.sample([" the", "e ", ".", "an", "1"], 2)
    waiting = workload.run(model, tokenizer, run_ahead=False)
    assert_all_same(workload.run(model, tokenizer, run_ahead=True), waiting)
    stops = {c.stop_reason for output in waiting.outputs.values() for c in output.outputs}
    assert any(isinstance(stop, str) for stop in stops)


def test_lazy_kernels_behind_fences_get_the_same_as_plain_mlx(kernel_model: qwen3.Model):
    workload = Workload(50, 25, VOCAB_SIZE)
    plain = workload.run(kernel_model, run_ahead=False)
    with lazy_metal(computes=True):
        assert_all_same(workload.run(kernel_model), plain)


def test_metal_runs_ahead_by_default_and_plain_mlx_waits(
    model: qwen3.Model, kernel_model: qwen3.Model
):
    assert not make_engine(model).run_ahead and make_engine(model, run_ahead=True).run_ahead
    with lazy_metal():
        assert (
            make_engine(kernel_model).run_ahead
            and not make_engine(kernel_model, run_ahead=False).run_ahead
        )
    with pytest.raises(ValueError, match="run_ahead must be True, False or None, got 1"):
        make_engine(model, run_ahead=1)


# What may be planned before the tokens are known


def ahead_engine(model: qwen3.Model, **options: Any) -> Engine:
    return make_engine(model, run_ahead=True, **options)


def test_a_step_returns_its_tokens_while_the_next_one_is_in_flight(model: qwen3.Model):
    engine = ahead_engine(model)
    engine.add_request("a", prompt(20), greedy(5))
    (output,) = engine.step()
    (step,) = engine.steps.in_flight
    request = step.batch.completions[0]
    assert len(output.outputs[0].token_ids) == 1 and request.num_computed_tokens == 21
    # Its sampler is launched already, from tokens that are known.
    assert step.sampled.completions == [request] and PENDING_TOKEN not in request.token_ids
    assert run(engine)["a"].outputs[0].token_ids == ask_alone(model, prompt(20), greedy(5))


def test_an_answer_whose_length_is_known_is_not_computed_further(model: qwen3.Model):
    computed: list[int] = []
    for is_ahead in (False, True):
        engine = make_engine(model, run_ahead=is_ahead)
        launch = engine.runner.launch
        engine.runner.launch = lambda batch, awaited, launch=launch: (
            computed.append(batch.num_tokens),
            launch(batch, awaited),
        )[1]
        engine.add_request("a", prompt(20), greedy(4))
        engine.add_request("b", prompt(9), greedy(4))
        run(engine)
    assert computed == [29, 2, 2, 2] * 2


def test_the_last_slot_of_the_budget_is_used(model: qwen3.Model):
    # 4 blocks of 16 hold 64 tokens; the 65th has no room for its own K/V, and needs none.
    outputs = {}
    for is_ahead in (False, True):
        engine = make_engine(model, run_ahead=is_ahead, kv_cache_bytes="4blocks", watermark=0)
        outputs[is_ahead] = answer(engine, prompt(50), greedy(100))
        assert outputs[is_ahead].outputs[0].finish_reason == "length"
        assert len(outputs[is_ahead].outputs[0].token_ids) == 15
        assert_nothing_held(engine)
    assert_same(outputs[True], outputs[False])


def test_no_request_is_preempted_before_the_tokens_are_read(model: qwen3.Model):
    # Both need a block at once, and one is left; the first ends with the token in flight.
    tokens = ask_alone(model, prompt(31), greedy(20))
    engine = ahead_engine(model, kv_cache_bytes="5blocks", watermark=0)
    engine.add_request("ends", prompt(31), greedy(20, stop_token_ids=[tokens[1]]))
    engine.add_request("goes on", prompt(30), greedy(20))
    outputs = run(engine)
    assert outputs["ends"].outputs[0].finish_reason == "stop"
    assert engine.stats().num_preemptions == 0
    assert outputs["goes on"].outputs[0].token_ids == ask_alone(model, prompt(30), greedy(20))


def test_a_block_that_an_unread_token_fills_is_found_by_the_next_turn(model: qwen3.Model):
    hits = {}
    for is_ahead in (False, True):
        engine = make_engine(model, run_ahead=is_ahead)
        # 30 + 18 tokens fill the third block with the token before the last.
        history = prompt(30) + answer(engine, prompt(30), greedy(19)).outputs[0].token_ids
        hits[is_ahead] = answer(engine, [*history, 1, 2], greedy(2)).num_cached_tokens
    assert hits == {False: 48, True: 48}


def test_an_unread_token_is_never_hashed(model: qwen3.Model):
    engine = ahead_engine(model, block_size=8)
    for number in range(6):
        engine.add_request(str(number), prompt(5 + number), greedy(40))
    hashed: list[int] = []
    hash_blocks = engine.scheduler._prefix_cache._hash_blocks

    def watched(request: Any) -> None:
        hash_blocks(request)
        num_known = len(request.token_ids) - request.awaits_token
        hashed.append(num_known // 8 - len(request.block_hashes))

    engine.scheduler._prefix_cache._hash_blocks = watched  # type: ignore[method-assign]
    outputs = run(engine)
    assert set(hashed) == {0} and len(hashed) > 20
    for number in range(6):
        tokens = prompt(5 + number)
        assert outputs[str(number)].outputs[0].token_ids == ask_alone(model, tokens, greedy(40))


def test_memory_is_given_back_while_a_step_is_in_flight(model: qwen3.Model):
    engine = ahead_engine(model, kv_cache_bytes="400blocks")
    requests = {"long": (prompt(1500), greedy(2)), "short": (prompt(20), greedy(40))}
    for name, (tokens, params) in requests.items():
        engine.add_request(name, tokens, params)
    outputs: dict[str, RequestOutput] = {}
    given_back = 0
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
        assert engine.steps.in_flight or not engine.has_unfinished_requests()
        given_back += engine.shrink()
        assert not engine.steps.in_flight
    assert given_back > 0
    for name, (tokens, params) in requests.items():
        assert outputs[name].outputs[0].token_ids == ask_alone(model, tokens, params)


def test_an_abort_gives_back_blocks_that_a_step_in_flight_writes(model: qwen3.Model):
    engine = ahead_engine(model, kv_cache_bytes="6blocks", watermark=0)
    engine.add_request("a", prompt(60), greedy(30))
    engine.step()
    assert engine.steps.in_flight
    engine.abort("a")
    assert engine.stats().num_used_blocks == 0
    engine.add_request("b", prompt(70), greedy(20))  # It gets the same blocks.
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.outputs[0].finish_reason] = output.outputs[0].token_ids
    assert len(outputs["abort"]) == 1
    assert outputs["length"] == ask_alone(model, prompt(70), greedy(20))


def test_a_step_in_flight_is_read_by_another_thread_when_its_own_has_ended(model: qwen3.Model):
    engine = ahead_engine(model)
    engine.add_request("a", prompt(20), greedy(30))
    outputs: dict[str, RequestOutput] = {}

    def some_steps() -> None:
        for _ in range(3):
            outputs.update({output.request_id: output for output in engine.step()})

    for _ in range(5):
        thread = threading.Thread(target=some_steps)
        thread.start()
        thread.join()
        assert engine.steps.in_flight
    outputs |= run(engine)
    assert outputs["a"].outputs[0].token_ids == ask_alone(model, prompt(20), greedy(30))


# Failures


def fail_at(engine: Engine, num_steps: int, error: BaseException) -> None:
    """The launch of a step raises, once."""
    launch, numbers = engine.runner.launch, iter(range(1000))

    def failing(batch: Any, awaited: Any) -> Any:
        if next(numbers) == num_steps:
            raise error
        return launch(batch, awaited)

    engine.runner.launch = failing  # type: ignore[method-assign]


@mostly_slow("at", range(6), quick=(0, 1, 4))
@pytest.mark.parametrize("error", [ValueError("once"), KeyboardInterrupt()], ids=type)
def test_a_step_that_fails_once_takes_the_one_before_with_it_and_both_come_again(
    model: qwen3.Model, at: int, error: BaseException
):
    engine = ahead_engine(model)
    requests = {
        "several": (prompt(20), sampled(5, 8, n=3)),
        "one": (prompt(33), sampled(6, 8, repetition_penalty=1.2)),
    }
    for name, (tokens, params) in requests.items():
        engine.add_request(name, tokens, params)
    fail_at(engine, at, error)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        try:
            outputs |= {output.request_id: output for output in engine.step()}
        except KeyboardInterrupt:
            assert isinstance(error, KeyboardInterrupt)
        check_scheduler(engine.scheduler)
    assert_nothing_held(engine)
    for name, (tokens, params) in requests.items():
        alone = make_engine(model)
        alone.add_request(name, tokens, params)
        assert_same(outputs[name], run(alone)[name])


def test_an_answer_that_breaks_a_step_has_all_tokens_before_it(model: qwen3.Model):
    tokens = ask_alone(model, prompt(20), greedy(6))
    for is_ahead in (False, True):
        engine = make_engine(model, run_ahead=is_ahead)
        launch = engine.runner.launch

        def failing(batch: Any, awaited: Any, launch: Any = launch) -> Any:
            if any(request.num_computed_tokens >= 24 for request in batch.completions):
                raise ValueError("24 tokens are too many")
            return launch(batch, awaited)

        engine.runner.launch = failing  # type: ignore[method-assign]
        output = answer(engine, prompt(20), greedy(20))
        assert str(output.error) == "24 tokens are too many"
        assert output.outputs[0].token_ids == tokens[:4]


class Unreadable:
    """Sampled tokens that the device can't give."""

    def __init__(self, engine: Engine):
        (step,) = engine.steps.in_flight
        self.completions, self.token_ids = step.sampled.completions, step.sampled.token_ids
        self.num_in_flight = 0  # when they were asked for
        self._engine = engine
        step.sampled = self  # type: ignore[assignment]

    def read(self) -> list[Any]:
        self.num_in_flight = len(self._engine.steps.in_flight)
        raise RuntimeError("the device gave up")


def test_reading_that_fails_takes_back_the_step_behind_it(model: qwen3.Model):
    engine = ahead_engine(model)
    engine.add_request("a", prompt(20), greedy(12))
    engine.add_request("b", prompt(40), greedy(12))
    engine.step()
    unreadable = Unreadable(engine)
    outputs = run(engine)
    assert unreadable.num_in_flight == 2
    for name, size in (("a", 20), ("b", 40)):
        assert outputs[name].outputs[0].token_ids == ask_alone(model, prompt(size), greedy(12))


def test_a_block_that_a_failed_step_was_to_fill_is_not_found(model: qwen3.Model):
    engine = ahead_engine(model)
    engine.add_request("a", prompt(30), greedy(12))
    # The step in flight computes the second token, which ends the second block and is known.
    (output,) = engine.step()
    (output,) = engine.step()
    tokens = prompt(30) + output.outputs[0].token_ids
    assert len(tokens) == 32 and len(engine.cached_block_ids(tokens)) == 2
    Unreadable(engine)
    engine.step()
    assert len(engine.cached_block_ids(tokens)) == 1
    assert run(engine)["a"].outputs[0].token_ids == ask_alone(model, prompt(30), greedy(12))


@pytest.mark.parametrize("token", [61, 10**6, -1])
def test_a_sampler_that_chooses_no_token_of_the_vocabulary_fails_its_request_alone(
    model: qwen3.Model, token: int
):
    assert model.args.vocab_size == 61
    calls = iter(range(100))

    def wild(logprobs: mx.array) -> mx.array:
        return mx.array([token if next(calls) == 3 else 1])

    engine = ahead_engine(model)
    engine.add_request("wild", prompt(20), greedy(12, sampler=wild))
    engine.add_request("b", prompt(40), greedy(12))
    outputs = run(engine)
    assert f"chose token {token}, outside the model's vocabulary" in str(outputs["wild"].error)
    assert outputs["wild"].outputs[0].token_ids == [1, 1, 1]
    assert outputs["b"].outputs[0].token_ids == ask_alone(model, prompt(40), greedy(12))
