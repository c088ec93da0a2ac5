"""The block table: where each token lives, growing, trimming, sharing, and who may write."""

import pytest
from helpers.block_tables import TokenSlot, append_token_slot
from paged_testing.integrity import check_table_integrity

from mlx_paged.core import (
    BlockPool,
    BlockTable,
    BlockTableError,
    DoubleFreeError,
    ForeignBlockError,
    FrozenBlockError,
    UseAfterFreeError,
    hash_token_blocks,
)


def ids(blocks):
    return [block.block_id for block in blocks]


def free_ids(pool):
    return ids(pool.free_block_queue)


def held(pool):
    return {block.block_id: block.ref_cnt for block in pool.blocks if block.ref_cnt}


def make(num_tokens=0, num_blocks=10, block_size=4, pool=None):
    table = BlockTable(pool or BlockPool(num_blocks, block_size))
    assert table.reserve(num_tokens) == []
    table.advance(num_tokens)
    return table


def make_cached(num_tokens, **kwargs):
    """A table whose full blocks are all in the prefix index."""
    table = make(num_tokens, **kwargs)
    table.cache_full_blocks(hash_token_blocks(range(num_tokens), table.block_size))
    return table


def state(table):
    check_table_integrity(table)
    return table.num_tokens, table.block_ids, free_ids(table.pool), held(table.pool)


# Growing


def test_a_new_table_is_empty():
    table = make()
    assert (table.num_tokens, len(table), len(table), table.capacity, table.num_unfilled_slots) == (
        0,
        0,
        0,
        0,
        0,
    )
    assert (table.block_ids, list(table), table.is_freed) == ([], [], False)
    assert table.slot_mapping(0, 0) == []


def test_a_table_knows_its_blocks_and_what_is_free_in_them():
    table = make(9)
    assert (table.num_tokens, len(table)) == (9, 3)
    assert (table.capacity, table.num_unfilled_slots) == (12, 3)
    assert (table.block_ids, ids(table), ids(table.blocks)) == ([1, 2, 3], [1, 2, 3], [1, 2, 3])
    assert (table.blocks[-1].block_id, table.num_full_blocks) == (3, 2)


def test_appending_takes_one_block_in_every_block_size_tokens_and_copies_nothing():
    table = make(block_size=3)
    appended = [append_token_slot(table) for _ in range(7)]
    assert appended == [TokenSlot(slot, []) for slot in (3, 4, 5, 6, 7, 8, 9)]
    assert state(table) == (7, [1, 2, 3], [4, 5, 6, 7, 8, 9], {1: 1, 2: 1, 3: 1})


def test_blocks_needed_count_the_free_rest_of_the_last_block_and_reserved_blocks():
    table = make(6)
    assert [table.num_new_blocks(n) for n in (0, 1, 2, 3, 6, 7, 11)] == [0, 0, 0, 1, 1, 2, 3]
    table.reserve(5)
    assert [table.num_new_blocks(n) for n in (0, 1, 2, 3, 6, 7, 11)] == [0, 0, 0, 0, 0, 1, 2]


def test_reserve_makes_room_and_counts_nothing():
    table = make(3)
    assert table.reserve(6) == []
    assert state(table) == (3, [1, 2, 3], [4, 5, 6, 7, 8, 9], {1: 1, 2: 1, 3: 1})
    assert (table.capacity, table.num_unfilled_slots, table.reserve(9)) == (12, 9, [])
    table.advance(4)
    assert state(table) == (7, [1, 2, 3], [4, 5, 6, 7, 8, 9], {1: 1, 2: 1, 3: 1})


def test_reserve_takes_all_or_nothing():
    table = make(3, num_blocks=4)
    before = state(table)
    assert table.num_new_blocks(10) == 3
    assert table.reserve(10) is None
    assert state(table) == before == (3, [1], [2, 3], {1: 1})
    assert table.reserve(9) == []
    assert state(table) == (3, [1, 2, 3], [], {1: 1, 2: 1, 3: 1})


