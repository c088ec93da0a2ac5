"""Configurations of models as they are published, as their public ``config.json`` say.

``FULL_SIZE`` has the whole of them, for what is made of a configuration alone: nothing evaluates
their weights. ``FAMILIES`` are popular models with attention as it really is (widths of heads,
groups, windows, scaling of RoPE, numbers of experts), whose layers, vocabulary and other widths are
cut so far that they run.
"""

from __future__ import annotations

from helpers.model_zoo.configs import FULL, SLIDING, Config

# fmt: off
_DEEPSEEK_V3 = dict(
    hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048, num_attention_heads=128,
    num_key_value_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_rope_head_dim=64,
    qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=256, num_experts_per_tok=8,
    n_shared_experts=1, n_group=8, topk_group=4, routed_scaling_factor=2.5, first_k_dense_replace=3,
    vocab_size=129280, max_position_embeddings=163840, rope_scaling=dict(type="yarn", factor=40,
    beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
    original_max_position_embeddings=4096),
)

FULL_SIZE: dict[str, Config] = {
    "Llama-3.1-70B": dict(
        model_type="llama", hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8, rms_norm_eps=1e-05, vocab_size=128256,
        max_position_embeddings=131072, rope_theta=5e5, rope_scaling=dict(rope_type="llama3",
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192), tie_word_embeddings=False,
    ),
    "internlm2-chat-7b": dict(
        model_type="internlm2", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, rms_norm_eps=1e-05, vocab_size=92544,
        bias=False, max_position_embeddings=32768, rope_theta=1000000,
        rope_scaling=dict(type="dynamic", factor=2.0),
    ),
    "Qwen2.5-72B": dict(
        model_type="qwen2", hidden_size=8192, intermediate_size=29568, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8, rms_norm_eps=1e-06, vocab_size=152064,
        max_position_embeddings=32768, sliding_window=131072, use_sliding_window=False,
        rope_theta=1e6, tie_word_embeddings=False,
    ),
    "Qwen3-235B-A22B": dict(
        model_type="qwen3_moe", hidden_size=4096, intermediate_size=12288,
        moe_intermediate_size=1536, num_hidden_layers=94, num_attention_heads=64,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, rms_norm_eps=1e-06,
        vocab_size=151936, max_position_embeddings=40960, rope_theta=1e6, tie_word_embeddings=False,
    ),
    "DeepSeek-V3": _DEEPSEEK_V3 | dict(
        model_type="deepseek_v3", num_hidden_layers=61, rms_norm_eps=1e-06, rope_theta=1e4,
    ),
    "DeepSeek-V3.2": _DEEPSEEK_V3 | dict(
        model_type="deepseek_v32", num_hidden_layers=8, index_head_dim=128, index_n_heads=64,
        index_topk=2048,
    ),
    "GLM-4.5-Air": dict(
        model_type="glm4_moe", hidden_size=4096, intermediate_size=10944,
        moe_intermediate_size=1408, num_hidden_layers=46, num_attention_heads=96,
        num_key_value_heads=8, head_dim=128, partial_rotary_factor=0.5, use_qk_norm=False,
        attention_bias=True, n_routed_experts=128, num_experts_per_tok=8, n_shared_experts=1,
        n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0,
        first_k_dense_replace=1, rms_norm_eps=1e-05, vocab_size=151552,
        max_position_embeddings=131072, rope_theta=1e6, rope_scaling=None,
        tie_word_embeddings=False,
    ),
    "gpt-oss-20b": dict(
        model_type="gpt_oss", hidden_size=2880, intermediate_size=2880, num_hidden_layers=24,
        num_attention_heads=64, num_key_value_heads=8, head_dim=64, num_local_experts=32,
        num_experts_per_tok=4, sliding_window=128, layer_types=[SLIDING, FULL] * 12,
        rms_norm_eps=1e-05, vocab_size=201088, rope_theta=150000,
        rope_scaling=dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0,
        original_max_position_embeddings=4096, truncate=False),
    ),
    "gemma-2-27b": dict(
        model_type="gemma2", hidden_size=4608, intermediate_size=36864, num_hidden_layers=46,
        num_attention_heads=32, num_key_value_heads=16, head_dim=128, query_pre_attn_scalar=144,
        sliding_window=4096, rms_norm_eps=1e-06, vocab_size=256000, max_position_embeddings=8192,
    ),
    "gemma-3-27b": dict(
        model_type="gemma3", vision_config=dict(hidden_size=1152, num_hidden_layers=27),
        text_config=dict(model_type="gemma3_text", hidden_size=5376, intermediate_size=21504,
        num_hidden_layers=62, num_attention_heads=32, num_key_value_heads=16, head_dim=128,
        query_pre_attn_scalar=168, sliding_window=1024, rope_scaling=dict(factor=8.0,
        rope_type="linear")),
    ),
    "gemma-3-4b": dict(
        model_type="gemma3", vision_config=dict(hidden_size=1152, num_hidden_layers=27),
        text_config=dict(model_type="gemma3_text", hidden_size=2560, intermediate_size=10240,
        num_hidden_layers=34, sliding_window=1024, rope_scaling=dict(factor=8.0,
        rope_type="linear")),
    ),
    "gemma-3n-E2B": dict(
        model_type="gemma3n", text_config=dict(model_type="gemma3n_text", hidden_size=2048,
        num_hidden_layers=30, intermediate_size=[8192] * 30, num_attention_heads=8,
        num_key_value_heads=2, head_dim=256, rms_norm_eps=1e-06, vocab_size=262400,
        vocab_size_per_layer_input=262144, num_kv_shared_layers=10, sliding_window=512,
        max_position_embeddings=32768, rope_local_base_freq=1e4, rope_theta=1e6,
        final_logit_softcapping=30.0, layer_types=[SLIDING, SLIDING, SLIDING, SLIDING, FULL] * 6,
        activation_sparsity_pattern=[0.95] * 10 + [0.0] * 20, hidden_size_per_layer_input=256,
        altup_num_inputs=4, altup_coef_clip=120.0, altup_correct_scale=True, altup_active_idx=0,
        laurel_rank=64),
    ),
    "Mixtral-8x22B": dict(
        model_type="mixtral", hidden_size=6144, intermediate_size=16384, num_hidden_layers=56,
        num_attention_heads=48, num_key_value_heads=8, num_experts_per_tok=2, num_local_experts=8,
        rms_norm_eps=1e-05, vocab_size=32768, rope_theta=1e6,
    ),
    "Phi-3.5-mini": dict(
        model_type="phi3", hidden_size=3072, intermediate_size=8192, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=32, rms_norm_eps=1e-05, vocab_size=32064,
        sliding_window=262144, max_position_embeddings=131072,
        original_max_position_embeddings=4096, rope_theta=1e4, rope_scaling=dict(type="longrope",
        long_factor=[1.0 + 0.5 * i for i in range(48)], short_factor=[1.0] * 48),
    ),
    "Phi-3-small-8k": dict(
        model_type="phi3small", hidden_size=4096, ff_intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, dense_attention_every_n_layers=2,
        gegelu_limit=20.0, layer_norm_epsilon=1e-05, vocab_size=100352, mup_attn_multiplier=1.0,
        blocksparse_block_size=64, blocksparse_num_local_blocks=16, blocksparse_vert_stride=8,
    ),
    "MiniCPM3-4B": dict(
        model_type="minicpm3", hidden_size=2560, dim_model_base=256, num_hidden_layers=62,
        intermediate_size=6400, num_attention_heads=40, num_key_value_heads=40, rms_norm_eps=1e-05,
        vocab_size=73448, q_lora_rank=768, qk_nope_head_dim=64, qk_rope_head_dim=32,
        kv_lora_rank=256, scale_depth=1.4, scale_emb=12, max_position_embeddings=32768,
        rope_scaling=dict(type="longrope", long_factor=[1.0] * 16, short_factor=[1.0] * 16,
        original_max_position_embeddings=32768),
    ),
    "Command-R7B": dict(
        model_type="cohere2", hidden_size=4096, head_dim=128, num_hidden_layers=32,
        intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, rope_theta=5e4,
        vocab_size=256000, layer_norm_eps=1e-05, logit_scale=0.25, sliding_window=4096,
        sliding_window_pattern=4,
    ),
    "Llama-4-Scout": dict(
        model_type="llama4", vision_config=dict(hidden_size=1408),
        text_config=dict(model_type="llama4_text", hidden_size=5120, intermediate_size=8192,
        intermediate_size_mlp=16384, num_hidden_layers=48, num_attention_heads=40,
        num_key_value_heads=8, head_dim=128, attention_chunk_size=8192, attention_bias=False,
        interleave_moe_layer_step=1, num_local_experts=16, num_experts_per_tok=1,
        max_position_embeddings=10485760, rms_norm_eps=1e-05, rope_theta=5e5,
        rope_scaling=dict(factor=16.0, high_freq_factor=1.0, low_freq_factor=1.0,
        original_max_position_embeddings=8192, rope_type="llama3"), use_qk_norm=True,
        vocab_size=202048),
    ),
    "Qwen3-Next-80B-A3B": dict(
        model_type="qwen3_next", hidden_size=2048, intermediate_size=5120,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, num_hidden_layers=48,
        full_attention_interval=4, num_attention_heads=16, num_key_value_heads=2, head_dim=256,
        partial_rotary_factor=0.25, linear_num_value_heads=32, linear_num_key_heads=16,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
        num_experts=512, num_experts_per_tok=10, decoder_sparse_step=1, mlp_only_layers=[],
        norm_topk_prob=True, rms_norm_eps=1e-06, vocab_size=151936, max_position_embeddings=262144,
        rope_theta=1e7,
    ),
    "Falcon-H1-34B": dict(
        model_type="falcon_h1", hidden_size=5120, intermediate_size=21504, num_hidden_layers=72,
        num_attention_heads=20, num_key_value_heads=4, head_dim=128, mamba_d_ssm=4096,
        mamba_n_heads=32, mamba_d_head=128, mamba_d_state=256, mamba_n_groups=2, mamba_d_conv=4,
        rms_norm_eps=1e-05, rope_theta=100000042.0, vocab_size=261120,
        max_position_embeddings=262144,
    ),
    "granite-4.0-h-small": dict(
        model_type="granitemoehybrid", hidden_size=4096, intermediate_size=768,
        shared_intermediate_size=1536, num_hidden_layers=40, num_attention_heads=32,
        num_key_value_heads=8, num_local_experts=72, num_experts_per_tok=10, attention_bias=False,
        attention_multiplier=0.0078125, embedding_multiplier=12, residual_multiplier=0.22,
        logits_scaling=16, layer_types=["mamba", "mamba", "mamba", "mamba", "mamba", "mamba",
        "mamba", "mamba", "mamba", "attention"] * 4, mamba_n_heads=128, mamba_d_head=64,
        mamba_d_state=128, mamba_n_groups=1, mamba_d_conv=4, mamba_proj_bias=False,
        mamba_conv_bias=True, position_embedding_type="nope", rms_norm_eps=1e-05, rope_theta=10000,
        tie_word_embeddings=True, vocab_size=100352, max_position_embeddings=131072,
    ),
    "Nemotron-H-8B": dict(
        model_type="nemotron_h", hidden_size=4096, intermediate_size=21504, num_hidden_layers=52,
        hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        num_attention_heads=32, num_key_value_heads=8, attention_head_dim=128, attention_bias=False,
        mamba_num_heads=128, mamba_head_dim=64, mamba_proj_bias=False, mlp_bias=False,
        ssm_state_size=128, conv_kernel=4, n_groups=8, use_bias=False, use_conv_bias=True,
        time_step_limit=[0.0, 3.4e+38], layer_norm_epsilon=1e-05, max_position_embeddings=8192,
        vocab_size=131072,
    ),
    "LFM2-8B-A1B": dict(
        model_type="lfm2_moe", hidden_size=2048, intermediate_size=7168, moe_intermediate_size=1792,
        num_hidden_layers=24, num_attention_heads=32, num_key_value_heads=8, num_experts=32,
        num_experts_per_tok=4, num_dense_layers=2, norm_topk_prob=True, use_expert_bias=True,
        conv_L_cache=3, conv_bias=False, norm_eps=1e-05, rope_theta=1e6, vocab_size=65536,
        max_position_embeddings=128000, layer_types=["conv", "conv", FULL, "conv"] * 6,
    ),
    "jamba-large": dict(
        model_type="jamba", hidden_size=8192, intermediate_size=24576, num_hidden_layers=72,
        num_attention_heads=64, num_key_value_heads=8, attn_layer_offset=4, attn_layer_period=8,
        expert_layer_offset=1, expert_layer_period=2, mamba_d_conv=4, mamba_d_state=16,
        mamba_expand=2, mamba_dt_rank=512, num_experts=16, num_experts_per_tok=2,
        rms_norm_eps=1e-06, max_position_embeddings=262144, vocab_size=65536,
    ),
    "Codestral-Mamba-7B": dict(
        model_type="mamba2", hidden_size=4096, num_hidden_layers=64, num_heads=128, head_dim=64,
        intermediate_size=8192, state_size=128, layer_norm_epsilon=1e-05, conv_kernel=4, n_groups=8,
        use_bias=False, use_conv_bias=True, tie_word_embeddings=False,
        time_step_limit=[0.0, 3.4e+38], time_step_rank=256, vocab_size=32768,
    ),
    "rwkv7-2.9B": dict(
        model_type="rwkv7", vocab_size=65536, hidden_size=2560, intermediate_size=10240,
        norm_eps=1e-05, head_dim=64, num_hidden_layers=32, a_low_rank_dim=96, v_low_rank_dim=64,
        gate_low_rank_dim=320, decay_low_rank_dim=96, tie_word_embeddings=False,
    ),
    "Kimi-Linear-48B-A3B": dict(
        model_type="kimi_linear", vocab_size=163840, hidden_size=2304, num_hidden_layers=27,
        num_attention_heads=32, num_key_value_heads=32, intermediate_size=9216, head_dim=72,
        rope_theta=1e4, rms_norm_eps=1e-05, linear_attn_config=dict(full_attn_layers=[4, 8, 12, 16,
        20, 24, 27], kda_layers=[n for n in range(1, 27) if n % 4], head_dim=128, num_heads=32,
        short_conv_kernel_size=4), model_max_length=1048576, num_experts=256,
        num_experts_per_token=8, moe_intermediate_size=1024, kv_lora_rank=512, q_lora_rank=None,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_expert_group=1, topk_group=1,
        num_shared_experts=1, first_k_dense_replace=1, moe_layer_freq=1,
        routed_scaling_factor=2.446, moe_router_activation_func="sigmoid", moe_renormalize=True,
        tie_word_embeddings=False,
    ),
    "plamo-3-31b": dict(
        model_type="plamo3", hidden_size=6144, num_hidden_layers=64, num_attention_heads=48,
        num_key_value_heads=8, head_dim=128, intermediate_size=16384, vocab_size=107520,
        sliding_window=2048, sliding_window_pattern=8, max_position_embeddings=32768,
    ),
    "dbrx": dict(
        model_type="dbrx", vocab_size=100352, d_model=6144, n_heads=48, n_layers=40,
        ffn_config=dict(ffn_hidden_size=10752, moe_num_experts=16, moe_top_k=4),
        attn_config=dict(kv_n_heads=8, clip_qkv=8, rope_theta=500000),
    ),
    "gpt2-xl": dict(
        model_type="gpt2", n_ctx=1024, n_embd=1600, n_head=25, n_layer=48, n_positions=1024,
        layer_norm_epsilon=1e-05, vocab_size=50257,
    ),
    "starcoder": dict(
        model_type="gpt_bigcode", n_embd=6144, n_head=48, n_inner=24576, n_layer=40,
        n_positions=8192, layer_norm_epsilon=1e-05, vocab_size=49152, multi_query=True,
    ),
}

