"""``FreeKVCacheBlockQueue``: the free blocks, each a ``KVCacheBlock``, in allocation order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from mlx_paged.core.block_hash import BlockHash
from mlx_paged.core.errors import BlockError


# eq=False: a block equals only itself. Comparing fields would follow the links of the free queue.
@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """One fixed-size block of K/V slots (vLLM's name; elsewhere: page, physical block).

    A block is free if and only if ``ref_cnt == 0``. Its ``block_hash`` is set while it is in the
    prefix index, even when it is free; it is then full and frozen (elsewhere: finalized).
    """

    block_id: int
    ref_cnt: int = 0
    """How many block tables hold the block. Also known as ``ref_count``."""
    block_hash: BlockHash | None = None
    is_null: bool = False
    """True for the placeholder block 0, which is never allocated, cached or freed."""
    is_foreign: bool = False
    """True for a block in the prefix index whose K/V came from a file, or were computed after such
    K/V. It is used like any other, and never stored in a tier. Blocks of another pool are a
    different matter (``ForeignBlockError``)."""

    # Owned by FreeKVCacheBlockQueue; None while the block is not in the queue.
    prev_free_block: KVCacheBlock | None = field(default=None, repr=False)
    next_free_block: KVCacheBlock | None = field(default=None, repr=False)

    @property
    def is_writable(self) -> bool:
        """One holder and no hash: only then may new rows be written into the block."""
        return self.ref_cnt == 1 and self.block_hash is None


class FreeKVCacheBlockQueue:
    """A doubly linked list through the blocks themselves, so that removal from the middle is O(1).

    Its name and its links (``prev_free_block``, ``next_free_block``) are those of vLLM's v1 core;
    elsewhere it is a free list or an LRU list. The queue only keeps an order: ``BlockPool`` decides
    to which end a block goes. Two sentinels, which are never taken, avoid special cases at the
    ends.

    Every operation raises BlockError if a block to remove is not in the queue, or a block to add is
    in it already.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock] = ()) -> None:
        self._head = KVCacheBlock(block_id=-1)
        self._tail = KVCacheBlock(block_id=-1)
        self._head.next_free_block = self._tail
        self._tail.prev_free_block = self._head
        self.num_free_blocks = 0
        self.append_n(blocks)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """The free blocks, the first to be taken first (vLLM: ``get_all_free_blocks``)."""
        block = _linked(self._head.next_free_block)
        while block is not self._tail:
            following = _linked(block.next_free_block)
            yield block
            block = following

    @property
    def first(self) -> KVCacheBlock | None:
        """The block that will be taken next, None when the queue is empty."""
        block = self._head.next_free_block
        return None if block is self._tail else block

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the first n blocks, in queue order: all of them, or an error. O(n)."""
        if not 0 <= n <= self.num_free_blocks:
            raise BlockError(
                f"FreeKVCacheBlockQueue.popleft_n: {n} blocks requested, "
                f"{self.num_free_blocks} are free"
            )
        blocks: list[KVCacheBlock] = []
        block = _linked(self._head.next_free_block)
        for _ in range(n):
            following = _linked(block.next_free_block)
            block.prev_free_block = block.next_free_block = None
            blocks.append(block)
            block = following
        self._head.next_free_block = block
        block.prev_free_block = self._head
        self.num_free_blocks -= n
        return blocks

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block from any place in the queue. O(1)."""
        previous, following = block.prev_free_block, block.next_free_block
        if previous is None or following is None:
            raise BlockError(
                f"FreeKVCacheBlockQueue.remove: block {block.block_id} is not in the queue"
            )
        previous.next_free_block = following
        following.prev_free_block = previous
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Put blocks at the end, in the order given: the last of them is taken last. O(n)."""
        self._link("append_n", _linked(self._tail.prev_free_block), blocks, self._tail)

    def prepend_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Put blocks at the front, in the order given: the first of them is taken next. O(n)."""
        self._link("prepend_n", self._head, blocks, _linked(self._head.next_free_block))

    def _link(
        self,
        operation: str,
        previous: KVCacheBlock,
        blocks: Iterable[KVCacheBlock],
        following: KVCacheBlock,
    ) -> None:
        for block in blocks:
            if block.next_free_block is not None:
                raise BlockError(
                    f"FreeKVCacheBlockQueue.{operation}: block {block.block_id} "
                    f"is in the queue already"
                )
            # Each block is linked on both sides at once: an error halfway leaves a whole queue.
            previous.next_free_block = block
            block.prev_free_block = previous
            block.next_free_block = following
            following.prev_free_block = block
            self.num_free_blocks += 1
            previous = block


def _linked(block: KVCacheBlock | None) -> KVCacheBlock:
    """The target of a link inside the queue, which is never None."""
    assert block is not None, "the free queue ends before its sentinel"
    return block
