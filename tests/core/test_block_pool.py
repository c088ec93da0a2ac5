"""The pool: who holds a block, in which order free ones are taken, and what is found again."""

import pytest
from paged_testing.integrity import check_pool_integrity

from mlx_paged.core import (
    BlockError,
    BlockPool,
    DoubleFreeError,
    ForeignBlockError,
    FrozenBlockError,
    KVCacheBlock,
    UseAfterFreeError,
)

A, B, C, D = b"hash a", b"hash b", b"hash c", b"hash d"


def ids(blocks):
    return None if blocks is None else [block.block_id for block in blocks]


def free_ids(pool):
    return ids(pool.free_block_queue)


def held(pool):
    return {block.block_id: block.ref_cnt for block in pool.blocks if block.ref_cnt}


def cached(pool):
    return [(block_hash, block.block_id) for block_hash, block in pool.prefix_index]


def state(pool):
    check_pool_integrity(pool)
    return free_ids(pool), held(pool), cached(pool), pool.num_evictions


def take(pool, *block_ids):
    """Hold exactly these blocks, whatever the allocator would choose."""
    blocks = [pool.get_new_blocks(1, after=block_id - 1)[0] for block_id in block_ids]
    assert ids(blocks) == list(block_ids)
    return blocks


def pool_with_cached(num_blocks, *order):
    """All blocks free; those in `order` are cached, and least recently freed in that order."""
    pool = BlockPool(num_blocks, 4)
    blocks = take(pool, *order)
    pool.cache_full_blocks(
        blocks, [b"hash of %d" % block.block_id for block in blocks], 0, len(blocks)
    )
    pool.free_blocks(blocks)
    return pool


# A new pool


def test_a_new_pool_has_all_blocks_free_but_the_null_block():
    pool = BlockPool(6, 16)
    assert state(pool) == ([1, 2, 3, 4, 5], {}, [], 0)
    assert (pool.num_blocks, pool.num_usable_blocks) == (6, 5)
    assert (pool.num_free_blocks, pool.num_used_blocks) == (5, 0)
    assert (pool.null_block.block_id, pool.null_block.is_null) == (0, True)


def test_the_null_block_is_neither_usable_nor_used():
    pool = BlockPool(5, 16)
    pool.get_new_blocks(1)
    assert (pool.num_usable_blocks, pool.num_used_blocks) == (4, 1)
    pool.get_new_blocks(3)
    assert (pool.num_usable_blocks, pool.num_used_blocks) == (4, 4)
    assert BlockPool(1, 16).num_usable_blocks == 0


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (-1, 16), (2, 0)])
def test_a_pool_without_a_block_or_a_slot_is_refused(num_blocks, block_size):
    with pytest.raises(ValueError, match=r"BlockPool: .* must be at least 1"):
        BlockPool(num_blocks, block_size)


def test_a_block_is_found_by_its_id_and_a_foreign_id_raises():
    pool = BlockPool(3, 16)
    assert [pool.get_block(block_id) for block_id in range(3)] == pool.blocks
    for block_id in -1, 3:
        with pytest.raises(
            ForeignBlockError, match=f"BlockPool.get_block: block {block_id} is not"
        ):
            pool.get_block(block_id)


# Taking


def test_all_blocks_or_none_and_nothing_changes_when_none():
    pool = pool_with_cached(6, 4, 2)
    pool.get_new_blocks(1)
    before = state(pool)
    assert pool.get_new_blocks(5) is None
    assert pool.get_new_blocks(5, after=1) is None
    assert (
        state(pool) == before == ([3, 5, 4, 2], {1: 1}, [(b"hash of 4", 4), (b"hash of 2", 2)], 0)
    )
    assert ids(pool.get_new_blocks(4)) == [3, 5, 4, 2]
    assert pool.get_new_blocks(1) is None
    assert pool.get_new_blocks(0) == []


def test_a_taken_block_has_one_holder_and_no_hash():
    pool = pool_with_cached(4, 1, 2, 3)
    for block in pool.get_new_blocks(3):
        assert (block.ref_cnt, block.block_hash, block.is_writable) == (1, None, True)


def test_a_negative_number_and_a_foreign_neighbour_are_refused():
    pool = BlockPool(4, 16)
    with pytest.raises(ValueError, match="n must be at least 0, got -1"):
        pool.get_new_blocks(-1)
    for after in -1, 4:
        with pytest.raises(ForeignBlockError, match=f"after={after} is not one of 4 blocks"):
            pool.get_new_blocks(1, after=after)
    assert free_ids(pool) == [1, 2, 3]


