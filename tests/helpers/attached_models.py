"""What the tests of attached models share: the models, each made once, and what they compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import mlx.core as mx
from mlx_lm.generate import generate_step
from paged_testing.integrity import check_manager

from helpers.mlx_lm_models import DEEPSEEK_V3, GEMMA3, GPT_OSS, LLAMA, random_model
from mlx_paged import attach

BLOCK_SIZE = 8
QWEN3 = {**LLAMA, "model_type": "qwen3", "max_position_embeddings": 512, "rope_theta": 10000.0}
CONFIGS = {
    "llama": LLAMA,
    "qwen3": {**QWEN3, "tie_word_embeddings": False},
    "gemma3": {**GEMMA3, "num_hidden_layers": 3},
    "gpt_oss": {**GPT_OSS, "num_hidden_layers": 2, "layer_types": GPT_OSS["layer_types"][:2]},
    "qwen3_moe": {
        **QWEN3,
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "deepseek_v3": {**DEEPSEEK_V3, "num_hidden_layers": 2},
}


@cache
def cached_model(name: str):
    # Another one of these than the first has varied tokens.
    return random_model(CONFIGS[name], seed=1 if name == "gpt_oss" else 0)


@contextmanager
def attached(model, blocks: int = 200, **options) -> Iterator:
    """A model that is attached; nothing may be left of its sequences unless they are held."""
    options = {"kv_cache_bytes": f"{blocks}blocks", "block_size": BLOCK_SIZE, **options}
    with attach(model, **options) as paged:
        yield paged
        check_manager(paged._sequences.held.manager)


def tokens(count: int, seed: int = 0) -> list[int]:
    """Token ids without repetition: those of two seeds differ from the first on."""
    return [(i * i * 7 + i + seed * 13 + 1) % 256 for i in range(count)]


def generated(model, prompt: list[int], num_tokens: int = 12, **options) -> list[int]:
    """mlx-lm's own greedy tokens."""
    steps = generate_step(mx.array(prompt), model, max_tokens=num_tokens, **options)
    return [token for token, _ in steps]
