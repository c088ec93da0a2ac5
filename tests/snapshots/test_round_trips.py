"""What a snapshot gives back is what was stored, bit for bit."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from helpers.cache_helpers import stored_parts
from helpers.fast_lane import mostly_slow
from helpers.snapshot_helpers import assert_same_bits, config_of, fill
from paged_testing.integrity import check_manager

from mlx_paged.cache import CacheFullError, ContiguousKVCache, PagedKVCache, Sequences
from mlx_paged.errors import ArgumentError
from mlx_paged.models import qwen3
from mlx_paged.snapshots import load_snapshot, save_snapshot


@mostly_slow("dtype", ["float32", "float16", "bfloat16"], quick=(2,))
@pytest.mark.parametrize("form", ["dense", "8 bits", "4 bits", "K8V4"])
@pytest.mark.parametrize("layers", ["alike", "different", "windows"])
@pytest.mark.parametrize("block_size", [8, pytest.param(32, marks=pytest.mark.slow)])
def test_a_paged_cache_of_any_format_comes_back(
    model: qwen3.Model, tmp_path: Path, dtype: str, form: str, layers: str, block_size: int
):
    config, path = config_of(layers, dtype, form, block_size), tmp_path / "a.snapshot"
    old, new = Sequences(PagedKVCache(config)), Sequences(PagedKVCache(config))
    fill(old, "noise", 5, seed=7)
    for num_tokens in (block_size, 37):
        fill(old, num_tokens, num_tokens, seed=num_tokens)
        token_ids = list(range(num_tokens))
        num_bytes = save_snapshot(path, model, old, num_tokens, token_ids)
        assert num_bytes == path.stat().st_size
        assert load_snapshot(path, model, new, "b") == token_ids
        assert new.seq_len("b") == num_tokens
        assert_same_bits(stored_parts(new, "b"), stored_parts(old, num_tokens))
        check_manager(new.manager)


@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_a_sequence_goes_on_from_a_snapshot_in_the_place_of_another_one(
    model: qwen3.Model, tmp_path: Path, block_size: int
):
    config, path = config_of("different", "bfloat16", "dense", block_size), tmp_path / "a"
    old, new = (Sequences(PagedKVCache(config)) for _ in range(2))
    fill(old, "a", 37)
    save_snapshot(path, model, old, "a", range(37))
    fill(new, "b", 50, seed=9)
    assert load_snapshot(path, model, new, "b") == list(range(37))
    assert_same_bits(stored_parts(new, "b"), stored_parts(old, "a"))
    # Both go on alike.
    fill(old, "a", 30, seed=3)
    fill(new, "b", 30, seed=3)
    assert_same_bits(stored_parts(new, "b"), stored_parts(old, "a"))


def test_any_reader_of_safetensors_opens_the_file(model: qwen3.Model, tmp_path: Path):
    config, path = config_of("alike", "bfloat16", "dense", 8), tmp_path / "a.safetensors"
    seqs = Sequences(PagedKVCache(config))
    fill(seqs, "a", 21)
    save_snapshot(path, model, seqs, "a", range(100, 121))
    arrays, metadata = mx.load(str(path), return_metadata=True)
    assert metadata["block_size"] == "8" and metadata["dtype"] == "bfloat16"
    assert metadata["kv_format"] == "bfloat16" and metadata["num_tokens"] == "21"
    assert metadata["token_ids"] == str(list(range(100, 121)))
    assert len(metadata["model"]) == len(metadata["sha256"]) == 64
    for layer in range(3):
        for side, rows in zip(("keys", "values"), seqs.materialize("a", layer), strict=True):
            read = arrays[f"layers.{layer}.{side}.rows"]
            assert read.dtype == mx.bfloat16
            np.testing.assert_array_equal(np.array(read.view(mx.uint16)),
                                          np.array(rows.view(mx.uint16)))  # fmt: skip


def test_the_longest_sequence_inside_a_window_is_saved_and_no_longer_one(
    model: qwen3.Model, tmp_path: Path
):
    config, path = config_of("windows", "float32", "dense", 8), tmp_path / "a"
    old, new = Sequences(PagedKVCache(config)), Sequences(PagedKVCache(config))
    # Of 47 tokens the 48th one sees 39, which begin in the second block.
    fill(old, "a", 46)
    save_snapshot(path, model, old, "a", range(46))
    load_snapshot(path, model, new, "a")
    for seqs in (old, new):
        fill(seqs, "a", 1, seed=1)
    assert_same_bits(stored_parts(new, "a"), stored_parts(old, "a"))
    with pytest.raises(ArgumentError, match=r"^\[snapshot\] tokens of sequence 'a' have left the"):
        save_snapshot(path, model, old, "a", range(47))


def test_a_snapshot_that_does_not_fit_leaves_nothing_behind(model: qwen3.Model, tmp_path: Path):
    path = tmp_path / "a"
    old = Sequences(PagedKVCache(config_of("alike", "float32", "dense", 8)))
    fill(old, "a", 65)
    save_snapshot(path, model, old, "a", range(65))
    new = Sequences(PagedKVCache(config_of("alike", "float32", "dense", 8, num_blocks=8)))
    with pytest.raises(CacheFullError, match="need 9 blocks of 8, the budget holds 8"):
        load_snapshot(path, model, new, "b")
    assert list(new) == [] and new.cache.pool.num_used_blocks == 0


def test_a_cache_without_blocks_is_refused_by_name(model: qwen3.Model, tmp_path: Path):
    config, path = config_of("alike", "float32", "dense", 8), tmp_path / "a"
    seqs = Sequences(ContiguousKVCache(config))
    fill(seqs, "a", 5)
    for call in (
        lambda: save_snapshot(path, model, seqs, "a", range(5)),
        lambda: load_snapshot(path, model, seqs, "a"),
    ):
        with pytest.raises(ArgumentError, match=r"need blocks, which kv='basic' does not have"):
            call()
    assert list(tmp_path.iterdir()) == [] and seqs.seq_len("a") == 5


def test_arguments_are_refused_by_name(model: qwen3.Model, tmp_path: Path):
    seqs = Sequences(PagedKVCache(config_of("alike", "float32", "dense", 8)))
    fill(seqs, "a", 5)
    path = tmp_path / "a"
    for bad in (None, [], "12345", [1.5] * 5, 5):
        with pytest.raises(ArgumentError, match="token_ids must be a list of at least one"):
            save_snapshot(path, model, seqs, "a", bad)
    with pytest.raises(ArgumentError, match="has 5 tokens in the cache, and token_ids are 4"):
        save_snapshot(path, model, seqs, "a", [1, 2, 3, 4])
    with pytest.raises(KeyError, match="no sequence 'b'"):
        save_snapshot(path, model, seqs, "b", [1])
    for bad in (None, "", "a\0b", 3):
        with pytest.raises(ArgumentError, match="path must be the name of a file"):
            save_snapshot(bad, model, seqs, "a", range(5))
        with pytest.raises(ArgumentError, match="path must be the name of a file"):
            load_snapshot(bad, model, seqs, "a")
    with pytest.raises(ValueError, match="model"):
        save_snapshot(path, None, seqs, "a", range(5))
    assert list(tmp_path.iterdir()) == []
