"""Engines whose steps hold as many tokens as take a given time."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import pytest
from helpers.engine_runs import ask_alone, greedy, make_engine, prompt, run, sampled

from mlx_paged.cli.chat.program import setup_arg_parser as chat_parser
from mlx_paged.cli.flags import engine_options
from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.options import with_step_seconds
from mlx_paged.engine.scheduling.step_budget import ClockedBudgets, TokenBudgets
from mlx_paged.models import qwen3
from mlx_paged.options.config import SchedulerConfig
from mlx_paged.server.program import setup_arg_parser as server_parser

LIMITS = TokenBudgets(SchedulerConfig.max_num_batched_tokens, SchedulerConfig.max_num_mixed_tokens)


class SimulatedSteps:
    """A clock by which each step takes as long as its tokens say, up to a fifth more or less."""

    def __init__(self, engine: Engine, per_token: float):
        self.now, self.batches, self.per_token = 0.0, list[tuple[Any, ...]](), per_token
        rng, launch = random.Random(0), engine.runner.launch

        def timed_launch(batch: Any, awaited: Any) -> Any:
            parts = [(part.completion.request_id, *part[1:4]) for part in batch.scheduled]
            self.batches.append(tuple(parts))
            self.now += batch.num_tokens * self.per_token * rng.uniform(0.8, 1.2)
            return launch(batch, awaited)

        engine.runner.launch = timed_launch  # type: ignore[method-assign]

    def __call__(self) -> float:
        return self.now


def bits_of(engine: Engine) -> dict[str, bytes]:
    """The log-probabilities of requests that come one after the other while others run."""
    rng = random.Random(1)
    rows: dict[str, list[np.ndarray]] = {}
    engine.read_rows(
        lambda request, number, row: rows.setdefault(request.request_id, []).append(np.array(row))
    )
    for number in range(6):
        params = sampled(number, 12) if number % 2 else greedy(12)
        engine.add_request(str(number), prompt(rng.randrange(100, 700), number), params)
        for _ in range(5):
            engine.step()
    run(engine)
    return {name: np.stack(each).tobytes() for name, each in rows.items()}


@pytest.mark.parametrize("run_ahead", [False, True])
def test_budgets_that_are_given_again_make_the_same_steps_and_the_same_bits(
    model: qwen3.Model, run_ahead: bool, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG, "mlx_paged.engine")
    options = {"run_ahead": run_ahead, "kv_cache_bytes": "400blocks"}
    first = make_engine(model, mixed_step_seconds=0.1, prefill_step_seconds=0.7, **options)
    clock = SimulatedSteps(first, per_token=0.002)
    first.steps.budgets = ClockedBudgets(LIMITS, 0.7, 0.1, clock)
    bits = bits_of(first)
    chosen = first.token_budgets
    assert len({each.mixed for each in chosen}) > 1 and len({each.prefill for each in chosen}) > 1
    assert [record.message for record in caplog.records if "from step" in record.message] == [
        f"from step {each.step} on: {TokenBudgets(each.prefill, each.mixed)}" for each in chosen[1:]
    ]
    again = make_engine(model, token_budgets=chosen, **options)
    steps = SimulatedSteps(again, 0.0)
    assert bits_of(again) == bits
    assert steps.batches == clock.batches
    # Other budgets are other steps.
    other = make_engine(model, **options)
    steps = SimulatedSteps(other, 0.0)
    assert bits_of(other).keys() == bits.keys()
    assert steps.batches != clock.batches


def test_an_answer_goes_on_beside_a_long_prompt_on_a_slow_device(model: qwen3.Model):
    engine = make_engine(model, kv_cache_bytes="400blocks")
    clock = SimulatedSteps(engine, per_token=1 / 118)
    engine.steps.budgets = ClockedBudgets(LIMITS, 1.0, 0.2, clock)
    engine.add_request("answer", prompt(10), greedy(200))
    engine.step()
    engine.add_request("prompt", prompt(1500, 1), greedy(2))
    times = []
    while "prompt" in engine.reports.requests:
        times.append(clock.now)
        engine.step()
    gaps = np.diff(times)
    # 64 tokens are tried once; 32 take 0.27 s, a fifth more or less.
    assert gaps.max() <= 64 / 118 * 1.2 and np.sort(gaps)[-2] <= 32 / 118 * 1.2
    # The prompt has 31 of them.
    assert len(times) <= 1500 / 31 + 5


@pytest.mark.parametrize("factor", [5, 20])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_device_that_becomes_much_slower_is_believed_after_two_steps(
    model: qwen3.Model, run_ahead: bool, factor: int
):
    engine = make_engine(model, kv_cache_bytes="400blocks", run_ahead=run_ahead)
    clock = SimulatedSteps(engine, per_token=1 / 3000)
    engine.steps.budgets = ClockedBudgets(LIMITS, 1.0, 0.2, clock)
    engine.add_request("answer", prompt(10), greedy(300))
    engine.step()
    for number in range(2):
        engine.add_request(str(number), prompt(1500, number), greedy(2))
        while str(number) in engine.reports.requests:
            engine.step()
    clock.per_token *= factor
    engine.add_request("slow", prompt(1500, 2), greedy(2))
    begin = len(clock.batches)
    while "slow" in engine.reports.requests:
        engine.step()
    counts = [sum(part[2] for part in batch) for batch in clock.batches[begin:]]
    over = [number for number, count in enumerate(counts) if count * clock.per_token > 2 * 0.2]
    # A step that was launched ahead does not know of the one before it.
    assert len(over) == (3 if run_ahead else 2) and over[-1] <= 3


def test_an_engine_that_is_stepped_by_hand_has_the_limits(model: qwen3.Model):
    engine = make_engine(model)
    assert engine.token_budgets == [(0, *LIMITS)]
    assert make_engine(model, max_num_batched_tokens=100).token_budgets == [(0, 100, 100)]


def test_an_engine_that_steps_by_itself_begins_low_and_gives_the_same_tokens(model: qwen3.Model):
    with AsyncEngine(model, kv_cache_bytes="100blocks") as engine:
        assert engine.engine.token_budgets[0] == (0, 128, 64)
        *_, last = engine.stream(prompt(600), greedy(10))
    assert last.outputs[0].token_ids == ask_alone(model, prompt(600), greedy(10))


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({}, (1.0, 0.2)),
        ({"max_num_batched_tokens": 2048}, (None, 0.2)),
        ({"max_num_mixed_tokens": 512}, (1.0, None)),
        ({"max_num_mixed_tokens": 512, "mixed_step_seconds": 0.1}, (1.0, 0.1)),
        ({"mixed_step_seconds": 0}, (1.0, 0)),
        ({"prefill_step_seconds": 3.0, "max_num_batched_tokens": None}, (3.0, 0.2)),
        ({"token_budgets": []}, (None, None)),
    ],
    ids=str,
)
def test_what_is_given_of_a_step_wins_over_the_default_seconds(
    given: dict[str, Any], seconds: tuple[float | None, float | None]
):
    chosen = with_step_seconds(given)
    assert (chosen.get("prefill_step_seconds"), chosen.get("mixed_step_seconds")) == seconds
    assert {**chosen, **given} == chosen | given


def test_flags_of_the_programs_leave_the_seconds_to_the_engine_or_set_them():
    options = engine_options(server_parser().parse_args([]), "server")
    assert with_step_seconds(options)["mixed_step_seconds"] == 0.2
    args = server_parser().parse_args(["--prefill-step-size", "2048"])
    options = engine_options(args, "server")
    assert with_step_seconds(options)["prefill_step_seconds"] is None
    args = chat_parser().parse_args(["--prefill-step-seconds", "0.5"])
    assert engine_options(args, "chat")["prefill_step_seconds"] == 0.5
    assert chat_parser().parse_args([]).prefill_step_size is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixed_step_seconds": -1}, "mixed_step_seconds must be seconds within 0..3600"),
        ({"prefill_step_seconds": "1s"}, "prefill_step_seconds must be seconds within 0..3600"),
        ({"token_budgets": [(0, 1)]}, "token_budgets must be a list of triples"),
        ({"token_budgets": [(0, 0, 1)]}, "token_budgets must be a list of triples"),
        ({"token_budgets": [(-1, 1, 1)]}, "token_budgets must be a list of triples"),
        ({"token_budgets": 7}, "token_budgets must be a list of triples"),
        (
            {"token_budgets": [], "mixed_step_seconds": 0.1},
            "token_budgets can't be combined with mixed_step_seconds",
        ),
        ({"max_num_mixed_tokens": 0}, "max_num_mixed_tokens must be a positive integer, or None"),
    ],
    ids=str,
)
def test_options_that_are_out_of_range_are_refused(
    model: qwen3.Model, options: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        make_engine(model, **options)


def test_a_failed_step_is_not_measured(model: qwen3.Model):
    engine = make_engine(model, kv_cache_bytes="400blocks", mixed_step_seconds=0.2)
    clock = SimulatedSteps(engine, per_token=0.001)
    engine.steps.budgets = budgets = ClockedBudgets(LIMITS, 1.0, 0.2, clock)
    launch, fails = engine.runner.launch, [True]

    def failing_launch(batch: Any, awaited: Any) -> Any:
        logits = launch(batch, awaited)
        if fails and batch.num_tokens > 100:
            clock.now += fails.pop() * 1000.0
            raise RuntimeError("once")
        return logits

    engine.runner.launch = failing_launch  # type: ignore[method-assign]
    engine.add_request("a", prompt(60), greedy(4))
    engine.add_request("b", prompt(60, 1), greedy(4))
    outputs = run(engine)
    assert not fails and all(each.error is None for each in outputs.values())
    assert budgets.price.seconds(60, 0) == pytest.approx(0.06, rel=0.3)
