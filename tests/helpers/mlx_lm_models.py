"""Tiny random models of mlx-lm, and what mlx-lm itself answers with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.base import Module
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.utils import _get_classes

Config = dict[str, Any]

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA: Config = {**_SIZES, "model_type": "llama", "num_hidden_layers": 2}
GEMMA3: Config = {
    **_SIZES,
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "sliding_window": 8,
    "sliding_window_pattern": 3,
}
GPT_OSS: Config = {  # sinks, windows and experts
    **_SIZES,
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "rope_theta": 10000,
    "rope_scaling": None,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
DEEPSEEK_V3: Config = {  # latents
    **_SIZES,
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
QWEN3_MOE: Config = {
    **_SIZES,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
GEMMA3N: Config = {  # layers that share K/V
    "model_type": "gemma3n",
    "text_config": {
        **_SIZES,
        "model_type": "gemma3n_text",
        "num_hidden_layers": 5,
        "intermediate_size": [64] * 5,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 256,
        "altup_active_idx": 0,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_num_inputs": 2,
        "laurel_rank": 8,
        "max_position_embeddings": 4096,
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1e6,
        "final_logit_softcapping": 30.0,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
        ],
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0],
        "num_kv_shared_layers": 2,
        "sliding_window": 8,
    },
}


def random_model(config: Config, seed: int = 0) -> Module:
    """Of float32 weights, large enough for the next token to depend on the whole context."""
    model_class, args_class = _get_classes(config)
    mx.random.seed(seed)
    model: Module = model_class(args_class.from_dict(config))

    def weight(old: mx.array) -> mx.array:
        noise = mx.random.normal(old.shape)
        return 1 + 0.1 * noise if old.ndim == 1 else noise * old.shape[-1] ** -0.5

    model.update(tree_map(weight, model.parameters()))
    mx.eval(model.parameters())
    return model


# MLX's modes of quantisation: mode, bits, group size.
QUANTISATIONS = [
    *(("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)),
    ("mxfp4", 4, 32),
    ("nvfp4", 4, 16),
    ("mxfp8", 8, 32),
]


def quantised_model(config: Config, quantisation: tuple[str, int, int], seed: int = 0) -> Module:
    """A random model in bfloat16, quantised as mlx-lm does: without the routers of experts."""
    mode, bits, group_size = quantisation
    model = random_model(config, seed)
    model.update(tree_map(lambda weight: weight.astype(mx.bfloat16), model.parameters()))

    def is_quantised(path: str, module: Module) -> bool:
        return hasattr(module, "to_quantized") and not path.endswith("mlp.gate")

    nn.quantize(model, group_size, bits, mode=mode, class_predicate=is_quantised)
    mx.eval(model.parameters())
    return model


def stock_tokens(model: Module, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What mlx-lm's own loop and caches answer greedily."""
    steps = generate_step(mx.array(prompt), model, max_tokens=max_tokens)
    return [int(token) for token, _ in steps]