def test_blocks_that_follow_the_given_one_are_taken_first():
    pool = BlockPool(10, 16)
    assert ids(pool.get_new_blocks(3, after=4)) == [5, 6, 7]
    assert free_ids(pool) == [1, 2, 3, 4, 8, 9]


def test_when_the_run_ends_the_front_of_the_queue_begins_the_next_run():
    pool = BlockPool(10, 16)
    used = take(pool, 6, 2)
    pool.free_blocks(take(pool, 8))
    assert free_ids(pool) == [8, 1, 3, 4, 5, 7, 9]
    # 5 follows 4; 6 is held: on to the front, 8, and its neighbour 9; then 1; 2 is held: 3; its
    # neighbour 4.
    assert ids(pool.get_new_blocks(6, after=4)) == [5, 8, 9, 1, 3, 4]
    assert free_ids(pool) == [7]
    assert held(pool) == {1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1, 8: 1, 9: 1}
    assert ids(used) == [6, 2]


def test_the_last_block_of_the_pool_has_no_neighbour():
    pool = BlockPool(4, 16)
    assert ids(pool.get_new_blocks(2, after=3)) == [1, 2]


def test_a_neighbour_that_holds_something_cached_is_passed_over():
    pool = pool_with_cached(8, 4)
    assert ids(pool.get_new_blocks(3, after=2)) == [3, 1, 2]
    assert cached(pool) == [(b"hash of 4", 4)]


def test_nothing_cached_is_evicted_while_an_empty_block_is_left():
    pool = pool_with_cached(8, 5, 2, 6)
    assert free_ids(pool) == [1, 3, 4, 7, 5, 2, 6]
    assert ids(pool.get_new_blocks(4)) == [1, 3, 4, 7]
    assert (len(cached(pool)), pool.num_evictions) == (3, 0)


def test_cached_blocks_are_evicted_in_the_order_of_the_queue_whatever_is_adjacent():
    pool = pool_with_cached(8, 5, 2, 6, 1, 3)
    assert ids(pool.get_new_blocks(5, after=6)) == [7, 4, 5, 2, 6]
    # 7 follows 6 and 4 is the last empty one. Then 5, 2 and 6 go, the least recently freed: neither
    # 3 nor 1.
    assert state(pool) == (
        [1, 3],
        {2: 1, 4: 1, 5: 1, 6: 1, 7: 1},
        [(b"hash of 1", 1), (b"hash of 3", 3)],
        3,
    )


# Freeing


def test_blocks_that_hold_nothing_cached_come_back_to_the_front_with_ids_ascending():
    pool = BlockPool(8, 16)
    blocks = pool.get_new_blocks(5)
    assert ids(pool.free_blocks(reversed(blocks))) == [5, 4, 3, 2, 1]
    assert free_ids(pool) == [1, 2, 3, 4, 5, 6, 7]


def test_cached_blocks_go_to_the_back_in_the_order_given():
    pool = BlockPool(8, 16)
    blocks = pool.get_new_blocks(5)
    pool.cache_full_blocks(blocks, [A, B, C], 0, 3)
    assert ids(pool.free_blocks(reversed(blocks))) == [5, 4, 3, 2, 1]
    assert free_ids(pool) == [4, 5, 6, 7, 3, 2, 1]


def test_freed_tail_blocks_are_evicted_before_a_shared_prefix():
    pool = BlockPool(7, 16)
    prefix, tail, other_tail = (
        pool.get_new_blocks(2),
        pool.get_new_blocks(2),
        pool.get_new_blocks(2),
    )
    pool.touch(prefix)
    first, second = prefix + tail, prefix + other_tail
    pool.cache_full_blocks(first, [A, B, C, D], 0, 4)
    pool.cache_full_blocks(second, [A, B, b"e", b"f"], 2, 4)
    assert ids(pool.free_blocks(reversed(first))) == [4, 3]
    assert free_ids(pool) == [4, 3]
    assert ids(pool.free_blocks(reversed(second))) == [6, 5, 2, 1]
    assert free_ids(pool) == [4, 3, 6, 5, 2, 1]
    assert ids(pool.get_new_blocks(4)) == [4, 3, 6, 5]
    assert cached(pool) == [(A, 1), (B, 2)]


def test_a_shared_block_is_free_when_the_last_holder_gives_it_back():
    pool = BlockPool(3, 16)
    block = pool.get_new_blocks(1)[0]
    pool.touch([block, block])
    assert (held(pool), pool.free_blocks([block]), pool.free_blocks([block])) == ({1: 3}, [], [])
    assert (held(pool), pool.free_blocks([block])) == ({1: 1}, [block])
    assert free_ids(pool) == [1, 2]


