"""Architectures with recurrent or convolutional state."""

from __future__ import annotations

from helpers.model_zoo.common import FULL, LINEAR, SLIDING, VOCAB_SIZE, WINDOW, Config

BAILING_LINEAR: Config = {
    "num_hidden_layers": 4,
    "layer_group_size": 2,
    "group_norm_size": 2,
    "num_key_value_heads": 4,
}

KIMI_LINEAR_ATTENTION: Config = {
    "kda_layers": [1],
    "full_attn_layers": [2],
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
}

QWEN3_5_TEXT: Config = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB_SIZE,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "full_attention_interval": 2,
}

MAMBA2: Config = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_n_groups": 2,
}

RECURRENT: dict[str, Config] = {
    "baichuan_m1": {
        "sliding_window_layers": [0],
        "conv_window": 2,
    },
    "bailing_hybrid": BAILING_LINEAR,
    "bailing_moe_linear": BAILING_LINEAR,
    "bailing_moe_v3": {
        "model_type": "bailing_hybrid",
        "architectures": ["BailingMoeV3ForCausalLM"],
        "num_hidden_layers": 4,
        "layer_group_size": 2,
        "moe_shared_expert_intermediate_size": 16,
    },
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 64},
    "gear": {"num_hidden_layers": 3, "layer_types": ["conv_mixer", SLIDING, FULL]},
    "granitemoehybrid": {
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 16,
        "mamba_proj_bias": False,
        "mamba_d_conv": 4,
        "mamba_conv_bias": True,
        **MAMBA2,
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
    },
    "kimi_k3": {
        "text_config": {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 48,
            "linear_attn_config": KIMI_LINEAR_ATTENTION,
            "activation_situ_beta": 1.0,
            "activation_situ_linear_beta": 1.0,
            "attn_res_block_size": 2,
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 24,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "routed_expert_hidden_size": 32,
        }
    },
    "kimi_linear": {
        "linear_attn_config": KIMI_LINEAR_ATTENTION,
        "model_max_length": 4096,
        "num_experts_per_token": 2,
        "num_key_value_heads": 4,
    },
    "lfm2": {
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", FULL],
    },
    "lfm2_moe": {
        "conv_bias": False,
        "conv_L_cache": 3,
        "use_expert_bias": True,
        "layer_types": ["conv", FULL],
    },
    "mamba": {
        "intermediate_size": 96,
        "state_size": 16,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "time_step_rank": 8,
    },
    "mamba2": {
        "num_heads": 4,
        "intermediate_size": 64,
        "state_size": 32,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_conv_bias": True,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": 8,
    },
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 32,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_conv_bias": True,
        "layers_block_type": ["mamba", "attention", "mlp", "moe"],
        "layer_types": None,
        "moe_shared_expert_intermediate_size": 16,
    },
    "olmo_hybrid": {"linear_allow_neg_eigval": True, "layer_types": [LINEAR, FULL]},
    "plamo2": {
        "num_hidden_layers": 4,
        "hidden_size_per_head": 16,
        "attention_window_size": 4096,
        "mamba_d_state": 16,
        "mamba_num_heads": 4,
        "mamba_chunk_size": 16,
    },
    "prism_hadamard_qwen35": {
        "text_config": QWEN3_5_TEXT | {"hidden_size": 128, "intermediate_size": 128},
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {
                "path": "model.layers.0.mlp.down_proj",
                "embedding": False,
                "dtype": "float16",
                "block": 0,
            }
        ],
    },
    "qwen3_5": {"text_config": QWEN3_5_TEXT},
    "qwen3_5_moe": {
        "text_config": QWEN3_5_TEXT
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 16,
            "moe_intermediate_size": 16,
        }
    },
    "qwen3_next": {
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.5,
        "full_attention_interval": 2,
    },
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "num_key_value_heads": 1,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv7": {
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
}
