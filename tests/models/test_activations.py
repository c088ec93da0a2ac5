"""The estimate of a step's activations, held against the peaks of models of several shapes."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import pytest
from helpers.engine_runs import load_demo
from helpers.mlx_lm_models import DEEPSEEK_V3, GEMMA3, GPT_OSS, LLAMA, Config, random_model

from mlx_paged.engine.engine import Engine
from mlx_paged.models import qwen3
from mlx_paged.models.activations import activation_nbytes
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm import adapt
from mlx_paged.ops import device
from mlx_paged.options.sampling_params import SamplingParams

WIDE: Config = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "vocab_size": 2048,
}


def qwen3_model(**sizes: int) -> LanguageModel:
    config: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": 2048,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
        "rope_theta": 1e4,
    } | sizes
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return model


def mlx_lm_model(config: Config) -> LanguageModel:
    config = config | WIDE
    return adapt(random_model(config), config)


def peak_of_prompts(model: LanguageModel, num_seqs: int, length: int) -> int:
    """The most memory in a step of ``num_seqs`` prompts, above what was held before it."""
    num_tokens = num_seqs * length
    engine = Engine(
        model,
        None,
        kv_cache_bytes=f"{num_tokens // 2}blocks",
        preallocate=True,
        enable_prefix_caching=False,
        max_num_batched_tokens=max(64, num_tokens),
        max_num_seqs=max(1, num_seqs),
        max_num_mixed_tokens=64,
    )
    for _ in range(2):  # What is made once is made the first time.
        for seq in range(num_seqs):
            engine.add_request(str(seq), [1 + seq] * length, SamplingParams(max_tokens=1))
        mx.synchronize()
        gc.collect()  # What earlier tests have left must not go meanwhile.
        mx.clear_cache()
        base = mx.get_active_memory()
        mx.reset_peak_memory()
        engine.step()
        peak = mx.get_peak_memory() - base
        assert not engine.has_unfinished_requests()
    return peak


MODELS = {
    "demo": lambda: load_demo()[0],
    "llama": lambda: mlx_lm_model(LLAMA),
    "wide": lambda: qwen3_model(hidden_size=256, intermediate_size=768),
    "wide MLP": lambda: qwen3_model(intermediate_size=2000),
    "many heads": lambda: qwen3_model(num_attention_heads=16, num_key_value_heads=16),
    "grouped heads": lambda: qwen3_model(num_attention_heads=16),
    "many layers": lambda: qwen3_model(num_hidden_layers=24),
    "windows": lambda: mlx_lm_model(GEMMA3),
    "experts, sinks": lambda: mlx_lm_model(GPT_OSS),
    "experts, latents": lambda: mlx_lm_model(DEEPSEEK_V3),
}
IN_THE_FAST_LANE = ("demo", "llama")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_THE_FAST_LANE else pytest.mark.slow)
        for name in MODELS
    ],
)
@pytest.mark.parametrize(("num_seqs", "length"), [(8, 64), (1, 256)], ids=["many", "one"])
def test_it_is_near_the_peak_of_a_step(name: str, num_seqs: int, length: int):
    model = MODELS[name]()
    peak = peak_of_prompts(model, num_seqs, length)
    estimate = activation_nbytes(model, num_seqs * length, num_seqs, length)
    # How far Python builds ahead of what is computed differs from run to run.
    assert 0.65 * peak <= estimate <= 2 * peak, estimate / peak


def test_scores_count_where_attention_is_not_one_kernel(monkeypatch: pytest.MonkeyPatch):
    model = qwen3_model(head_dim=64)
    without = 4 * 2048 * (5 * 64 + 2 * 256 + 6 * (4 + 2) * 64)
    assert activation_nbytes(model, 2048, 1, 1000) == without + 2048 * 1000 * 4 * 4
    monkeypatch.setattr(device, "is_cpu", lambda: False)
    assert activation_nbytes(model, 2048, 1, 1000) == without
    odd = qwen3_model(head_dim=32)
    assert activation_nbytes(odd, 2048, 1, 1000) > 2048 * 1000 * 4 * 4


def test_logits_count_where_they_are_more(monkeypatch: pytest.MonkeyPatch):
    assert activation_nbytes(qwen3_model(), 8, 64, 8) == 64 * 2048 * 4 * 8


def test_an_engine_says_it_for_its_largest_step():
    model = load_demo()[0]
    engine = Engine(
        model, None, kv_cache_bytes="64blocks", max_num_batched_tokens=512, max_model_len=300
    )
    assert engine.stats().nbytes_activations == activation_nbytes(model, 512, 64, 300)
