"""Wrappers around another architecture; those of vision models load their text part."""

from __future__ import annotations

from helpers.model_zoo.attention import ATTENTION
from helpers.model_zoo.common import COMMON, FULL, SLIDING, Config
from helpers.model_zoo.latents import DEEPSEEK_TEXT
from helpers.model_zoo.recurrent import RECURRENT

PLAIN: Config = {
    name: COMMON[name]
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "max_position_embeddings",
        "tie_word_embeddings",
    )
}

MOE: Config = PLAIN | {
    name: COMMON[name]
    for name in (
        "num_experts",
        "num_experts_per_tok",
        "decoder_sparse_step",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
    )
}

WRAPPERS: dict[str, Config] = {
    "gemma3": {
        "vocab_size": 256,
        "text_config": PLAIN
        | ATTENTION["gemma3_text"]
        | {"model_type": "gemma3_text", "sliding_window": 8},
    },
    "gemma4": {
        "vocab_size": 256,
        "text_config": PLAIN
        | ATTENTION["gemma4_text"]
        | {
            "model_type": "gemma4_text",
            "sliding_window": 8,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
    },
    "kimi_k25": {"text_config": DEEPSEEK_TEXT},
    "kimi_vl": {"text_config": DEEPSEEK_TEXT},
    "lfm2-vl": {
        "text_config": PLAIN | {"model_type": "lfm2", "norm_eps": 1e-5} | RECURRENT["lfm2"]
    },
    "mistral3": {
        "text_config": PLAIN
        | ATTENTION["ministral3"]
        | {"model_type": "ministral3", "layer_types": [SLIDING, FULL], "sliding_window": 8}
    },
    "pixtral": {"text_config": PLAIN | {"model_type": "mistral"}},
    "qwen2_vl": {"text_config": PLAIN | {"model_type": "qwen2"}},
    "qwen3_vl": {"text_config": PLAIN | {"model_type": "qwen3"}},
    "qwen3_vl_moe": {"text_config": MOE | {"model_type": "qwen3_moe"}},
}
