"""Requests come and go from any thread while one thread steps."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from helpers.engine_runs import (
    ask_alone,
    assert_nothing_held,
    greedy,
    make_engine,
    prompt,
    run,
    sampled,
)
from paged_testing.integrity import check_scheduler

from mlx_paged.cache import PagedKVCache, PromptTooLongError
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.thread import EngineThread, run_in_engine_thread
from mlx_paged.generation import generate_step
from mlx_paged.models import qwen3
from mlx_paged.request import RequestOutput

pytestmark = pytest.mark.usefixtures("run_ahead")

NUM_PROMPTS = 8


def params_of(n: int):
    options = {"max_tokens": 4 + n % 5, "n": 1 + (n % 4 == 3)}
    return sampled(seed=n % NUM_PROMPTS, **options) if n % 2 else greedy(**options)


def tokens_of(n: int) -> list[int]:
    """Of a few different prompts, half of which begin alike."""
    n %= NUM_PROMPTS
    return prompt(40)[: 32 * (n % 2)] + prompt(1 + 7 * n, seed=n)


class Threads:
    """Runs functions side by side; ``join`` raises what one of them raised."""

    def __init__(self, *functions: Callable[[], None]):
        self.errors: list[BaseException] = []
        self.threads = [
            threading.Thread(target=self._run, args=(function,), daemon=True)
            for function in functions
        ]
        for thread in self.threads:
            thread.start()

    def _run(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            self.errors.append(error)

    @property
    def are_running(self) -> bool:
        return any(thread.is_alive() for thread in self.threads)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(timeout=60)
            assert not thread.is_alive(), "a thread hangs"
        if self.errors:
            raise self.errors[0]


def step_while(engine: Engine, threads: Threads) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    end = time.monotonic() + 60
    while threads.are_running or engine.has_unfinished_requests():
        assert time.monotonic() < end, "the requests come to no end"
        for output in engine.step():
            if output.finished:
                assert output.request_id not in outputs
                outputs[output.request_id] = output
        check_scheduler(engine.scheduler)
    return outputs


def test_threads_add_and_abort_hundreds_of_requests_while_another_steps(model: qwen3.Model):
    engine = make_engine(
        model, kv_cache_bytes="30blocks", max_num_seqs=8, max_num_batched_tokens=40
    )
    num_requests = 40

    def client(name: int) -> None:
        rng = random.Random(name)
        for n in range(num_requests):
            engine.add_request(f"{name}-{n}", tokens_of(n), params_of(n))
            # Its own, one of another thread that may be anywhere by now, and one that never was.
            for request_id in (f"{name}-{n}", f"{(name + 1) % 4}-{n}", "unknown"):
                if rng.random() < 0.2:
                    engine.abort(request_id)
            if rng.random() < 0.3:
                time.sleep(0.001)

    threads = Threads(*(lambda name=name: client(name) for name in range(4)))
    outputs = step_while(engine, threads)
    threads.join()
    assert set(outputs) == {f"{name}-{n}" for name in range(4) for n in range(num_requests)}
    assert_nothing_held(engine)
    reasons = [output.outputs[0].finish_reason for output in outputs.values()]
    assert set(reasons) == {"length", "abort"} and min(map(reasons.count, set(reasons))) > 20
    # What each has is what it would have got alone, up to where it was aborted.
    expected = {n: ask_alone(model, tokens_of(n), params_of(n)) for n in range(num_requests)}
    for request_id, output in outputs.items():
        completion = output.outputs[0]
        right = expected[int(request_id.split("-")[1])]
        assert completion.token_ids == right[: len(completion.token_ids)]
        assert completion.finish_reason == "abort" or completion.token_ids == right


def test_of_threads_that_add_the_same_id_one_gets_it(model: qwen3.Model):
    engine = make_engine(model)
    refused = []

    def client() -> None:
        for n in range(50):
            try:
                engine.add_request(str(n), prompt(5), greedy(2))
            except ValueError:
                refused.append(n)

    threads = Threads(*[client] * 4)
    threads.join()
    assert sorted(refused) == sorted([*range(50)] * 3)
    assert len(run(engine)) == 50


def test_what_is_asked_for_during_a_step_is_done_when_the_step_ends(model: qwen3.Model):
    engine = make_engine(model)
    in_step, go_on, gave_up = threading.Event(), threading.Event(), threading.Event()

    def wait(tokens: mx.array, logits: mx.array) -> mx.array:
        in_step.set()
        if not go_on.wait(timeout=30):
            gave_up.set()
        return logits

    engine.add_request("slow", prompt(5), greedy(1, logits_processors=[wait]))
    engine.add_request("goes", prompt(30), greedy(5))
    reported: list[RequestOutput] = []
    stepping = Threads(lambda: reported.extend(engine.step()))
    assert in_step.wait(timeout=30)
    engine.add_request("comes", prompt(7), greedy(2))
    engine.abort("goes")
    engine.abort("unknown")
    assert engine.has_unfinished_requests()
    engine.stats()
    # None of them waits for the step, which would have given up first.
    assert not gave_up.is_set() and stepping.are_running
    assert ("goes", 0) in engine.scheduler.completions and (
        "comes",
        0,
    ) not in engine.scheduler.completions
    go_on.set()
    stepping.join()
    assert ("goes", 0) not in engine.scheduler.completions and (
        "comes",
        0,
    ) in engine.scheduler.completions
    assert engine.manager.tables.keys() == set()
    reasons = {output.request_id: output.outputs[0].finish_reason for output in reported}
    assert reasons == {"slow": "length", "goes": "abort"}
    outputs = run(engine)
    assert outputs["comes"].outputs[0].token_ids == ask_alone(model, prompt(7), greedy(2))


def test_an_idle_engine_does_at_once_what_it_is_asked(model: qwen3.Model):
    engine = make_engine(model)
    engine.add_request("a", prompt(30), greedy(5))
    engine.step()
    assert len(engine.manager.tables) == 1
    Threads(lambda: engine.abort("a")).join()
    assert len(engine.manager.tables) == 0


@pytest.mark.slow
def test_figures_can_be_asked_for_at_any_time(model: qwen3.Model):
    engine = make_engine(model, max_num_seqs=8)
    is_done = threading.Event()

    def ask_figures() -> None:
        while not is_done.is_set():
            stats = engine.stats()
            assert 0 <= stats.usage <= 1 and stats.num_running <= 16
            engine.prompt_progress("3")

    threads = Threads(ask_figures)
    for n in range(12):
        engine.add_request(f"{n}", tokens_of(n), params_of(n))
    run(engine)
    is_done.set()
    threads.join()


def test_a_prompt_that_fits_is_not_refused_because_the_pool_grows_meanwhile(
    model: qwen3.Model, monkeypatch: pytest.MonkeyPatch
):
    engine = make_engine(model, kv_cache_bytes="400blocks")
    most = PagedKVCache.max_num_blocks
    growth = iter([100])

    def grows(cache: PagedKVCache, *args: int) -> int:
        before = most(cache, *args)
        for num_blocks in growth:
            cache.make_room(num_blocks)
        return before

    for _ in range(2):
        monkeypatch.setattr(PagedKVCache, "max_num_blocks", grows)
        engine.add_request("whole", prompt(6400), greedy(1))
        monkeypatch.undo()
        with pytest.raises(PromptTooLongError):
            engine.add_request("too long", prompt(6401), greedy(1))
        assert engine.cache.pool.num_blocks == 129
        engine.abort("whole")
        engine.step()


def test_steps_may_move_to_another_thread(model: qwen3.Model):
    engine = make_engine(model)
    engine.add_request("a", prompt(30), greedy(12))
    engine.add_request(
        "b", prompt(20), sampled(seed=3, max_tokens=12, top_p=0.9, min_p=0.01, top_k=20)
    )
    answers = {}

    def three_steps() -> None:
        for _ in range(3):
            answers.update({out.request_id: out.outputs[0].token_ids for out in engine.step()})

    for _ in range(4):
        Threads(three_steps).join()
    assert answers["a"] == ask_alone(model, prompt(30), greedy(12))
    options = {"max_tokens": 12, "top_p": 0.9, "min_p": 0.01, "top_k": 20}
    assert answers["b"] == ask_alone(model, prompt(20), sampled(seed=3, **options))


def engine_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "mlx_paged engine"}


def test_one_shot_calls_share_a_thread(model: qwen3.Model):
    options = {"max_tokens": 3, "block_size": 16, "kv_cache_bytes": "20blocks"}
    tokens = [*generate_step(prompt(20), model, **options)]
    before = engine_threads()
    for _ in range(3):
        again = [*generate_step(prompt(20), model, **options)]
        assert [token for token, _ in again] == [token for token, _ in tokens]
        next(generate_step(prompt(20), model, **options))  # one that is left early
        Threads(lambda: list(generate_step(prompt(20), model, **options)) and None).join()
    assert engine_threads() == before
    # Calls at the same time have a thread each, which later calls use.
    streams = [generate_step(prompt(20), model, **options) for _ in range(3)]
    for stream in streams:
        next(stream)
    during = engine_threads()
    assert len(during - before) <= 2
    for stream in streams:
        stream.close()
    streams = [generate_step(prompt(20), model, **options) for _ in range(3)]
    assert engine_threads() == during


def test_a_one_shot_call_does_not_wait_for_a_thread_that_hangs(model: qwen3.Model):
    may_end, has_begun = threading.Event(), threading.Event()

    def wait(tokens: mx.array, logits: mx.array) -> mx.array:
        has_begun.set()
        assert may_end.wait(60)
        return logits

    hanging = Threads(
        lambda: (
            list(generate_step(prompt(5), model, max_tokens=1, logits_processors=[wait])) and None
        )
    )
    assert has_begun.wait(60)
    assert len(list(generate_step(prompt(5), model, max_tokens=2))) == 2
    assert hanging.are_running
    may_end.set()
    hanging.join()


def test_a_processor_may_call_generate(model: qwen3.Model):
    expected = [token for token, _ in generate_step(prompt(5), model, max_tokens=3)]
    inner: list[list[int]] = []

    def calls(tokens: mx.array, logits: mx.array) -> mx.array:
        inner.append([token for token, _ in generate_step(prompt(5), model, max_tokens=3)])
        return logits

    outer = generate_step(prompt(5), model, max_tokens=3, logits_processors=[calls])
    assert [token for token, _ in outer] == expected and inner == [expected] * 3


def test_a_shared_thread_that_is_stopped_after_a_call_does_not_fail_the_call(
    monkeypatch: pytest.MonkeyPatch,
):
    def stopped(thread: EngineThread) -> None:
        thread.stop(MemoryError("meanwhile"))
        raise thread.stopped()

    monkeypatch.setattr(EngineThread, "_become_idle", stopped)
    with ThreadPoolExecutor(1) as pool:  # The main thread calls by itself.
        assert pool.submit(run_in_engine_thread, lambda: 5).result() == 5
