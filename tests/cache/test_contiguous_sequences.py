"""What a contiguous cache does with whole sequences: it copies forks, and keeps the last one."""

from __future__ import annotations

import mlx.core as mx
import pytest
from helpers.cache_helpers import CONFIG, assert_holds, rows

from mlx_paged.cache import ContiguousKVCache
from mlx_paged.core import hash_token_blocks

TOKENS = list(range(20))
HASHES = hash_token_blocks(TOKENS, CONFIG.block_size)


def cache_with_one() -> tuple[ContiguousKVCache, tuple[mx.array, mx.array]]:
    cache, kv = ContiguousKVCache(CONFIG), rows(20)
    cache.set_prompt("a", *kv)
    return cache, kv


def go_on(cache: ContiguousKVCache, seq: str, num_kept: int, num_new: int) -> None:
    """As a scheduler lets a request go on with what is kept, and runs its other tokens."""
    assert cache.manager.allocate_slots(seq, num_kept + num_new) == []
    cache.take_last(seq)
    with cache.scheduled_step([seq], [num_new]):
        k, v = rows(num_new, seed=1)
        for index, layer in enumerate(cache.layers):
            layer.update(k[index], v[index])
        mx.eval(cache.arrays)


def test_a_fork_has_rows_and_blocks_of_its_own():
    cache, (k, v) = cache_with_one()
    cache.fork("a", "b")
    assert not set(cache.block_ids("a")) & set(cache.block_ids("b"))
    assert cache.stats().blocks_used == 6
    new = rows(2, seed=1)
    cache.append("b", *new)
    assert_holds(cache, "a", k, v)
    assert_holds(
        cache, "b", mx.concatenate([k, new[0]], axis=1), mx.concatenate([v, new[1]], axis=1)
    )


def test_the_last_sequence_is_trimmed_to_the_common_beginning():
    cache, (k, v) = cache_with_one()
    cache.keep_last("a", HASHES)
    cache.manager.free("a")
    assert cache.stats().blocks_used == 0 < cache.nbytes_held
    held = cache.nbytes_held
    other = hash_token_blocks([*TOKENS[:9], 99, *TOKENS], CONFIG.block_size)
    assert [cache.num_kept_blocks(hashes) for hashes in (HASHES, other, [])] == [2, 1, 0]
    go_on(cache, "b", 8, 3)
    assert cache.nbytes_held == held, "the same arrays"
    new = rows(3, seed=1)
    expected = [
        mx.concatenate([old[:, :8], more], axis=1) for old, more in zip((k, v), new, strict=True)
    ]
    assert_holds(cache, "b", *expected)
    assert cache.num_kept_blocks(HASHES) == 0, "it is another sequence's now"


def test_only_the_last_sequence_is_kept_and_until_its_memory_is_needed():
    cache, _ = cache_with_one()
    others = hash_token_blocks([50, *TOKENS], CONFIG.block_size)
    cache.set_prompt("b", *rows(21))
    for seq, hashes in (("a", HASHES), ("b", others)):
        cache.keep_last(seq, hashes)
        cache.manager.free(seq)
    assert [cache.num_kept_blocks(hashes) for hashes in (HASHES, others)] == [0, 2]
    cache.set_prompt("short", *rows(9))
    assert cache.num_kept_blocks(others) == 2
    cache.free("short")
    cache.set_prompt("long", *rows(310))
    assert cache.num_kept_blocks(others) == 0
    assert cache.nbytes_held <= CONFIG.num_blocks * CONFIG.nbytes_per_block


@pytest.mark.parametrize("forget", ["shrink", "reset_prefix_cache", "reset", "forget_last"])
def test_what_is_kept_is_forgotten_where_that_is_asked_for(forget: str):
    cache, _ = cache_with_one()
    cache.keep_last("a", HASHES)
    cache.manager.free("a")
    getattr(cache, forget)()
    assert cache.num_kept_blocks(HASHES) == 0 == cache.nbytes_held


def test_blocks_without_rows_are_refused_by_name():
    cache, _ = cache_with_one()
    cache.manager.fork("a", "b")
    assert cache.manager.allocate_slots("b", 1) is not None
    with (
        pytest.raises(RuntimeError, match="20 tokens of sequence 'b' have blocks and no rows"),
        cache.scheduled_step(["b"], [1]),
    ):
        pass
