"""The integrity checks find planted corruption of every kind, and print the sum that failed."""

import pytest
from paged_testing.integrity import IntegrityError, check_pool_integrity, check_table_integrity

from mlx_paged.core import BlockPool, BlockTable, KVCacheBlock

A, B, C = b"\xaa" * 32, b"\xbb" * 32, b"\xcc" * 32


def healthy():
    """Free: 5, 6, 7, then cached 3, 2. Held: 1 (twice, hashed) and 4. Blocks 2 and 3 have the same
    hash.
    """
    pool = BlockPool(8, 4)
    first, second = BlockTable(pool), BlockTable(pool)
    first.reserve(8)
    first.advance(8)
    first.cache_full_blocks([A, B])
    second.reserve(4)
    second.advance(4)
    pool.cache_full_blocks(second.blocks, [B], 0, 1)
    second.free()
    first.trim_to(4)
    branch = first.fork()
    branch.reserve(1)
    check_pool_integrity(pool, [first, branch])
    check_table_integrity(first)
    check_table_integrity(branch)
    blocks = [block.block_id for block in pool.free_block_queue]
    assert (blocks, first.block_ids, branch.block_ids) == ([5, 6, 7, 3, 2], [1], [1, 4])
    return pool, first, branch


def swap(queue, front, back):
    queue.remove(back)
    queue.remove(front)
    queue.prepend_n([back])
    queue.append_n([front])


def unlink_forward(blocks):
    blocks[5].next_free_block = blocks[7]


def close_a_ring(blocks):
    blocks[7].next_free_block, blocks[5].prev_free_block = blocks[5], blocks[7]


def lose_the_end(pool):
    pool.free_block_queue._tail.prev_free_block.next_free_block = None


def link_a_held_block(blocks):
    blocks[4].prev_free_block, blocks[4].next_free_block = blocks[5], blocks[6]


def queue_a_held_block(pool):
    pool.free_block_queue.prepend_n([pool.blocks[4]])


def queue_a_foreign_block(pool):
    pool.free_block_queue.prepend_n([KVCacheBlock(5)])


def lose_a_free_block(pool):
    pool.free_block_queue.remove(pool.blocks[6])


def hash_outside_the_index(pool):
    pool.blocks[4].block_hash = C


def index_twice(pool):
    pool.prefix_index._others[B][7] = pool.blocks[2]


def index_a_foreign_block(pool):
    pool.prefix_index.add(KVCacheBlock(6, block_hash=C))


def index_under_another_hash(pool):
    pool.prefix_index._first[C] = pool.prefix_index._first.pop(A)


def change_a_hash(pool):
    pool.blocks[1].block_hash = C


def keep_an_empty_entry(pool):
    pool.prefix_index._others[A] = {}


def keep_a_headless_entry(pool):
    del pool.prefix_index._first[B]


def set_attribute(name, value, of=lambda pool: pool):
    def plant(pool):
        setattr(of(pool), name, value)

    return plant


POOL_CORRUPTION = {
    r"free queue: -1 -> 5 -> back to 7": lambda pool: close_a_ring(pool.blocks),
    r"free queue: 5 -> 7 -> back to 6": lambda pool: unlink_forward(pool.blocks),
    r"free queue: it ends after block 2, after 5 blocks, before its tail": lose_the_end,
    r"free queue: uncached block 6 comes after cached block 2": (
        lambda pool: swap(pool.free_block_queue, pool.blocks[5], pool.blocks[2])
    ),
    r"free queue: block 5 is the null block or not of this pool": queue_a_foreign_block,
    r"free queue: block 0 is the null block": lambda pool: pool.free_block_queue.prepend_n(
        [pool.null_block]
    ),
    r"free queue: a block is linked outside its ends": lambda pool: setattr(
        pool.free_block_queue._tail, "next_free_block", pool.blocks[4]
    ),
    r"num_free_blocks 4 != 5 blocks in the free queue": (
        lambda pool: setattr(pool.free_block_queue, "num_free_blocks", 4)
    ),
    r"block 4 has ref_cnt 1, in the free queue: True": queue_a_held_block,
    r"block 6 has ref_cnt 0, in the free queue: False": lose_a_free_block,
    r"block 4 has free-queue links: True, in the free queue: False": lambda pool: link_a_held_block(
        pool.blocks
    ),
    r"block 5 has ref_cnt 1, in the free queue: True": set_attribute(
        "ref_cnt", 1, lambda pool: pool.blocks[5]
    ),
    r"block 4 has ref_cnt 0, in the free queue: False": set_attribute(
        "ref_cnt", 0, lambda pool: pool.blocks[4]
    ),
    r"block 4 has ref_cnt -1 < 0": set_attribute("ref_cnt", -1, lambda pool: pool.blocks[4]),
    r"the null block has ref_cnt 1, hashed: False": set_attribute(
        "ref_cnt", 1, lambda pool: pool.null_block
    ),
    r"the null block has ref_cnt 0, hashed: True": set_attribute(
        "block_hash", C, lambda pool: pool.null_block
    ),
    r"block 0 has is_null False; block 0, and only it": set_attribute(
        "is_null", False, lambda pool: pool.null_block
    ),
    r"block 4 has is_null True; block 0, and only it": set_attribute(
        "is_null", True, lambda pool: pool.blocks[4]
    ),
    r"blocks\[4\] has block_id 5": set_attribute("block_id", 5, lambda pool: pool.blocks[4]),
    r"prefix index: 4 blocks have a hash, 3 are found; \[4\]": hash_outside_the_index,
    r"prefix index: bbbbbbbb -> block 2, twice": index_twice,
    r"prefix index: cccccccc -> block 6, the null block or not of this pool": index_a_foreign_block,
    r"prefix index: cccccccc -> block 1, whose hash is aaaaaaaa": index_under_another_hash,
    r"prefix index: aaaaaaaa -> block 1, whose hash is cccccccc": change_a_hash,
    r"prefix index: aaaaaaaa -> block 1, whose hash is None": (
        set_attribute("block_hash", None, lambda pool: pool.blocks[1])
    ),
    r"num_cached_blocks 4 != 3 blocks in the prefix index": (
        set_attribute("num_blocks", 4, lambda pool: pool.prefix_index)
    ),
    r"prefix index: 1 entries for further blocks without any, or without a first: "
    r"\['aaaaaaaa'\]": keep_an_empty_entry,
    r"prefix index: 3 blocks have a hash, 1 are found; \[2, 3\]": keep_a_headless_entry,
}


