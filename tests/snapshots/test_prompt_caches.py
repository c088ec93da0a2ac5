"""mlx-lm goes on from our K/V, and we from mlx-lm's, with the tokens that each gives by itself."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from functools import cache as remembered
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from helpers.engine_runs import tiny_models
from helpers.fast_lane import mostly_slow
from helpers.mlx_lm_models import (
    DEEPSEEK_V3,
    GEMMA3,
    GEMMA3N,
    GPT_OSS,
    LLAMA,
    random_model,
    stock_tokens,
)
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as mlx_lm_caches
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from paged_testing.integrity import check_manager

from mlx_paged import Engine, SamplingParams, make_kv_cache
from mlx_paged.cache import Sequences
from mlx_paged.errors import ArgumentError
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm import adapt
from mlx_paged.snapshots import SnapshotError, export_prompt_cache, import_prompt_cache

CONFIGS = {
    "llama": LLAMA,
    "gemma3": {**GEMMA3, "num_hidden_layers": 3},  # windows of 8
    "gpt_oss": {**GPT_OSS, "num_hidden_layers": 2, "layer_types": GPT_OSS["layer_types"][:2]},
    "deepseek_v3": {**DEEPSEEK_V3, "num_hidden_layers": 2},  # latents
    "gemma3n": GEMMA3N,  # layers that share K/V
    "wide": {**LLAMA, "head_dim": 64},
}
NUM_TOKENS = 12


@remembered
def models(name: str) -> tuple[LanguageModel, Any]:
    """Ours and mlx-lm's, of the same weights."""
    if name == "qwen3":
        return tiny_models()
    stock = random_model(CONFIGS[name], seed=1 if name == "gpt_oss" else 0)
    return adapt(stock, CONFIGS[name]), stock


def prompt(count: int) -> list[int]:
    return [(i * i * 7 + i + 1) % 61 for i in range(count)]


def engine_of(name: str, **options: Any) -> Engine:
    return Engine(models(name)[0], kv_cache_bytes="100blocks", block_size=8, seed=0, **options)


def answer(engine: Engine, token_ids: list[int], **options: Any) -> tuple[list[int], int]:
    """The tokens of the answer, and how many tokens of the prompt were cached."""
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    engine.add_request("a", token_ids, params, **options)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    return outputs[-1].outputs[0].token_ids, outputs[-1].num_cached_tokens


def continued(stock: Any, token_ids: list[int], prompt_cache: list[Any]) -> list[int]:
    """mlx-lm's tokens after a prompt cache and these tokens."""
    steps = generate_step(
        mx.array(token_ids), stock, max_tokens=NUM_TOKENS, prompt_cache=prompt_cache
    )
    return [int(token) for token, _ in steps]


def made_by_mlx_lm(path: Path, stock: Any, token_ids: list[int], **options: Any) -> None:
    """As mlx_lm.cache_prompt makes it."""
    made = make_prompt_cache(stock, options.pop("max_kv_size", None))
    list(generate_step(mx.array(token_ids), stock, max_tokens=0, prompt_cache=made, **options))
    save_prompt_cache(str(path), made, {"model": "m", "tokenizer_config": "{}"})


