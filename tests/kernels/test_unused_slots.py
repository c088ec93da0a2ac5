"""NaN in the slots that no token fills: a cache on kernels zeroes nothing, and nothing of it is
seen.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from helpers.cache_helpers import swap_in, swapped_out
from helpers.fast_lane import mostly_slow

from mlx_paged.cache import KVCacheConfig, PagedKVCache, Sequences
from mlx_paged.ops.metal import MetalBackend

CONFIG = KVCacheConfig.uniform(
    num_layers=2, num_kv_heads=2, head_dim=32, dtype="float32", block_size=8, num_blocks=80
)
STEPS = (
    {"a": 3, "b": 300},  # prompts
    {"a": 1, "b": 1},  # a decode alone and a merged one
    {"a": 20, "b": 5},  # a chunk of a prompt with history, a run
    {"c": 13, "a": 1},
)


def fill_with_nan(seqs: Sequences) -> None:
    for layer in seqs.cache.layers:
        layer.kv.k, layer.kv.v = (
            (mx.full(slab.shape, mx.nan, slab.dtype),) for slab in layer.kv.slabs
        )
        mx.eval(layer.kv.arrays)


def run_step(seqs: Sequences, counts: dict[str, int], seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    results = []
    with seqs.step(counts) as step:
        for layer in seqs.cache.layers:
            q, k, v = (
                mx.array(rng.standard_normal((step.num_tokens, heads, 32), dtype=np.float32))
                for heads in (4, 2, 2)
            )
            results.append(layer.update_and_attend(q, k, v, scale=32**-0.5))
        mx.eval(results, seqs.cache.arrays)
    return [np.array(result) for result in results]


def use(seqs: Sequences) -> list[np.ndarray]:
    """Every way in which a block comes to be filled in part."""
    results = []
    for number, counts in enumerate(STEPS):
        results += run_step(seqs, counts, number)
    seqs.fork("a", "d")
    results += run_step(seqs, {"a": 1, "d": 2}, 10)  # the shared tail is copied first
    seqs.trim("b", 259)
    results += run_step(seqs, {"b": 1}, 11)
    num_tokens = seqs.seq_len("b")
    swapped = swapped_out(seqs, "b")
    seqs.free("b")
    seqs.cache.make_room(40)
    swap_in(seqs, "b", swapped)
    seqs.trim("b", num_tokens)
    results += run_step(seqs, {"b": 1, "c": 9}, 12)
    results += [np.array(rows) for seq in list(seqs) for rows in seqs.materialize(seq, 1)]
    return results


@mostly_slow("in_place", [True, False], ids=["in_place", "scatter"])
def test_a_cache_on_kernels_zeroes_no_block_and_sees_no_nan(in_place, metal, monkeypatch):
    expected = use(Sequences(PagedKVCache(CONFIG, backend="reference", initial_blocks=80)))
    seqs = Sequences(PagedKVCache(CONFIG, backend="metal", initial_blocks=80))
    seqs.cache._backend = MetalBackend(writes_in_place=in_place)
    seqs.reset()
    fill_with_nan(seqs)
    monkeypatch.setattr(MetalBackend, "zero_blocks", None)
    for ours, theirs in zip(use(seqs), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)
    assert any(mx.isnan(layer.kv.k[0]).any().item() for layer in seqs.cache.layers)


def test_plain_mlx_reads_unused_slots_and_needs_them_finite():
    seqs = Sequences(PagedKVCache(CONFIG, backend="reference", initial_blocks=80))
    fill_with_nan(seqs)
    seqs.cache._backend.reads_unused_slots = False  # of this instance
    assert any(np.isnan(result).any() for result in use(seqs))
