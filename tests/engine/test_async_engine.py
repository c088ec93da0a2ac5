"""Tokens as they come, to any number of readers in threads and event loops; whoever leaves takes
nothing along.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest
from helpers.engine_runs import CONFIG, ask_alone, assert_nothing_held, greedy, prompt, sampled

from mlx_paged.cache import PromptTooLongError
from mlx_paged.distributed import RanksError
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.errors import EngineStoppedError
from mlx_paged.models import qwen3

pytestmark = pytest.mark.usefixtures("run_ahead")

LONG = greedy(100_000, ignore_eos=True)


@contextmanager
def running(model: Any, tokenizer: Any = None, **options: Any) -> Iterator[AsyncEngine]:
    """An engine that is shut down at the end, and must hold nothing then."""
    with AsyncEngine(model, tokenizer, **{"kv_cache_bytes": "8000blocks", **options}) as engine:
        yield engine
    assert not engine.engine.thread._thread.is_alive()
    assert_nothing_held(engine.engine)
    assert not engine._receivers


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.001)


def is_idle(engine: AsyncEngine) -> bool:
    stats = engine.stats()
    return (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (
        0,
        0,
        0,
    ) and not engine._receivers


# Reading


def test_a_stream_gives_the_answer_so_far_at_each_token(model: qwen3.Model):
    with running(model) as engine:
        outputs = list(engine.stream(prompt(20), greedy(10)))
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == sorted(set(lengths)) and lengths[-1] == 10
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    expected = ask_alone(model, prompt(20), greedy(10))
    for output in outputs:
        # A value of its own: what came later did not change it.
        assert output.outputs[0].token_ids == expected[: len(output.outputs[0].token_ids)]


def test_asyncio_readers_side_by_side_get_the_tokens_of_each_alone(model: qwen3.Model):
    requests = [
        (prompt(5 * n + 1), sampled(n, 10 + n) if n % 2 else greedy(10 + n)) for n in range(12)
    ]

    async def read(engine: AsyncEngine, tokens: list[int], params: Any) -> list[int]:
        answer: list[int] = []
        async for output in engine.generate(tokens, params):
            answer = output.outputs[0].token_ids
        return answer

    async def read_all() -> list[list[int]]:
        async with AsyncEngine(model, kv_cache_bytes="100blocks", max_num_seqs=5) as engine:
            return await asyncio.gather(*(read(engine, *request) for request in requests))

    assert asyncio.run(read_all()) == [ask_alone(model, *request) for request in requests]


def test_threads_and_event_loops_may_read_from_one_engine_at_once(model: qwen3.Model):
    answers: dict[str, list[int]] = {}
    errors = []

    def in_thread(n: int) -> None:
        try:
            for round in range(5):
                *_, output = engine.stream(prompt(10 + n), greedy(8 + round))
                answers[f"{n} {round}"] = output.outputs[0].token_ids
        except BaseException as error:
            errors.append(error)

    async def in_loop(n: int) -> None:
        async for output in engine.generate(prompt(10 + n), greedy(8)):
            answers[f"loop {n}"] = output.outputs[0].token_ids

    async def in_loops() -> None:
        await asyncio.gather(*map(in_loop, range(3)))

    with running(model) as engine:
        threads = [threading.Thread(target=in_thread, args=(n,)) for n in range(3)]
        threads += [threading.Thread(target=asyncio.run, args=(in_loops(),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert not errors
    for n in range(3):
        assert (
            answers[f"loop {n}"] == answers[f"{n} 0"] == ask_alone(model, prompt(10 + n), greedy(8))
        )
        assert answers[f"{n} 4"] == ask_alone(model, prompt(10 + n), greedy(12))


def test_a_slow_reader_misses_no_text(demo: tuple[Any, Any]):
    model, tokenizer = demo
    with running(model, tokenizer) as engine:
        slow = engine.stream("Hello, who are you?", greedy(40, ignore_eos=True))
        fast = engine.stream("Hello, who are you?", greedy(40, ignore_eos=True))
        *_, complete = fast
        texts = [output.outputs[0].text for output in slow]
    assert texts == [complete.outputs[0].text], (
        "it was done before this reader asked for the first one"
    )
    assert len(texts[0]) > 40


def test_a_reader_that_comes_after_the_shutdown_still_gets_its_finished_answer(model: qwen3.Model):
    with running(model) as engine:
        output_of = engine.stream(prompt(5), greedy(5))
        wait_until(lambda: not engine.engine.has_unfinished_requests())
        engine.shutdown()
        (output,) = output_of
    assert output.finished and output.outputs[0].finish_reason == "length"


def test_text_and_logprobs_of_an_output_do_not_change_behind_the_readers_back(
    demo: tuple[Any, Any],
):
    model, tokenizer = demo
    with running(model, tokenizer) as engine:
        kept = []
        for output in engine.stream(
            "Once upon a time", greedy(12, logprobs=1, ignore_eos=True, n=2)
        ):
            completion = output.outputs[0]
            kept.append(
                (output, completion.text, len(completion.token_ids), len(completion.logprobs))
            )
    for output, text, num_tokens, num_logprobs in kept:
        completion = output.outputs[0]
        assert (completion.text, len(completion.token_ids), len(completion.logprobs)) == (
            text,
            num_tokens,
            num_logprobs,
        )


# Leaving


def test_leaving_a_stream_frees_the_request_at_once(model: qwen3.Model):
    with running(model) as engine:
        for output in engine.stream(prompt(20), LONG):
            if len(output.outputs[0].token_ids) >= 5:
                break
        wait_until(lambda: is_idle(engine))
        assert engine.engine.scheduler.num_steps < 2000, "it was not computed to its end"


def test_leaving_an_async_for_frees_the_request_at_once(model: qwen3.Model):
    async def leave() -> None:
        async for output in engine.generate(prompt(20), LONG):
            if len(output.outputs[0].token_ids) >= 5:
                break
        # The loop finalises what was left.
        while not is_idle(engine):
            await asyncio.sleep(0.001)

    with running(model) as engine:
        asyncio.run(asyncio.wait_for(leave(), timeout=20))


def test_a_cancelled_task_aborts_its_request_and_no_other(model: qwen3.Model):
    async def read(params: Any) -> list[int]:
        tokens: list[int] = []
        async for output in engine.generate(prompt(20), params):
            tokens = output.outputs[0].token_ids
        return tokens

    async def cancel() -> list[int]:
        goes = asyncio.create_task(read(LONG))
        stays = asyncio.create_task(read(greedy(60)))
        while not engine.stats().num_tokens:
            await asyncio.sleep(0.001)
        goes.cancel()
        with pytest.raises(asyncio.CancelledError):
            await goes
        return await stays

    with running(model) as engine:
        assert asyncio.run(asyncio.wait_for(cancel(), timeout=30)) == ask_alone(
            model, prompt(20), greedy(60)
        )
        wait_until(lambda: is_idle(engine))


def test_a_request_whose_event_loop_is_gone_is_aborted_and_no_other_is_affected(model: qwen3.Model):
    with running(model) as engine:
        loop = asyncio.new_event_loop()
        outputs = engine.generate(prompt(20), LONG)
        loop.run_until_complete(outputs.__anext__())
        # As a program does that ends its loop without closing what runs in it.
        loop.close()
        wait_until(lambda: is_idle(engine))
        *_, output = engine.stream(prompt(5), greedy(3))
        assert output.outputs[0].token_ids == ask_alone(model, prompt(5), greedy(3))


def test_an_unread_stream_is_aborted_when_it_is_dropped(model: qwen3.Model):
    with running(model) as engine:
        outputs = engine.stream(prompt(20), LONG)
        wait_until(lambda: engine.stats().num_running == 1)
        del outputs
        wait_until(lambda: is_idle(engine))


def test_an_abort_by_id_gives_the_reader_a_last_output(model: qwen3.Model):
    with running(model) as engine:
        outputs = engine.stream(prompt(20), LONG, request_id="mine")
        next(outputs)
        engine.abort("mine")
        *_, last = outputs
        assert (
            last.finished and last.outputs[0].finish_reason == "abort" and last.outputs[0].token_ids
        )
        engine.abort("unknown")


def test_all_requests_are_aborted_together_and_others_may_come(model: qwen3.Model):
    with running(model) as engine:
        both = [engine.stream(prompt(20), LONG) for _ in range(2)]
        for outputs in both:
            next(outputs)
        engine.abort_all()
        assert [list(outputs)[-1].outputs[0].finish_reason for outputs in both] == ["abort"] * 2
        assert engine.stopped() is None
        assert list(engine.stream(prompt(5), greedy(3)))[-1].finished


# Failures


def test_bad_requests_are_refused_where_they_are_made(model: qwen3.Model):
    async def ask(tokens: Any, **options: Any) -> None:
        async for _ in engine.generate(tokens, greedy(2), **options):
            pass

    with running(model, kv_cache_bytes="10blocks") as engine:
        for tokens, error in (
            ([], ValueError),
            ("text", ValueError),
            ([99], ValueError),
            ([1] * 161, PromptTooLongError),
        ):
            with pytest.raises(error):
                list(engine.stream(tokens, greedy(2)))
            with pytest.raises(error):
                asyncio.run(ask(tokens))
        held = engine.stream(prompt(5), greedy(100), request_id="a")
        with pytest.raises(ValueError, match="request 'a' exists already"):
            asyncio.run(ask(prompt(5), request_id="a"))
        assert len(list(held)[-1].outputs[0].token_ids) == 100


def test_what_fails_a_request_reaches_only_its_reader(model: qwen3.Model):
    def fails(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size == 23:
            raise LookupError("no more")
        return logits

    with running(model) as engine:
        good = engine.stream(prompt(20), greedy(10))
        bad = engine.stream(prompt(20), greedy(10, logits_processors=[fails]))
        with pytest.raises(LookupError, match="no more"):
            for _ in bad:
                pass
        *_, output = good
        assert output.outputs[0].token_ids == ask_alone(model, prompt(20), greedy(10))


def test_the_failure_of_the_engines_thread_reaches_readers_and_later_requests(model: qwen3.Model):
    with AsyncEngine(model, kv_cache_bytes="100blocks") as engine:
        first, second = (engine.stream(prompt(20), LONG) for _ in range(2))
        next(first), next(second)

        def broken(*args: Any, **kwargs: Any) -> Any:
            raise SystemError("the bookkeeping is broken")

        engine.engine.scheduler.schedule = broken
        # All readers are told, so what the failure quotes of one of them is not in the message.
        told = r"^\[engine\] it stopped: SystemError at engine/test_async_engine\.py:\d+$"
        for read in (first.__next__, second.__next__, lambda: next(engine.stream(prompt(5)))):
            with pytest.raises(EngineStoppedError, match=told) as caught:
                while True:
                    read()
            assert str(caught.value.__cause__) == "the bookkeeping is broken"
        stopped = engine.stopped()
        assert stopped is not None and isinstance(stopped.__cause__, SystemError)
        # And ending it does not hang.


def test_readers_are_told_in_its_own_words_what_failed_if_those_quote_nothing(model: qwen3.Model):
    with AsyncEngine(model, kv_cache_bytes="100blocks") as engine:

        def broken(*args: Any, **kwargs: Any) -> Any:
            raise RanksError("[ranks] rank 1 has ended")

        engine.engine.scheduler.schedule = broken
        with pytest.raises(EngineStoppedError, match=r"^\[engine\] it stopped: rank 1 has ended$"):
            list(engine.stream(prompt(20)))


# Ending


def test_a_shutdown_ends_the_readers_with_what_they_have(model: qwen3.Model):
    with running(model) as engine:
        streams = [engine.stream(prompt(20), LONG) for _ in range(3)]
        for outputs in streams:
            next(outputs)
        results: list[Any] = []

        def read(outputs: Iterator[Any]) -> None:
            *_, last = outputs
            results.append(
                (last.finished, last.outputs[0].finish_reason, len(last.outputs[0].token_ids) > 0)
            )

        threads = [threading.Thread(target=read, args=(outputs,)) for outputs in streams]
        for thread in threads:
            thread.start()
        engine.shutdown()
        for thread in threads:
            thread.join(timeout=20)
        assert results == [(True, "abort", True)] * 3
        engine.shutdown()


def test_a_shutdown_ends_asyncio_readers_too(model: qwen3.Model):
    async def read() -> str:
        reason = None
        async for output in engine.generate(prompt(20), LONG):
            reason = output.outputs[0].finish_reason
        return reason

    async def read_and_end() -> list[str]:
        readers = [asyncio.create_task(read()) for _ in range(3)]
        while engine.stats().num_running < 3:
            await asyncio.sleep(0.001)
        await asyncio.get_running_loop().run_in_executor(None, engine.shutdown)
        return await asyncio.gather(*readers)

    with running(model) as engine:
        assert asyncio.run(asyncio.wait_for(read_and_end(), timeout=20)) == ["abort"] * 3


def test_nothing_can_be_asked_after_the_shutdown(model: qwen3.Model):
    async def ask() -> None:
        async for _ in engine.generate(prompt(5)):
            pass

    with running(model) as engine:
        pass
    with pytest.raises(EngineStoppedError, match="it was shut down"):
        list(engine.stream(prompt(5)))
    with pytest.raises(EngineStoppedError, match="it was shut down"):
        asyncio.run(ask())
    engine.abort("unknown")
    assert engine.stats().num_running == 0


def test_an_idle_engine_sleeps_and_wakes(model: qwen3.Model):
    with running(model) as engine:
        list(engine.stream(prompt(5), greedy(3)))
        num_steps = engine.engine.scheduler.num_steps
        time.sleep(0.05)
        assert engine.engine.scheduler.num_steps == num_steps
        list(engine.stream(prompt(5), greedy(3)))


def test_a_model_whose_rope_keeps_arrays_of_its_own_runs_in_the_engines_thread():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    mx.random.seed(3)
    # Not evaluated, as after loading: frequencies that are left lazy belong to the thread that made
    # them.
    model = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG | {"rope_scaling": yarn}))
    with running(model) as engine:
        *_, output = engine.stream(prompt(20), sampled(1, 10, top_p=0.9, min_p=0.01, top_k=30))
        assert len(output.outputs[0].token_ids) == 10


@pytest.mark.parametrize("is_busy", [False, True])
def test_an_engine_that_is_dropped_without_a_shutdown_is_freed_with_its_thread(
    model: qwen3.Model, is_busy: bool
):
    engine = AsyncEngine(model, kv_cache_bytes="100blocks")
    *_, last = engine.stream(prompt(20), greedy(3))
    if is_busy:
        # Nobody reads it, and nothing else holds the engine.
        engine.engine.add_request("endless", prompt(20), LONG)
    thread, freed = engine.engine.thread._thread, weakref.ref(engine.engine)
    del engine
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()
    gc.collect()
    assert freed() is None
    assert last.finished


def test_a_reader_keeps_the_engine_that_it_reads_from(model: qwen3.Model):
    outputs = AsyncEngine(model, kv_cache_bytes="100blocks").stream(prompt(20), greedy(30))
    gc.collect()
    *_, last = outputs
    assert last.outputs[0].token_ids == ask_alone(model, prompt(20), greedy(30))


ENDS_OF_PROGRAMS = {
    "shut down": "engine.shutdown()",
    "dropped": "del engine",
    "left as it is": "",
    "left while it answers": "left = engine.stream([1, 2, 3], SamplingParams(max_tokens=-1, "
    "ignore_eos=True))",
    "left by an error": "sys.exit(0)",
}


# The program is a process of its own, in which engines run ahead or not as they do.
@pytest.mark.parametrize("run_ahead", ["waiting"], indirect=True)
@pytest.mark.parametrize(
    "end",
    [
        pytest.param(end, id=name, marks=() if name == "dropped" else pytest.mark.slow)
        for name, end in ENDS_OF_PROGRAMS.items()
    ],
)
def test_a_program_that_streams_ends_well_however_it_leaves_the_engine(end: str):
    program = (
        "import sys\n"
        "from mlx_paged import AsyncEngine, SamplingParams, demo_model_path, load\n"
        "engine = AsyncEngine(*load(demo_model_path()), kv_cache_bytes='100blocks')\n"
        "*_, last = engine.stream('Hello', SamplingParams(max_tokens=5))\n"
        f"{end}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
