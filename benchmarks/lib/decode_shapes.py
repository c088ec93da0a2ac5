"""Models that the benchmarks make themselves: layers of real models' shapes, random weights. A
ratio of times is one of layers, so a few of them do, and these fit a CPU.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.utils import _get_classes

from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm import adapt

SHAPES: dict[str, dict[str, Any]] = {
    # Llama-3.2-1B, 4 layers of 16
    "llama-layers": {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "vocab_size": 4096,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": True,
    },
    # Gemma 3 1B, 6 layers of 26: five with a window of 512 tokens, one that sees all
    "gemma3-layers": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "num_hidden_layers": 6,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rms_norm_eps": 1e-6,
        "vocab_size": 4096,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    },
    # Qwen3-30B-A3B, 4 layers of 48 and 16 experts of 128, of which 8 work on a token as there
    "qwen3-moe-layers": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 16,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "vocab_size": 4096,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
}


def random_model(config: dict[str, Any]) -> tuple[LanguageModel, Module]:
    """mlx-lm's model of a configuration in float32, as it runs here and by itself. It is one model
    with one set of weights; on mlx-lm's caches it does what it always does.
    """
    model_class, args_class = _get_classes(config)
    mx.random.seed(0)
    model: Module = model_class(args_class.from_dict(config))
    model.eval()
    mx.eval(model.parameters())
    return adapt(model, config), model
