"""The rows of a sequence make one in a cache of either kind again."""

from __future__ import annotations

import mlx.core as mx
import pytest
from helpers.cache_helpers import CONFIG, KINDS, assert_holds, copy_rows, rows

from mlx_paged.cache import CacheFullError, KVCacheConfig, PagedKVCache, Sequences


@pytest.mark.parametrize("source", ["basic", "paged"])
@pytest.mark.parametrize("target", ["basic", "paged"])
@pytest.mark.parametrize("num_tokens", [1, 8, 21])
def test_rows_of_either_kind_are_copied_into_either_kind(source: str, target: str, num_tokens: int):
    k, v = rows(num_tokens)
    old, new = Sequences(KINDS[source](CONFIG)), Sequences(KINDS[target](CONFIG))
    old.append("noise", *rows(5, seed=5))
    old.append("a", k, v)
    copy_rows(old, "a", new, "b")
    # They are independent of the cache that they came from.
    old.append("a", *rows(3, seed=1))
    old.free("a")
    assert_holds(new, "b", k, v)
    more_k, more_v = rows(10, seed=2)
    new.append("b", more_k, more_v)
    assert_holds(new, "b", mx.concatenate([k, more_k], axis=1), mx.concatenate([v, more_v], axis=1))


def test_rows_fit_a_cache_with_another_block_size():
    k, v = rows(21)
    old = Sequences(PagedKVCache(CONFIG))
    old.append("a", k, v)
    new = Sequences(PagedKVCache(KVCacheConfig.uniform(2, 3, 8, block_size=32, num_blocks=4)))
    copy_rows(old, "a", new, "a")
    assert_holds(new, "a", k, v)


def test_more_rows_than_the_budget_holds_are_refused():
    old = Sequences(PagedKVCache(CONFIG))
    old.append("a", *rows(65))
    new = Sequences(PagedKVCache(KVCacheConfig.uniform(2, 3, 8, block_size=8, num_blocks=8)))
    with pytest.raises(CacheFullError, match="need 9 blocks of 8, the budget holds 8"):
        copy_rows(old, "a", new, "a")


def test_rows_of_another_model_are_refused():
    old = Sequences(PagedKVCache(CONFIG))
    old.append("a", *rows(6))
    new = Sequences(PagedKVCache(KVCacheConfig.uniform(3, 3, 8, block_size=8, num_blocks=8)))
    with pytest.raises(
        ValueError, match="append: expected rows of 3 layers, got 2 of K and 2 of V"
    ):
        copy_rows(old, "a", new, "a")
