"""What the engine does with a packed model of mlx-lm, beyond its tokens."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers.engine_runs import CONFIG, tiny_models
from helpers.fast_lane import mostly_slow
from helpers.mlx_lm_models import DEEPSEEK_V3, GPT_OSS, LLAMA, random_model, stock_tokens
from helpers.model_zoo import config_of, make_from_config
from mlx.utils import tree_flatten
from paged_testing.pure_metal import pure_metal

from mlx_paged import LLM, Engine, SamplingParams, demo_model_path, load
from mlx_paged.cache import group_layers
from mlx_paged.engine import compiled_decode
from mlx_paged.loading import LoadError
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm import adapt

PROMPT = [7, 3, 3, 8] * 6
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def answer(engine: Engine, params: SamplingParams = GREEDY) -> list[int]:
    engine.add_request("a", PROMPT, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
    return tokens


@pytest.mark.slow  # as tests/engine/test_compiled_decode.py, in blocks of another size
@pytest.mark.parametrize("config", [LLAMA, GPT_OSS], ids=lambda c: c["model_type"])
def test_decodes_are_replayed_from_a_trace(config, monkeypatch):
    monkeypatch.setattr(compiled_decode, "NUM_BUILT_FIRST", 0)
    model = random_model(config)
    expected = stock_tokens(model, PROMPT, 12)
    with pure_metal():
        engine = Engine(adapt(model, config), block_size=8, backend="metal")
        assert answer(engine) == expected
        assert engine.runner.compiled_decode._traces, "no decode was replayed"
        assert not engine.runner.compiled_decode._has_failed


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK_V3], ids=lambda c: c["model_type"])
def test_drafts_change_no_token(config):
    model = random_model(config)
    expected = stock_tokens(model, PROMPT, 12)
    looked_up = Engine(adapt(model, config), block_size=8, num_draft_tokens=3)
    assert answer(looked_up) == expected
    assert looked_up.stats().spec_decoding.num_draft_tokens > 0
    small = adapt(random_model(LLAMA, seed=1), LLAMA)
    assert answer(Engine(adapt(model, config), block_size=8, draft_model=small)) == expected


def save_folder(folder: Path, config: dict, model: nn.Module) -> Path:
    """With the demo model's tokenizer."""
    for file in demo_model_path().glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return folder


@pytest.fixture
def config():
    return {**LLAMA, "vocab_size": 1024, "max_position_embeddings": 512}


def test_a_folder_of_quantised_weights_loads(tmp_path, config):
    model = random_model(config)
    nn.quantize(model, group_size=32, bits=4)
    quantised = {**config, "quantization": {"group_size": 32, "bits": 4}}
    loaded, tokenizer = load(save_folder(tmp_path, quantised, model))
    assert loaded.description == "llama of mlx-lm, packed"
    expected = stock_tokens(model, PROMPT, 12)
    assert answer(Engine(loaded, tokenizer, block_size=8)) == expected
    assert Engine(loaded, tokenizer).max_model_len == 512


def test_a_configuration_that_lacks_a_field_is_one_line(tmp_path, config):
    folder = save_folder(tmp_path, config, random_model(config))
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match="hidden_size") as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_a_window_keeps_what_the_native_model_keeps():
    native, theirs = tiny_models()
    packed = adapt(theirs, CONFIG)
    long = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)
    expected = answer(Engine(native, block_size=8, window=24), long)
    assert answer(Engine(packed, block_size=8, window=24), long) == expected
    assert answer(Engine(packed, block_size=8), long) != expected


def test_a_window_is_refused_where_keys_can_not_be_moved():
    latents = adapt(random_model(DEEPSEEK_V3), DEEPSEEK_V3)
    with pytest.raises(ValueError, match=r"window needs keys that can be rotated .* deepseek_v3"):
        Engine(latents, window=64)


POPULAR = (
    "cohere2", "gemma3_text", "glm4", "gpt_oss", "granite", "llama", "mixtral", "olmo2", "qwen2",
    "qwen3_moe",
)  # fmt: skip


@cache
def popular(architecture: str) -> LanguageModel:
    """With heads wide enough for groups of 32 numbers that share a scale."""
    config = {**config_of(architecture), "hidden_size": 128, "head_dim": 32}
    return adapt(make_from_config(config), config)


@mostly_slow("architecture", POPULAR, quick=(0, 1, 6, 8))
def test_kv_of_8_bits_change_log_probabilities_a_little(architecture):
    prompt, likely = list(range(40, 75)), []
    for kv_format in (None, 8):
        llm = LLM(popular(architecture), kv_cache_bytes="100blocks", kv_format=kv_format)
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        [output] = llm.generate([prompt], params)
        chosen = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        likely.append([entries[token].logprob for entries, token in chosen])
    differences = [abs(one - other) for one, other in zip(*likely, strict=True)]
    assert max(differences) > 0
    # Rounding may send a token of a mixture to other experts.
    assert sorted(differences)[len(differences) // 2] < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("architecture", POPULAR[1:])
def test_a_window_bounds_what_is_held(architecture):
    model, prompt = popular(architecture), [5, 9, 200, 17, 33, 4, 90]
    # All tokens together would need 9 blocks for each group of layers.
    budget = f"{8 * len(group_layers(model.layer_specs, 8))}blocks"
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    streaming = LLM(model, kv_cache_bytes=budget, block_size=8, window=16, num_sink_tokens=4)
    ours, others = (
        list(llm.generate([prompt], params)[0].outputs[0].token_ids)
        for llm in (streaming, LLM(model, kv_cache_bytes="100blocks"))
    )
    assert len(ours) == 60
    # As long as all tokens are seen, they are the same.
    assert ours[: 16 - len(prompt)] == others[: 16 - len(prompt)]
    assert ours != others


def test_a_window_is_refused_where_layers_have_no_positions():
    with pytest.raises(ValueError, match="cohere2 of mlx-lm, packed, has layers whose"):
        LLM(popular("cohere2"), window=16)
