"""Requests of every kind on deterministic engines of any options: each answer has the bits of its
request alone.
"""

from __future__ import annotations

import random
from functools import partial

import pytest
from fuzzing import Case
from helpers.deterministic_workloads import (
    KINDS,
    compare,
    let_mlx_vary,
    shorten_steps,
    workload,
)
from helpers.workloads import Workload

NUM_REQUESTS, MAX_TOKENS = 6, 16  # of a case, and of an answer
OF_LARGE_MODEL = 3, 8


def deterministic_case(rng: random.Random) -> Case:
    kind = rng.choice(KINDS)
    options: dict[str, object] = {"run_ahead": rng.random() < 0.5}
    if rng.random() < 0.6:
        options["num_draft_tokens"] = rng.randint(1, 7)
    if rng.random() < 0.3 and kind != "head":
        options |= {"window": rng.choice([16, 24, 40]), "num_sink_tokens": rng.choice([0, 8])}
    if rng.random() < 0.3:
        options["kv_format"] = rng.choice(["8", "4", "K:8,V:4"])
    sizes = OF_LARGE_MODEL if kind == "head" else (NUM_REQUESTS, MAX_TOKENS)
    asked = workload(rng.randrange(2**32), *sizes, kind, **options)
    # From a budget that holds one request to one that holds all.
    num_slots = rng.choice([224, 272, 400])
    asked.options["kv_cache_bytes"] = f"{num_slots // asked.options['block_size']}blocks"
    return Case(f"{kind}, {asked.seed}: {asked.options}", partial(_compare, kind, asked))


def _compare(kind: str, asked: Workload) -> None:
    with pytest.MonkeyPatch.context() as patch:
        shorten_steps(patch)
        let_mlx_vary(patch)
        compare(kind, asked)
