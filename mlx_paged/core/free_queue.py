"""`FreeKVCacheBlockQueue`: the free blocks, in the order in which they will be taken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mlx_paged.core.errors import BlockError
from mlx_paged.core.kv_cache_block import KVCacheBlock


class FreeKVCacheBlockQueue:
    """A doubly linked list through the blocks themselves, so that a block leaves the middle in
    O(1).

    Name and links (`prev_free_block`, `next_free_block`) as in vLLM's v1 core; elsewhere: free
    list, LRU list. The queue only keeps an order; which end a block goes to is decided by
    `BlockPool`. Two sentinels, never taken, make every real block an inner one.

    Raises (all verbs): BlockError, when a block that is not in the queue is taken from it, or one
    that is in it is put in again."""

    def __init__(self, blocks: Iterable[KVCacheBlock] = ()) -> None:
        self._head = KVCacheBlock(block_id=-1)
        self._tail = KVCacheBlock(block_id=-1)
        self._head.next_free_block = self._tail
        self._tail.prev_free_block = self._head
        self.num_free_blocks = 0
        self.append_n(blocks)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """The free blocks, the first to be taken first (vLLM: `get_all_free_blocks`)."""
        block = _linked(self._head.next_free_block)
        while block is not self._tail:
            following = _linked(block.next_free_block)
            yield block
            block = following

    def __reversed__(self) -> Iterator[KVCacheBlock]:
        block = _linked(self._tail.prev_free_block)
        while block is not self._head:
            previous = _linked(block.prev_free_block)
            yield block
            block = previous

    @property
    def first(self) -> KVCacheBlock | None:
        """The block that `popleft` would take, None when the queue is empty."""
        block = self._head.next_free_block
        return None if block is self._tail else block

    def popleft(self) -> KVCacheBlock:
        """Take the first block. O(1)."""
        block = self.first
        if block is None:
            raise BlockError("FreeKVCacheBlockQueue.popleft: the queue is empty")
        self.remove(block)
        return block

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the first n blocks, in queue order. O(n); all or an error."""
        if not 0 <= n <= self.num_free_blocks:
            raise BlockError(
                f"FreeKVCacheBlockQueue.popleft_n: {n} blocks wanted, {self.num_free_blocks} are free"
            )
        blocks: list[KVCacheBlock] = []
        block = _linked(self._head.next_free_block)
        for _ in range(n):
            following = block.next_free_block
            assert following is not None, "the free queue ends before its tail"
            block.prev_free_block = block.next_free_block = None
            blocks.append(block)
            block = following
        self._head.next_free_block = block
        block.prev_free_block = self._head
        self.num_free_blocks -= n
        return blocks

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block from wherever it is. O(1)."""
        previous, following = block.prev_free_block, block.next_free_block
        if previous is None or following is None:
            raise BlockError(
                f"FreeKVCacheBlockQueue.remove: block {block.block_id} is not in the queue"
            )
        previous.next_free_block = following
        following.prev_free_block = previous
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Put a block at the end: it is taken last. O(1)."""
        self._link("append", _linked(self._tail.prev_free_block), [block], self._tail)

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Put blocks at the end, in the order given. O(n)."""
        self._link("append_n", _linked(self._tail.prev_free_block), blocks, self._tail)

    def prepend(self, block: KVCacheBlock) -> None:
        """Put a block at the front: it is taken next. O(1)."""
        self._link("prepend", self._head, [block], _linked(self._head.next_free_block))

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
                    f"FreeKVCacheBlockQueue.{operation}: block {block.block_id} is in the queue already"
                )
            # Close the list behind each block: an error in the middle leaves a whole queue.
            previous.next_free_block = block
            block.prev_free_block = previous
            block.next_free_block = following
            following.prev_free_block = block
            self.num_free_blocks += 1
            previous = block


def _linked(block: KVCacheBlock | None) -> KVCacheBlock:
    """What a link within the queue points to; only a block outside it has none, or a far side."""
    assert block is not None, "the free queue ends before its sentinel"
    return block
