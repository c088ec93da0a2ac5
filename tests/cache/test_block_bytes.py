"""Blocks of a paged cache as bytes, and back into other blocks, of this cache or another."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from helpers.cache_helpers import CONFIG, rows, stored_parts, uniform
from helpers.quantised_problems import BITS_OF_K_AND_V

from mlx_paged.cache import KVCacheConfig, KVFormat, LayerGroup, LayerSpec, PagedKVCache, Sequences
from mlx_paged.core import KEEP_ALL, Retention
from mlx_paged.ops.formats import DENSE_DTYPES
from mlx_paged.options.config import KVBits

BLOCK_SIZE = CONFIG.block_size


def quantised(bits: tuple[int, int], dtype: str = "bfloat16") -> KVCacheConfig:
    form = KVFormat.quantised(KVBits(*bits), 64, 96, dtype)
    return KVCacheConfig((LayerSpec(2, 64, 96, format=form),) * 2, BLOCK_SIZE, 40)


def layers_that_differ() -> KVCacheConfig:
    specs = LayerSpec(2, 32, 16), LayerSpec(1, 8, 8, format=KVFormat.dense("float16"))
    return KVCacheConfig(specs, BLOCK_SIZE, 40)


CONFIGS = {
    **{dtype: uniform(dtype=dtype) for dtype in DENSE_DTYPES},
    **{f"K{bits[0]}V{bits[1]}": quantised(bits) for bits in BITS_OF_K_AND_V},
    "layers_that_differ": layers_that_differ(),
    **{f"blocks_of_{size}": uniform(block_size=size) for size in (16, 32, 64)},
}


def filled(config: KVCacheConfig, num_blocks: int, seed: int) -> Sequences:
    seqs = Sequences(PagedKVCache(config))
    rng = np.random.default_rng(seed)
    num_tokens = num_blocks * config.block_size
    shapes = [(num_tokens, spec.num_kv_heads, n) for spec in config.layers for n in (spec.key_dim,)]
    values = [
        (*shape[:2], spec.value_dim) for shape, spec in zip(shapes, config.layers, strict=True)
    ]
    k, v = (
        [mx.array(rng.standard_normal(shape, dtype=np.float32)) for shape in each]
        for each in (shapes, values)
    )
    seqs.append("a", k, v)
    return seqs


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_bit_comes_back_in_another_cache_and_in_other_blocks(config: KVCacheConfig) -> None:
    seqs, other = filled(config, 5, seed=1), filled(config, 3, seed=2)
    contents = seqs.cache.read_blocks(0, seqs.block_ids("a"))
    assert {len(content) for content in contents} == {seqs.cache.config.block_nbytes(0)}
    assert seqs.cache.config.block_nbytes(0) == config.nbytes_per_block
    before = stored_parts(other, "a")
    assert other.manager.allocate_slots("b", 5 * config.block_size) == []
    assert list(other.block_ids("b")) != list(seqs.block_ids("a"))
    other.cache.write_blocks(0, other.block_ids("b"), contents)
    for ours, theirs in zip(stored_parts(other, "b"), stored_parts(seqs, "a"), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(stored_parts(other, "a"), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_block_has_the_bytes_of_its_own_group_alone() -> None:
    spec = LayerSpec(2, 32, 32)
    groups = LayerGroup(KEEP_ALL, (2, 3, 4, 5)), LayerGroup(Retention.sliding_window(8, 8), (0, 1))
    config = KVCacheConfig((spec,) * 6, BLOCK_SIZE, 40, groups)
    seqs = Sequences(PagedKVCache(config))
    assert seqs.cache.config.block_nbytes(0) == 4 * spec.nbytes_per_token * BLOCK_SIZE
    assert seqs.cache.config.block_nbytes(1) == 2 * spec.nbytes_per_token * BLOCK_SIZE
    content = bytes(range(256)) * (seqs.cache.config.block_nbytes(1) // 256)
    seqs.cache.write_blocks(1, [7], [content])
    assert seqs.cache.read_blocks(1, [7]) == [content]
    assert seqs.cache.read_blocks(0, [7])[0][: len(content)] == content


def test_a_slab_is_not_copied_by_the_write_after_a_read() -> None:
    seqs = filled(CONFIG, 2, seed=0)
    contents = seqs.cache.read_blocks(0, seqs.block_ids("a"))
    where = [np.frombuffer(memoryview(kv.k[0])).ctypes.data for kv in seqs.cache._slabs]
    seqs.append("a", *rows(1))
    assert [np.frombuffer(memoryview(kv.k[0])).ctypes.data for kv in seqs.cache._slabs] == where
    assert seqs.cache.read_blocks(0, seqs.block_ids("a")[:2]) == contents


@pytest.mark.parametrize(
    "block_ids", [[3], [4, 5, 6], [9, 2, 3, 12, 11], [7, 8, 20, 21, 5]], ids=str
)
def test_blocks_are_written_where_they_belong_and_the_slabs_stay(block_ids: list[int]) -> None:
    seqs = filled(uniform(), 30, seed=0)
    where = [np.frombuffer(memoryview(kv.k[0])).ctypes.data for kv in seqs.cache._slabs]
    everything = seqs.cache.read_blocks(0, range(seqs.cache.pool.num_blocks))
    contents = filled(uniform(), len(block_ids), seed=1).cache.read_blocks(
        0, range(1, 1 + len(block_ids))
    )
    seqs.cache.write_blocks(0, block_ids, contents)
    for block_id, content in zip(block_ids, contents, strict=True):
        everything[block_id] = content
    assert seqs.cache.read_blocks(0, range(seqs.cache.pool.num_blocks)) == everything
    assert [np.frombuffer(memoryview(kv.k[0])).ctypes.data for kv in seqs.cache._slabs] == where


def test_contents_of_another_size_are_refused() -> None:
    seqs = filled(CONFIG, 2, seed=0)
    with pytest.raises(ValueError, match=r"has 3072 bytes, got 3"):
        seqs.cache.write_blocks(0, [1], [b"abc"])
