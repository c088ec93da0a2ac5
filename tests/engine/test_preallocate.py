"""``preallocate``: a cache that begins with its whole budget, and neither grows nor shrinks."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers.engine_runs import greedy, prompt

from mlx_paged import make_kv_cache
from mlx_paged.engine.engine import Engine
from mlx_paged.errors import ArgumentError
from mlx_paged.ops import KVHandle

BUDGET = {"kv_cache_bytes": "300blocks"}


def run(engine: Engine) -> list[int]:
    """The answer to a prompt that needs more blocks than a cache begins with by default."""
    engine.add_request("a", prompt(1100), greedy(8))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    return outputs[0].outputs[0].token_ids


def test_the_cache_has_its_budget_from_the_start_and_answers_as_one_that_grows(
    demo_model: nn.Module, monkeypatch: pytest.MonkeyPatch
):
    growing, whole = Engine(demo_model, **BUDGET), Engine(demo_model, **BUDGET, preallocate=True)
    config = whole.cache.config
    at_first = growing.stats().nbytes_held
    assert at_first == 65 * config.nbytes_per_block
    assert whole.stats().nbytes_held == 301 * config.nbytes_per_block  # and the null block
    expected = run(growing)
    assert growing.stats().nbytes_held > at_first
    monkeypatch.setattr(KVHandle, "grow", None)
    assert run(whole) == expected
    assert whole.stats().nbytes_held == 301 * config.nbytes_per_block


def test_what_was_asked_for_at_once_is_not_given_back(demo_model: nn.Module):
    engine = Engine(demo_model, **BUDGET, preallocate=True)
    run(engine)
    assert engine.reset_prefix_cache()
    assert engine.shrink() == 0
    assert engine.stats().nbytes_held == 301 * engine.cache.config.nbytes_per_block


def test_a_basic_cache_refuses_it(demo_model: nn.Module):
    message = "preallocate needs the paged cache: a basic one has separate arrays for each sequence"
    with pytest.raises(ArgumentError, match=message) as refused:
        Engine(demo_model, **BUDGET, kv="basic", preallocate=True)
    assert refused.value.argument == "preallocate"
    assert Engine(demo_model, **BUDGET, kv="basic", preallocate=False).cache.nbytes_held == 0


@pytest.mark.parametrize("value", [1, "yes", None])
def test_other_values_are_refused_by_name(demo_model: nn.Module, value: Any):
    with pytest.raises(ArgumentError, match="preallocate must be True or False"):
        make_kv_cache(demo_model, **BUDGET, preallocate=value)


def test_a_budget_that_the_device_has_no_memory_for_is_refused_with_the_way_out(
    demo_model: nn.Module, monkeypatch: pytest.MonkeyPatch
):
    def allocate(*_: object) -> KVHandle:
        raise RuntimeError("[malloc] Unable to allocate 4 bytes.")

    monkeypatch.setattr(KVHandle, "allocate", allocate)
    with pytest.raises(ArgumentError) as refused:
        make_kv_cache(demo_model, **BUDGET, preallocate=True)
    nbytes = 301 * 16 * 4 * 2 * 2 * 32 * mx.float32.size
    assert str(refused.value) == (
        f"[kv cache] preallocate: there is no memory for a budget of {nbytes:,} bytes at once "
        "([malloc] Unable to allocate 4 bytes.); make kv_cache_bytes smaller, or leave preallocate "
        "out"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="other systems set no such limit")
def test_a_process_that_may_not_have_the_memory_says_so_and_goes_on():
    program = """
import resource
from mlx_paged import load, make_kv_cache
model, _ = load("demo")
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
try:
    make_kv_cache(model, kv_cache_bytes="9G", preallocate=True)
except ValueError as error:
    print(error)
print(make_kv_cache(model, kv_cache_bytes="1M", preallocate=True))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    refusal, cache = done.stdout.splitlines()
    assert refusal.startswith("[kv cache] preallocate: there is no memory for a budget of 9,66")
    assert "Cannot allocate memory" in refusal
    assert cache.startswith("PagedKVCache(31 blocks")
