"""An interrupt at any line leaves an engine that goes on, or that ``abort_all`` repairs."""

from __future__ import annotations

import random
import threading
from typing import Any

import mlx.core as mx
import pytest
from engine_runs import ask_alone, assert_nothing_held, greedy, load_demo, make_engine, prompt, run, sampled
from interrupted_lines import LineInterrupt

from mlx_paged.engine.engine import Engine
from mlx_paged.engine.swap_space import SwapSpace
from mlx_paged.models import qwen3
from mlx_paged.request import RequestOutput, SamplingParams

Requests = dict[str, tuple[str, SamplingParams]]
MAX_STEPS = 2000

FACTS = "The code of apple is 4821. " * 4
REQUESTS: Requests = {
    "logprobs": (FACTS, greedy(12, logprobs=2, ignore_eos=True)),
    "sampled": ("Hello, who are you? ", sampled(seed=2, max_tokens=14, ignore_eos=True)),
    "two": ("Count from 5 to 40. ", sampled(seed=9, max_tokens=8, n=2, logprobs=1, ignore_eos=True)),
    "shared": (FACTS + "What", greedy(8)),
    "stop": ("Once upon a time ", greedy(30, stop=["e"], repetition_penalty=1.1)),
}


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    return load_demo()


def tight_engine(demo: tuple[Any, Any]) -> Engine:
    """Room for less than all requests, so that they meet growth, preemption, swapping and chunks."""
    return make_engine(
        *demo,
        block_size=8,
        kv_cache_bytes="9blocks",
        swap_bytes="9blocks",
        max_num_batched_tokens=32,
        max_num_seqs=5,
    )


def answer_of(output: RequestOutput) -> list[tuple]:
    return [
        (c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs and [sorted(entry) for entry in c.logprobs])
        for c in output.outputs
    ]


