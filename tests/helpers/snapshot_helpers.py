"""Caches of many kinds with random content, and what is stored in them, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged.cache import KVCacheConfig, KVFormat, LayerSpec, Sequences, group_layers
from mlx_paged.options.config import KVBits

# Layers that are alike, whose heads and widths differ, and that see different tokens.
LAYERS = {
    "alike": [LayerSpec(2, 64, 64)] * 3,
    "different": [LayerSpec(2, 64, 32), LayerSpec(1, 128, 64), LayerSpec(3, 32, 64)],
    "windows": [LayerSpec(2, 64, 64), LayerSpec(2, 64, 64, window=40)] * 2,
}
BITS = {"8 bits": KVBits(8, 8), "4 bits": KVBits(4, 4), "K8V4": KVBits(8, 4)}


def config_of(
    layers: str, dtype: str, form: str, block_size: int, num_blocks: int = 64
) -> KVCacheConfig:
    """Of layers of this kind, in the dtype alone or in these bits."""
    specs = [_stored(spec, dtype, form) for spec in LAYERS[layers]]
    groups = group_layers(specs, block_size)
    return KVCacheConfig(tuple(specs), block_size, num_blocks, groups)


def _stored(spec: LayerSpec, dtype: str, form: str) -> LayerSpec:
    if form == "dense":
        return replace(spec, format=KVFormat.dense(dtype))
    made = KVFormat.quantised(BITS[form], spec.key_dim, spec.value_dim, dtype)
    return replace(spec, format=made)


def fill(seqs: Sequences, seq: Any, num_tokens: int, seed: int = 0) -> None:
    """Let a sequence hold random rows."""
    rng = np.random.default_rng(seed)

    def rows(heads: int, width: int) -> mx.array:
        return mx.array(rng.standard_normal((num_tokens, heads, width), dtype=np.float32))

    specs = [layer.spec for layer in seqs.cache.layers]
    k = [rows(spec.num_kv_heads, spec.key_dim) for spec in specs]
    v = [rows(spec.num_kv_heads, spec.value_dim) for spec in specs]
    seqs.append(seq, k, v)


def assert_same_bits(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)
