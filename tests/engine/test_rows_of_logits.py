"""The rows of logits that tokens are drawn from, as an engine hands them out."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from helpers.engine_runs import greedy, make_engine, prompt, run, sampled

from mlx_paged.engine.request import Completion
from mlx_paged.engine.sampling import sampler
from mlx_paged.generation import generate_step
from mlx_paged.models import qwen3


class Rows:
    """A reader that keeps the likeliest token of each row, and how many rows came."""

    def __init__(self) -> None:
        self.likeliest: dict[tuple[str, int, int], int] = {}
        self.num_rows = 0

    def __call__(self, completion: Completion, number: int, row: mx.array) -> None:
        assert row.ndim == 1
        self.num_rows += 1
        self.likeliest[completion.request_id, completion.index, number] = int(mx.argmax(row).item())


def rotated(tokens: mx.array, logits: mx.array) -> mx.array:
    return mx.roll(logits, 3, axis=-1)


@pytest.mark.usefixtures("run_ahead")
def test_each_token_comes_with_the_row_that_it_was_drawn_from(model: qwen3.Model):
    engine, rows = make_engine(model), Rows()
    engine.read_rows(rows)
    params: dict[str, Any] = {
        "greedy": greedy(9, ignore_eos=True),
        "masked": greedy(7, ignore_eos=True, logit_bias={4: 5.0}),
        "processed": greedy(8, ignore_eos=True, logits_processors=[rotated]),
        "own": greedy(6, ignore_eos=True, sampler=lambda logprobs: mx.argmax(logprobs, axis=-1)),
        "cold": sampled(3, 5, n=2, temperature=1e-6, ignore_eos=True),
    }
    for seed, (name, each) in enumerate(params.items()):
        engine.add_request(name, prompt(20 + seed, seed=seed), each)
    outputs = run(engine)
    expected = {
        (name, completion.index, number): token
        for name, output in outputs.items()
        for completion in output.outputs
        for number, token in enumerate(completion.token_ids, 1)
    }
    assert rows.likeliest == expected
    assert rows.num_rows == len(expected) == 9 + 7 + 8 + 6 + 2 * 5


def test_no_row_is_handed_out_once_the_reader_is_gone(model: qwen3.Model):
    engine, rows = make_engine(model), Rows()
    engine.read_rows(rows)
    engine.add_request("a", prompt(5), greedy(4, ignore_eos=True))
    engine.step()
    engine.read_rows(None)
    run(engine)
    assert rows.num_rows == 1


def test_a_greedy_answer_with_logprobs_is_drawn_as_one_without(
    model: qwen3.Model, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*arguments: Any) -> Any:
        raise AssertionError("drawn with settings")

    monkeypatch.setattr(sampler, "_draw_with_settings", refuse)
    pieces = list(generate_step(prompt(5), model, max_tokens=6))
    assert [int(mx.argmax(logprobs).item()) for _, logprobs in pieces] == [
        token for token, _ in pieces
    ]
