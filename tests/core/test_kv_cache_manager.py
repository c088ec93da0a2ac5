"""The manager of all requests' blocks: whole states after each call."""

from __future__ import annotations

import pytest
from paged_testing.integrity import check_manager

from mlx_paged.core import (
    BlockPool,
    BlockTableError,
    ComputedBlocks,
    KVCacheManager,
    KVCacheManagerStats,
)
from mlx_paged.core.block_hash import hash_token_blocks

BLOCK_SIZE = 4


def manager_of(num_usable_blocks: int, **options) -> KVCacheManager:
    return KVCacheManager(BlockPool(num_usable_blocks + 1, BLOCK_SIZE), **options)


def hashes(tokens, extra_keys=()):
    return hash_token_blocks(tokens, BLOCK_SIZE, extra_keys)


def start(manager, request_id, tokens, extra_keys=()):
    """A new request, computed in one step; returns how many tokens were hit."""
    block_hashes = hashes(tokens, extra_keys)
    computed = manager.get_computed_blocks(block_hashes, len(tokens))
    copies = manager.allocate_slots(request_id, len(tokens) - computed.num_tokens, computed)
    assert copies == []
    manager.cache_blocks(request_id, block_hashes)
    check_manager(manager)
    return computed.num_tokens


def tables(manager):
    return {request_id: table.block_ids for request_id, table in manager.tables.items()}


def free_ids(manager):
    return [block.block_id for block in manager.pool.free_block_queue]


def test_a_request_takes_the_blocks_that_its_tokens_fill():
    manager = manager_of(5)
    start(manager, "a", range(9))
    assert tables(manager) == {"a": [1, 2, 3]}
    assert manager.num_tokens("a") == 9
    assert manager.num_tokens("b") == 0
    assert manager.num_free_blocks == 2


def test_tokens_fill_the_last_block_before_another_is_taken():
    manager = manager_of(5)
    start(manager, "a", range(5))
    assert [manager.num_needed_blocks("a", n) for n in (1, 3, 4, 8)] == [0, 0, 1, 2]
    for num_new, expected in ((3, [1, 2]), (1, [1, 2, 3])):
        assert manager.allocate_slots("a", num_new) == []
        assert tables(manager) == {"a": expected}


def test_a_second_request_with_the_same_prefix_shares_its_full_blocks():
    manager = manager_of(9)
    assert start(manager, "a", [*range(10)]) == 0
    assert start(manager, "b", [*range(8), 77, 78]) == 8
    assert start(manager, "c", [0, 1, 2, 3, 77, 78]) == 4
    assert tables(manager) == {"a": [1, 2, 3], "b": [1, 2, 4], "c": [1, 5]}


def test_a_hit_leaves_the_last_token_to_be_computed():
    manager = manager_of(9)
    start(manager, "a", [*range(8)])
    block_hashes = hashes([*range(8)])
    assert [manager.get_computed_blocks(block_hashes, n).num_tokens for n in (8, 9)] == [4, 8]
    assert manager.get_computed_blocks(hashes([]), 0) == ComputedBlocks([[]], 0, 0)


def test_a_hit_ends_at_the_first_block_that_is_not_there():
    manager = manager_of(3)
    start(manager, "a", [*range(12)])
    manager.free("a")
    start(manager, "b", [90])  # evicts the block freed first, the tail
    assert manager.get_computed_blocks(hashes([*range(12)]), 13).num_tokens == 8
    manager.pool.evict_blocks([manager.pool.get_cached_block(hashes([*range(12)])[0]).block_id])
    assert manager.get_computed_blocks(hashes([*range(12)]), 13).num_tokens == 0


def test_other_extra_keys_are_another_context():
    manager = manager_of(9)
    start(manager, "a", [*range(8)], extra_keys=("adapter", "x"))
    assert start(manager, "b", [*range(8)]) == 0
    assert start(manager, "c", [*range(8)], extra_keys=("adapter", "y")) == 0
    assert start(manager, "d", [*range(8)], extra_keys=("adapter", "x")) == 4