def test_a_block_given_twice_in_one_call_loses_two_holders():
    pool = BlockPool(3, 16)
    block = pool.get_new_blocks(1)[0]
    pool.touch([block])
    assert pool.free_blocks([block, block]) == [block]
    assert state(pool) == ([1, 2], {}, [], 0)


def test_a_double_free_raises_and_changes_nothing():
    pool = BlockPool(5, 16)
    first, second, third = pool.get_new_blocks(3)
    pool.touch([third])
    pool.free_blocks([second])
    before = state(pool)
    for blocks in (
        [second],
        [first, third, second],
        [first, third, first],
        [first, third, third, third],
    ):
        with pytest.raises(
            DoubleFreeError, match=r"BlockPool.free_blocks: block \d is free already"
        ):
            pool.free_blocks(blocks)
        assert state(pool) == before == ([2, 4], {1: 1, 3: 2}, [], 0)


def test_a_foreign_block_raises_in_every_verb_and_changes_nothing():
    pool, other = BlockPool(4, 16), BlockPool(8, 16)
    own = pool.get_new_blocks(1)
    before = state(pool)
    for foreign in other.get_new_blocks(5)[0], other.blocks[5], KVCacheBlock(-9), other.null_block:
        for verb in (
            pool.touch,
            pool.free_blocks,
            lambda blocks: pool.cache_full_blocks(blocks, [A, B], 0, 2),
        ):
            with pytest.raises(
                ForeignBlockError, match=f"block {foreign.block_id} is not of this pool of 4 blocks"
            ):
                verb([*own, foreign])
            assert state(pool) == before == ([2, 3], {1: 1}, [], 0)


def test_an_error_in_the_callers_iterable_changes_nothing():
    pool = BlockPool(4, 16)
    block = pool.get_new_blocks(1)[0]

    def failing():
        yield block
        raise RuntimeError("not ours")

    with pytest.raises(RuntimeError, match="not ours"):
        pool.free_blocks(failing())
    assert state(pool) == ([2, 3], {1: 1}, [], 0)


def test_the_null_block_is_passed_over_by_every_verb():
    pool = BlockPool(3, 16)
    null = pool.null_block
    pool.touch([null])
    assert pool.free_blocks([null, null]) == []
    pool.cache_full_blocks([null], [A], 0, 1)
    pool.evict_blocks([0])
    assert state(pool) == ([1, 2], {}, [], 0)
    assert (null.ref_cnt, null.block_hash, pool.get_cached_block(A)) == (0, None, None)


# Finding again


def test_a_full_block_is_found_by_its_hash_while_held_and_after():
    pool = BlockPool(4, 16)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(blocks, [A, B], 0, 2)
    assert [pool.get_cached_block(key) for key in (A, B, C)] == [*blocks, None]
    assert [block.is_writable for block in blocks] == [False, False]
    pool.free_blocks(reversed(blocks))
    assert [pool.get_cached_block(key) for key in (A, B, C)] == [*blocks, None]
    assert pool.num_cached_blocks == 2


def test_touch_revives_a_free_cached_block_from_the_middle_of_the_queue():
    pool = pool_with_cached(6, 4, 2, 3)
    block = pool.get_cached_block(b"hash of 2")
    pool.touch([block])
    assert state(pool) == (
        [1, 5, 4, 3],
        {2: 1},
        [(b"hash of 4", 4), (b"hash of 2", 2), (b"hash of 3", 3)],
        0,
    )
    pool.touch([block])
    assert held(pool) == {2: 2}
    pool.free_blocks([block, block])
    assert free_ids(pool) == [1, 5, 4, 3, 2]


def test_touching_a_free_block_that_holds_nothing_cached_raises_and_changes_nothing():
    pool = pool_with_cached(4, 3)
    with pytest.raises(
        UseAfterFreeError, match=r"BlockPool.touch: block 1 is free and holds nothing cached"
    ):
        pool.touch([pool.blocks[3], pool.blocks[1]])
    assert state(pool) == ([1, 2, 3], {}, [(b"hash of 3", 3)], 0)


def test_only_the_range_that_is_new_is_cached():
    pool = BlockPool(6, 16)
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks(blocks, [A, B, C, D], 1, 3)
    assert cached(pool) == [(B, 2), (C, 3)]
    pool.cache_full_blocks(blocks, [A, B, C, D], 3, 3)
    assert cached(pool) == [(B, 2), (C, 3)]


