"""What is said of a K/V format as a cache is made: whether a model's predictions suffer in it."""

from __future__ import annotations

import re
import warnings
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from helpers.adapted_models import adapted_model
from helpers.fast_lane import mostly_slow
from paged_testing.biased_keys import llama_with_biased_keys

from mlx_paged import Engine, demo_model_path, load, make_kv_cache
from mlx_paged.config import KVBits
from mlx_paged.models import kv_format
from mlx_paged.models.kv_format import (
    MAX_DIVERGENCE,
    divergence,
    log_probabilities,
    own_text,
)
from mlx_paged.models.language_model import LanguageModel, check_model


@cache
def demo() -> LanguageModel:
    return check_model(load(demo_model_path())[0])


@cache
def llama(times: float) -> LanguageModel:
    return llama_with_biased_keys(times)


def said(model: LanguageModel, bits: str | int | None) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_kv_cache(model, kv_format=bits, kv_cache_bytes="8blocks")
    return [str(each.message) for each in caught]


@mostly_slow(
    ("times", "bits", "better"),
    [
        (0, 4, None),
        (20, 8, None),
        (20, "K:8,V:4", None),
        (20, 4, "K:8,V:4 changes them by 0.0"),
        (50, 8, None),
        (50, "K:8,V:4", "8 bits changes them by 0.0"),
        (50, 4, "8 bits changes them by 0.0"),
        (50, None, None),
    ],
    quick=(3, 4),
)
def test_a_format_that_costs_much_is_named_in_a_line_with_one_that_does_not(
    times: float, bits: str | int | None, better: str | None
):
    lines = said(llama(times), bits)
    assert len(lines) == (better is not None)
    for line in lines:
        assert line.startswith(f"[kv cache] K/V in {KVBits.parse(bits)} change what this")
        assert better in line


def test_where_no_format_is_good_the_line_says_to_leave_it_out():
    assert said(llama(500), 8)[0].endswith("; leave the format out")


@pytest.mark.slow
@pytest.mark.parametrize("times", [0, 20, 50])
def test_what_a_short_prompt_shows_is_what_a_long_one_costs(times: float):
    """Within a factor of three of 256 tokens, where that is not little."""
    ids = mx.random.randint(0, 256, (256,), key=mx.random.key(1)).tolist()
    exact = log_probabilities(llama(times), None, ids)
    for name in (8, "K:8,V:4", 4):
        bits = KVBits.parse(name)
        long = divergence(exact, log_probabilities(llama(times), bits, ids))
        start = log_probabilities(llama(times), None, ids[:64])
        short = divergence(start, log_probabilities(llama(times), bits, ids[:64]))
        assert short / 2 < long < 3 * short
        if (lines := said(llama(times), name)) or long > 0.3:
            number = re.search(r"by ([\d.]+) nats", lines[0])
            assert float(number[1]) / 2 < long < 3 * float(number[1])


def test_the_divergence_is_that_of_the_definition():
    exact, found = (mx.array([[p, 1 - p], [0.5, 0.5]]) for p in (0.5, 0.25))
    # 0.5 log(0.5 / 0.25) + 0.5 log(0.5 / 0.75), and nothing in the other row.
    assert divergence(mx.log(exact), mx.log(found)) == pytest.approx(0.143841 / 2, rel=1e-5)
    never = mx.array([[0.0, -mx.inf]])
    assert divergence(never, never) == 0


def test_models_of_all_kinds_are_measured():
    """Native, one sequence at a time, and with a recurrent state; none of them has such keys."""
    for each in (demo(), adapted_model("gpt_bigcode"), adapted_model("falcon_h1")):
        assert said(each, 8) == []


def test_nothing_is_said_of_a_trained_model_that_4_bits_hardly_change():
    """Its perplexity grows by 0.2% (docs/internals/measured.md); after random tokens it changes by
    far more than the limit.
    """
    assert said(demo(), 4) == []
    ids = mx.random.randint(0, demo().args.vocab_size, (64,), key=mx.random.key(1)).tolist()
    exact, found = (log_probabilities(demo(), bits, ids) for bits in (None, KVBits(4, 4)))
    assert divergence(exact, found) > MAX_DIVERGENCE


def test_a_model_is_tried_once_for_each_format(monkeypatch: pytest.MonkeyPatch):
    model, tried = llama_with_biased_keys(50), []
    monkeypatch.setattr(kv_format, "own_text", lambda *args: tried.append(args) or own_text(*args))
    lines = [said(model, bits) for bits in (4, 8, 4, 8)]
    assert lines == lines[:2] * 2 and len(lines[0]) == 1 and len(tried) == 2


def test_what_a_model_writes_comes_with_what_it_predicts_of_it():
    ids, exact = own_text(demo(), 40)
    again, _ = own_text(demo(), 40)
    assert len(ids) == 40 and ids == again
    np.testing.assert_allclose(exact, log_probabilities(demo(), None, ids), atol=2e-5)


def test_an_engine_says_it_as_it_is_made():
    with pytest.warns(UserWarning, match="K/V in 4 bits change what this model predicts"):
        Engine(llama(50), kv_format=4, kv_cache_bytes="8blocks")