@pytest.mark.parametrize("message", POOL_CORRUPTION)
def test_corruption_of_a_pool_is_found(message):
    pool, *tables = healthy()
    POOL_CORRUPTION[message](pool)
    with pytest.raises(IntegrityError, match=f"^check_integrity: {message}"):
        check_pool_integrity(pool, tables)


def test_a_wrong_sum_is_printed():
    class Miscounting(BlockPool):
        num_used_blocks = 5

    with pytest.raises(
        IntegrityError,
        match=r"free \+ used = 3 \+ 0 by counting, 3 \+ 5 by the pool, num_usable_blocks 3",
    ):
        check_pool_integrity(Miscounting(4, 16))


@pytest.mark.parametrize(
    ("holders", "message"),
    [
        (lambda first, branch: [first], "block 1 has ref_cnt 2, and is held 1 times"),
        (
            lambda first, branch: [first, branch, branch],
            "block 1 has ref_cnt 2, and is held 3 times",
        ),
        (
            lambda first, branch: [first, branch, [first.pool.blocks[5]]],
            "block 5 has ref_cnt 0, and is held 1 times",
        ),
        (
            lambda first, branch: [first, branch, [KVCacheBlock(6)]],
            "block 6 is held and not of this pool",
        ),
    ],
)
def test_a_reference_too_many_or_too_few_is_found(holders, message):
    pool, first, branch = healthy()
    with pytest.raises(IntegrityError, match=message):
        check_pool_integrity(pool, holders(first, branch))
    check_pool_integrity(pool, [first, branch, [pool.null_block]])
    check_pool_integrity(pool)


TABLE_CORRUPTION = {
    r"block table: block_ids \[1, 5\] != ids of its blocks \[1, 4\]": lambda table: (
        table._block_ids.__setitem__(1, 5)
    ),
    r"block table: 2 blocks, 1 different ones: \[1, 1\]": lambda table: (
        table._blocks.__setitem__(1, table._blocks[0]),
        table._block_ids.__setitem__(1, 1),
    ),
    r"block table: 9 tokens in 2 \* 4 = 8 slots": set_attribute("num_held_tokens", 9),
    r"block table: -1 tokens in 2 \* 4 = 8 slots": set_attribute("num_held_tokens", -1),
    r"block table: 2 blocks cached, 4 // 4 = 1 are full": set_attribute("num_cached_blocks", 2),
    r"block table: freed, and holds 2 blocks, 4 tokens": set_attribute("is_freed", True),
    r"block table: block 4 is in the table, its ref_cnt is 0": lambda table: table.pool.free_blocks(
        [table.blocks[-1]]
    ),
    r"block table: empty block 4 has ref_cnt 2, hashed: False": lambda table: table.pool.touch(
        [table.blocks[-1]]
    ),
    r"block table: empty block 4 has ref_cnt 1, hashed: True": (
        lambda table: table.pool.cache_full_blocks(table.blocks, [A, C], 1, 2)
    ),
    r"block table: block 4 is the null block or not of this pool": (
        lambda table: table._blocks.__setitem__(1, KVCacheBlock(4, ref_cnt=1))
    ),
}


@pytest.mark.parametrize("message", TABLE_CORRUPTION)
def test_corruption_of_a_table_is_found(message):
    _, _, branch = healthy()
    TABLE_CORRUPTION[message](branch)
    with pytest.raises(IntegrityError, match=f"^check_integrity: {message}"):
        check_table_integrity(branch)