# Where a width of heads follows from ``hidden_size``, that stays, too, or some of the heads go in
# whole groups.
CUT: Config = dict(
    hidden_size=128, intermediate_size=128, moe_intermediate_size=32,
    shared_expert_intermediate_size=32, num_hidden_layers=2, vocab_size=256,
)

# Of those that are among ``FULL_SIZE``, only what is cut besides.
FAMILIES: dict[str, Config] = {
    "Llama-3.2-1B": dict(
        model_type="llama", num_attention_heads=32, num_key_value_heads=8, head_dim=64,
        rms_norm_eps=1e-05, max_position_embeddings=131072, rope_theta=5e5,
        rope_scaling=dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0,
        high_freq_factor=4.0, original_max_position_embeddings=8192), tie_word_embeddings=True,
    ),
    "Qwen2.5-0.5B": dict(
        model_type="qwen2", hidden_size=448, num_attention_heads=7, num_key_value_heads=1,  # of 14
        rms_norm_eps=1e-06, max_position_embeddings=32768, rope_theta=1e6, tie_word_embeddings=True,
    ),
    "Qwen3-30B-A3B": dict(
        model_type="qwen3_moe", num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        num_experts=128, num_experts_per_tok=8, decoder_sparse_step=1, mlp_only_layers=[],
        norm_topk_prob=True, rms_norm_eps=1e-06, max_position_embeddings=40960, rope_theta=1e6,
        tie_word_embeddings=False,
    ),
    "Mistral-7B-v0.3": dict(
        model_type="mistral", num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        rms_norm_eps=1e-05, max_position_embeddings=32768, rope_theta=1e6,
        tie_word_embeddings=False,
    ),
    "Ministral-3-8B": dict(
        model_type="ministral3", num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        rms_norm_eps=1e-05, max_position_embeddings=262144, rope_parameters=dict(rope_type="yarn",
        type="yarn", rope_theta=1e6, factor=16.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
        mscale_all_dim=1.0, llama_4_scaling_beta=0.1, original_max_position_embeddings=16384),
        tie_word_embeddings=False,
    ),
    "gemma-3-1b": dict(
        model_type="gemma3_text", num_attention_heads=4, num_key_value_heads=1, head_dim=256,
        query_pre_attn_scalar=256, sliding_window=512, rms_norm_eps=1e-06,
        sliding_window_pattern=2,  # of 6: two layers have one of each
        max_position_embeddings=32768, rope_theta=1e6, rope_local_base_freq=1e4,
    ),
    "gpt-oss-20b": dict(layer_types=[SLIDING, FULL], intermediate_size=32),
    "Phi-4-mini": dict(
        model_type="phi3", hidden_size=384, num_attention_heads=3, num_key_value_heads=1,  # of 24
        partial_rotary_factor=0.75, rms_norm_eps=1e-05, max_position_embeddings=131072,
        original_max_position_embeddings=4096, rope_theta=1e4, rope_scaling=dict(type="longrope",
        long_factor=[1.0 + 0.5 * i for i in range(48)], short_factor=[1.0] * 48),
        tie_word_embeddings=True,
    ),
    "DeepSeek-V3": dict(
        num_attention_heads=16, num_key_value_heads=16, q_lora_rank=64,  # of 128
        first_k_dense_replace=1,
    ),
    "GLM-4.5-Air": dict(),
    "granite-3.3-2b": dict(
        model_type="granite", hidden_size=512, num_key_value_heads=2,
        num_attention_heads=8,  # of 32
        attention_multiplier=0.015625, embedding_multiplier=12.0, residual_multiplier=0.22,
        logits_scaling=8.0, attention_bias=False, mlp_bias=False, rms_norm_eps=1e-05,
        max_position_embeddings=131072, rope_theta=1e7, tie_word_embeddings=True,
    ),
    "SmolLM3-3B": dict(
        model_type="smollm3", num_hidden_layers=4,  # the fourth is without RoPE
        no_rope_layer_interval=4, num_attention_heads=16, num_key_value_heads=4, head_dim=128,
        rms_norm_eps=1e-06, max_position_embeddings=65536,
        rope_theta=5e6, tie_word_embeddings=True,
    ),
    "OLMo-2-1B": dict(
        model_type="olmo2", num_attention_heads=16, num_key_value_heads=16, head_dim=128,
        rms_norm_eps=1e-06, max_position_embeddings=4096, rope_theta=5e5, tie_word_embeddings=False,
    ),
    "Qwen3-Next-80B-A3B": dict(
        num_hidden_layers=4,  # the fourth has attention
        moe_intermediate_size=16, num_experts=128,  # of 512
    ),
}

# fmt: on


def family_config(name: str) -> Config:
    """What its ``config.json`` would say, cut."""
    return FULL_SIZE.get(name, {}) | CUT | FAMILIES[name]
