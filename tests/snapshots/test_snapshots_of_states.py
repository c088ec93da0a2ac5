"""Snapshots of models with recurrent layers: the state after the tokens is in the file."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from helpers.adapted_models import RECURRENT, adapted_model, greedy_answer
from helpers.engine_runs import answer, greedy, make_engine, prompt
from safetensors import safe_open

from mlx_paged.cache import Sequences
from mlx_paged.cache.state_bytes import state_from_bytes, state_to_bytes
from mlx_paged.errors import ArgumentError
from mlx_paged.models.kv_cache import make_kv_cache
from mlx_paged.models.run_step import run_step
from mlx_paged.ops import StateRow, StateStack
from mlx_paged.snapshots import SnapshotError, export_prompt_cache, load_snapshot, save_snapshot
from mlx_paged.snapshots.rows import StoredArray, TensorFile, written_tensor_file

TWO = ("qwen3_next", "mamba2")
ALL = [name if name in TWO else pytest.param(name, marks=pytest.mark.slow) for name in RECURRENT]
BLOCK_SIZE = 8


@pytest.mark.parametrize("name", ALL)
def test_an_engine_goes_on_from_the_state_in_a_snapshot(name: str, tmp_path: Path):
    model, tokens = adapted_model(name), prompt(70)
    old, new = (make_engine(model, block_size=BLOCK_SIZE) for _ in range(2))
    told = [*tokens, *answer(old, tokens, greedy(12)).outputs[0].token_ids]
    more = [*told, *prompt(9, 3)]
    # 81 tokens have been computed, and the state after the last full block was kept.
    assert old.save_snapshot(tmp_path / "a", told) == 80
    assert new.load_snapshot(tmp_path / "a") == told[:80]
    output = answer(new, more, greedy(12))
    assert output.num_cached_tokens == 80
    assert output.outputs[0].token_ids == greedy_answer(name, more, 12)


@pytest.mark.parametrize("kv_format", [None, "K:8,V:4"])
def test_a_sequence_goes_on_from_the_state_in_a_snapshot(kv_format: str | None, tmp_path: Path):
    model, tokens = adapted_model("qwen3_next"), prompt(45)
    options = {"block_size": BLOCK_SIZE, "kv_cache_bytes": "40blocks", "kv_format": kv_format}
    old, new = (Sequences(make_kv_cache(model, **options)) for _ in range(2))
    run_step(model, old, {"a": tokens[:37], "other": prompt(9)})
    size = save_snapshot(tmp_path / "a", model, old, "a", tokens[:37])
    assert size == (tmp_path / "a").stat().st_size > model.state_nbytes
    run_step(model, new, {"b": prompt(12, 5)})
    assert load_snapshot(tmp_path / "a", model, new, "b") == tokens[:37]
    states = [
        state_to_bytes(seqs.manager.states.get(seq, 37)) for seqs, seq in ((old, "a"), (new, "b"))
    ]
    assert states[0] == states[1]
    found = run_step(model, new, {"b": tokens[37:]}, [8])
    expected = run_step(model, old, {"a": tokens[37:]}, [8])
    assert (found == expected).all()
    with safe_open(tmp_path / "a", "numpy") as file:
        assert file.get_tensor("state").tobytes() == states[0]
        layout = "float32 [3, 192], float32 [4, 16, 32]"
        assert file.metadata()["state"] == layout


def test_an_engine_refuses_a_state_within_a_block(tmp_path: Path):
    model, tokens = adapted_model("qwen3_next"), prompt(37)
    options = {"block_size": BLOCK_SIZE, "kv_cache_bytes": "40blocks"}
    seqs = Sequences(make_kv_cache(model, **options))
    run_step(model, seqs, {"a": tokens[:32]})
    save_snapshot(tmp_path / "whole", model, seqs, "a", tokens[:32])
    run_step(model, seqs, {"a": tokens[32:]})
    save_snapshot(tmp_path / "part", model, seqs, "a", tokens)
    engine = make_engine(model, block_size=BLOCK_SIZE)
    with pytest.raises(SnapshotError, match="after 37 tokens, and an engine can continue only"):
        engine.load_snapshot(tmp_path / "part")
    assert engine.load_snapshot(tmp_path / "whole") == tokens[:32]
    assert answer(engine, tokens, greedy(1)).num_cached_tokens == 32


def test_a_state_that_was_altered_or_is_of_another_layout_is_refused(tmp_path: Path):
    model, tokens = adapted_model("qwen3_next"), prompt(40)
    engine = make_engine(model, block_size=BLOCK_SIZE)
    answer(engine, tokens, greedy(2))
    engine.save_snapshot(tmp_path / "a", tokens)
    other = make_engine(model, block_size=BLOCK_SIZE)
    object.__setattr__(other.cache.config, "state_layout", ("bfloat16 [3, 192]",))
    with pytest.raises(
        SnapshotError,
        match=r"another recurrent state than this cache: float32 \[3, 192\], float32 \[4, 16, 32\] "
        r"in the file, bfloat16 \[3, 192\] here",
    ):
        other.load_snapshot(tmp_path / "a")
    content = bytearray((tmp_path / "a").read_bytes())
    content[-50] ^= 1  # of the state, which is the last array
    (tmp_path / "b").write_bytes(content)
    fresh = make_engine(model, block_size=BLOCK_SIZE)
    with pytest.raises(SnapshotError, match="was altered since it was written"):
        fresh.load_snapshot(tmp_path / "b")
    assert answer(fresh, tokens, greedy(1)).num_cached_tokens == 0


def test_a_state_of_another_dtype_is_refused(tmp_path: Path):
    model, tokens = adapted_model("qwen3_next"), prompt(40)
    engine = make_engine(model, block_size=BLOCK_SIZE)
    answer(engine, tokens, greedy(2))
    engine.save_snapshot(tmp_path / "a", tokens)
    other = tmp_path / "b"
    file = TensorFile(tmp_path / "a")
    content = file.read("state", 0, slice(0, 1))
    stack = state_from_bytes(content).stack
    half = [[array.astype(mx.float16) for array in slots] for slots in stack.arrays]
    content = state_to_bytes(StateRow(StateStack(half, 1), 0))
    # The file says as before that its state is of float32.
    tensors = {**file.arrays, "state": StoredArray("U8", (1, 1, len(content)))}
    with written_tensor_file(other, file.metadata, tensors) as rows:
        for name, info in tensors.items():
            for head in range(info.shape[0]):
                whole = slice(0, info.shape[1])
                kv = content if name == "state" else file.read(name, head, whole)
                rows.write(name, head, whole, memoryview(kv))
    fresh = make_engine(model, block_size=BLOCK_SIZE)
    with pytest.raises(SnapshotError) as caught:
        fresh.load_snapshot(other)
    assert str(caught.value) == (
        f"[snapshot] {other} holds no state for this cache: [paged cache] these bytes are not a "
        "state: it has arrays of float16, float16, and this cache float32, float32"
    )
    assert answer(fresh, tokens, greedy(1)).num_cached_tokens == 0


def test_prompt_caches_of_mlx_lm_hold_no_states_and_are_refused(tmp_path: Path):
    model, file = adapted_model("qwen3_next"), tmp_path / "a.safetensors"
    engine, tokens = make_engine(model, block_size=BLOCK_SIZE), prompt(40)
    answer(engine, tokens, greedy(2))
    seqs = Sequences(make_kv_cache(model, kv_cache_bytes="40blocks"))
    run_step(model, seqs, {"a": tokens})
    refused = (
        lambda: engine.export_prompt_cache(file, tokens),
        lambda: engine.import_prompt_cache(file, tokens),
        lambda: export_prompt_cache(file, model, seqs, "a"),
    )
    for refuse in refused:
        with pytest.raises(ArgumentError, match="exchanged without it; use a snapshot") as caught:
            refuse()
        assert caught.value.argument == "model"
    assert not file.exists()