def test_out_of_blocks_is_none_and_nothing_has_changed():
    manager = manager_of(3)
    start(manager, "a", [*range(8)])
    before = tables(manager), free_ids(manager), manager.stats()
    assert manager.allocate_slots("a", 5) is None
    assert manager.allocate_slots("b", 5) is None
    computed = manager.get_computed_blocks(hashes([*range(8)]), 16)
    assert manager.allocate_slots("c", 8, computed) is None
    assert (tables(manager), free_ids(manager), manager.stats()) == before
    check_manager(manager)


def test_computed_blocks_that_are_free_are_counted_and_never_evicted_for_their_own_request():
    manager = manager_of(3)
    start(manager, "a", [*range(8)])
    manager.free("a")
    computed = manager.get_computed_blocks(hashes([*range(8)]), 17)
    assert computed.num_tokens == 8
    # Two of the three free blocks are the hit itself, so there is one for new tokens.
    assert manager.num_needed_blocks("b", 5, computed) == 4
    assert manager.allocate_slots("b", 5, computed) is None
    assert manager.allocate_slots("b", 4, computed) == []
    assert tables(manager) == {"b": [1, 2, 3]}


def test_blocks_are_evicted_tail_first_and_the_least_recently_freed_request_first():
    manager = manager_of(6)
    start(manager, "a", [*range(8)])
    start(manager, "b", [*range(4), *range(50, 54)])
    start(manager, "c", [*range(70, 78)])
    assert tables(manager) == {"a": [1, 2], "b": [1, 3], "c": [4, 5]}
    for request_id in "bca":
        manager.free(request_id)
    # Nothing is cached in block 6; then b's own tail, c, and a, whose first block b shared.
    assert free_ids(manager) == [6, 3, 5, 4, 2, 1]


def test_a_request_that_comes_again_finds_what_it_left():
    manager = manager_of(4)
    tokens = [*range(10)]
    start(manager, "a", tokens)
    manager.free("a")
    assert start(manager, "a", tokens) == 8
    assert tables(manager) == {"a": [1, 2, 3]}


def test_a_request_of_the_same_step_shares_blocks_that_are_about_to_be_written():
    manager = manager_of(4)
    tokens = [*range(9)]
    assert [start(manager, "a", tokens), start(manager, "b", tokens)] == [0, 8]
    assert tables(manager) == {"a": [1, 2, 3], "b": [1, 2, 4]}


def test_what_a_failed_step_allocated_can_be_taken_back_and_is_not_hit():
    manager = manager_of(6)
    tokens = [*range(6)]
    start(manager, "a", tokens)
    longer = [*range(12)]
    assert manager.allocate_slots("a", 6) == []
    manager.cache_blocks("a", hashes(longer))
    assert manager.get_computed_blocks(hashes(longer), 13).num_tokens == 12
    manager.pool.evict_blocks([2, 3])  # as the step was never written
    manager.trim("a", 6)
    assert manager.get_computed_blocks(hashes(longer), 13).num_tokens == 4
    assert (tables(manager), manager.num_tokens("a")) == ({"a": [1, 2]}, 6)
    check_manager(manager)
    # The partly filled block is writable again: no copy.
    assert manager.allocate_slots("a", 1) == []


def test_a_fork_shares_all_blocks_and_who_writes_first_gets_a_copy_of_the_partly_filled_one():
    manager = manager_of(6)
    start(manager, "a", [*range(6)])
    manager.fork("a", "b")
    assert tables(manager) == {"a": [1, 2], "b": [1, 2]}
    assert manager.num_needed_blocks("b", 1) == 1
    assert manager.allocate_slots("b", 1) == [(2, 3)]
    assert manager.allocate_slots("a", 1) == []
    assert tables(manager) == {"a": [1, 2], "b": [1, 3]}
    check_manager(manager)


def test_a_trimmed_request_gives_its_tail_back_and_copies_a_hashed_block_before_it_writes_there():
    manager = manager_of(6)
    start(manager, "a", [*range(12)])
    manager.trim("a", 6)
    assert (tables(manager), manager.num_tokens("a")) == ({"a": [1, 2]}, 6)
    assert manager.get_computed_blocks(hashes([*range(12)]), 13).num_tokens == 12
    assert manager.allocate_slots("a", 1) == [(2, 4)]
    assert tables(manager) == {"a": [1, 4]}
    check_manager(manager)


