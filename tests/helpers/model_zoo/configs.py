"""A small configuration of every architecture of mlx-lm, derived from its own ``ModelArgs``.

An architecture is a module of ``mlx_lm.models`` with a ``Model``, so those of another version are
found by themselves. ``MEANINGS`` says what a field is by its name, whichever class has it. A field
that it lacks keeps the default of its class; one without a default has to be in ``MEANINGS`` or in
``EXCEPTIONS``, which hold what only one architecture needs.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx_lm.models

Config = dict[str, Any]

VOCAB_SIZE = 256
WINDOW = 8
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

MEANINGS: Config = {
    name: value
    for value, names in (
        (VOCAB_SIZE, "vocab_size embedding_size num_vocab vocab_size_per_layer_input"),
        (4096, "max_position_embeddings model_max_length"),
        (512, "n_ctx n_positions block_size"),
        # Widths: of the model, of an MLP, of an expert's MLP.
        (64, "hidden_size hidden_dim d_model model_dim n_embd block_dim mamba_d_ssm"),
        (48, "intermediate_size intermediate_size_mlp dense_intermediate_size ffn_hidden_size"),
        (48, "ff_intermediate_size n_inner"),
        (96, "mlp_hidden_size"),
        (16, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size"),
        (16, "moe_shared_expert_intermediate_size expert_ffn_hidden_size share_expert_dim"),
        (32, "moe_hidden_size routed_expert_hidden_size dim_model_base"),
        # Layers, and heads, which are grouped where they can be.
        (2, "num_hidden_layers num_layers n_layers n_layer num_transformer_layers loop_num"),
        (4, "num_attention_heads num_heads n_heads n_head"),
        (2, "num_key_value_heads num_kv_heads n_kv_heads num_attention_groups n_shared_head"),
        (16, "head_dim hidden_size_per_head kv_channels hidden_size_per_layer_input"),
        (4, "swa_num_attention_heads swa_num_key_value_heads"),
        (16, "swa_head_dim"),
        (1e-5, "rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps"),
        (1e-5, "norm_epsilon post_norm_eps"),
        (False, "tie_word_embeddings attention_bias mlp_bias use_bias conv_bias mamba_proj_bias"),
        (False, "post_norm"),
        (True, "use_qk_norm qk_norm qk_layernorm use_qkv_bias qkv_bias use_conv_bias"),
        (True, "use_expert_bias mamba_conv_bias"),
        # Positions.
        (1e4, "rope_theta rotary_emb_base rope_local_base_freq swa_rope_theta"),
        (0.5, "partial_rotary_factor rotary_pct"),
        (None, "rope_scaling"),
        (8, "rotary_dim"),
        # Windows: a layer with one is followed by one without.
        (WINDOW, "sliding_window sliding_window_size attention_window_size loop_window_size"),
        (WINDOW, "attention_chunk_size"),
        (2, "sliding_window_pattern no_rope_layer_interval"),
        # Experts: a dense layer first, then one with experts, where an architecture can mix them.
        (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
        (2, "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts"),
        (1, "n_shared_experts num_shared_experts num_shared_expert moe_num_shared_experts"),
        (1, "n_group topk_group decoder_sparse_step"),
        (1, "first_k_dense_replace num_dense_layers moe_layer_start_index"),
        ([0], "mlp_only_layers"),
        (True, "norm_topk_prob"),
        (1.5, "routed_scaling_factor"),
        ("sigmoid", "scoring_func"),
        ("noaux_tc", "topk_method"),
        # Latent attention (MLA), and an indexer that picks the tokens to attend to.
        (24, "q_lora_rank v_head_dim swa_v_head_dim"),
        (32, "kv_lora_rank"),
        (16, "qk_nope_head_dim index_head_dim o_lora_rank"),
        (8, "qk_rope_head_dim index_topk"),
        (2, "index_n_heads o_groups index_topk_blocks"),
        (4, "index_block_size"),
        # Recurrent and convolutional layers, of which every second one is none.
        (2, "linear_num_key_heads mamba_n_groups n_groups group_norm_size mamba_expand"),
        (4, "linear_num_value_heads mamba_n_heads mamba_num_heads linear_conv_kernel_dim"),
        (4, "conv_kernel mamba_d_conv conv1d_width"),
        (32, "linear_key_head_dim mamba_d_state state_size ssm_state_size"),
        (16, "linear_value_head_dim mamba_d_head mamba_head_dim mamba_chunk_size"),
        (8, "time_step_rank a_low_rank_dim v_low_rank_dim gate_low_rank_dim decay_low_rank_dim"),
        (3, "conv_L_cache"),
        (2, "conv_window full_attention_interval layer_group_size attn_layer_period"),
        (1, "attn_layer_offset"),
        # Factors that a model multiplies with.
        (2.0, "logits_scaling embedding_multiplier scale_emb"),
        (0.5, "residual_multiplier output_multiplier"),
        (0.25, "attention_multiplier"),
        (1.4, "scale_depth"),
        (16.0, "query_pre_attn_scalar"),
        (30.0, "final_logit_softcapping logits_soft_cap"),
    )
    for name in names.split()
}

# fmt: off
_ROPE_OF_KINDS = {
    SLIDING: dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=1.0),
    FULL: dict(rope_type="default", rope_theta=1e5, partial_rotary_factor=0.5),
}
_LLAMA_4_SCALING = dict(
    rope_theta=1e4, rope_type="default", llama_4_scaling_beta=0.1,
    original_max_position_embeddings=16,
)
_LONGCAT = dict(
    attention_method="MLA", mla_scale_q_lora=True, mla_scale_kv_lora=True, zero_expert_num=2,
    zero_expert_type="identity",
)
_LFM2 = dict(
    layer_types=["conv", FULL], block_multiple_of=16, block_ffn_dim_multiplier=1.0,
    block_auto_adjust_ff_dim=False,
)
_KIMI_LINEAR = dict(
    linear_attn_config=dict(kda_layers=[1], full_attn_layers=[2], num_heads=4, head_dim=16,
    short_conv_kernel_size=4),
)
# Of which the last two layers share the K/V of others.
_SIX_LAYERS = dict(num_hidden_layers=6, num_kv_shared_layers=2)
_GEMMA4 = _SIX_LAYERS | dict(global_head_dim=32)
_DENSE = dict(num_experts=0)

# Of a wrapper, ``text_config`` holds the exceptions of its text part.
EXCEPTIONS: dict[str, Config] = {
    # Fields whose values depend on one another, on the number of layers or on words.
    "dbrx": dict(
        ffn_config=dict(ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2),
        attn_config=dict(kv_n_heads=2, clip_qkv=8, rope_theta=1e4),
    ),
    "deepseek_v41": dict(
        num_hidden_layers=4, head_dim=32, index_topk=4, hc_mult=2, hc_sinkhorn_iters=4,
        compress_ratios=(0, 0, 4, 4), kv_source_layer_ids=(2,), index_source_layer_ids=(2,),
        scoring_func="sqrtsoftplus",
    ),
    "exaone4": dict(num_hidden_layers=4, sliding_window_pattern="LLLG"),
    "exaone_moe": dict(is_moe_layer=[False, True]),
    "laguna": dict(num_attention_heads_per_layer=[4, 8], rope_parameters=_ROPE_OF_KINDS),
    "llama4_text": dict(no_rope_layers=[1, 0]),
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": _LONGCAT | dict(
        ngram_vocab_size_ratio=3, emb_neighbor_num=3, emb_split_num=2,
    ),
    "mellum": dict(rope_parameters=_ROPE_OF_KINDS),
    "mimo_v2_flash": dict(
        hybrid_layer_pattern=[0, 1], moe_layer_freq=[0, 1], add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
    ),
    "minimax_m3_vl": dict(
        text_config=dict(layer_types=None, moe_layer_freq=[0, 1], sparse_attention_freq=[0, 1]),
    ),
    "ministral3": dict(rope_parameters=_LLAMA_4_SCALING),
    "mistral4": dict(rope_parameters=_LLAMA_4_SCALING),
    "muse_spark": dict(
        text_config=dict(
            rope_parameters=dict(rope_theta=1e4),
            layer_rope_theta=[1e4, 0],
            qk_scale_factor=1.5,
            num_shared_experts=0,  # it refuses any
            routed_scaling_factor=1.0,
            final_logit_softcapping=20.0,
        )
    ),
    "nemotron": dict(hidden_act="relu2"),
    "nemotron-nas": dict(num_hidden_layers=3, block_configs=[
        dict(attention=dict(n_heads_in_group=2), ffn=dict(ffn_mult=1.0)),
        dict(attention=dict(no_op=True), ffn=dict(replace_with_linear=True)),
        dict(attention=dict(n_heads_in_group=4), ffn=dict(no_op=True)),
    ]),
    "openelm": dict(
        ffn_dim_divisor=16, num_query_heads=[4, 8], num_kv_heads=[2, 4], ffn_multipliers=[0.5, 1.0],
    ),
    "phi3small": dict(
        vocab_size=100_352,  # it masks special tokens by their ids in its own vocabulary
        dense_attention_every_n_layers=2,
        gegelu_limit=20.0,
        mup_attn_multiplier=4.0,
        blocksparse_block_size=32,
        blocksparse_num_local_blocks=1,
        blocksparse_vert_stride=2,
    ),
    "spark2_5": dict(rope_parameters=_ROPE_OF_KINDS),
    "step3p5": dict(
        num_hidden_layers=3, attention_other_setting=dict(num_attention_heads=8,
        num_attention_groups=4), moe_layers_enum="1,2",
    ),
    # Scaling of RoPE, of each kind once.
    "deepseek_v2": dict(
        topk_method="greedy", rope_scaling=dict(type="yarn", factor=4.0,
        original_max_position_embeddings=1024, mscale=1.0, mscale_all_dim=1.0, beta_fast=32,
        beta_slow=1),
    ),
    "glm_moe_dsa": dict(moe_layer_freq=1, rope_parameters=dict(rope_theta=1e4)),
    "minicpm3": dict(
        rope_scaling=dict(type="longrope", long_factor=[1.0] * 4, short_factor=[1.0] * 4,
        original_max_position_embeddings=1024),
    ),
    "phimoe": dict(
        rope_scaling=dict(type="longrope", long_factor=[1.0] * 8, short_factor=[1.0] * 8,
        long_mscale=1.2, short_mscale=1.2),
    ),
    # Switches that turn on what the architecture is known for.
    "gemma2": dict(attn_logit_softcapping=4.0),  # a cap that bends its scores, which are a few
    "glm4": dict(attention_bias=True),
    "hunyuan": dict(
        num_hidden_layers=4,
        use_mixed_mlp_moe=True,
        use_cla=True,  # every second layer uses the keys and values of the one before
        cla_share_factor=2,
        rope_scaling=dict(alpha=10.0, factor=1.0, type="dynamic"),
    ),
    "seed_oss": dict(attention_bias=True),
    "afm7": dict(num_layers=3, num_kv_reuse_layers=1),
    "gemma3n": dict(
        text_config=_SIX_LAYERS | dict(activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
        altup_num_inputs=2, altup_coef_clip=120.0, altup_correct_scale=True, altup_active_idx=0,
        laurel_rank=8),
    ),
    "gemma4_text": _GEMMA4,
    "gemma4": dict(text_config=_GEMMA4 | dict(enable_moe_block=True)),
    "llama4": dict(
        text_config=dict(num_hidden_layers=4, interleave_moe_layer_step=2, num_experts_per_tok=1),
    ),
    "mistral3": dict(text_config=dict(model_type="ministral3", rope_parameters=_LLAMA_4_SCALING)),
    # Recurrent layers: which ones they are, and what has to fit their heads.
    "baichuan_m1": dict(sliding_window_layers=[0]),
    "bailing_hybrid": dict(num_hidden_layers=4),
    "bailing_moe_linear": dict(num_hidden_layers=4, num_key_value_heads=4),
    "bailing_moe_v3": dict(
        model_type="bailing_hybrid", architectures=["BailingMoeV3ForCausalLM"], num_hidden_layers=4,
    ),
    "gear": dict(num_hidden_layers=3, layer_types=["conv_mixer", SLIDING, FULL]),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"]),
    "jamba": dict(expert_layer_offset=1, expert_layer_period=2),
    "kimi_k3": dict(
        text_config=_KIMI_LINEAR | dict(activation_situ_beta=1.0, activation_situ_linear_beta=1.0,
        attn_res_block_size=2),
    ),
    "kimi_linear": _KIMI_LINEAR,
    "lfm2": _LFM2,
    "lfm2-vl": dict(text_config=_LFM2),
    "lfm2_moe": dict(layer_types=["conv", FULL]),
    "mamba2": dict(intermediate_size=64, time_step_limit=[0.0, 100.0]),
    "nemotron_h": dict(layers_block_type=["mamba", "attention", "mlp", "moe"], layer_types=None),
    "olmo_hybrid": dict(linear_allow_neg_eigval=True, layer_types=[LINEAR, FULL]),
    "pixtral": dict(text_config=dict(layer_types=None)),  # as a mistral, without windows
    "plamo2": dict(num_hidden_layers=4, attention_window_size=4096),
    "prism_hadamard_qwen35": dict(
        text_config=_DENSE | dict(hidden_size=128, intermediate_size=128), schema_version=1,
        tensor_namespace="mlx-lm-text", quantization=dict(bits=2, group_size=128, mode="affine"),
        modules=[dict(path="model.layers.0.mlp.down_proj", embedding=False, dtype="float16",
        block=0)],
    ),
    "qwen3_5": dict(text_config=_DENSE),
    "qwen3_next": dict(mlp_only_layers=[]),
    "recurrent_gemma": dict(num_key_value_heads=1, block_types=["recurrent", "attention"]),
}
# fmt: on


def _find_architectures() -> list[str]:
    has_model = re.compile(r"^class Model\(|import Model\b", re.MULTILINE)
    folder = Path(mlx_lm.models.__path__[0])
    names = [path.stem for path in folder.glob("*.py") if has_model.search(path.read_text())]
    return sorted(names, key=str.lower)


ARCHITECTURES = _find_architectures()


def config_of(architecture: str) -> Config:
    """What its ``config.json`` would say."""
    module = _module(architecture)
    own = EXCEPTIONS.get(architecture, {})
    config = {"model_type": architecture} | _derived(module.ModelArgs, own)
    if "text_config" in config:
        text = own.get("text_config", {})
        model_type, args_class = _text_class(architecture, text.get("model_type"))
        named = {"model_type": model_type} if model_type else {}
        config["text_config"] = _derived(args_class, named | text)
    return copy.deepcopy(config)


def _module(architecture: str) -> ModuleType:
    # mlx-lm's olmo only asks whether this package is there, and ends the program if it is not.
    sys.modules.setdefault("hf_olmo", ModuleType("hf_olmo"))
    return importlib.import_module(f"mlx_lm.models.{architecture}")


def _derived(args_class: type, own: Config) -> Config:
    """A value for each field that has a meaning, or none and no default, and the exceptions."""
    fields = {field.name: field for field in dataclasses.fields(args_class)}
    config = {name: MEANINGS[name] for name in fields if name in MEANINGS}
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        config["num_key_value_heads"] = config["num_attention_heads"]  # latents have no groups
    if "layer_types" in fields:
        num_layers = own.get("num_hidden_layers", MEANINGS["num_hidden_layers"])
        config["layer_types"] = ([SLIDING, FULL] * num_layers)[:num_layers]
    config |= own
    for name in fields.keys() - config.keys() - {"model_type"}:
        if fields[name].default is fields[name].default_factory is dataclasses.MISSING:
            config[name] = _empty(fields[name])
    return config


def _empty(field: dataclasses.Field[Any]) -> Any:
    """Of a field of which nothing is known: false, none, or the configuration of a text part."""
    if field.name == "text_config":
        return {}
    if field.type in (bool, "bool"):
        return False
    assert "Optional" in str(field.type) or "None" in str(field.type), (
        f"say in MEANINGS what a small model has as its {field.name} ({field.type})"
    )
    return None


def _text_class(architecture: str, model_type: str | None) -> tuple[str | None, type]:
    """The type and the class of a wrapper's text part: its own class, or another architecture's."""
    for module in _modules_around(model_type or architecture):
        classes = (each for name, each in vars(module).items() if name.startswith("Text"))
        for args_class in filter(dataclasses.is_dataclass, classes):
            field = {each.name: each for each in dataclasses.fields(args_class)}.get("model_type")
            has_name = field is None or (isinstance(field.default, str) and field.default)
            return None if has_name else f"{architecture}_text", args_class
        if module.__name__ != _module(architecture).__name__:
            return module.__name__.rpartition(".")[2], module.ModelArgs
    raise AssertionError(f"{architecture} has no text part")


def _modules_around(architecture: str) -> Iterator[ModuleType]:
    """An architecture's own, those that it imports, and those of the classes that it extends."""
    module = _module(architecture)
    yield module
    for each in vars(module).values():
        if inspect.ismodule(each) and hasattr(each, "ModelArgs"):
            yield each
    yield from (sys.modules[base.__module__] for base in module.Model.__mro__)
