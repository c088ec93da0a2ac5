"""Popular models with attention as it really is, as their public ``config.json`` say: widths of
heads, groups, windows, scaling of RoPE, numbers of experts. Layers, vocabulary and what else is
wide are cut.

Where a width of heads follows from ``hidden_size``, that stays, too, or some of the heads go in
whole groups.
"""

from __future__ import annotations

from helpers.model_zoo.common import FULL, SLIDING, Config
from helpers.model_zoo.full_size import FULL_SIZE

CUT: Config = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 2,
    "vocab_size": 256,
}

# Of those that are among ``FULL_SIZE``, only what is cut besides.
FAMILIES: dict[str, Config] = {
    "Llama-3.2-1B": {
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
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
    "Qwen2.5-0.5B": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "Mistral-7B-v0.3": {
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "Ministral-3-8B": {
        "model_type": "ministral3",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "yarn",
            "type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16384,
        },
        "tie_word_embeddings": False,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 2,  # of 6: two layers have one of each
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    },
    "gpt-oss-20b": {"layer_types": [SLIDING, FULL], "intermediate_size": 32},
    "Phi-4-mini": {
        "model_type": "phi3",
        "hidden_size": 1152,  # of 3072
        "num_attention_heads": 9,  # of 24
        "num_key_value_heads": 3,  # of 8
        "partial_rotary_factor": 0.75,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0 + 0.5 * i for i in range(48)],
            "short_factor": [1.0] * 48,
        },
        "tie_word_embeddings": True,
    },
    "DeepSeek-V3": {
        "num_attention_heads": 32,  # of 128
        "num_key_value_heads": 32,
        "q_lora_rank": 64,
        "first_k_dense_replace": 1,
    },
    "GLM-4.5-Air": {},
    "granite-3.3-2b": {
        "model_type": "granite",
        "hidden_size": 1024,  # of 2048
        "num_attention_heads": 16,  # of 32
        "num_key_value_heads": 4,  # of 8
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
    },
    "SmolLM3-3B": {
        "model_type": "smollm3",
        "num_hidden_layers": 4,  # the fourth is without RoPE
        "no_rope_layer_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 65536,
        "rope_theta": 5000000.0,
        "tie_word_embeddings": True,
    },
    "OLMo-2-1B": {
        "model_type": "olmo2",
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "Qwen3-Next-80B-A3B": {
        "num_hidden_layers": 4,  # the fourth has attention
        "moe_intermediate_size": 16,
    },
}


def family_config(name: str) -> Config:
    """What its ``config.json`` would say, cut."""
    return FULL_SIZE.get(name, {}) | CUT | FAMILIES[name]
