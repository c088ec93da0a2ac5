"""Ctrl-C ends a wait at once, and cuts no step; what a request's own code raises fails it alone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from helpers.engine_runs import (
    answer,
    ask_alone,
    assert_nothing_held,
    greedy,
    lose_all_kv,
    make_engine,
    prompt,
    run,
)
from helpers.interrupts import check_interrupts

from mlx_paged import LLM, AsyncEngine
from mlx_paged.engine.thread import STUCK_SECONDS, StuckStepError
from mlx_paged.errors import EngineStoppedError
from mlx_paged.models import qwen3

pytestmark = pytest.mark.usefixtures("run_ahead")


@pytest.mark.parametrize(
    ("swap", "count"), [(True, 60), pytest.param(False, 200, marks=pytest.mark.slow)]
)
def test_signals_at_random_moments_lose_no_request_and_change_no_token(
    demo: tuple[Any, Any], swap: bool, count: int
):
    check_interrupts(demo, count, seed=count + swap, swap=swap)


class Endless:
    """A logits processor that does not end before it is told to."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.has_begun.set()
        while not self.may_end.is_set():
            time.sleep(0.001)
        return logits


@contextmanager
def ctrl_c(*moments: Callable[[], object]) -> Iterator[list[float]]:
    """A real Ctrl-C after each of these calls has returned; when each was sent."""
    times: list[float] = []

    def send() -> None:
        for wait in moments:
            wait()
            times.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield times
    finally:
        thread.join(timeout=60)


def test_ctrl_c_in_a_step_that_does_not_end_is_answered_at_once_and_the_engine_goes_on(
    model: qwen3.Model,
):
    engine, endless = make_engine(model), Endless()
    engine.add_request("endless", prompt(20), greedy(2, logits_processors=[endless]))
    engine.add_request("other", prompt(20, seed=1), greedy(12))
    with ctrl_c(endless.has_begun.wait) as sent, pytest.raises(KeyboardInterrupt):
        while True:
            engine.step()
    assert time.monotonic() - sent[0] < 10, "it waited for the step"
    endless.may_end.set()
    outputs = run(engine)
    assert len(outputs["endless"].outputs[0].token_ids) == 2
    assert outputs["other"].outputs[0].token_ids == ask_alone(model, prompt(20, seed=1), greedy(12))


def test_the_outputs_of_an_interrupted_wait_come_with_the_next_one(model: qwen3.Model):
    engine, slow = make_engine(model), Endless()
    engine.add_request("a", prompt(20), greedy(1, logits_processors=[slow]))
    with ctrl_c(slow.has_begun.wait), pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.has_unfinished_requests()
    slow.may_end.set()
    while engine.reports.requests:  # It was the last step of all.
        time.sleep(0.001)
    assert engine.has_unfinished_requests()
    (output,) = engine.step()
    assert output.finished and len(output.outputs[0].token_ids) == 1
    assert not engine.has_unfinished_requests() and engine.step() == []


def test_a_second_ctrl_c_stops_an_engine_whose_step_does_not_end(model: qwen3.Model):
    engine, endless = make_engine(model), Endless()
    engine.add_request("endless", prompt(20), greedy(2, logits_processors=[endless]))
    with ctrl_c(endless.has_begun.wait, lambda: time.sleep(2 * STUCK_SECONDS)):
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                engine.step()
    told = r"^\[engine\] it stopped: it was interrupted twice while one step ran$"
    for call in (engine.step, lambda: engine.add_request("b", prompt(5)), engine.shrink):
        with pytest.raises(EngineStoppedError, match=told) as caught:
            call()
        assert isinstance(caught.value.__cause__, StuckStepError)
    # It does not burn a core for ever, and ending such an engine does not wait.
    engine.thread.join(timeout=60)
    assert not engine.thread._thread.is_alive()
    assert engine.close() and engine.stats().num_requests >= 0
    engine.abort("endless")


