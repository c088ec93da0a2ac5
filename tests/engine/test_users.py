"""Requests of several users on an engine: their tokens are those that they have alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from helpers.engine_runs import greedy, make_engine, prompt, run, sampled

from mlx_paged import AsyncEngine
from mlx_paged.engine.engine import Engine
from mlx_paged.models import qwen3
from mlx_paged.options.sampling_params import SamplingParams
from mlx_paged.request import RequestOutput


def params_of(number: int) -> SamplingParams:
    return sampled(number, 25, n=4) if number % 3 == 0 else greedy(25)


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def answer_all(engine: Engine, users: list[str | None]) -> dict[str, list[list[int]]]:
    """Twelve requests that come one after the other, each of the next user."""
    answers = {}
    for number in range(12):
        tokens = prompt(20 + 11 * number, number)
        user = users[number % len(users)]
        engine.add_request(str(number), tokens, params_of(number), user=user)
        for _ in range(3):
            answers |= {each.request_id: tokens_of(each) for each in engine.step()}
    return answers | {name: tokens_of(output) for name, output in run(engine).items()}


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_bytes": "400blocks"},
        {"kv_cache_bytes": "30blocks", "swap_bytes": "40blocks"},
        {"kv_cache_bytes": "30blocks", "swap_bytes": 0, "enable_prefix_caching": False},
        {"kv_cache_bytes": "60blocks", "kv": "basic"},
    ],
    ids=["blocks for all", "swapped", "recomputed", "basic"],
)
def test_tokens_are_the_same_with_users_who_take_each_others_places(
    model: qwen3.Model, run_ahead: bool, options: dict[str, Any]
):
    expected = answer_all(make_engine(model, kv_cache_bytes="400blocks"), [None])
    engine = make_engine(model, **{"max_num_seqs": 4, "run_ahead": run_ahead, **options})
    assert answer_all(engine, ["ann", "bob", "ann", None]) == expected
    assert engine.scheduler.num_preemptions > 0


def test_the_user_of_a_stream_is_passed_on(model: qwen3.Model):
    with AsyncEngine(model, kv_cache_bytes="100blocks") as engine:
        users: list[Any] = []
        add = engine.engine.scheduler.add

        def spied(request: Any) -> None:
            users.append(request.user)
            add(request)

        engine.engine.scheduler.add = spied  # type: ignore[method-assign]
        list(engine.stream(prompt(20), greedy(2), user="ann"))

        async def main() -> None:
            async for _ in engine.generate(prompt(20), greedy(2), user="bob"):
                pass

        asyncio.run(main())
        list(engine.stream(prompt(20), greedy(2)))
    assert users == ["ann", "bob", None]
