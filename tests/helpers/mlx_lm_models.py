"""Tiny random models of mlx-lm, and what mlx-lm itself answers with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.base import Module
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.utils import _get_classes

from helpers.model_zoo.configs import FULL, SLIDING, Config, config_of

_SIZES: Config = dict(
    hidden_size=64,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=256,
    rms_norm_eps=1e-5,
)
LLAMA: Config = _SIZES | dict(model_type="llama", num_hidden_layers=2)
GEMMA3: Config = _SIZES | dict(
    model_type="gemma3_text", num_hidden_layers=6, sliding_window=8, sliding_window_pattern=3
)
GPT_OSS: Config = _SIZES | dict(  # sinks, windows and experts
    model_type="gpt_oss",
    num_hidden_layers=4,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=8,
    rope_theta=10000,
    rope_scaling=None,
    layer_types=[SLIDING, FULL] * 2,
)
# Latents, experts, and layers that share K/V, with what else they need from the zoo.
DEEPSEEK_V3: Config = config_of("deepseek_v3") | dict(
    _SIZES,
    num_hidden_layers=3,
    num_key_value_heads=4,
    moe_intermediate_size=32,
    kv_lora_rank=32,
    q_lora_rank=32,
    qk_rope_head_dim=32,
    v_head_dim=16,
    max_position_embeddings=2048,
    routed_scaling_factor=1.0,
)
QWEN3_MOE: Config = config_of("qwen3_moe") | dict(
    _SIZES, num_hidden_layers=4, num_experts=8, mlp_only_layers=[], moe_intermediate_size=64
)
GEMMA3N: Config = config_of("gemma3n")
GEMMA3N["text_config"] |= dict(
    _SIZES,
    num_hidden_layers=5,
    intermediate_size=[64] * 5,
    hidden_size_per_layer_input=8,
    rope_theta=1e6,
    layer_types=[SLIDING, FULL, SLIDING, FULL, SLIDING],
    activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0, 0.0],
)


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


def save_adapters(
    folder: Path,
    weights: dict[str, mx.array],
    parameters: dict[str, Any],
    num_layers: int = 1,
    fine_tune_type: str = "lora",
) -> Path:
    """A folder of adapters as mlx-lm's trainer writes it."""
    folder.mkdir()
    settings = {
        "fine_tune_type": fine_tune_type,
        "num_layers": num_layers,
        "lora_parameters": parameters,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    return folder
