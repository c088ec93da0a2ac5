"""Architectures with latent attention (MLA), or an indexer that picks the tokens to attend to."""

from __future__ import annotations

from helpers.model_zoo.attention import LLAMA_4_SCALING
from helpers.model_zoo.common import VOCAB_SIZE, Config

LONGCAT: Config = {
    "hidden_size": 64,
    "ffn_hidden_size": 48,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 16,
    "zero_expert_num": 2,
    "zero_expert_type": "identity",
    "num_layers": 2,
    "attention_method": "MLA",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}

LATENTS: dict[str, Config] = {
    "deepseek_v2": {
        "topk_method": "greedy",
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
    "deepseek_v3": {},
    "deepseek_v32": {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 8},
    "deepseek_v41": {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 4,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 4,
        "compress_ratios": (0, 0, 4, 4),
        "kv_source_layer_ids": (2,),
        "index_source_layer_ids": (2,),
        "rms_norm_eps": 1e-6,
    },
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "glm_moe_dsa": {
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 8,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": LONGCAT
    | {"ngram_vocab_size_ratio": 3, "emb_neighbor_num": 3, "emb_split_num": 2},
    "minicpm3": {
        "dim_model_base": 32,
        "scale_depth": 1.4,
        "scale_emb": 2.0,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0] * 4,
            "short_factor": [1.0] * 4,
            "original_max_position_embeddings": 1024,
        },
    },
    "mistral4": {"rope_parameters": LLAMA_4_SCALING},
    "youtu_llm": {"num_key_value_heads": 4},
}

DEEPSEEK_TEXT: Config = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}
