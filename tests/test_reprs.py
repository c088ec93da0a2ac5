"""What people see who explore the package in a shell."""

from __future__ import annotations

import mlx_paged
from mlx_paged import LLM, AsyncEngine, Engine, SamplingParams, Sequences, load, make_kv_cache
from mlx_paged.snapshots import PromptCacheFile, SnapshotFile


def test_objects_say_what_they_are_in_a_line():
    model, tokenizer = load("demo")
    paged = "PagedKVCache(64 blocks of 16 tokens, 2,129,920 of 2,129,920 bytes held)"
    engine = Engine(model, tokenizer, kv_cache_bytes="64blocks", preallocate=True)
    assert repr(engine) == f"Engine(demo_model, {paged}, 0 running, 0 waiting)"
    engine.add_request("a", "Hello", SamplingParams(max_tokens=4))
    assert repr(engine) == f"Engine(demo_model, {paged}, 0 running, 1 waiting)"

    cache = make_kv_cache(model, kv_cache_bytes="64blocks", preallocate=True)
    assert repr(cache) == paged
    sequences = Sequences(cache)
    assert repr(sequences) == f"Sequences(0 of 0 tokens in {paged})"
    basic = make_kv_cache(model, "basic", kv_cache_bytes="64blocks")
    assert repr(basic).startswith("ContiguousKVCache(64 blocks of 16 tokens, 0 of ")

    llm = LLM(model, tokenizer, kv_cache_bytes="64blocks", preallocate=True)
    assert repr(llm) == f"LLM(Engine(demo_model, {paged}, 0 running, 0 waiting))"
    with AsyncEngine(model, tokenizer, kv_cache_bytes="64blocks", preallocate=True) as serving:
        assert repr(serving) == f"AsyncEngine(Engine(demo_model, {paged}, 0 running, 0 waiting))"


def test_files_of_kv_say_what_they_hold_in_a_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, tokenizer = load("demo")
    llm = LLM(model, tokenizer, kv_cache_bytes="64blocks")
    token_ids = [7] * 40
    llm.generate(token_ids, SamplingParams(max_tokens=1))
    engine = llm.engine
    assert engine.save_snapshot("a.safetensors", token_ids) == 32
    assert repr(SnapshotFile("a.safetensors", engine.snapshots.facts)) == (
        "SnapshotFile('a.safetensors', 32 tokens)"
    )
    assert engine.export_prompt_cache("b.safetensors", token_ids) == 32
    file = PromptCacheFile("b.safetensors", model, engine.cache)
    assert repr(file) == "PromptCacheFile('b.safetensors', 32 tokens)"


def test_dir_shows_what_is_public():
    assert dir(mlx_paged) == sorted(mlx_paged.__all__)
