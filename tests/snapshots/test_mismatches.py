"""A snapshot of anything else is refused, with the value in the file and the one here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from helpers.engine_runs import CONFIG, livelier_model
from helpers.snapshot_helpers import config_of, fill
from mlx.utils import tree_map

from mlx_paged import make_kv_cache
from mlx_paged.cache import KVCacheConfig, LayerSpec, PagedKVCache, Sequences
from mlx_paged.errors import ArgumentError
from mlx_paged.models import qwen3
from mlx_paged.models.identity import identities_of, model_identity
from mlx_paged.snapshots import (
    KVFacts,
    SnapshotError,
    SnapshotFile,
    import_prompt_cache,
    load_snapshot,
    save_snapshot,
    sequence_headers,
    written_snapshot,
)
from mlx_paged.snapshots.snapshots import store_sequence

ALIKE = {"layers": "alike", "dtype": "float32", "form": "dense", "block_size": 16}


@pytest.fixture
def file(model: qwen3.Model, tmp_path: Path) -> Path:
    seqs = Sequences(PagedKVCache(config_of(**ALIKE)))
    fill(seqs, "a", 11)
    save_snapshot(tmp_path / "a", model, seqs, "a", range(11))
    return tmp_path / "a"


@pytest.mark.parametrize("field", ["model_name", "model", "version", "layers"])
def test_what_a_foreign_file_says_of_itself_is_quoted_without_controls(
    model: qwen3.Model, field: str
):
    hostile = "ev\x1b]0;title\x07il\x9b31m\nnew\rline\u2028\u202etxt\ud800" + "x" * 10_000
    facts = KVFacts.of(identities_of(model), PagedKVCache(config_of(**ALIKE)))
    metadata = {**facts.as_metadata([1]), "model": "another", field: hostile}
    with pytest.raises(SnapshotError) as error:
        facts.check(Path("file"), metadata)
    text = str(error.value)
    assert text.isprintable() and len(text) < 1100


@pytest.mark.parametrize(
    ("change", "what", "theirs", "ours"),
    [
        ({"block_size": 32}, "block size", "16", "32"),
        ({"dtype": "float16"}, "dtype", "float32", "float16"),
        ({"form": "8 bits"}, "K/V format", "float32", "8 bits in groups of 64"),
        (
            {"form": "K8V4"},
            "K/V format",
            "float32",
            "K 8 bits in groups of 64, V 4 bits in groups of 64",
        ),
    ],
)
def test_other_settings_are_named(
    model: qwen3.Model, file: Path, change: dict[str, Any], what: str, theirs: str, ours: str
):
    seqs = Sequences(PagedKVCache(config_of(**ALIKE | change)))
    with pytest.raises(SnapshotError) as caught:
        load_snapshot(file, model, seqs, "a")
    assert str(caught.value) == (
        f"[snapshot] {file} has another {what} than this cache: {theirs} in the file, {ours} here"
    )
    assert caught.value.argument == "path"
    assert list(seqs) == []


@pytest.mark.parametrize(
    ("layers", "line"),
    [
        (
            [LayerSpec(2, 64, 64)] * 2,
            "has another number of layers than this cache: 3 in the file, 2 here",
        ),
        (
            [LayerSpec(2, 64, 64), LayerSpec(4, 64, 64), LayerSpec(2, 64, 64)],
            "has another shape than this cache: 2 KV heads of 64 + 64 in the file, layer 0: "
            "2 KV heads of 64 + 64; layer 1: 4 KV heads of 64 + 64; layer 2: 2 KV heads of 64 + 64 "
            "here",
        ),
    ],
)
def test_other_layers_are_named(model: qwen3.Model, file: Path, layers: list[LayerSpec], line: str):
    seqs = Sequences(PagedKVCache(KVCacheConfig(tuple(layers), 16)))
    with pytest.raises(SnapshotError, match=re.escape(line)):
        load_snapshot(file, model, seqs, "a")


def test_another_window_is_named(model: qwen3.Model, tmp_path: Path):
    windowed = config_of("windows", "float32", "dense", 16)
    seqs = Sequences(PagedKVCache(windowed))
    fill(seqs, "a", 11)
    save_snapshot(tmp_path / "a", model, seqs, "a", range(11))
    # A cache of the same layers that keeps everything.
    other = Sequences(PagedKVCache(KVCacheConfig(windowed.layers, 16)))
    with pytest.raises(SnapshotError, match="has another window than this cache: layer 0: all "):
        load_snapshot(tmp_path / "a", model, other, "a")


def test_another_model_is_named_by_content(model: qwen3.Model, file: Path):
    other = livelier_model(CONFIG)
    seqs = Sequences(PagedKVCache(config_of(**ALIKE)))
    with pytest.raises(SnapshotError) as caught:
        load_snapshot(file, other, seqs, "a")
    mine, theirs = (str(model_identity(each)) for each in (other, model))
    assert mine != theirs
    assert str(caught.value) == (
        f"[snapshot] {file} has another model than this cache: {theirs} in the file, {mine} here"
    )
    # One number of one weight makes another model.
    changed = livelier_model(CONFIG)
    norm = changed.model.norm.weight
    changed.model.norm.weight = norm + mx.array([1e-6] + [0.0] * (norm.size - 1))
    save_snapshot(file, other, filled(), "a", range(11))
    with pytest.raises(SnapshotError, match="another model"):
        load_snapshot(file, changed, seqs, "a")
    # A copy is the same model.
    assert load_snapshot(file, livelier_model(CONFIG), seqs, "a") == list(range(11))


def filled() -> Sequences:
    seqs = Sequences(PagedKVCache(config_of(**ALIKE)))
    fill(seqs, "a", 11)
    return seqs


def test_the_dtype_of_a_model_shows(tmp_path: Path):
    model = livelier_model(CONFIG)
    seqs = Sequences(make_kv_cache(model, kv_cache_bytes="20blocks"))
    fill(seqs, "a", 20)
    save_snapshot(tmp_path / "a", model, seqs, "a", range(20))
    half = livelier_model(CONFIG)
    half.update(tree_map(lambda leaf: leaf.astype(mx.bfloat16), half.parameters()))
    with pytest.raises(SnapshotError, match="another model"):
        load_snapshot(
            tmp_path / "a", half, Sequences(make_kv_cache(half, kv_cache_bytes="20blocks")), "a"
        )


def test_a_draft_model_belongs_to_the_facts(model: qwen3.Model, tmp_path: Path):
    seqs = filled()
    other = livelier_model(CONFIG)
    facts = KVFacts.of(identities_of(model, other), seqs.cache)
    headers = sequence_headers(seqs.cache.config, 11)
    with written_snapshot(tmp_path / "a", facts, range(11), headers) as tier:
        store_sequence(seqs, "a", tier, headers)
    assert SnapshotFile(tmp_path / "a", facts).token_ids == list(range(11))
    with pytest.raises(SnapshotError, match=r"another draft model than this cache: qwen3 \(.*none"):
        load_snapshot(tmp_path / "a", model, seqs, "b")


def test_another_version_is_named(model: qwen3.Model, file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mlx_paged.snapshots.snapshots.VERSION", "3")
    save_snapshot(file, model, filled(), "a", range(11))
    monkeypatch.undo()
    with pytest.raises(SnapshotError, match="is of version 3, and only 1 and 2 can be read"):
        load_snapshot(file, model, filled(), "b")


def test_a_recurrent_state_beside_the_kv_of_mlx_lm_is_refused_by_name(
    model: qwen3.Model, tmp_path: Path
):
    config = KVCacheConfig((LayerSpec(2, 64, 64),) * 3, 16, state_nbytes=100)
    seqs = Sequences(PagedKVCache(config))
    with pytest.raises(ArgumentError, match="keeps a recurrent state beside K/V") as caught:
        import_prompt_cache(tmp_path / "a.safetensors", model, seqs, "a")
    assert caught.value.argument == "model"
