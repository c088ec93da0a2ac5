"""Budgets and times are read as people write them, and their sums are right."""

from __future__ import annotations

import math

import pytest

from mlx_paged.options.config import KEEP_ALIVE, KVBudget


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("65536", KVBudget(nbytes=65536)),
        (65536, KVBudget(nbytes=65536)),
        ("64K", KVBudget(nbytes=64 * 2**10)),
        ("512m", KVBudget(nbytes=512 * 2**20)),
        ("2G", KVBudget(nbytes=2 * 2**30)),
        ("1.5GiB", KVBudget(nbytes=3 * 2**29)),
        (" 2 GB ", KVBudget(nbytes=2 * 2**30)),
        ("100b", KVBudget(nbytes=100)),
        ("256blocks", KVBudget(num_blocks=256)),
        ("1 block", KVBudget(num_blocks=1)),
    ],
    ids=str,
)
def test_a_budget_is_bytes_with_a_unit_or_blocks(text: str, budget: KVBudget):
    assert KVBudget.parse(text) == budget


@pytest.mark.parametrize(
    "text",
    ["", "much", "-5", "5X", "0", "0.2", "0blocks", "1.5blocks", "G", "1e9", "1 2", "9" * 400],
)
def test_what_is_no_budget_is_refused(text: str):
    with pytest.raises(ValueError, match=r"^\[kv cache\] kv_cache_bytes must be bytes"):
        KVBudget.parse(text)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        *((0, 0), ("0", 0), (300, 300), ("300", 300), (1.5, 1.5), ("90s", 90), ("5m", 300)),
        *(("1h30m", 5400), ("500ms", 0.5), ("1.5h", 5400), ("2d", 172_800), (" 5M ", 300)),
        *((-1, math.inf), ("-1", math.inf), ("-1m", math.inf), ("9999999h", math.inf)),
        *((math.inf, None), (math.nan, None), (True, None), ("", None), ("5 m", None)),
        *(("soon", None), ("--1", None), ("5mm", None), ([], None), ("1e3", None), ("m", None)),
    ],
)
def test_a_time_to_keep_a_model_is_read_as_ollama_reads_it(given: object, seconds: float | None):
    assert KEEP_ALIVE.read(given) == seconds