@pytest.mark.parametrize(
    ("num_cached_blocks", "num_full_blocks"), [(-1, 1), (2, 1), (0, 3), (0, 4)]
)
def test_a_range_beyond_the_blocks_or_the_hashes_is_refused(num_cached_blocks, num_full_blocks):
    pool = BlockPool(6, 16)
    with pytest.raises(
        ValueError,
        match=f"blocks {num_cached_blocks} to {num_full_blocks} of 3 blocks and 2 hashes",
    ):
        pool.cache_full_blocks(pool.get_new_blocks(3), [A, B], num_cached_blocks, num_full_blocks)
    assert cached(pool) == []


def test_caching_a_block_again_with_its_own_hash_changes_nothing():
    pool = BlockPool(4, 16)
    blocks = pool.get_new_blocks(2)
    for _ in range(2):
        pool.cache_full_blocks(blocks, [A, B], 0, 2)
        assert state(pool) == ([3], {1: 1, 2: 1}, [(A, 1), (B, 2)], 0)


def test_caching_a_block_with_another_hash_raises_and_changes_nothing():
    pool = BlockPool(5, 16)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(blocks, [A, B], 1, 2)
    for sequence, hashes in (
        ([blocks[0], blocks[1]], [A, C]),
        ([blocks[0], blocks[2], blocks[2]], [A, C, D]),
    ):
        with pytest.raises(
            FrozenBlockError,
            match=r"BlockPool.cache_full_blocks: block \d already has another hash",
        ):
            pool.cache_full_blocks(sequence, hashes, 0, len(hashes))
        assert state(pool) == ([4], {1: 1, 2: 1, 3: 1}, [(B, 2)], 0)


def test_caching_a_free_block_raises_and_changes_nothing():
    pool = BlockPool(4, 16)
    blocks = pool.get_new_blocks(2)
    pool.free_blocks(blocks[1:])
    with pytest.raises(UseAfterFreeError, match=r"BlockPool.cache_full_blocks: block 2 is free"):
        pool.cache_full_blocks(blocks, [A, B], 0, 2)
    assert state(pool) == ([2, 3], {1: 1}, [], 0)


@pytest.mark.parametrize(("evicted", "found"), [(1, 2), (2, 1)])
def test_of_two_blocks_with_the_same_content_either_may_be_evicted(evicted, found):
    pool = BlockPool(3, 16)
    first, second = pool.get_new_blocks(2)
    pool.cache_full_blocks([first], [A], 0, 1)
    pool.cache_full_blocks([second], [A], 0, 1)
    assert pool.get_cached_block(A) is first
    pool.free_blocks([pool.blocks[evicted], pool.blocks[found]])
    assert ids(pool.get_new_blocks(1)) == [evicted]
    assert pool.get_cached_block(A) is pool.blocks[found]
    assert state(pool) == ([found], {evicted: 1}, [(A, found)], 1)
    assert ids(pool.get_new_blocks(1)) == [found]
    assert (pool.get_cached_block(A), pool.num_evictions) == (None, 2)


# Forgetting


def test_evicted_blocks_are_forgotten_whether_free_or_held():
    pool = pool_with_cached(7, 5, 2, 6, 1)
    pool.touch([pool.blocks[2]])
    assert free_ids(pool) == [3, 4, 5, 6, 1]
    pool.evict_blocks([6, 2, 1, 3, 6])
    assert state(pool) == ([6, 1, 3, 4, 5], {2: 1}, [(b"hash of 5", 5)], 3)
    assert pool.blocks[2].is_writable
    with pytest.raises(ForeignBlockError):
        pool.evict_blocks([5, 7])
    assert cached(pool) == [(b"hash of 5", 5)]


def test_reset_forgets_everything_and_orders_the_queue_by_id():
    pool = pool_with_cached(6, 4, 2)
    pool.free_blocks(take(pool, 5))
    assert free_ids(pool) == [5, 1, 3, 4, 2]
    assert pool.reset_prefix_cache() is True
    assert state(pool) == ([1, 2, 3, 4, 5], {}, [], 0)
    assert pool.get_cached_block(b"hash of 4") is None


def test_reset_is_refused_while_a_block_is_in_use():
    pool = pool_with_cached(4, 2)
    block = pool.get_new_blocks(1)
    before = state(pool)
    assert pool.reset_prefix_cache() is False
    assert state(pool) == before == ([3, 2], {1: 1}, [(b"hash of 2", 2)], 0)
    pool.free_blocks(block)
    assert pool.reset_prefix_cache() is True


# Growing and shrinking