# Each model with tokens that leave windows of 8, and those that have such within them, too.
@mostly_slow(
    ("name", "num_tokens"),
    [
        *((name, 29) for name in ("qwen3", *CONFIGS)),
        *((name, 8) for name in ("qwen3", "gemma3", "gpt_oss", "gemma3n")),
        ("gemma3", 50),
    ],
    quick=(0, 2, 4, 6),
)
def test_mlx_lm_goes_on_from_what_an_engine_exports(tmp_path: Path, name: str, num_tokens: int):
    path, (_, stock) = tmp_path / "a.safetensors", models(name)
    token_ids = prompt(num_tokens)
    engine = engine_of(name)
    answer(engine, token_ids)
    num_exported = engine.export_prompt_cache(path, token_ids, model_name="somewhere/model")
    assert num_exported == num_tokens // 8 * 8
    rest = [*token_ids[num_exported:], 5, 6, 7]
    loaded, metadata = load_prompt_cache(str(path), return_metadata=True)
    expected = stock_tokens(stock, [*token_ids, 5, 6, 7], NUM_TOKENS)
    assert continued(stock, rest, loaded) == expected
    assert metadata["model"] == "somewhere/model"
    assert json.loads(metadata["tokenizer_config"]) == {}
    # One token at a time goes the other way through mlx-lm's caches.
    loaded = load_prompt_cache(str(path))
    for token in rest[:-1]:
        mx.eval(stock(mx.array([[token]]), cache=loaded))
    assert continued(stock, rest[-1:], loaded) == expected
    # And back: our own exports say their tokens.
    if name not in ("gemma3", "gpt_oss", "gemma3n") or num_tokens <= 8:
        back = engine_of(name)
        assert back.import_prompt_cache(path) == token_ids[:num_exported]
        assert answer(back, [*token_ids, 5, 6, 7]) == (expected, num_exported)


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [
        # Within all windows.
        *(pytest.param(name, 7, marks=pytest.mark.slow) for name in CONFIGS),
        *((name, 29) for name in ("qwen3", "llama", "deepseek_v3")),
    ],
)
def test_an_engine_goes_on_from_a_prompt_cache_of_mlx_lm(
    tmp_path: Path, name: str, num_tokens: int
):
    path, (_, stock) = tmp_path / "a.safetensors", models(name)
    token_ids = prompt(num_tokens)
    made_by_mlx_lm(path, stock, token_ids)
    engine = engine_of(name)
    assert engine.import_prompt_cache(path, token_ids, cache_salt="s") == token_ids
    check_manager(engine.manager)
    expected = stock_tokens(stock, [*token_ids, 5, 6, 7], NUM_TOKENS)
    tokens, num_cached = answer(engine, [*token_ids, 5, 6, 7], cache_salt="s")
    assert (tokens, num_cached) == (expected, num_tokens // 8 * 8)
    assert answer(engine, [*token_ids, 5, 6, 7]) == (expected, 0)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_sequences_of_a_cache_go_both_ways_to_the_last_token(tmp_path: Path, name: str):
    path, (model, stock) = tmp_path / "a.safetensors", models(name)
    theirs, token_ids = make_prompt_cache(stock), prompt(13)
    list(generate_step(mx.array(token_ids), stock, max_tokens=0, prompt_cache=theirs))
    save_prompt_cache(str(path), theirs)
    seqs = Sequences(make_kv_cache(model, kv_cache_bytes="20blocks", block_size=8))
    assert import_prompt_cache(path, model, seqs, "a") == 13
    for layer, held in enumerate(theirs):
        for ours, rows in zip(seqs.materialize("a", layer), held.keys_and_values(), strict=True):
            assert mx.array_equal(ours, rows[0])
    with pytest.raises(ArgumentError, match="has 13 tokens in the cache, and token_ids are 3"):
        export_prompt_cache(path, model, seqs, "a", token_ids=[1, 2, 3])
    assert export_prompt_cache(path, model, seqs, "a", token_ids=token_ids) == 13
    again = load_prompt_cache(str(path))
    expected = stock_tokens(stock, [*token_ids, 9], NUM_TOKENS)
    assert continued(stock, [9], again) == continued(stock, [9], theirs) == expected


@pytest.mark.parametrize("group_size", [64, 32])
def test_kv_of_8_bits_go_both_ways(tmp_path: Path, group_size: int):
    name = "wide" if group_size == 64 else "llama"
    path, (_, stock) = tmp_path / "a.safetensors", models(name)
    token_ids, options = prompt(29), {"kv_bits": 8, "kv_group_size": group_size}
    made = make_prompt_cache(stock)
    # From the first token on, as here.
    made = [each.to_quantized(group_size, 8) for each in made]
    list(generate_step(mx.array(token_ids), stock, max_tokens=0, prompt_cache=made, **options))
    save_prompt_cache(str(path), made)
    engine = engine_of(name, kv_format=8)
    engine.import_prompt_cache(path, token_ids)
    expected = continued(stock, [5, 6], load_prompt_cache(str(path)))
    assert answer(engine, [*token_ids, 5, 6]) == (expected, 24)
    assert engine.export_prompt_cache(path, token_ids) == 24
    loaded = load_prompt_cache(str(path))
    assert {type(each) for each in loaded} == {mlx_lm_caches.QuantizedKVCache}
    assert continued(stock, [*token_ids[24:], 5, 6], loaded) == expected


def test_what_mlx_lm_can_not_hold_is_refused_by_name(tmp_path: Path):
    path, token_ids = tmp_path / "a.safetensors", prompt(29)
    for name, kv_format, why in (
        ("wide", 4, "keys of 4 bits are rotated here, and mlx-lm would not rotate back"),
        ("wide", "K:8,V:4", "mlx-lm has the same bits and groups for K and V"),
        ("gpt_oss", 8, "mlx-lm does not quantise layers with a window"),
    ):
        engine = engine_of(name, kv_format=kv_format)
        answer(engine, token_ids)
        with pytest.raises(ArgumentError, match=why) as caught:
            engine.export_prompt_cache(path, token_ids)
        assert caught.value.argument == "kv_format"
    engine = engine_of("llama", window=32)
    answer(engine, token_ids)
    with pytest.raises(ArgumentError, match="no cache for a window with sinks"):
        engine.export_prompt_cache(path, token_ids)
    engine = engine_of("llama")
    answer(engine, token_ids)
    with pytest.raises(SnapshotError, match=r"a\.bin must end with \.safetensors"):
        engine.export_prompt_cache(tmp_path / "a.bin", token_ids)
    assert list(tmp_path.iterdir()) == []


def rotated(path: Path) -> None:
    made_by_mlx_lm(path, models("gemma3")[1], prompt(8))
    caches = load_prompt_cache(str(path))
    continued(models("gemma3")[1], [1], caches)
    save_prompt_cache(str(path), caches)


def kv_of(path: Path, **change: Any) -> None:
    """A prompt cache of llama whose first layer is another one."""
    made_by_mlx_lm(path, models("llama")[1], prompt(9))
    caches = load_prompt_cache(str(path))
    for name, value in change.items():
        setattr(caches[0], name, value(getattr(caches[0], name)))
    # Some versions of MLX read the file only now, and the next line writes to it.
    mx.eval([cache.state for cache in caches])
    save_prompt_cache(str(path), caches)


def unlike(path: Path) -> None:
    save_prompt_cache(str(path), [mlx_lm_caches.ArraysCache(2), mlx_lm_caches.KVCache()])


def cut(path: Path) -> None:
    made_by_mlx_lm(path, models("llama")[1], prompt(9))
    path.write_bytes(path.read_bytes()[:-1])


def other_files(path: Path) -> None:
    mx.save_safetensors(str(path), {"a": mx.zeros(3)})


@pytest.mark.parametrize(
    ("name", "make", "why"),
    [
        ("gemma3", rotated, "in layer 0 and keeps the last 8; make it again from fewer tokens"),
        ("llama", lambda path: made_by_mlx_lm(path, models("gemma3")[1], prompt(8)),
         "has caches of 3 layers, and the model has 2"),
        ("wide", lambda path: made_by_mlx_lm(path, models("llama")[1], prompt(8)),
         r"K of shape \[1, 2, 256, 32\] and mlx.core.float32 in layer 0, and the model has 2 KV "
         "heads of 64 numbers"),
        ("llama", unlike, "has a ArraysCache in layer 0, which can't be mapped"),
        ("llama", lambda path: kv_of(path, offset=lambda offset: offset - 1),
         r"has layers of \[8, 9\] tokens"),
        ("llama", lambda path: kv_of(path, keys=lambda keys: keys.astype(mx.float16)),
         "holds K/V of float16 in layer 0, and this cache float32"),
        ("llama", lambda path: kv_of(path, keys=lambda keys: mx.concatenate([keys, keys])),
         r"has K of shape \[2, "),
        ("llama", lambda path: made_by_mlx_lm(
            path, models("llama")[1], prompt(9), kv_bits=8, kv_group_size=32,
            quantized_kv_start=0),
         "holds K/V of 8 bits in groups of 32 in layer 0, and this cache float32"),
        ("llama", cut, "is not one of mlx-lm's prompt caches"),
        ("llama", other_files, "is not one of mlx-lm's prompt caches"),
        ("llama", lambda path: path.write_bytes(b"{}"), "is not one of mlx-lm's prompt caches"),
        ("llama", lambda path: None, "can't be read: No such file"),
    ],
)  # fmt: skip
def test_prompt_caches_that_do_not_fit_are_refused_in_a_line(
    tmp_path: Path, name: str, make: Callable[[Path], None], why: str
):
    path = tmp_path / "a.safetensors"
    make(path)
    engine = engine_of(name)
    with pytest.raises(SnapshotError, match=why) as caught:
        engine.import_prompt_cache(path, prompt(9))
    assert str(caught.value).startswith(f"[snapshot] {path} ") and "\n" not in str(caught.value)
    assert engine.cache.pool.num_used_blocks == engine.cache.pool.num_cached_blocks == 0


def test_the_tokens_of_a_prompt_cache_have_to_be_said(tmp_path: Path):
    path, engine = tmp_path / "a.safetensors", engine_of("llama")
    made_by_mlx_lm(path, models("llama")[1], prompt(9))
    with pytest.raises(ArgumentError, match="does not contain the ids of its tokens, like all of"):
        engine.import_prompt_cache(path)
    with pytest.raises(ArgumentError, match="holds K/V of 9 tokens, and token_ids are 8"):
        engine.import_prompt_cache(path, prompt(8))


def test_a_cache_of_max_kv_size_that_is_not_full_is_imported(tmp_path: Path):
    path, engine = tmp_path / "a.safetensors", engine_of("llama")
    stock = models("llama")[1]
    made_by_mlx_lm(path, stock, prompt(20), max_kv_size=64)
    engine.import_prompt_cache(path, prompt(20))
    expected = stock_tokens(stock, [*prompt(20), 5], NUM_TOKENS)
    assert answer(engine, [*prompt(20), 5]) == (expected, 16)


def test_a_prompt_cache_of_another_model_is_refused_by_name(tmp_path: Path):
    path, (model, stock) = tmp_path / "a.safetensors", models("wide")
    made_by_mlx_lm(path, stock, prompt(20))  # with the model "m"
    model = adapt(stock, CONFIGS["wide"])
    engine = Engine(model, kv_cache_bytes="100blocks", block_size=8)
    seqs = Sequences(make_kv_cache(model, kv_cache_bytes="20blocks", block_size=8))
    ways: tuple[Callable[..., Any], ...] = (
        lambda **options: engine.import_prompt_cache(path, prompt(20), **options),
        lambda **options: import_prompt_cache(path, model, seqs, "a", **options),
    )
    # A model that was not loaded by a name may be any.
    for name in ("", "m", "somewhere/m"):
        model.name = name
        for take in ways:
            take()
    model.name = "somewhere/else"
    for take in ways:
        with pytest.raises(SnapshotError) as caught:
            take()
        assert str(caught.value) == (
            f"[snapshot] {path} was made with the model 'm', and this one is somewhere/else; if "
            "they are the same, allow it with allow_other_model=True"
        )
        take(allow_other_model=True)
    with pytest.raises(ArgumentError, match="allow_other_model must be True or False, got 'no'"):
        engine.import_prompt_cache(path, prompt(20), allow_other_model="no")  # type: ignore


@pytest.mark.parametrize("num_tokens", [20, 60])
def test_an_engine_with_a_window_refuses_kv_that_have_seen_all_tokens(
    tmp_path: Path, num_tokens: int
):
    path, (model, stock) = tmp_path / "a.safetensors", models("llama")
    made_by_mlx_lm(path, stock, prompt(num_tokens))
    engine = engine_of("llama", window=32)
    seqs = Sequences(make_kv_cache(model, kv_cache_bytes="20blocks", block_size=8, window=32))
    for take in (
        lambda: engine.import_prompt_cache(path, prompt(num_tokens)),
        lambda: import_prompt_cache(path, model, seqs, "a"),
    ):
        with pytest.raises(ArgumentError, match="which differ from those within a window") as no:
            take()
        assert no.value.argument == "window"
    assert engine.cache.pool.num_cached_blocks == 0 and list(seqs) == []


def test_only_its_owner_can_read_a_prompt_cache(tmp_path: Path):
    path, engine = tmp_path / "a.safetensors", engine_of("llama")
    answer(engine, prompt(20))
    for mode in (None, 0o644):
        if mode is not None:
            path.chmod(mode)
        engine.export_prompt_cache(path, prompt(20))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, engine = tmp_path / "a.safetensors", engine_of("llama")
    answer(engine, prompt(20))
    engine.export_prompt_cache(path, prompt(20))
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SnapshotError, match="can't be written: No space left on device"):
        engine.export_prompt_cache(path, prompt(20))
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["a.safetensors"]
