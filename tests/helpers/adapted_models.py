"""Tiny random models of mlx-lm: some that run one sequence at a time, and some with recurrent
layers, which run packed. And what mlx-lm itself says of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step

from helpers.engine_runs import NEAR_TIE, VOCAB_SIZE
from helpers.model_zoo.configs import Config
from helpers.model_zoo.configs import config_of as small_config_of
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm.packed import PackedModel
from mlx_paged.models.mlx_lm.per_sequence import PerSequenceModel

COMMON = {"hidden_size": 32, "head_dim": 32, "vocab_size": VOCAB_SIZE}
# What differs from the model of that name in the zoo, which is smaller still.
# With a vector for each position, and with attention in chunks.
ATTENTION: dict[str, Config] = {
    "gpt_bigcode": {
        "n_embd": 128,
        "n_inner": 96,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama4": {"attention_chunk_size": 24},
}
# With recurrent layers: beside full attention, alone, in each layer, and beside a window.
RECURRENT: dict[str, Config] = {
    "qwen3_next": {},
    "mamba2": {"head_dim": 16},
    "falcon_h1": {"embedding_multiplier": 32**0.5, "tie_word_embeddings": True},
    "lfm2": {"block_dim": 32},
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "attention_window_size": 20,
        "block_types": ["recurrent", "attention", "recurrent"],
    },
}
CONFIGS = {**ATTENTION, **RECURRENT}
# A model whose states are much of the memory that it works in.
WIDE: Config = small_config_of("mamba2") | {
    "num_hidden_layers": 16,
    "num_heads": 16,
    "head_dim": 64,
    "intermediate_size": 1024,
    "state_size": 64,
    "ssm_state_size": 64,
    "n_groups": 1,
}
# Where a state decays: so slowly that a token is felt after dozens of others.
DECAYS = {"dt_bias": -3.0, "recurrent_param": -4.0}


def config_of(name: str) -> Config:
    config = small_config_of(name)
    sizes = config.get("text_config", config)
    sizes |= {field: size for field, size in COMMON.items() if field in sizes} | CONFIGS[name]
    return config


@cache
def mlx_lm_model(name: str) -> Module:
    """One with weights at which every part shows."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict(config_of(name)))
    rng = np.random.default_rng(7)
    weights = []
    for path, weight in tree_flatten(model.parameters()):
        values = rng.normal(size=weight.shape)
        decay = next((v for end, v in DECAYS.items() if path.endswith(end)), None)
        if decay is not None:
            values = decay + 0.1 * values
        elif weight.ndim > 1:
            values *= 1.3 * weight.shape[-1] ** -0.5
        else:
            values = 1 + 0.3 * values
        weights.append((path, mx.array(values, dtype=mx.float32)))
    model.load_weights(weights)
    model.eval()
    mx.eval(model.parameters())
    return model


def adapted_model(name: str) -> LanguageModel:
    kind = PackedModel if name in RECURRENT else PerSequenceModel
    return kind(mlx_lm_model(name), config_of(name))


@cache
def _answer(name: str, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    token_ids = []
    steps = generate_step(mx.array(prompt), mlx_lm_model(name), max_tokens=max_tokens)
    for token_id, logprobs in steps:
        best, second = mx.sort(logprobs)[::-1][:2].tolist()
        assert best - second > NEAR_TIE, f"a near tie at token {len(token_ids)}: another prompt"
        token_ids.append(int(token_id))
    return tuple(token_ids)


def greedy_answer(name: str, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The tokens of mlx-lm's own ``generate_step``, in which none are all but tied."""
    return list(_answer(name, tuple(prompt), max_tokens))
