"""An interrupt at any line leaves an engine that goes on, or that ``abort_all`` repairs."""

from __future__ import annotations

import contextlib
import random
import threading
from typing import Any

import mlx.core as mx
import pytest
from helpers.engine_runs import (
    ask_alone,
    assert_nothing_held,
    greedy,
    load_demo,
    make_engine,
    prompt,
    run,
)
from helpers.interrupted_lines import (
    Answers,
    LineInterrupt,
    check_interrupt,
    check_random_interrupts,
    run_undisturbed,
)

from mlx_paged.engine.engine import Engine
from mlx_paged.models import qwen3
from mlx_paged.request import RequestOutput

pytestmark = pytest.mark.usefixtures("run_ahead")

ENGINE_ROOMS = (
    "engine.py",
    "steps.py",
    "reports.py",
    "scheduler.py",
    "request_state.py",
    "kv_cache_manager.py",
)


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    return load_demo()


@pytest.fixture(scope="module")
def undisturbed_runs() -> dict[bool, tuple[LineInterrupt, Answers]]:
    return {}


@pytest.fixture
def undisturbed(
    demo: tuple[Any, Any],
    run_ahead: bool,
    undisturbed_runs: dict[bool, tuple[LineInterrupt, Answers]],
) -> tuple[LineInterrupt, Answers]:
    if run_ahead not in undisturbed_runs:
        undisturbed_runs[run_ahead] = run_undisturbed(demo)
    return undisturbed_runs[run_ahead]


@pytest.mark.parametrize("swap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_line_loses_no_request_and_changes_no_token(
    demo: tuple[Any, Any],
    undisturbed: tuple[LineInterrupt, Answers],
    monkeypatch: pytest.MonkeyPatch,
    swap: bool,
):
    lines, expected = undisturbed
    check_random_interrupts(demo, expected, lines.num_lines, count=8, seed=int(swap), swap=swap)


@pytest.mark.slow
def test_an_interrupt_in_the_engines_own_bookkeeping_is_survived(
    demo: tuple[Any, Any],
    undisturbed: tuple[LineInterrupt, Answers],
    monkeypatch: pytest.MonkeyPatch,
):
    lines, expected = undisturbed
    rng = random.Random(5)
    places = sorted(place for place in lines.turns if place[0] in ENGINE_ROOMS)
    for number, place in enumerate(rng.sample(places, 10)):
        turns = lines.turns[place]
        interrupt = LineInterrupt(rng.choice(turns[: max(1, len(turns) * 3 // 4)]))
        check_interrupt(demo, interrupt, number % 2 == 0, expected)


@pytest.mark.parametrize("kv", ["paged", "basic"])
def test_a_repair_replaces_neither_the_pool_nor_the_manager(model: qwen3.Model, kv: str):
    expected = ask_alone(model, prompt(40), greedy(8))
    engine = make_engine(model, kv=kv)
    manager, pool = engine.manager, engine.cache.pool
    engine.add_request("a", prompt(40), greedy(8))
    for _ in range(3):
        engine.step()
    pool.get_new_blocks(2)  # As an interrupt may leave them: nobody's.
    engine._steps.repair()
    assert engine.manager is engine.scheduler.manager is manager
    assert engine.cache.pool is manager.pool is pool and pool.num_used_blocks == 0
    assert run(engine)["a"].outputs[0].token_ids == expected
    assert_nothing_held(engine)


# One token leaves nothing to draft, and whoever adds a request does the same in all ways.
without_drafts = pytest.mark.parametrize("run_ahead", ["waiting", "ahead"], indirect=True)


def one_turn_of_each_line(counted: LineInterrupt, run_ahead: bool) -> list[int]:
    """The first one if steps wait, else the last one."""
    return sorted(turns[-1 if run_ahead else 0] for turns in counted.turns.values())


@without_drafts
def test_no_line_of_the_step_that_ends_a_request_loses_its_answer(
    model: qwen3.Model, run_ahead: bool
):
    engine = make_engine(model)
    expected = ask_alone(model, prompt(5), greedy(1))

    def answer_of(request_id: str, interrupt: LineInterrupt) -> list[int]:
        engine.add_request(request_id, prompt(5), greedy(1))
        outputs: dict[str, RequestOutput] = {}
        with contextlib.suppress(KeyboardInterrupt), interrupt.armed():
            outputs = {output.request_id: output for output in engine.step()}
        return (outputs | run(engine))[request_id].outputs[0].token_ids

    counter = LineInterrupt()
    assert answer_of("counted", counter) == expected
    for at in one_turn_of_each_line(counter, run_ahead):
        interrupt = LineInterrupt(at)
        assert answer_of(f"{at}", interrupt) == expected, interrupt.where
    assert_nothing_held(engine)


@pytest.mark.slow
@without_drafts
def test_an_interrupt_in_another_threads_call_does_not_stop_the_thread_that_steps(
    model: qwen3.Model, run_ahead: bool
):
    engine = make_engine(model)
    expected = ask_alone(model, prompt(20), greedy(3))
    counter = LineInterrupt()
    with counter.armed():
        engine.add_request("counted", prompt(20), greedy(10))
        engine.abort("counted")
    run(engine)
    for at in one_turn_of_each_line(counter, run_ahead):
        interrupt = LineInterrupt(at)
        with pytest.raises(KeyboardInterrupt), interrupt.armed():
            engine.add_request(f"{at}", prompt(20), greedy(10))
            engine.abort(f"{at}")
        outputs: dict[str, RequestOutput] = {}
        engine.abort(f"{at}")

        def others(engine: Engine = engine, outputs: dict = outputs) -> None:
            engine.add_request("good", prompt(20), greedy(3))
            outputs |= run(engine)

        thread = threading.Thread(target=others, daemon=True)
        thread.start()
        thread.join(timeout=60)
        assert not thread.is_alive(), f"hangs after an interrupt at {interrupt.where}"
        assert outputs["good"].outputs[0].token_ids == expected, interrupt.where
        assert_nothing_held(engine)


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
    assert_nothing_held(engine)


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
    assert_nothing_held(engine)


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
    engine.add_request("fails", prompt(20), greedy(3))
    assert run(engine)["fails"].outputs[0].finish_reason == "error"
    engine.runner.model = engine.model
    engine.add_request("good", prompt(20), greedy(10))
    assert run(engine)["good"].outputs[0].token_ids == ask_alone(model, prompt(20), greedy(10))
    assert_nothing_held(engine)


def test_a_step_inside_a_step_is_refused_by_name(model: qwen3.Model):
    engine = make_engine(model)
    refusals: list[str] = []

    def steps(tokens: mx.array, logits: mx.array) -> mx.array:
        for call in (engine.step, engine.shrink, engine.reset_prefix_cache):
            with pytest.raises(RuntimeError, match="was called from inside a step") as caught:
                call()
            refusals.append(str(caught.value))
        return logits

    engine.add_request("a", prompt(20), greedy(1, logits_processors=[steps]))
    assert run(engine)["a"].outputs[0].finish_reason == "length" and len(refusals) == 3
    assert_nothing_held(engine)