class Work:
    """The requests, asked of an engine some at a time; may be gone on with after any interrupt."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.to_ask = dict(REQUESTS)
        self.answers: dict[str, list[tuple]] = {}

    def go_on(self) -> None:
        for request_id, (text, params) in list(self.to_ask.items()):
            try:
                self.engine.add_request(request_id, text, params)
            except ValueError as error:
                # It was interrupted when it was all but done.
                assert "exists already" in str(error)
            self.to_ask.pop(request_id)
            if request_id == "sampled":
                self._step()
        for _ in range(MAX_STEPS):
            if not self.engine.has_unfinished_requests():
                return
            self._step()
        raise AssertionError("the engine spins")

    def _step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                self.answers[output.request_id] = answer_of(output)


def check_interrupt(demo: tuple[Any, Any], at: int, is_aborted: bool, expected: dict[str, list[tuple]]) -> None:
    engine = tight_engine(demo)
    interrupt, work = LineInterrupt(at), Work(engine)
    with pytest.raises(KeyboardInterrupt), interrupt.armed():
        work.go_on()
    try:
        if is_aborted:
            engine.abort_all()
            assert engine.stats().num_used_blocks == 0
            for _ in range(MAX_STEPS):
                if not engine.has_unfinished_requests():
                    break
                engine.step()
            assert_nothing_held(engine)
            work = Work(engine)
        work.go_on()
        assert work.answers == expected
        assert_nothing_held(engine)
    except BaseException as error:
        error.add_note(f"interrupted at line event {at}, {interrupt.where}; aborted: {is_aborted}")
        raise


@pytest.fixture(scope="module")
def undisturbed(demo: tuple[Any, Any]) -> tuple[int, dict[str, list[tuple]]]:
    """How many lines the work takes, and the answers."""
    counter, work = LineInterrupt(), Work(tight_engine(demo))
    with counter.armed():
        work.go_on()
    assert work.engine.stats().num_preemptions > 0 and len(work.answers) == len(REQUESTS)
    return counter.num_lines, work.answers


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2, 3))])
def test_an_interrupt_at_any_line_loses_no_request_and_changes_no_token(
    demo: tuple[Any, Any], undisturbed: tuple[int, dict], monkeypatch: pytest.MonkeyPatch, part: int
):
    monkeypatch.setattr(SwapSpace, "_is_cheaper", lambda self: part % 2 == 0)
    num_lines, expected = undisturbed
    rng = random.Random(part)
    for _ in range(10):
        check_interrupt(demo, rng.randrange(num_lines * 9 // 10), rng.random() < 0.5, expected)


ENGINE_ROOMS = ("engine.py", "scheduler.py", "request_state.py", "kv_cache_manager.py")


@pytest.mark.slow
@pytest.mark.parametrize("is_aborted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_interrupt_at_each_line_of_the_engines_own_bookkeeping_is_survived(
    demo: tuple[Any, Any], undisturbed: tuple[int, dict], monkeypatch: pytest.MonkeyPatch, is_aborted: bool
):
    # Each line of these files once, at a random one of its turns.
    monkeypatch.setattr(SwapSpace, "_is_cheaper", lambda self: True)
    events: dict[tuple[str, int], list[int]] = {}

    class Recorder(LineInterrupt):
        def _trace(self, frame: Any, event: str, argument: Any) -> Any:
            name = frame.f_code.co_filename.rpartition("/")[2]
            if event == "line" and name in ENGINE_ROOMS:
                events.setdefault((name, frame.f_lineno), []).append(self.num_lines)
            return super()._trace(frame, event, argument)

    recorder = Recorder()
    with recorder.armed():
        Work(tight_engine(demo)).go_on()
    rng = random.Random(5)
    lines = rng.sample(sorted(events), 30)
    for line in lines:
        # The last steps differ by a line or so from run to run: where garbage is collected, for one.
        turns = events[line]
        check_interrupt(demo, rng.choice(turns[: max(1, len(turns) * 3 // 4)]), is_aborted, undisturbed[1])


@pytest.mark.slow
def test_an_interrupt_in_another_threads_call_does_not_stop_the_thread_that_steps(model: qwen3.Model):
    engine = make_engine(model)
    expected = ask_alone(model, prompt(20), greedy(10))
    counter = LineInterrupt()
    with counter.armed():
        engine.add_request("counted", prompt(20), greedy(10))
        engine.abort("counted")
    run(engine)
    for at in range(counter.num_lines):
        interrupt = LineInterrupt(at)
        with pytest.raises(KeyboardInterrupt), interrupt.armed():
            engine.add_request(f"{at}", prompt(20), greedy(10))
            engine.abort(f"{at}")
        outputs: dict[str, RequestOutput] = {}
        engine.abort(f"{at}")

        def others(engine: Engine = engine, outputs: dict = outputs) -> None:
            engine.add_request("good", prompt(20), greedy(10))
            outputs |= run(engine)

        thread = threading.Thread(target=others, daemon=True)
        thread.start()
        thread.join(timeout=60)
        assert not thread.is_alive(), f"hangs after an interrupt at {interrupt.where}"
        assert outputs["good"].outputs[0].token_ids == expected, interrupt.where
        assert_nothing_held(engine)


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), StopIteration(), BaseException("base")], ids=repr)
def test_whatever_a_logits_processor_raises_fails_its_own_request(model: qwen3.Model, error: BaseException):
    def raises(tokens: mx.array, logits: mx.array) -> mx.array:
        raise error

    engine = make_engine(model)
    engine.add_request("bad", prompt(20), greedy(5, logits_processors=[raises]))
    engine.add_request("good", prompt(20), greedy(5))
    outputs = run(engine)
    assert outputs["bad"].outputs[0].finish_reason == "error"
    # An error that a reader can be handed: none that would end its program, task or loop.
    assert isinstance(outputs["bad"].error, RuntimeError) and outputs["bad"].error.__cause__ is error
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

    def leaves_a_broken_slab(tokens: mx.array, positions: mx.array, cache: Any, indices: mx.array) -> mx.array:
        logits = engine.model(tokens, positions, cache, indices)
        # MLX has this product in float32 only, and says so when it is evaluated.
        half = mx.zeros((2, 4, 4), mx.float16)
        handle = cache._layers[0]
        handle.k = handle.k + mx.gather_mm(half, half, mx.array([0]), mx.array([0])).sum()
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
