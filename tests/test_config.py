"""Budgets are read as people write them, and their sums are right."""

from __future__ import annotations

import pytest

from mlx_paged.config import KVBudget, KVCacheConfig

SHAPE = {
    "num_layers": 28,
    "num_kv_heads": 8,
    "head_dim": 128,
    "dtype": "bfloat16",
    "block_size": 16,
}


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("65536", KVBudget(nbytes=65536)),
        (65536, KVBudget(nbytes=65536)),
        ("64K", KVBudget(nbytes=64 * 2**10)),
        ("512m", KVBudget(nbytes=512 * 2**20)),
        ("2G", KVBudget(nbytes=2 * 2**30)),
        ("1.5GiB", KVBudget(nbytes=3 * 2**29)),
        (" 2 GB ", KVBudget(nbytes=2 * 2**30)),
        ("100b", KVBudget(nbytes=100)),
        ("256blocks", KVBudget(num_blocks=256)),
        ("1 block", KVBudget(num_blocks=1)),
    ],
    ids=str,
)
def test_a_budget_is_bytes_with_a_unit_or_blocks(text: str, budget: KVBudget):
    assert KVBudget.parse(text) == budget


@pytest.mark.parametrize(
    "text",
    ["", "much", "-5", "5X", "0", "0.2", "0blocks", "1.5blocks", "G", "1e9", "1 2", "9" * 400],
)
def test_what_is_no_budget_is_refused(text: str):
    with pytest.raises(ValueError, match=r"^\[kv cache\] kv_cache_bytes must be bytes"):
        KVBudget.parse(text)


def test_512_blocks_of_qwen3_0_6b_are_0_94_gb():
    config = KVCacheConfig(**SHAPE, num_blocks=512)
    assert config.nbytes_per_token == 2 * 28 * 8 * 128 * 2 == 114_688
    assert 512 * config.nbytes_per_block == 939_524_096
    assert (config.num_slots, config.nbytes) == (8192, 513 * config.nbytes_per_block)


def test_the_cache_within_a_budget_in_bytes_never_exceeds_it():
    per_block = KVCacheConfig(**SHAPE).nbytes_per_block
    for nbytes in (2 * per_block, 2**30, 10**9, 3 * per_block - 1, 3 * per_block):
        config = KVCacheConfig.within(KVBudget(nbytes=nbytes), **SHAPE)
        assert config.nbytes <= nbytes < config.nbytes + per_block
    assert KVCacheConfig.within(KVBudget(num_blocks=7), **SHAPE).num_blocks == 7


def test_a_budget_below_one_block_is_refused_with_the_sum():
    with pytest.raises(
        ValueError, match=r"holds no block: .* take 2 \* 1835008 = 3670016 bytes; raise"
    ):
        KVCacheConfig.within(KVBudget(nbytes=3_670_015), **SHAPE)


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
        KVCacheConfig(**SHAPE | change)
