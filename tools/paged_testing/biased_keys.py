"""A random llama whose keys have a bias, as those of Qwen2 have: channels that are far from zero
and the same in all tokens.
"""

from __future__ import annotations

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.llama import Model, ModelArgs

from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm import adapt

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
# Matrices, over the square root of their fan-in, so that the last token feels those before it.
GAIN = 1.25
# One of this many channels of K has a bias.
APART = 32


def llama_with_biased_keys(times: float) -> LanguageModel:
    """In float32; the same weights for each bias.

    Args:
        times: the spread of the bias of K over that of the rest of K.
    """
    model = Model(ModelArgs.from_dict(CONFIG))
    weights = dict(tree_flatten(model.parameters()))
    keys = mx.random.split(mx.random.key(0), len(weights))
    made: list[tuple[str, mx.array]] = []
    for (name, old), key in zip(weights.items(), keys, strict=True):
        noise = mx.random.normal(old.shape, key=key)
        if old.ndim > 1:
            made.append((name, noise * (GAIN * old.shape[-1] ** -0.5)))
        elif name.endswith("k_proj.bias"):
            is_far = mx.arange(old.size) % APART == 0
            made.append((name, mx.where(is_far, GAIN * times * noise, 0)))
        else:
            made.append((name, mx.full(old.shape, 0.0 if name.endswith("bias") else 1.0)))
    model.update(tree_unflatten(made))
    mx.eval(model.parameters())
    return adapt(model, CONFIG)
