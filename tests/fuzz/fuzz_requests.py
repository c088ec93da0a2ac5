"""Requests in flight: bad ones are refused or fail alone, and the tokens of the good ones are those
they have alone.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import mlx.core as mx
from fuzz_library import CONTEXT, VOCAB_SIZE, tiny_model, tokenizer
from fuzz_values import described, junk
from fuzzing import Case, Defect, what_is_wrong
from paged_testing.integrity import check_scheduler

from mlx_paged import AsyncEngine, Engine, SamplingParams
from mlx_paged.errors import EngineStoppedError

NUM_GOOD = 24
# Of the two best log-probabilities of a greedy token, below which rounding may choose.
NEAR_TIE = 1e-4
# Greedy answers whose tokens are no near ties are exact; sampled ones depend on their seed alone.
Good = tuple[list[int], dict[str, Any]]


class Ends(BaseException):
    """What a program may raise to end itself."""


@cache
def good_requests() -> list[tuple[Good, list[int]]]:
    """Requests and the tokens they have when each runs alone."""
    rng = random.Random(1)
    found: list[tuple[Good, list[int]]] = []
    while len(found) < NUM_GOOD:
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 2, 7, 16, 17, 30)))]
        params: dict[str, Any] = {"max_tokens": rng.choice((1, 3, 9, 17)), "ignore_eos": True}
        if rng.random() < 0.5:
            params |= {"temperature": 1.0, "seed": rng.randrange(10**6), "top_k": 50}
        if rng.random() < 0.2:
            params["repetition_penalty"] = 1.3
        completion = ask_alone(prompt, SamplingParams(**params, logprobs=2))
        best_two = [
            sorted((entry.logprob for entry in each.values()), reverse=True)
            for each in completion.logprobs
        ]
        if "seed" in params or all(first - second > NEAR_TIE for first, second, *_ in best_two):
            found.append(((prompt, params), completion.token_ids))
    return found


def ask_alone(prompt: list[int], params: SamplingParams) -> Any:
    engine = Engine(tiny_model(), None, kv_cache_bytes="100blocks", enable_prefix_caching=False)
    engine.add_request("alone", prompt, params)
    output = None
    while engine.has_unfinished_requests():
        (output,) = engine.step() or [None]
    return output.outputs[0]


def bad_processor(rng: random.Random) -> Callable[[Any, Any], Any]:
    """A logits processor that raises, or returns what it should not, sooner or later."""
    after = rng.choice((0, 0, 1, 3))
    errors = (
        LookupError("never"), SystemExit(3), asyncio.CancelledError(), GeneratorExit(),
        StopIteration(7), Ends("end"), StopAsyncIteration(), MemoryError(), RecursionError(),
        ValueError("two\nlines"),
    )  # fmt: skip
    error = rng.choice(errors)
    returned = rng.choice(
        (None, 3, "x", mx.zeros((1, 3)), mx.zeros((VOCAB_SIZE,)), mx.full((1, VOCAB_SIZE), mx.nan))
    )
    raises = rng.random() < 0.6
    calls = 0

    def process(tokens: mx.array, logits: mx.array) -> Any:
        nonlocal calls
        calls += 1
        if calls <= after:
            return logits
        if raises:
            raise error
        return returned

    return process


def bad_request(rng: random.Random) -> dict[str, Any]:
    """Arguments of ``add_request`` that are wrong, or that fail later; some of them are right by
    chance.
    """
    arguments: dict[str, Any] = {
        "prompt": [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 5, 20)))]
    }
    arguments["params"] = SamplingParams(max_tokens=rng.choice((1, 5, 20)))
    kind = rng.randrange(6)
    if kind == 0:
        arguments["prompt"] = junk(rng)
    elif kind == 1:
        arguments[rng.choice(("priority", "cache_salt", "no_store", "params"))] = junk(rng)
    elif kind == 2:
        arguments["prompt"] = [1] * rng.choice((CONTEXT - 1, CONTEXT, 10 * CONTEXT))
    elif kind == 3:
        # SamplingParams says what is wrong with most of them.
        arguments["params"] = SamplingParams(
            stop=["\ud800", "x"], logit_bias={rng.choice((0, 10**9)): 5.0}, n=2
        )
    else:
        arguments["params"] = SamplingParams(max_tokens=9, logits_processors=[bad_processor(rng)])
    return arguments


def options_of_engine(rng: random.Random) -> dict[str, Any]:
    num_seqs = rng.choice((1, 2, 4, 16))
    return {
        # A few blocks only, so that requests are preempted and swapped.
        "kv_cache_bytes": rng.choice(("4blocks", "6blocks", "9blocks", "40blocks")),
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": rng.choice((num_seqs, 16, 64)) if num_seqs <= 16 else 64,
        "swap_bytes": rng.choice((0, "4blocks", None)),
        "enable_prefix_caching": rng.random() < 0.7,
        "priority_steps": rng.choice((1, 5, 1000)),
        "seed": 0,
    }


def request_case(rng: random.Random) -> Case:
    good = rng.sample(good_requests(), rng.choice((1, 2, 4)))
    bad = [bad_request(rng) for _ in range(rng.choice((1, 2, 4)))]
    shown = [{key: described(value) for key, value in arguments.items()} for arguments in bad]
    run = rng.choice((run_on_engine, run_on_engine, run_on_streams, run_on_event_loop))
    options = options_of_engine(rng)
    return Case(f"{run.__name__}: {options} bad: {shown}", lambda: run(rng, options, good, bad))


def run_on_engine(
    rng: random.Random, options: dict[str, Any], good: list[Any], bad: list[dict[str, Any]]
) -> None:
    """Good and bad requests in any order, between steps, with aborts among them."""
    engine = Engine(tiny_model(), tokenizer(), **options)
    expected = {f"good {index}": tokens for index, (_, tokens) in enumerate(good)}
    asked: set[str] = set()

    def ask_good(request_id: str, prompt: list[int], params: dict[str, Any]) -> None:
        engine.add_request(request_id, prompt, SamplingParams(**params))
        asked.add(request_id)

    def ask_bad(request_id: str, arguments: dict[str, Any]) -> None:
        # At times under the id of a good one, which is in use, or done.
        taken = sorted(asked)
        request_id = rng.choice(taken) if taken and rng.random() < 0.3 else request_id
        refused_or_taken(lambda: engine.add_request(request_id, **arguments))

    acts: list[Callable[[], None]] = []
    for request_id, ((prompt, params), _) in zip(expected, good, strict=True):
        acts.append(partial(ask_good, request_id, prompt, params))
    for index, arguments in enumerate(bad):
        acts.append(partial(ask_bad, f"bad {index}", arguments))
        aborted = rng.choice((f"bad {index}", "nobody", junk(rng)))
        acts.append(partial(refused_or_taken, partial(engine.abort, aborted)))
    rng.shuffle(acts)
    outputs: dict[str, Any] = {}
    while acts or engine.has_unfinished_requests():
        for _ in range(rng.choice((0, 1, 3))):
            if acts:
                acts.pop(0)()
        for output in engine.step():
            if output.finished:
                outputs.setdefault(output.request_id, output)
        check_scheduler(engine.scheduler)
    check_good(expected, outputs)
    stats = engine.stats()
    if stats.num_running or stats.num_waiting or engine.manager.tables:
        raise Defect("something is left in the engine")


def refused_or_taken(act: Callable[[], object]) -> None:
    try:
        act()
    except (ValueError, TypeError, RuntimeError) as error:
        wrong = what_is_wrong(error, ())
        if wrong is not None:
            raise Defect(f"{wrong}: {type(error).__name__}: {error}") from error


def check_good(expected: dict[str, list[int]], outputs: dict[str, Any]) -> None:
    for request_id, tokens in expected.items():
        output = outputs.get(request_id)
        if output is None:
            raise Defect(f"{request_id} has no output")
        if output.outputs[0].token_ids != tokens:
            raise Defect(
                f"{request_id}: {output.outputs[0].token_ids} instead of {tokens}, "
                f"{output.outputs[0].finish_reason}, {output.error!r}"
            )


@contextmanager
def defects_noted(defects: list[str], request_id: str, is_good: bool) -> Iterator[None]:
    """Note when the engine stops, or a good request fails; a bad one may fail."""
    try:
        yield
    except EngineStoppedError as error:
        defects.append(f"the engine stopped: {error}")
    except Exception as error:
        if is_good:
            defects.append(f"{request_id} failed: {error!r}")


def run_on_streams(
    rng: random.Random, options: dict[str, Any], good: list[Any], bad: list[dict[str, Any]]
) -> None:
    """Each request in a thread of its own."""
    outputs: dict[str, Any] = {}
    defects: list[str] = []

    def read(
        engine: AsyncEngine, request_id: str, arguments: dict[str, Any], is_good: bool
    ) -> None:
        with defects_noted(defects, request_id, is_good):
            for output in engine.stream(request_id=request_id, **arguments):
                outputs[request_id] = output

    with AsyncEngine(tiny_model(), tokenizer(), **options) as engine:
        threads = [
            threading.Thread(target=read, args=(engine, name, arguments, is_good), daemon=True)
            for name, arguments, is_good in named(rng, good, bad)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finish(engine, good, outputs, defects)


def run_on_event_loop(
    rng: random.Random, options: dict[str, Any], good: list[Any], bad: list[dict[str, Any]]
) -> None:
    """Each request in a task of its own; some bad ones are cancelled."""
    outputs: dict[str, Any] = {}
    defects: list[str] = []

    async def read(
        engine: AsyncEngine, request_id: str, arguments: dict[str, Any], is_good: bool
    ) -> None:
        with defects_noted(defects, request_id, is_good):
            async for output in engine.generate(request_id=request_id, **arguments):
                outputs[request_id] = output

    async def read_all(engine: AsyncEngine) -> None:
        tasks = []
        for name, arguments, is_good in named(rng, good, bad):
            tasks.append(asyncio.create_task(read(engine, name, arguments, is_good)))
            if not is_good and rng.random() < 0.3:
                await asyncio.sleep(0)
                tasks[-1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    with AsyncEngine(tiny_model(), tokenizer(), **options) as engine:
        asyncio.run(read_all(engine))
    finish(engine, good, outputs, defects)


def named(
    rng: random.Random, good: list[Any], bad: list[dict[str, Any]]
) -> list[tuple[str, dict[str, Any], bool]]:
    requests = [
        (f"good {index}", {"prompt": prompt, "params": SamplingParams(**params)}, True)
        for index, ((prompt, params), _) in enumerate(good)
    ]
    requests += [(f"bad {index}", arguments, False) for index, arguments in enumerate(bad)]
    rng.shuffle(requests)
    return requests


def finish(
    engine: AsyncEngine, good: list[Any], outputs: dict[str, Any], defects: list[str]
) -> None:
    if defects:
        raise Defect("; ".join(defects))
    check_good({f"good {index}": tokens for index, (_, tokens) in enumerate(good)}, outputs)
    check_scheduler(engine.engine.scheduler)
    if engine.engine.has_unfinished_requests():
        raise Defect("something is left in the engine")