def test_appending_out_of_blocks_is_none_and_changes_nothing():
    table = make(4, num_blocks=2)
    assert append_token_slot(table) is None
    assert state(table) == (4, [1], [], {1: 1})


def test_a_table_grows_into_the_blocks_that_follow_its_last():
    pool = BlockPool(12, 4)
    first, second = make(4, pool=pool), make(4, pool=pool)
    gap = make(8, pool=pool)
    second_tail = make(4, pool=pool)
    gap.free()
    assert free_ids(pool) == [3, 4, 6, 7, 8, 9, 10, 11]
    second_tail.reserve(4)
    assert (first.block_ids, second_tail.block_ids, free_ids(pool)) == (
        [1],
        [5, 6],
        [3, 4, 7, 8, 9, 10, 11],
    )
    second.reserve(12)
    assert second.block_ids == [2, 3, 4, 7]


def test_the_last_slot_of_the_pool_can_be_appended_to():
    table = make(block_size=1, num_blocks=3)
    assert [append_token_slot(table) for _ in range(3)] == [
        TokenSlot(1, []),
        TokenSlot(2, []),
        None,
    ]


def test_advance_beyond_what_was_reserved_raises():
    table = make(3)
    for n in 2, 5:
        with pytest.raises(
            BlockTableError, match=f"BlockTable.advance: {n} tokens, but 1 slots are reserved"
        ):
            table.advance(n)
    assert table.num_tokens == 3


@pytest.mark.parametrize("verb", ["reserve", "advance", "num_new_blocks", "trim_to"])
def test_a_negative_count_raises(verb):
    table = make(5)
    before = state(table)
    with pytest.raises(
        BlockTableError, match=rf"BlockTable.{verb}: a count must be at least 0, got -1"
    ):
        getattr(table, verb)(-1)
    assert state(table) == before


# Token -> slot


def scattered():
    """Blocks 5, 6, 2: ten tokens in blocks of four."""
    pool = BlockPool(7, 4)
    blocks = pool.get_new_blocks(6)
    pool.free_blocks([blocks[1]])
    table = BlockTable(pool)
    table.adopt(blocks[4:6], 8)
    assert table.reserve(2) == []
    table.advance(2)
    assert table.block_ids == [5, 6, 2]
    return table


def test_a_token_lives_in_block_t_over_block_size_at_offset_t_mod_block_size():
    table = scattered()
    slots = [20, 21, 22, 23, 24, 25, 26, 27, 8, 9, 10, 11]
    assert table.slot_mapping(0, 12) == slots
    for offset in range(13):
        for n in range(13 - offset):
            assert table.slot_mapping(offset, n) == slots[offset : offset + n]


@pytest.mark.parametrize("token", [-1, 12, 99])
def test_a_token_beyond_the_capacity_raises(token):
    with pytest.raises(
        BlockTableError,
        match=f"BlockTable.slot_mapping: tokens {token} to {token + 1} of a table of 3 block",
    ):
        scattered().slot_mapping(token, 1)


@pytest.mark.parametrize(("offset", "n"), [(-1, 2), (11, 2), (13, 0), (8, -1)])
def test_a_range_beyond_the_capacity_raises(offset, n):
    with pytest.raises(
        BlockTableError, match=f"BlockTable.slot_mapping: tokens {offset} to {offset + n} of a"
    ):
        scattered().slot_mapping(offset, n)


# Who may write


def test_reserved_slots_and_the_partly_filled_block_are_written_in_place():
    table = make(6)
    assert table.reserve(4) == []
    assert table.slot_mapping(6, 4) == [10, 11, 12, 13]
    table.advance(4)
    assert (table.num_tokens, table.block_ids) == (10, [1, 2, 3])


def test_a_shared_block_is_frozen_for_both_sides():
    table = make(6)
    other = table.fork()
    for side in table, other:
        with pytest.raises(
            FrozenBlockError,
            match=r"BlockTable.advance: 1 tokens into block 2, which is frozen "
            r"\(ref_cnt 2, hashed: False\); reserve first",
        ):
            side.advance(1)
        side.advance(0)


