"""Tiny random models of mlx-lm: some that run one sequence at a time, and some with recurrent
layers, which run packed. And what mlx-lm itself says of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step

from helpers.engine_runs import NEAR_TIE, VOCAB_SIZE
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm.packed import PackedModel
from mlx_paged.models.mlx_lm.per_sequence import PerSequenceModel

COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
# With a vector for each position, and with attention in chunks.
ATTENTION: dict[str, dict[str, Any]] = {
    "gpt_bigcode": {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 128,
        "n_layer": 2,
        "n_inner": 96,
        "n_head": 4,
        "n_positions": 512,
        "layer_norm_epsilon": 1e-5,
    },
    "llama4": {
        "text_config": {
            **COMMON,
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "attention_chunk_size": 24,
            "attention_bias": False,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "rope_scaling": None,
            "use_qk_norm": True,
        }
    },
}
# With recurrent layers: beside full attention, alone, in each layer, and beside a window.
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **COMMON,
        **EXPERTS,
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [],
        "moe_intermediate_size": 16,
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
    },
    "mamba2": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 16,
        "intermediate_size": 64,
        "state_size": 32,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": 8,
    },
    "falcon_h1": {
        **COMMON,
        "num_hidden_layers": 2,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 32,
        "mamba_n_groups": 2,
        "mamba_d_ssm": 64,
    },
    "lfm2": {
        **COMMON,
        "num_hidden_layers": 2,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"],
    },
    "recurrent_gemma": {
        **COMMON,
        "num_hidden_layers": 3,
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": 20,
        "block_types": ["recurrent", "attention", "recurrent"],
    },
}
CONFIGS = {**ATTENTION, **RECURRENT}
# A model whose states are much of the memory that it works in.
WIDE: dict[str, Any] = {
    "model_type": "mamba2",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 16,
    "num_heads": 16,
    "head_dim": 64,
    "intermediate_size": 1024,
    "state_size": 64,
    "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4,
    "n_groups": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "tie_word_embeddings": False,
    "time_step_limit": [0.0, 100.0],
    "time_step_rank": 8,
}
# Where a state decays: so slowly that a token is felt after dozens of others.
DECAYS = {"dt_bias": -3.0, "recurrent_param": -4.0}


def config_of(name: str) -> dict[str, Any]:
    return {"model_type": name, **CONFIGS[name]}


@cache
def mlx_lm_model(name: str) -> Module:
    """One with weights at which every part shows."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict(config_of(name)))
    rng = np.random.default_rng(7)
    weights = []
    for path, weight in tree_flatten(model.parameters()):
        values = rng.normal(size=weight.shape)
        decay = next((v for end, v in DECAYS.items() if path.endswith(end)), None)
        if decay is not None:
            values = decay + 0.1 * values
        elif weight.ndim > 1:
            values *= 1.3 * weight.shape[-1] ** -0.5
        else:
            values = 1 + 0.3 * values
        weights.append((path, mx.array(values, dtype=mx.float32)))
    model.load_weights(weights)
    model.eval()
    mx.eval(model.parameters())
    return model


def adapted_model(name: str) -> LanguageModel:
    kind = PackedModel if name in RECURRENT else PerSequenceModel
    return kind(mlx_lm_model(name), config_of(name))


@cache
def _answer(name: str, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    token_ids = []
    steps = generate_step(mx.array(prompt), mlx_lm_model(name), max_tokens=max_tokens)
    for token_id, logprobs in steps:
        best, second = mx.sort(logprobs)[::-1][:2].tolist()
        assert best - second > NEAR_TIE, f"a near tie at token {len(token_ids)}: another prompt"
        token_ids.append(int(token_id))
    return tuple(token_ids)


def greedy_answer(name: str, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The tokens of mlx-lm's own ``generate_step``, in which none are all but tied."""
    return list(_answer(name, tuple(prompt), max_tokens))
