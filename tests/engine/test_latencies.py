"""What the engine observes of its requests, by a clock that the test moves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import mlx.nn as nn
import pytest
from helpers.engine_runs import greedy, make_engine, prompt, run, sampled

from mlx_paged.engine.engine import Engine
from mlx_paged.engine.reports import Histogram, Latencies, one_two_five
from mlx_paged.request import RequestOutput

HISTOGRAMS = (
    "time_to_first_token",
    "queue_time",
    "prefill_time",
    "inference_time",
    "inter_token_latency",
    "time_per_output_token",
    "decode_time",
    "e2e_latency",
    "prompt_tokens",
    "prefill_computed_tokens",
    "generation_tokens",
    "params_n",
    "params_max_tokens",
)
# Observed once per request, with its first token.
OF_PROMPTS = (
    "time_to_first_token",
    "queue_time",
    "prefill_time",
    "prompt_tokens",
    "prefill_computed_tokens",
    "params_n",
    "params_max_tokens",
)


class Clock:
    """Says the time that it was set to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    yield clock


def counts(latencies: Latencies) -> dict[str, int]:
    return {name: getattr(latencies, name).count for name in HISTOGRAMS}


def sums(latencies: Latencies) -> dict[str, float]:
    return {name: round(getattr(latencies, name).sum, 6) for name in HISTOGRAMS}


def step(engine: Engine, clock: Clock, seconds: float) -> list[RequestOutput]:
    """A step at whose end the clock is ``seconds`` further."""
    process_output = engine.steps.process_output

    def process_late() -> None:
        clock.now, engine.steps.process_output = clock.now + seconds, process_output
        process_output()

    engine.steps.process_output = process_late
    return engine.step()


def run_ticking(engine: Engine, clock: Clock, seconds: float) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in step(engine, clock, seconds)}
    return outputs


def test_a_value_falls_into_the_first_bucket_that_is_not_below_it():
    histogram = Histogram([1, 5])
    for value in (0, 1, 1.5, 5):
        histogram.observe(value)
    histogram.observe(6, times=3)
    assert (histogram.counts, histogram.count, histogram.sum) == ([2, 2, 3], 7, 25.5)


def test_buckets_of_token_numbers_end_at_the_context():
    assert list(one_two_five(100)) == [1, 2, 5, 10, 20, 50, 100]
    assert list(one_two_five(99)) == [1, 2, 5, 10, 20, 50]


def test_a_request_is_observed_from_its_arrival_to_its_end(model: nn.Module, clock: Clock):
    engine = make_engine(model, max_num_seqs=1)
    engine.add_request("a", prompt(20), greedy(3))
    clock.now += 5
    engine.add_request("b", prompt(30, seed=1), greedy(2))
    run_ticking(engine, clock, 1)
    # a waits 5 s, and has tokens at 6, 7 and 8 s; b arrives at 5, begins at 8, has tokens at 9, 10.
    assert sums(engine.latencies) == {
        "time_to_first_token": 6 + 4,
        "queue_time": 5 + 3,
        "prefill_time": 1 + 1,
        "inference_time": 3 + 2,
        "inter_token_latency": 2 + 1,
        "time_per_output_token": 1 + 1,
        "decode_time": 2 + 1,
        "e2e_latency": 8 + 5,
        "prompt_tokens": 50,
        "prefill_computed_tokens": 50,
        "generation_tokens": 5,
        "params_n": 2,
        "params_max_tokens": 5,
    }
    assert counts(engine.latencies) == dict.fromkeys(HISTOGRAMS, 2) | {"inter_token_latency": 3}
    stats = engine.stats()
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (50, 5)
    assert stats.num_finished == {"stop": 0, "length": 2, "abort": 0, "error": 0}
    assert (stats.num_steps, stats.busy_seconds) == (5, 5)
    # Each first token counts beside those that its step computed, as in vLLM.
    assert engine.latencies.iteration_tokens.sum == (20 + 1) + 2 + (30 + 1) + 1
    assert engine.latencies.iteration_tokens.count == 5


