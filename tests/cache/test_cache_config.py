"""The sums of a cache's shape are right, layers that differ included."""

from __future__ import annotations

import pytest

from mlx_paged.cache import KVCacheConfig, KVFormat, LayerSpec
from mlx_paged.options.config import KVBudget

SHAPE = {
    "num_layers": 28,
    "num_kv_heads": 8,
    "head_dim": 128,
    "dtype": "bfloat16",
    "block_size": 16,
}


LAYERS = KVCacheConfig.uniform(**SHAPE).layers


def test_512_blocks_of_qwen3_0_6b_are_0_94_gb():
    config = KVCacheConfig.uniform(**SHAPE, num_blocks=512)
    assert config.nbytes_per_token == 2 * 28 * 8 * 128 * 2 == 114_688
    assert 512 * config.nbytes_per_block == 939_524_096
    assert (config.num_slots, config.nbytes) == (8192, 513 * config.nbytes_per_block)


def test_the_cache_within_a_budget_in_bytes_never_exceeds_it():
    per_block = KVCacheConfig.uniform(**SHAPE).nbytes_per_block
    for nbytes in (2 * per_block, 2**30, 10**9, 3 * per_block - 1, 3 * per_block):
        config = KVCacheConfig.within(KVBudget(nbytes=nbytes), LAYERS)
        assert config.nbytes <= nbytes < config.nbytes + per_block
    assert KVCacheConfig.within(KVBudget(num_blocks=7), LAYERS).num_blocks == 7


def test_a_budget_below_one_block_is_refused_with_the_sum():
    with pytest.raises(
        ValueError, match=r"holds no block: .* take 2 \* 1835008 = 3670016 bytes; raise"
    ):
        KVCacheConfig.within(KVBudget(nbytes=3_670_015), LAYERS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 12}, r"block_size must be one of \(8, 16, 32, 64\), got 12"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"num_layers": 0}, "num_layers must be a positive integer, got 0"),
        ({"head_dim": 1.5}, "head_dim must be a positive integer, got 1.5"),
    ],
    ids=str,
)
def test_a_shape_that_can_not_be_is_refused_by_name(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        KVCacheConfig.uniform(**SHAPE | change)


def test_a_budget_counts_layers_that_differ_each_by_its_own_rows():
    layers = [
        LayerSpec(2, 64, 32, format=KVFormat.dense("float16")),
        LayerSpec(1, 16, 16, window=7),
    ]
    per_token = 2 * (64 + 32) * 2 + 1 * (16 + 16) * 4
    config = KVCacheConfig.within(KVBudget(nbytes=11 * 8 * per_token - 1), layers, block_size=8)
    assert [layer.nbytes_per_token for layer in config.layers] == [384, 128]
    assert config.nbytes_per_token == per_token == 512
    assert (config.num_blocks, config.nbytes) == (9, 10 * 8 * per_token)


@pytest.mark.parametrize(
    "change", [{"num_kv_heads": 0}, {"value_dim": -1}, {"window": 0}, {"num_heads": 0}], ids=str
)
def test_a_layer_that_can_not_be_is_refused_by_name(change: dict):
    (name,) = change
    with pytest.raises(ValueError, match=f"{name} must be a positive integer"):
        LayerSpec(**{"num_kv_heads": 1, "key_dim": 8, "value_dim": 8} | change)


def test_a_cache_without_layers_is_refused():
    with pytest.raises(ValueError, match="num_layers must be a positive integer, got 0"):
        KVCacheConfig(())