def test_new_blocks_continue_the_ids_and_are_taken_before_anything_cached():
    pool = pool_with_cached(4, 2, 1)
    held_block = pool.get_new_blocks(1)
    pool.grow(3)
    assert state(pool) == ([4, 5, 6, 2, 1], {3: 1}, [(b"hash of 2", 2), (b"hash of 1", 1)], 0)
    assert (pool.num_blocks, pool.num_usable_blocks, pool.num_free_blocks) == (7, 6, 5)
    assert ids(held_block + pool.get_new_blocks(3, after=3)) == [3, 4, 5, 6]


def test_a_pool_of_the_null_block_alone_can_grow():
    pool = BlockPool(1, 16)
    assert pool.get_new_blocks(1) is None
    pool.grow(0)
    assert pool.num_blocks == 1
    pool.grow(2)
    assert ids(pool.get_new_blocks(2)) == [1, 2]


def test_growing_by_a_negative_number_is_refused():
    with pytest.raises(
        ValueError, match=r"BlockPool.grow: num_new_blocks must be at least 0, got -1"
    ):
        BlockPool(2, 16).grow(-1)


def test_free_blocks_at_the_end_are_dropped_and_what_they_cached_is_evicted():
    pool = pool_with_cached(7, 6, 2, 5)
    pool.touch([pool.blocks[2]])
    dropped = pool.blocks[4]
    assert pool.shrink_to(4) is True
    assert state(pool) == ([1, 3], {2: 1}, [(b"hash of 2", 2)], 2)
    assert (pool.num_blocks, pool.get_cached_block(b"hash of 6")) == (4, None)
    with pytest.raises(ForeignBlockError):
        pool.touch([dropped])
    pool.grow(1)
    assert ids(pool.blocks[4:]) == [4] and pool.blocks[4] is not dropped


def test_a_pool_does_not_shrink_below_a_block_in_use():
    pool = pool_with_cached(6, 5)
    pool.free_blocks(take(pool, 1))
    take(pool, 3)
    before = state(pool)
    assert pool.shrink_to(3) is False
    assert state(pool) == before == ([1, 2, 4, 5], {3: 1}, [(b"hash of 5", 5)], 0)
    assert pool.shrink_to(4) is True
    assert state(pool) == ([1, 2], {3: 1}, [], 1)


@pytest.mark.parametrize("num_blocks", [0, -1, 5])
def test_shrinking_beyond_either_end_is_refused(num_blocks):
    with pytest.raises(
        ValueError, match=rf"BlockPool.shrink_to: num_blocks must be 1..4, got {num_blocks}"
    ):
        BlockPool(4, 16).shrink_to(num_blocks)


def test_a_pool_is_reset_in_place_whatever_was_left_of_it():
    pool = BlockPool(1 + 4, block_size=4)
    (evicted,) = pool.get_new_blocks(1)
    pool.cache_full_blocks([evicted], [A], 0, 1)
    pool.evict_blocks([evicted.block_id])
    held_before = pool.get_new_blocks(2)
    pool.cache_full_blocks(held_before, [B, C], 0, 2)
    # As an interrupt may leave it: a block that is neither free nor held.
    pool.free_block_queue.popleft_n(1)
    pool.reset(1 + 6)
    assert state(pool) == ([1, 2, 3, 4, 5, 6], {}, [], 1), "what was counted stays"
    assert pool.num_empty_blocks == pool.num_usable_blocks == 6
    with pytest.raises(ForeignBlockError):
        pool.free_blocks(held_before)


def test_every_programmer_error_has_one_base():
    pool = BlockPool(2, 16)
    with pytest.raises(BlockError):
        pool.free_blocks(pool.blocks[1:])


# What a verb costs


class CountingList(list):
    """Counts the blocks looked up."""

    lookups = 0

    def __getitem__(self, index):
        CountingList.lookups += 1
        return super().__getitem__(index)


def test_taking_touching_and_freeing_look_at_as_many_blocks_in_a_large_pool_as_in_a_small_one():
    counts = []
    for num_blocks in 20, 20_000:
        pool = BlockPool(num_blocks, 16)
        pool.blocks = CountingList(pool.blocks)
        CountingList.lookups = 0
        blocks = pool.get_new_blocks(4, after=5)
        pool.cache_full_blocks(blocks, [A, B], 0, 2)
        pool.touch(blocks)
        pool.free_blocks(blocks + blocks)
        pool.touch([pool.get_cached_block(A)])
        counts.append(CountingList.lookups)
    assert 0 < counts[0] == counts[1] <= 40