def test_a_hashed_block_is_frozen_even_when_it_is_used_in_part():
    table = make_cached(8)
    table.trim_to(6)
    with pytest.raises(
        FrozenBlockError,
        match=r"2 tokens into block 2, which is frozen \(ref_cnt 1, hashed: True\)",
    ):
        table.advance(2)


# Trimming


def test_trimming_gives_back_whole_blocks_tail_first_and_keeps_a_part():
    table = make(15)
    assert ids(table.trim_to(6)) == [4, 3]
    assert state(table) == (6, [1, 2], [3, 4, 5, 6, 7, 8, 9], {1: 1, 2: 1})
    assert append_token_slot(table) == TokenSlot(10, [])


def test_trimming_to_the_length_gives_back_what_was_reserved():
    table = make(5)
    table.reserve(10)
    assert ids(table.trim_to(5)) == [4, 3]
    assert state(table) == (5, [1, 2], [3, 4, 5, 6, 7, 8, 9], {1: 1, 2: 1})
    assert table.trim_to(5) == []


def test_trimming_to_nothing_leaves_a_usable_table():
    table = make(5)
    assert ids(table.trim_to(0)) == [2, 1]
    assert state(table) == (0, [], [1, 2, 3, 4, 5, 6, 7, 8, 9], {})
    assert append_token_slot(table) == TokenSlot(4, [])


def test_trimming_beyond_the_length_raises():
    table = make(5)
    with pytest.raises(
        BlockTableError, match=r"BlockTable.trim_to: length 6 of a table of 5 tokens"
    ):
        table.trim_to(6)
    assert state(table) == (5, [1, 2], [3, 4, 5, 6, 7, 8, 9], {1: 1, 2: 1})


def test_trimming_a_shared_tail_frees_nothing():
    table = make(8)
    other = table.fork()
    assert table.trim_to(3) == []
    assert state(table) == (3, [1], [3, 4, 5, 6, 7, 8, 9], {1: 2, 2: 1})
    assert ids(other.trim_to(3)) == [2]


def test_after_trimming_into_an_unhashed_full_block_it_is_written_in_place():
    table = make(8)
    table.trim_to(6)
    assert table.reserve(2) == []
    assert table.slot_mapping(6, 2) == [10, 11]
    table.advance(2)


def test_after_trimming_into_a_hashed_block_the_next_append_copies_it():
    table = make_cached(8)
    hashed = table.blocks[-1]
    table.trim_to(6)
    assert [table.num_new_blocks(n) for n in (0, 1, 2, 3, 6)] == [0, 1, 1, 2, 2]
    assert append_token_slot(table) == TokenSlot(14, [(2, 3)])
    assert state(table) == (7, [1, 3], [4, 5, 6, 7, 8, 9, 2], {1: 1, 3: 1})
    assert table.pool.get_cached_block(hashed.block_hash) is hashed


def test_a_copy_of_a_hashed_tail_needs_a_block_and_evicting_the_tail_is_the_way_out():
    table = make_cached(8, num_blocks=3)
    table.trim_to(7)
    before = state(table)
    assert append_token_slot(table) is None
    assert state(table) == before == (7, [1, 2], [], {1: 1, 2: 1})
    table.pool.evict_blocks([table.blocks[-1].block_id])
    assert append_token_slot(table) == TokenSlot(11, [])


# Sharing


def test_a_fork_shares_every_block_that_holds_a_token_and_none_that_is_only_reserved():
    table = make(6)
    table.reserve(5)
    other = table.fork()
    assert state(other) == (6, [1, 2], [4, 5, 6, 7, 8, 9], {1: 2, 2: 2, 3: 1})
    assert state(table) == (6, [1, 2, 3], [4, 5, 6, 7, 8, 9], {1: 2, 2: 2, 3: 1})