def test_interrupts_of_two_different_calls_stop_no_engine(demo: tuple[Any, Any]):
    llm, slow = LLM(*demo), Endless()
    expected = llm.generate("Once upon a time", greedy(8))
    with ctrl_c(slow.has_begun.wait, *[lambda: time.sleep(2 * STUCK_SECONDS)] * 3):
        with pytest.raises(KeyboardInterrupt):
            llm.generate("Hello", greedy(50, logits_processors=[slow]))
        for call in (
            lambda: llm.generate("Count", greedy(2)),
            llm.engine.shrink,
            lambda: llm.generate("Count", greedy(2)),
        ):
            with pytest.raises(KeyboardInterrupt):
                call()
    slow.may_end.set()
    again = llm.generate("Once upon a time", greedy(8))
    assert again[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    assert_nothing_held(llm.engine)


def test_a_second_ctrl_c_stops_no_engine_if_a_step_has_ended_since_the_first(model: qwen3.Model):
    engine = make_engine(model)
    first, second = Endless(), Endless()
    engine.add_request("first", prompt(20), greedy(1, logits_processors=[first]))

    def next_step() -> None:
        time.sleep(2 * STUCK_SECONDS)
        engine.add_request("second", prompt(20), greedy(1, logits_processors=[second]))
        first.may_end.set()
        second.has_begun.wait()

    with ctrl_c(first.has_begun.wait, next_step):
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                while engine.has_unfinished_requests():
                    engine.step()
    second.may_end.set()
    assert set(run(engine)) == {"second"}


def test_a_step_whose_wait_was_interrupted_is_not_run_twice(model: qwen3.Model):
    engine, slow = make_engine(model), Endless()
    engine.add_request("a", prompt(20), greedy(5, logits_processors=[slow]))
    with ctrl_c(slow.has_begun.wait), pytest.raises(KeyboardInterrupt):
        engine.step()
    num_steps = engine.stats().num_steps
    threading.Timer(0.3, slow.may_end.set).start()
    engine.step()
    assert engine.stats().num_steps == num_steps + 1
    assert run(engine)["a"].outputs[0].token_ids == ask_alone(model, prompt(20), greedy(5))


def test_outputs_of_an_interrupted_wait_are_dropped_with_their_requests(model: qwen3.Model):
    engine = make_engine(model)
    for name in ("dropped", "kept"):
        engine.add_request(name, prompt(5), greedy(4))
    # The step ends and reports before its caller, who was interrupted, drops a request.
    engine.thread.call(partial(engine._step, None), "step")
    assert [output.request_id for output in engine._ready] == ["dropped", "kept"]
    engine.drop(["dropped"])
    assert set(run(engine)) == {"kept"}


def test_an_llm_gives_up_the_requests_of_an_interrupted_call_and_answers_the_next(
    demo: tuple[Any, Any],
):
    llm, endless = LLM(*demo), Endless()
    expected = llm.generate("Once upon a time", greedy(8))
    with ctrl_c(endless.has_begun.wait), pytest.raises(KeyboardInterrupt):
        llm.generate(["Hello", "Count"], greedy(50, logits_processors=[endless]))
    endless.may_end.set()
    again = llm.generate("Once upon a time", greedy(8))
    assert again[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    assert_nothing_held(llm.engine)


def test_a_reader_that_is_interrupted_ends_its_request_alone(demo: tuple[Any, Any]):
    with AsyncEngine(*demo) as engine:
        other = engine.stream("Once upon a time", greedy(30))
        endless = Endless()
        stream = engine.stream("Hello", greedy(50, logits_processors=[endless]))
        with ctrl_c(endless.has_begun.wait), pytest.raises(KeyboardInterrupt):
            list(stream)
        stream.close()
        endless.may_end.set()
        *_, last = other
        assert last.outputs[0].finish_reason == "length"
        while engine.engine.has_unfinished_requests():
            time.sleep(0.01)
        assert_nothing_held(engine.engine)


def test_handlers_of_signals_stay_as_they_are(model: qwen3.Model, demo: tuple[Any, Any]):
    seen: list[object] = []

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(signal.getsignal(signal.SIGINT))
        return logits

    for handler in (signal.SIG_IGN, signal.SIG_DFL, lambda number, frame: None):
        before = signal.signal(signal.SIGINT, handler)
        try:
            LLM(*demo).generate("Hello", greedy(2, logits_processors=[processor]))
        finally:
            signal.signal(signal.SIGINT, before)
        assert seen == [handler] * 2
        seen.clear()


def test_an_exception_in_the_bookkeeping_stops_the_engine_and_says_why(model: qwen3.Model):
    engine = make_engine(model)
    engine.add_request("a", prompt(20), greedy(5))

    def broken(*args: Any, **options: Any) -> Any:
        raise MemoryError("no memory for a list")

    engine.scheduler.schedule = broken  # type: ignore[method-assign]
    for call in (engine.step, engine.step, lambda: engine.add_request("b", prompt(5))):
        with pytest.raises(EngineStoppedError, match=r"^\[engine\] it stopped: ") as caught:
            call()
        assert str(caught.value.__cause__) == "no memory for a list"


@pytest.mark.parametrize("kv", ["paged", "basic"])
def test_lost_kv_replace_neither_the_pool_nor_the_manager(model: qwen3.Model, kv: str):
    expected = ask_alone(model, prompt(40), greedy(8))
    engine = make_engine(model, kv=kv)
    manager, pool = engine.manager, engine.cache.pool
    engine.add_request("a", prompt(40), greedy(8))
    for _ in range(3):
        engine.step()
    lose_all_kv(engine)
    assert engine.manager is engine.scheduler.manager is manager
    assert engine.cache.pool is manager.pool is pool and pool.num_used_blocks == 0
    assert run(engine)["a"].outputs[0].token_ids == expected


@pytest.mark.parametrize(
    "error", [SystemExit(3), GeneratorExit(), StopIteration(), BaseException("base")], ids=repr
)
def test_whatever_a_logits_processor_raises_fails_its_own_request(
    model: qwen3.Model, error: BaseException
):
    def raises(tokens: mx.array, logits: mx.array) -> mx.array:
        raise error

    engine = make_engine(model)
    engine.add_request("bad", prompt(20), greedy(5, logits_processors=[raises]))
    engine.add_request("good", prompt(20), greedy(5))
    outputs = run(engine)
    assert outputs["bad"].outputs[0].finish_reason == "error"
    # An error that a reader can be handed: none that would end its program, task or loop.
    assert (
        isinstance(outputs["bad"].error, RuntimeError) and outputs["bad"].error.__cause__ is error
    )
    # Its frames would keep logits, slabs and the engine; where it was raised is a note.
    assert error.__traceback__ is None and "in raises" in error.__notes__[-1]
    assert outputs["good"].outputs[0].token_ids == ask_alone(model, prompt(20), greedy(5))


def test_an_error_that_refuses_notes_fails_its_own_request(model: qwen3.Model):
    class Refuses(Exception):
        __notes__ = 7

        def add_note(self, note: str) -> None:
            raise TypeError("no notes")

    def raises(tokens: mx.array, logits: mx.array) -> mx.array:
        raise Refuses("refuses")

    engine = make_engine(model)
    engine.add_request("bad", prompt(20), greedy(5, logits_processors=[raises]))
    engine.add_request("good", prompt(20), greedy(5))
    outputs = run(engine)
    assert str(outputs["bad"].error) == "refuses" and outputs["good"].error is None


def test_slabs_that_can_not_be_evaluated_any_more_are_made_again(model: qwen3.Model):
    engine = make_engine(model)
    engine.add_request("warm", prompt(20), greedy(3))
    run(engine)

    def leaves_a_broken_slab(
        tokens: mx.array, layers: Any, logit_rows: mx.array | None
    ) -> mx.array:
        logits = engine.model(tokens, layers, logit_rows)
        # MLX has this product in float32 only, and says so when it is evaluated.
        half = mx.zeros((2, 4, 4), mx.float16)
        handle = layers[0].kv
        broken = mx.gather_mm(half, half, mx.array([0]), mx.array([0])).sum()
        handle.k = (handle.k[0] + broken,)
        return logits

    engine.runner.model = leaves_a_broken_slab
    assert answer(engine, prompt(20), greedy(3)).outputs[0].finish_reason == "error"
    engine.runner.model = engine.model
    assert answer(engine, prompt(20), greedy(10)).outputs[0].token_ids == ask_alone(
        model, prompt(20), greedy(10)
    )


def test_a_step_inside_a_step_is_refused_by_name(model: qwen3.Model):
    engine = make_engine(model)
    refusals: list[str] = []

    def steps(tokens: mx.array, logits: mx.array) -> mx.array:
        for call in (engine.step, engine.shrink, engine.reset_prefix_cache):
            with pytest.raises(RuntimeError, match="was called from inside a step") as caught:
                call()
            refusals.append(str(caught.value))
        return logits

    assert (
        answer(engine, prompt(20), greedy(1, logits_processors=[steps])).outputs[0].finish_reason
        == "length"
        and len(refusals) == 3
    )
