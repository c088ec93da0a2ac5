"""Snapshots of slabs that kernels write, and slabs that snapshots fill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.engine_runs import load_demo
from metal_emulator import Checks
from paged_testing.emulated_metal import emulated_metal

from mlx_paged import Engine, SamplingParams


def answer(engine: Engine, token_ids: list[int]) -> tuple[list[int], int]:
    engine.add_request("a", token_ids, SamplingParams(max_tokens=6))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    return outputs[-1].outputs[0].token_ids, outputs[-1].num_cached_tokens


@pytest.mark.parametrize("kv_format", [None, pytest.param("K:4,V:8", marks=pytest.mark.slow)])
def test_kernels_go_on_from_a_file(compiler: Any, tmp_path: Path, kv_format: str | None) -> None:
    model, tokenizer = load_demo()
    options = {"kv_format": kv_format, "block_size": 8, "kv_cache_bytes": "40blocks"}
    token_ids = tokenizer.encode("Once upon a time there was a code of apple, which was 4821.")
    with emulated_metal(Checks.quick()):
        old, new = (Engine(model, tokenizer, backend="metal", **options) for _ in range(2))
        told, _ = answer(old, token_ids)
        num_saved = old.save_snapshot(tmp_path / "a", [*token_ids, *told])
        new.load_snapshot(tmp_path / "a")
        goes_on = [*token_ids, *told, 5]
        expected, from_memory = answer(old, goes_on)
        assert answer(new, goes_on) == (expected, num_saved) and from_memory == num_saved > 16
        # The files of both backends are alike.
        plain = Engine(model, tokenizer, backend="reference", **options)
        plain.load_snapshot(tmp_path / "a")
        assert answer(plain, goes_on) == (expected, num_saved)