def test_a_shared_partial_block_is_copied_by_the_first_writer_and_the_last_holder_writes_in_place():
    table = make(6)
    other = table.fork()
    assert [side.num_new_blocks(1) for side in (table, other)] == [1, 1]
    assert other.reserve(1) == [(2, 3)]
    assert state(other) == (6, [1, 3], [4, 5, 6, 7, 8, 9], {1: 2, 2: 1, 3: 1})
    assert [side.num_new_blocks(1) for side in (table, other)] == [0, 0]
    assert append_token_slot(table) == TokenSlot(10, [])
    assert append_token_slot(other) == TokenSlot(14, [])
    assert state(table) == (7, [1, 2], [4, 5, 6, 7, 8, 9], {1: 2, 2: 1, 3: 1})


def test_a_copied_partial_block_keeps_its_place_before_reserved_ones():
    table = make(6)
    table.reserve(5)
    table.fork()
    assert table.reserve(8) == [(2, 4)]
    assert state(table) == (6, [1, 4, 3, 5], [6, 7, 8, 9], {1: 2, 2: 1, 3: 1, 4: 1, 5: 1})
    assert table.slot_mapping(6, 8) == [18, 19, 12, 13, 14, 15, 20, 21]


def test_a_copy_takes_one_block_however_many_are_reserved():
    table = make(6)
    table.reserve(14)
    table.fork()
    assert table.num_new_blocks(1) == 1
    assert table.reserve(1) == [(2, 6)]
    assert state(table) == (6, [1, 6, 3, 4, 5], [7, 8, 9], {1: 2, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1})


def test_a_fork_at_a_block_boundary_copies_nothing():
    table = make(8)
    other = table.fork()
    assert append_token_slot(table) == TokenSlot(12, [])
    assert append_token_slot(other) == TokenSlot(16, [])
    assert held(table.pool) == {1: 2, 2: 2, 3: 1, 4: 1}


def test_reserving_nothing_copies_nothing():
    table = make(6)
    table.fork()
    assert (table.num_new_blocks(0), table.reserve(0)) == (0, [])


def test_a_copy_that_finds_no_block_changes_nothing():
    table = make(6, num_blocks=4)
    other = table.fork()
    assert other.reserve(3) is None
    assert state(other) == (6, [1, 2], [3], {1: 2, 2: 2})
    assert other.reserve(2) == [(2, 3)]
    assert table.reserve(2) == []
    assert table.reserve(3) is None


def test_three_forks_copy_twice():
    table = make(2)
    branches = [table.fork(), table.fork()]
    pairs = [append_token_slot(side).copies for side in [table, *branches]]
    assert pairs == [[(1, 2)], [(1, 3)], []]
    assert held(table.pool) == {1: 1, 2: 1, 3: 1}


def test_freeing_a_fork_leaves_the_other_whole():
    table = make(10)
    other = table.fork()
    append_token_slot(other)
    assert ids(other.free()) == [4]
    assert state(table) == (10, [1, 2, 3], [4, 5, 6, 7, 8, 9], {1: 1, 2: 1, 3: 1})
    assert ids(table.free()) == [3, 2, 1]
    assert free_ids(table.pool) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


# Freeing


def test_freeing_goes_tail_first_and_so_a_prefix_is_evicted_last():
    table = make_cached(14)
    assert ids(table.free()) == [4, 3, 2, 1]
    assert free_ids(table.pool) == [4, 5, 6, 7, 8, 9, 3, 2, 1]
    assert (table.is_freed, table.num_tokens, table.block_ids, len(table)) == (True, 0, [], 0)


