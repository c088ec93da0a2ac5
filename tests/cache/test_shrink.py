"""Giving memory back: what stays, what goes, and what it costs meanwhile."""

from __future__ import annotations

import mlx.core as mx
import pytest
from helpers.cache_helpers import CONFIG, KINDS, assert_holds
from paged_testing.integrity import check_manager

from mlx_paged.cache import KVCacheConfig, PagedKVCache, Sequences
from mlx_paged.ops import KVHandle

LARGE = KVCacheConfig.uniform(
    num_layers=4, num_kv_heads=4, head_dim=64, block_size=16, num_blocks=600
)


def rows(num_tokens: int, config: KVCacheConfig = LARGE) -> mx.array:
    return mx.random.normal((len(config.layers), num_tokens, 4, 64))


@pytest.mark.slow
def test_memory_of_freed_sequences_is_given_back_and_the_others_stay_as_they_were():
    seqs = Sequences(PagedKVCache(LARGE, initial_blocks=4))
    k, v = rows(100), rows(100)
    seqs.append("stays", k, v)
    seqs.append("goes", rows(16 * 500), rows(16 * 500))
    held = seqs.stats().nbytes_held
    seqs.free("goes")
    mx.synchronize()
    before = mx.get_active_memory()
    given_back = seqs.cache.shrink()
    # What is left ends with the last block of "stays", 7 blocks from among the first 8.
    num_left = max(seqs.block_ids("stays")) + 1
    assert num_left <= 9
    assert seqs.stats().nbytes_held == num_left * LARGE.nbytes_per_block == held - given_back
    mx.synchronize()
    # On Metal the tokens of the kernels before go, too: a few bytes per layer.
    assert given_back <= before - mx.get_active_memory() < given_back + LARGE.nbytes_per_block
    assert_holds(seqs, "stays", k, v)
    check_manager(seqs.manager)
    # And it grows again.
    more = rows(500), rows(500)
    seqs.append("new", *more)
    assert_holds(seqs, "new", *more)
    assert_holds(seqs, "stays", k, v)


def test_what_shrinking_takes_meanwhile_is_less_than_one_layer():
    seqs = Sequences(PagedKVCache(LARGE, initial_blocks=4))
    seqs.append("stays", rows(16 * 250), rows(16 * 250))
    seqs.append("goes", rows(16 * 250), rows(16 * 250))
    seqs.free("goes")
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    assert seqs.cache.shrink() > 0
    assert mx.get_peak_memory() - base <= LARGE.nbytes // len(LARGE.layers)


def test_a_block_in_use_keeps_all_before_it():
    seqs = Sequences(PagedKVCache(LARGE, initial_blocks=4))
    seqs.append("goes", rows(16 * 50), rows(16 * 50))
    k, v = rows(40), rows(40)
    seqs.append("stays", k, v)
    seqs.free("goes")
    assert max(seqs.block_ids("stays")) == 53
    seqs.cache.shrink()
    assert seqs.stats().nbytes_held == 54 * LARGE.nbytes_per_block
    assert_holds(seqs, "stays", k, v)


def test_nothing_is_given_back_below_what_a_new_cache_holds():
    seqs = Sequences(PagedKVCache(LARGE, initial_blocks=64))
    seqs.append("a", rows(16), rows(16))
    seqs.free("a")
    held = seqs.stats().nbytes_held
    assert seqs.cache.shrink() == 0
    assert seqs.stats().nbytes_held == held


@pytest.mark.parametrize("kind", ["basic", "paged"])
def test_shrinking_within_a_step_is_refused(kind):
    seqs = Sequences(KINDS[kind](CONFIG))
    with (
        pytest.raises(RuntimeError, match=rf"\[{kind} cache\] a step is open; shrink after it"),
        seqs.step({"a": 1}),
    ):
        seqs.cache.shrink()
    assert seqs.cache.shrink() == 0


def test_a_handle_is_not_shrunk_to_nothing():
    kv = KVHandle.allocate(3, 1, 8, 32, 32)
    for num_blocks in (0, 4):
        with pytest.raises(
            ValueError, match=rf"shrink_to: num_blocks must be within 1..3, got {num_blocks}"
        ):
            kv.shrink_to(num_blocks)