def test_the_cache_is_reset_only_while_no_block_is_in_use():
    manager = manager_of(6)
    start(manager, "a", [*range(8)])
    assert not manager.reset_prefix_cache()
    manager.free("a")
    assert manager.reset_prefix_cache()
    assert manager.get_computed_blocks(hashes([*range(8)]), 9).num_tokens == 0


def test_a_manager_is_reset_in_place_and_the_views_of_its_tables_with_it():
    manager = manager_of(6)
    groups, of_requests = manager.groups, manager.tables
    start(manager, "a", range(9))
    manager.free("a")
    start(manager, "b", range(9))
    before = manager.stats()
    assert before.num_hit_tokens and list(groups) == list(of_requests) == ["b"]
    manager.pool.reset(1 + 6)
    manager.reset()
    assert list(groups) == list(of_requests) == []
    check_manager(manager)
    stats = manager.stats()
    assert (stats.num_requests, stats.num_used_blocks, stats.num_cached_blocks) == (0, 0, 0)
    assert stats.num_hit_tokens == before.num_hit_tokens, "what was counted stays"
    start(manager, "b", range(9))
    assert manager.stats().num_hit_tokens == before.num_hit_tokens, "nothing is found again"
    assert list(groups) == ["b"]


def test_statistics_count_each_block_and_each_unfilled_slot_once():
    manager = manager_of(10)
    assert manager.stats() == KVCacheManagerStats(0, 0, 10, 0, 0, 10, *[0] * 6)
    assert (manager.stats().usage, manager.stats().hit_rate) == (0.0, 0.0)
    start(manager, "a", [*range(10)])
    start(manager, "b", [*range(9)])
    manager.fork("a", "c")
    expected = KVCacheManagerStats(
        num_requests=3,
        num_tokens=29,
        num_usable_blocks=10,
        num_used_blocks=4,
        num_cached_blocks=2,
        num_empty_blocks=6,
        num_unfilled_slots=2 + 3,
        num_evictions=0,
        num_queried_tokens=19,
        num_hit_tokens=8,
        num_checkpoints=0,
        num_stateless_tokens=0,
    )
    assert manager.stats() == expected
    assert (expected.usage, expected.hit_rate) == (0.4, 8 / 19)


def test_misuse_is_refused_by_name():
    manager = manager_of(6)
    start(manager, "a", [*range(6)])
    computed = manager.get_computed_blocks(hashes([*range(6)]), 6)
    with pytest.raises(ValueError, match="num_new_tokens must be at least 1, got 0"):
        manager.allocate_slots("a", 0)
    with pytest.raises(
        BlockTableError,
        match="request 'a' already has 6 tokens, so its 4 computed ones can't be added",
    ):
        manager.allocate_slots("a", 1, computed)
    with pytest.raises(ValueError, match="fork: request 'a' exists already"):
        manager.fork("a", "a")
    with pytest.raises(BlockTableError, match="length 7 of a table of 6 tokens"):
        manager.trim("a", 7)
    for call in (
        manager.free,
        lambda name: manager.trim(name, 0),
        lambda name: manager.fork(name, "c"),
    ):
        with pytest.raises(KeyError, match=r"no request 'b'; there are \['a'\]"):
            call("b")
    assert tables(manager) == {"a": [1, 2]}
    check_manager(manager)


def test_blocks_that_freeing_several_requests_would_free_are_those_that_no_other_holds():
    manager = manager_of(12)
    start(manager, "a", [*range(10)])
    start(manager, "b", [*range(8), 77, 78])
    start(manager, "c", [0, 1, 2, 3, 77, 78])
    # a: 1 2 3, b: 1 2 4, c: 1 5.
    assert [manager.num_freed_blocks(each) for each in ("", "a", "b", "c", "ab", "ac", "abc")] == [
        0, 1, 1, 1, 3, 2, 5,
    ]  # fmt: skip
    found = manager.get_computed_blocks(hashes([*range(8)]), 9)
    assert [manager.num_freed_blocks(each, found) for each in ("ab", "abc")] == [2, 3]
    manager.free("b")
    manager.free("a")
    assert manager.num_free_blocks == 12 - 5 + 3
    with pytest.raises(KeyError, match="no request 'a'"):
        manager.num_freed_blocks("a")