def test_freeing_twice_is_a_double_free():
    table = make(5)
    table.free()
    with pytest.raises(DoubleFreeError, match=r"BlockTable.free: the table was freed before"):
        table.free()
    assert free_ids(table.pool) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    "use",
    [
        lambda table: table.reserve(1),
        lambda table: table.reserve(0),
        lambda table: table.advance(0),
        lambda table: append_token_slot(table),
        lambda table: table.num_new_blocks(1),
        lambda table: table.adopt([], 0),
        lambda table: table.cache_full_blocks([]),
        lambda table: table.trim_to(0),
        lambda table: table.fork(),
    ],
)
def test_a_freed_table_cannot_be_used(use):
    table = make(5)
    table.free()
    with pytest.raises(UseAfterFreeError, match="the table was freed"):
        use(table)
    assert state(table) == (0, [], [1, 2, 3, 4, 5, 6, 7, 8, 9], {})


# Prefix hits


def hit(pool, token_ids, num_tokens):
    """A table that begins with the cached blocks of the first num_tokens tokens."""
    hashes = hash_token_blocks(token_ids, pool.block_size)
    blocks = [pool.get_cached_block(key) for key in hashes[: -(-num_tokens // pool.block_size)]]
    pool.touch(blocks)
    table = BlockTable(pool)
    table.adopt(blocks, num_tokens)
    return table


def test_a_hit_adopts_the_cached_blocks_and_goes_on_behind_them():
    first = make_cached(10)
    second = hit(first.pool, range(8), 8)
    assert state(second) == (8, [1, 2], [4, 5, 6, 7, 8, 9], {1: 2, 2: 2, 3: 1})
    assert (second.num_cached_blocks, append_token_slot(second)) == (2, TokenSlot(16, []))


def test_a_hit_revives_freed_blocks():
    first = make_cached(8)
    first.free()
    assert free_ids(first.pool) == [3, 4, 5, 6, 7, 8, 9, 2, 1]
    second = hit(first.pool, range(8), 8)
    assert state(second) == (8, [1, 2], [3, 4, 5, 6, 7, 8, 9], {1: 1, 2: 1})


def test_a_hit_capped_at_one_token_less_copies_the_last_block_before_writing():
    first = make_cached(8)
    second = hit(first.pool, range(8), 7)
    assert (second.num_cached_blocks, second.num_new_blocks(1)) == (1, 1)
    assert second.reserve(1) == [(2, 3)]
    assert second.slot_mapping(7, 1) == [15]
    second.advance(1)
    # The copy holds the same content: both are in the index, the first is found.
    assert second.cache_full_blocks(hash_token_blocks(range(8), 4)) == 1
    assert first.pool.get_cached_block(first.blocks[-1].block_hash) is first.blocks[-1]
    assert second.blocks[-1].block_hash == first.blocks[-1].block_hash
    assert state(second) == (8, [1, 3], [4, 5, 6, 7, 8, 9], {1: 2, 2: 1, 3: 1})


def test_fresh_blocks_may_be_adopted_and_written():
    pool = BlockPool(6, 4)
    table = BlockTable(pool)
    table.adopt(pool.get_new_blocks(2), 6)
    assert state(table) == (6, [1, 2], [3, 4, 5], {1: 1, 2: 1})
    assert (table.num_cached_blocks, append_token_slot(table)) == (0, TokenSlot(10, []))


@pytest.mark.parametrize("num_tokens", [0, 4, 9])
def test_adopting_more_or_fewer_blocks_than_the_tokens_need_raises(num_tokens):
    pool = BlockPool(6, 4)
    table = BlockTable(pool)
    with pytest.raises(
        BlockTableError, match=f"BlockTable.adopt: 2 blocks for {num_tokens} tokens, which need"
    ):
        table.adopt(pool.get_new_blocks(2), num_tokens)
    assert (table.num_tokens, table.block_ids) == (0, [])


def test_only_an_empty_table_adopts():
    table = make(1)
    with pytest.raises(BlockTableError, match=r"BlockTable.adopt: the table already has 1 blocks"):
        table.adopt(table.pool.get_new_blocks(1), 4)


def test_blocks_must_be_taken_before_they_are_adopted():
    pool = BlockPool(6, 4)
    with pytest.raises(
        UseAfterFreeError, match=r"BlockTable.adopt: block 3 is free \(ref_cnt 0\); touch it first"
    ):
        BlockTable(pool).adopt([*pool.get_new_blocks(1), pool.blocks[3]], 8)


def test_blocks_of_another_pool_are_not_adopted():
    with pytest.raises(ForeignBlockError, match=r"adopt: block 1 is not of this pool"):
        BlockTable(BlockPool(6, 4)).adopt(BlockPool(6, 4).get_new_blocks(1), 4)


# Caching


def test_each_full_block_is_cached_once_as_it_fills():
    token_ids = list(range(11))
    table = make()
    cached = []
    for n in 3, 2, 3, 3:
        table.reserve(n)
        table.advance(n)
        hashes = hash_token_blocks(token_ids[: table.num_tokens], 4)
        cached.append(
            (table.cache_full_blocks(hashes), table.num_cached_blocks, table.num_full_blocks)
        )
    assert cached == [(0, 0, 0), (1, 1, 1), (1, 2, 2), (0, 2, 2)]
    assert [block.block_hash for block in table] == [*hash_token_blocks(token_ids, 4), None]


def test_only_as_many_blocks_are_cached_as_are_full_and_have_a_hash():
    hashes = hash_token_blocks(range(12), 4)
    table = make(11)
    assert (table.cache_full_blocks(hashes[:1]), table.num_cached_blocks) == (1, 1)
    assert (table.cache_full_blocks(hashes), table.num_cached_blocks) == (1, 2)
    assert [block.block_hash for block in table] == [hashes[0], hashes[1], None]


def test_a_block_refilled_after_a_trim_is_cached_again():
    table = make_cached(8)
    table.trim_to(6)
    assert table.num_cached_blocks == 1
    for _ in range(2):
        append_token_slot(table)
    hashes = hash_token_blocks([0, 1, 2, 3, 4, 5, 60, 70], 4)
    assert table.cache_full_blocks(hashes) == 1
    assert (table.block_ids, ids(table.pool.get_cached_block(key) for key in hashes)) == (
        [1, 3],
        [1, 3],
    )


def test_both_forks_may_cache_a_block_they_share():
    table = make(8)
    other = table.fork()
    hashes = hash_token_blocks(range(8), 4)
    assert (table.cache_full_blocks(hashes), other.cache_full_blocks(hashes)) == (2, 2)
    assert ids(table.pool.get_cached_block(key) for key in hashes) == [1, 2]


def test_a_fork_knows_what_was_cached():
    table = make_cached(9)
    assert table.fork().num_cached_blocks == 2


def test_hashes_of_another_sequence_are_refused():
    table = make(8)
    other = table.fork()
    table.cache_full_blocks(hash_token_blocks(range(8), 4))
    with pytest.raises(FrozenBlockError, match=r"block 1 already has another hash"):
        other.cache_full_blocks(hash_token_blocks(range(8), 4, ("another adapter",)))
    assert other.num_cached_blocks == 0


# What an append costs


@pytest.mark.parametrize("num_tokens", [5, 8])
def test_an_append_looks_at_as_many_blocks_in_a_long_table_as_in_a_short_one(num_tokens):
    class CountingList(list):
        lookups = 0

        def __getitem__(self, index):
            CountingList.lookups += 1
            return super().__getitem__(index)

        def __iter__(self):
            CountingList.lookups += len(self)
            return super().__iter__()

    counts = []
    for extra in 0, 4_000:
        table = make(num_tokens + extra, num_blocks=2_000)
        table._blocks, table._block_ids = CountingList(table._blocks), CountingList(table.block_ids)
        CountingList.lookups = 0
        assert append_token_slot(table) is not None
        counts.append(CountingList.lookups)
    assert 0 < counts[0] == counts[1] <= 6


def test_the_list_of_ids_is_kept_not_rebuilt():
    table = make(1)
    block_ids = table.packed_block_ids
    for _ in range(9):
        append_token_slot(table)
    assert table.packed_block_ids is block_ids
    assert (block_ids.tolist(), block_ids.itemsize) == ([1, 2, 3], 4)
