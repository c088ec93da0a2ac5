"""The errors of the bookkeeping: one family, told apart by name, each message beginning with its
operation.
"""

import pytest

from mlx_paged import core
from mlx_paged.core import BlockError, BlockPool, BlockTable, FreeKVCacheBlockQueue, KVCacheBlock

NAMES = [
    "BlockTableError",
    "DoubleFreeError",
    "ForeignBlockError",
    "FrozenBlockError",
    "UseAfterFreeError",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_error_is_a_block_error(name):
    assert issubclass(getattr(core, name), BlockError)


def test_every_public_name_exists_and_every_error_is_public():
    assert all(hasattr(core, name) for name in core.__all__)
    assert sorted(name for name in core.__all__ if name.endswith("Error")) == sorted(
        ["BlockError", *NAMES]
    )


def full_table():
    table = BlockTable(BlockPool(4, 2))
    table.reserve(2)
    table.advance(2)
    return table


def half_filled_fork():
    table = full_table()
    table.trim_to(1)
    return table.fork()


def freed_table():
    table = full_table()
    table.free()
    return table


MESSAGES = {
    "BlockPool.get_block: block 9 is not of this pool of 4 blocks": lambda: BlockPool(
        4, 2
    ).get_block(9),
    "BlockPool.get_new_blocks: after=4 is not one of 4 blocks": lambda: BlockPool(
        4, 2
    ).get_new_blocks(1, after=4),
    "BlockPool.touch: block 9 is not of this pool of 4 blocks": lambda: BlockPool(4, 2).touch(
        [KVCacheBlock(9)]
    ),
    "BlockPool.touch: block 1 is free and holds nothing cached": lambda: (
        pool := BlockPool(4, 2)
    ).touch([pool.blocks[1]]),
    "BlockPool.free_blocks: block 1 is free already (ref_cnt 0)": lambda: (
        pool := BlockPool(4, 2)
    ).free_blocks([pool.blocks[1]]),
    "BlockTable.trim_to: length 3 of a table of 2 tokens": lambda: full_table().trim_to(3),
    "BlockTable.advance: 1 tokens, but 0 slots are reserved": lambda: full_table().advance(1),
    "BlockTable.slot_mapping: tokens 2 to 3 of a table of 1 blocks of 2 = 2 slots": lambda: (
        full_table().slot_mapping(2, 1)
    ),
    "BlockTable.advance: 1 tokens into block 1, which is frozen (ref_cnt 2, hashed: False); "
    "reserve first": lambda: half_filled_fork().advance(1),
    "BlockTable.free: the table was freed before": lambda: freed_table().free(),
    "BlockTable.reserve: the table was freed": lambda: freed_table().reserve(1),
    "FreeKVCacheBlockQueue.popleft_n: 1 blocks requested, 0 are free": lambda: (
        FreeKVCacheBlockQueue().popleft_n(1)
    ),
}


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_opens_with_the_operation_and_says_the_numbers(message):
    with pytest.raises(BlockError) as caught:
        MESSAGES[message]()
    assert str(caught.value) == message
