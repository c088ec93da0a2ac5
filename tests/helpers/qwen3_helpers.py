"""What the model tests share: models and folders, feeding a model with all logits wanted, and how
near is equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from mlx_lm.utils import load_model as load_model_as_mlx_lm

from mlx_paged.cache import KVCache, Sequences
from mlx_paged.loading.configuration import model_classes
from mlx_paged.models.kv_cache import make_kv_cache

CACHES = ("basic", "paged")


def load_model(folder: Path):
    """Our model from a folder that has no tokenizer: the part of ``mlx_paged.load`` that reads
    weights.
    """
    return load_model_as_mlx_lm(folder, get_model_classes=model_classes)[0]


def make_cache(model, kind: str, block_size: int = 16) -> KVCache:
    return make_kv_cache(model, kind, block_size=block_size, kv_cache_bytes="16M")


def all_logits(
    model, seqs: Sequences, steps: Iterable[Mapping[str, Sequence[int]]]
) -> dict[str, np.ndarray]:
    """The logits ``[num_tokens, vocab_size]`` of every token fed, per sequence."""
    logits: dict[str, list[np.ndarray]] = {}
    for batch in steps:
        tokens = mx.array([token for new_tokens in batch.values() for token in new_tokens])
        with seqs.step({seq: len(new_tokens) for seq, new_tokens in batch.items()}):
            rows = model(tokens, seqs.cache.layers)
            mx.eval(rows, seqs.cache.arrays)
        rows = np.array(rows.astype(mx.float32))
        start = 0
        for seq, new_tokens in batch.items():
            logits.setdefault(seq, []).append(rows[start : start + len(new_tokens)])
            start += len(new_tokens)
    return {seq: np.concatenate(parts) for seq, parts in logits.items()}


def chunks(tokens: Sequence[int], *sizes: int) -> list[Sequence[int]]:
    """``tokens`` cut into pieces of these sizes; the last piece is the rest."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(tokens[start : start + size])
        start += size
    return [piece for piece in [*pieces, tokens[start:]] if len(piece)]


def float32_tolerance(args, num_tokens: int, logits: np.ndarray) -> float:
    """How far two correct float32 forward passes may lie apart.

    A sum of n terms is off by at most n units of rounding of its size, in either pass. Along the
    way to a logit lie the sums below, an angle of up to ``num_tokens`` radians, and norms that keep
    sizes near 1; so the bound is the length of all sums, times two passes, times the unit, times
    the size of the logits. Real errors add up like a random walk and lie far below it (1e-5 where
    this says 4e-4), wrong positions or a missing norm far above.
    """
    attention = (
        args.hidden_size + args.head_dim + num_tokens + args.num_attention_heads * args.head_dim
    )
    mlp = args.hidden_size + args.intermediate_size
    longest = args.num_hidden_layers * (attention + mlp) + num_tokens + args.hidden_size
    return 2 * longest * 2.0**-24 * float(np.abs(logits).max())


def max_error(actual: np.ndarray, expected: np.ndarray) -> float:
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    return float(np.abs(actual - expected).max())


CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


# Each kind of scaling of RoPE, for heads of 16.
SCALINGS = {
    "none": dict(rope_type="default"),
    "linear": dict(rope_type="linear", factor=3.0),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=4),
    "yarn with its own scale": dict(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=512,
        mscale=1.5,
        mscale_all_dim=0.5,
    ),
    "llama3": dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    "longrope": dict(
        rope_type="longrope",
        original_max_position_embeddings=256,
        short_factor=[1.0] * 8,
        long_factor=[1.0, 1.1, 1.3, 1.7, 2.0, 3.0, 5.0, 9.0],
    ),
}


def random_mlx_lm_model(config: dict, seed: int = 0, dtype: mx.Dtype = mx.float32):
    """mlx-lm's own Qwen3 with weights at which every part shows; the same on every machine."""
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    rng = np.random.default_rng(seed)
    weights = []
    for name, weight in tree_flatten(model.parameters()):
        if name.endswith("norm.weight"):
            values = rng.uniform(0.5, 2.0, weight.shape)
        else:
            values = rng.normal(
                0, 0.3 if "embed_tokens" in name else weight.shape[1] ** -0.5, weight.shape
            )
        weights.append((name, mx.array(values, dtype=mx.float32).astype(dtype)))
    model.load_weights(weights)
    return model


def save_folder(
    folder: Path, model, config: dict, num_shards: int = 1, extra_weights: Mapping | None = None
) -> Path:
    """A model folder without a tokenizer; several shards come with their index, as on the hub."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {**dict(tree_flatten(model.parameters())), **(extra_weights or {})}
    names = sorted(weights)
    weight_map = {}
    for shard in range(num_shards):
        file = (
            f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
            if num_shards > 1
            else "model.safetensors"
        )
        part = {name: weights[name] for name in names[shard::num_shards]}
        mx.save_safetensors(str(folder / file), part, metadata={"format": "mlx"})
        weight_map.update(dict.fromkeys(part, file))
    if num_shards > 1:
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
    return folder
