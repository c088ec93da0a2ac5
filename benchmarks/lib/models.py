"""Models on which benchmarks run: one folder or repository, here and in mlx-lm, and layers of real
models' shapes with random weights. A ratio of times is one of layers, so a few of them do, which
fit a CPU.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3 as mlx_lm_qwen3
from mlx_lm.utils import _get_classes, load_model

from mlx_paged import demo_model_path, load
from mlx_paged.models import qwen3
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm import adapt

QWEN3_0_6B_LAYERS = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 4,  # of 28: the ratio is one of layers, and this fits a CPU
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}

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


def load_both(name: str) -> tuple[nn.Module, nn.Module]:
    """The same weights here and in mlx-lm; ours is the native Qwen3, or a model of mlx-lm's."""
    if name == "qwen3-0.6b-layers":
        return random_weights(QWEN3_0_6B_LAYERS)
    if name in SHAPES:
        return random_model(SHAPES[name])
    path = demo_model_path() if name == "demo" else name
    return load(path)[0], load_theirs(path)


def load_theirs(path: str | Path) -> nn.Module:
    """A folder's or a repository's model as mlx-lm loads it."""
    model: nn.Module
    if Path(path).is_dir():
        model, _ = load_model(Path(path))
    else:
        from mlx_lm import load as mlx_lm_load

        model = mlx_lm_load(str(path))[0]
    return model


def random_weights(
    shape: dict[str, Any], dtype: mx.Dtype = mx.float32
) -> tuple[nn.Module, nn.Module]:
    """A Qwen3 of this shape, ours and mlx-lm's, which share their arrays."""
    mx.random.seed(0)
    theirs = mlx_lm_qwen3.Model(mlx_lm_qwen3.ModelArgs.from_dict(shape))
    theirs.set_dtype(dtype)
    ours = qwen3.Model(qwen3.ModelArgs.from_dict(shape))
    weights: list[tuple[str, Any]] = list(dict(tree_flatten(theirs.parameters())).items())
    ours.load_weights(weights)
    mx.eval(ours.parameters(), theirs.parameters())
    return ours, theirs


def shape_of(model: nn.Module) -> str:
    """The layers of a model, those alike together."""
    specs = model.layer_specs
    counts = Counter((s.num_heads, s.num_kv_heads, s.key_dim, s.value_dim, s.window) for s in specs)
    kinds = [
        f"{count} layers of {heads} query / {kv_heads} KV heads, widths {key_dim} and {value_dim}"
        + (f", window {window}" if window else "")
        for (heads, kv_heads, key_dim, value_dim, window), count in counts.items()
    ]
    return f"{'; '.join(kinds)}; {model.dtype}"