def test_tokens_are_counted_while_the_answer_still_grows(model: nn.Module, clock: Clock):
    engine = make_engine(model)
    engine.add_request("a", prompt(20), greedy(10))
    for num_tokens in (1, 2, 3):
        step(engine, clock, 0.5)
        assert engine.stats().num_generation_tokens == num_tokens
    assert engine.latencies.inter_token_latency.counts[9] == 2  # 0.4 < 0.5 <= 0.5
    assert engine.latencies.time_to_first_token.sum == 0.5
    assert engine.latencies.e2e_latency.count == 0
    engine.abort_all()
    run(engine)


def test_cached_prompt_tokens_are_counted_with_the_first_token(model: nn.Module):
    engine = make_engine(model)
    for name in ("a", "b"):
        engine.add_request(name, prompt(40), greedy(1))
        run(engine)
    stats = engine.stats()
    assert (stats.num_prompt_tokens, stats.num_cached_prompt_tokens) == (80, 32)


@pytest.mark.parametrize("kv", ["paged", "basic"])
def test_completions_of_one_prompt_share_what_concerns_the_prompt(
    model: nn.Module, clock: Clock, kv: str
):
    engine = make_engine(model, kv=kv)
    engine.add_request("a", prompt(20), sampled(1, 4, n=3, ignore_eos=True))
    run_ticking(engine, clock, 1)
    once = dict.fromkeys(OF_PROMPTS, 1) | {"inter_token_latency": 9}
    assert counts(engine.latencies) == dict.fromkeys(HISTOGRAMS, 3) | once
    assert engine.stats().num_generation_tokens == 12
    assert engine.latencies.inter_token_latency.sum == engine.latencies.decode_time.sum == 9
    assert engine.latencies.params_n.sum == 3


def test_what_was_aborted_or_failed_counts_by_its_reason_only(model: nn.Module, clock: Clock):
    def fail(tokens: Any, logits: Any) -> Any:
        raise ValueError("a processor failed")

    engine = make_engine(model)
    engine.add_request("waits", prompt(20), greedy(5))
    engine.abort("waits")
    engine.add_request("runs", prompt(30), greedy(5))
    step(engine, clock, 1)
    engine.abort("runs")
    engine.add_request("fails", prompt(25), greedy(5, logits_processors=[fail]))
    run(engine)
    assert engine.stats().num_finished == {"stop": 0, "length": 0, "abort": 2, "error": 1}
    begun = dict.fromkeys(OF_PROMPTS, 1)
    assert counts(engine.latencies) == dict.fromkeys(HISTOGRAMS, 0) | begun
    assert engine.stats().num_generation_tokens == 1


def test_preemptions_count_as_time_between_tokens_and_their_tokens_once(
    model: nn.Module, clock: Clock
):
    engine = make_engine(model, kv_cache_bytes="6blocks", swap_bytes=0)
    for index in range(3):
        engine.add_request(str(index), prompt(20, seed=index), greedy(30, ignore_eos=True))
    run_ticking(engine, clock, 1)
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_generation_tokens == 90
    assert counts(engine.latencies) == dict.fromkeys(HISTOGRAMS, 3) | {"inter_token_latency": 87}
    latencies = engine.latencies
    assert latencies.inter_token_latency.sum == pytest.approx(latencies.decode_time.sum)
    parts = (latencies.queue_time, latencies.prefill_time, latencies.decode_time)
    assert latencies.e2e_latency.sum == pytest.approx(sum(part.sum for part in parts))


@pytest.mark.usefixtures("run_ahead")
def test_each_token_counts_once_however_many_come_in_a_step(model: nn.Module, clock: Clock):
    engine = make_engine(model)
    engine.add_request("a", prompt(20), greedy(30, ignore_eos=True))
    run_ticking(engine, clock, 1)
    latencies = engine.latencies
    assert latencies.num_generation_tokens == latencies.generation_tokens.sum == 30
    assert latencies.inter_token_latency.count == 29
    assert latencies.inter_token_latency.sum == pytest.approx(latencies.decode_time.sum)
    # A step that gave k tokens was k observations of a k-th of its time.
    assert latencies.decode_time.sum == engine.stats().num_steps - 1
