"""A copy of one layer is all the memory that a snapshot takes beside the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from helpers.engine_runs import greedy, make_engine, prompt, run
from helpers.snapshot_helpers import fill

from mlx_paged.cache import KVCacheConfig, PagedKVCache, Sequences
from mlx_paged.models import qwen3
from mlx_paged.snapshots import load_snapshot, save_snapshot

NUM_LAYERS, NUM_TOKENS = 12, 2048
CONFIG = KVCacheConfig.uniform(NUM_LAYERS, 4, 64, block_size=64, num_blocks=64)
LAYER_NBYTES = NUM_TOKENS * CONFIG.nbytes_per_token // NUM_LAYERS


def peak_of(call: Callable[[], Any]) -> int:
    """Bytes that MLX held at most beyond those before."""
    mx.clear_cache()
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    call()
    return int(max(0, mx.get_peak_memory() - base))


def test_a_layer_at_a_time(model: qwen3.Model, tmp_path: Path):
    path, old = tmp_path / "a", Sequences(PagedKVCache(CONFIG, initial_blocks=64))
    fill(old, "a", NUM_TOKENS)
    new = Sequences(PagedKVCache(CONFIG, initial_blocks=64))
    # The gathered rows, and a copy of them that does not depend on the slab.
    assert peak_of(lambda: save_snapshot(path, model, old, "a", range(NUM_TOKENS))) <= (
        2.5 * LAYER_NBYTES
    )
    assert path.stat().st_size > NUM_LAYERS * LAYER_NBYTES
    # What was read, and the rows in the order in which slabs are written.
    assert peak_of(lambda: load_snapshot(path, model, new, "b")) <= 4 * LAYER_NBYTES
    assert mx.array_equal(*(seqs.materialize(seq, 3)[0] for seqs, seq in ((old, "a"), (new, "b"))))


def test_an_engine_holds_no_copy_behind_a_snapshot(model: qwen3.Model, tmp_path: Path):
    told = prompt(900)
    old, new = (make_engine(model) for _ in range(2))
    old.add_request("a", told, greedy(2))
    run(old)
    for engine in (old, new):
        _ = engine.snapshots.facts  # the weights are read once
    active = mx.get_active_memory()
    old.save_snapshot(tmp_path / "a", told)
    assert mx.get_active_memory() <= active
    held = new.cache.nbytes_held
    new.load_snapshot(tmp_path / "a")
    grown = new.cache.nbytes_held - held
    assert mx.get_active_memory() <= active + grown + 4096
