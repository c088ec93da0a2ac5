"""A tiny random Qwen3 whose next token depends on the whole context."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3 as mlx_lm_qwen3

from mlx_paged.models import qwen3

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 61,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2**20,
    "rope_theta": 1e4,
}


def livelier_model(config: dict[str, Any], seed: int = 5) -> qwen3.Model:
    """A random Qwen3 whose answers have many different tokens."""
    mx.random.seed(seed)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    # Than at its initialisation.
    livelier = [
        (name, weight * 2)
        for name, weight in tree_flatten(model.parameters())
        if "norm" not in name
    ]
    model.load_weights(livelier, strict=False)
    mx.eval(model.parameters())
    return model


def tiny_models() -> tuple[qwen3.Model, mlx_lm_qwen3.Model]:
    """The same random weights in our Qwen3 and in mlx-lm's."""
    mx.random.seed(3)
    theirs = mlx_lm_qwen3.Model(mlx_lm_qwen3.ModelArgs.from_dict(CONFIG))
    ours = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG))
    ours.load_weights(tree_flatten(theirs.parameters()))
    mx.eval(ours.parameters(), theirs.parameters())
    return ours, theirs
