"""``BlockPool``: hands out blocks, counts their holders and finds full blocks by their hash
(``PrefixIndex``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from mlx_paged.core.block_hash import BlockHash
from mlx_paged.core.errors import (
    DoubleFreeError,
    ForeignBlockError,
    FrozenBlockError,
    UseAfterFreeError,
)
from mlx_paged.core.free_queue import FreeKVCacheBlockQueue, KVCacheBlock


class PrefixIndex:
    """{block_hash: blocks that hold it}, all operations O(1) (vLLM:
    ``cached_block_hash_to_block``).

    Two requests that run at the same time may compute blocks with the same content. Both blocks
    stay in the index, because ids in a block table never change. A lookup returns the one that was
    added first, and after its eviction the next one.
    """

    def __init__(self) -> None:
        self._first: dict[BlockHash, KVCacheBlock] = {}
        # {block_hash: {block_id: block}}, all blocks but the first; only for the few hashes that
        # several blocks have.
        self._others: dict[BlockHash, dict[int, KVCacheBlock]] = {}
        self.num_blocks = 0

    def __iter__(self) -> Iterator[tuple[BlockHash, KVCacheBlock]]:
        """Every (hash, block) pair; blocks with the same hash in the order they were added."""
        for block_hash, block in self._first.items():
            yield block_hash, block
            for other in self._others.get(block_hash, {}).values():
                yield block_hash, other

    def get(self, block_hash: BlockHash) -> KVCacheBlock | None:
        """The block that was added first with this hash, None on a miss."""
        return self._first.get(block_hash)

    def get_storable(self, block_hash: BlockHash) -> KVCacheBlock | None:
        """The block that was added first with this hash, of those that are not foreign."""
        first = self._first.get(block_hash)
        if first is None or not first.is_foreign:
            return first
        others = self._others.get(block_hash, {}).values()
        return next((block for block in others if not block.is_foreign), None)

    def add(self, block: KVCacheBlock) -> None:
        """Add a block under its ``block_hash``."""
        block_hash = block.block_hash
        assert block_hash is not None, "a block enters the index under its hash"
        first = self._first.setdefault(block_hash, block)
        if first is not block:
            self._others.setdefault(block_hash, {})[block.block_id] = block
        self.num_blocks += 1

    def remove(self, block: KVCacheBlock) -> None:
        """Remove this block only: another block with the same hash can still be found."""
        block_hash = block.block_hash
        assert block_hash is not None, "a block keeps its hash until it has left the index"
        others = self._others.get(block_hash)
        if self._first[block_hash] is not block:
            del self._others[block_hash][block.block_id]
        elif others:
            self._first[block_hash] = others.pop(next(iter(others)))
        else:
            del self._first[block_hash]
        if others is not None and not others:
            del self._others[block_hash]
        self.num_blocks -= 1

    def clear(self) -> None:
        """Remove all blocks."""
        self._first.clear()
        self._others.clear()
        self.num_blocks = 0


class BlockPool:
    """All blocks of one slab: free queue, reference counts, prefix index. It stores neither K/V nor
    tokens.

    The method is PagedAttention's (Kwon et al. 2023), the names are those of vLLM's v1 core.
    Elsewhere: block allocator, free-list allocator, page allocator (``allocate``, ``alloc_n``:
    ``get_new_blocks``; ``free``: ``free_blocks``).

    The free queue holds first the blocks without cached content, then the cached ones, least
    recently freed first. So no cached block is evicted while an empty one is left, and cached
    blocks are evicted in vLLM's order.

    Block 0 is the null block, a placeholder that is never allocated; ``touch``, ``free_blocks`` and
    ``cache_full_blocks`` skip it. Not thread-safe: one thread at a time.

    Args:
        num_blocks: blocks in the pool, the null block included, as in the slab.
        block_size: token slots in a block.

    Raises:
        ValueError: for less than one block or slot.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1:
            raise ValueError(
                f"BlockPool: num_blocks must be at least 1 (the null block), got {num_blocks}"
            )
        if block_size < 1:
            raise ValueError(f"BlockPool: block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.num_evictions = 0
        """Cached blocks that were evicted since the pool was made."""
        self.on_eviction: Callable[[BlockHash], None] | None = None
        """Called with the hash of an evicted block, if no other block has it."""
        self.reset(num_blocks)

    def reset(self, num_blocks: int) -> None:
        """Start over with ``num_blocks`` empty blocks, the null block included. Existing block
        tables become invalid and must be dropped.
        """
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks[1:])
        self.prefix_index = PrefixIndex()
        self._num_free_cached_blocks = 0

    @property
    def num_blocks(self) -> int:
        """All blocks, the null block included, as in the slab."""
        return len(self.blocks)

    @property
    def num_usable_blocks(self) -> int:
        """The blocks that sequences can hold: all but the null block."""
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that ``get_new_blocks`` can hand out, cached ones included."""
        return self.free_block_queue.num_free_blocks

    @property
    def num_empty_blocks(self) -> int:
        """Free blocks without cached content, which are taken before anything is evicted."""
        return self.num_free_blocks - self._num_free_cached_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks with a reference."""
        return self.num_usable_blocks - self.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks in the prefix index, free or in use."""
        return self.prefix_index.num_blocks

    def get_block(self, block_id: int) -> KVCacheBlock:
        """The block with this id. Raises ForeignBlockError for an id out of range."""
        if not 0 <= block_id < len(self.blocks):
            raise ForeignBlockError(
                f"BlockPool.get_block: block {block_id} is not of this pool of "
                f"{len(self.blocks)} blocks"
            )
        return self.blocks[block_id]

    def get_new_blocks(self, n: int, after: int | None = None) -> list[KVCacheBlock] | None:
        """Take n blocks with ``ref_cnt`` 1 and no hash, or return None and change nothing. O(n).

        Adjacent ids are preferred, because a run of them is read without a gather, but only among
        blocks without cached content: first the blocks that follow ``after`` (the id of the
        previous block in the table), then the queue's first block and those that follow it, and so
        on. When no empty block is left, cached ones are evicted in queue order.

        Raises:
            ValueError: for n < 0.
            ForeignBlockError: for an ``after`` out of range.
        """
        if n < 0:
            raise ValueError(f"BlockPool.get_new_blocks: n must be at least 0, got {n}")
        blocks = self.blocks
        num_blocks = len(blocks)
        if after is not None and not 0 <= after < num_blocks:
            raise ForeignBlockError(
                f"BlockPool.get_new_blocks: after={after} is not one of {num_blocks} blocks"
            )
        queue = self.free_block_queue
        if n > queue.num_free_blocks:
            return None
        new_blocks: list[KVCacheBlock] = []
        next_id = num_blocks if after is None else after + 1
        while len(new_blocks) < n:
            block = blocks[next_id] if next_id < num_blocks else None
            if block is None or block.ref_cnt or block.block_hash is not None:
                # The run has ended: start the next one.
                block = queue.first
                if block is None or block.block_hash is not None:
                    break  # All blocks after it are cached as well.
            queue.remove(block)
            block.ref_cnt = 1
            new_blocks.append(block)
            next_id = block.block_id + 1
        for block in queue.popleft_n(n - len(new_blocks)):
            self._uncache(block)
            block.ref_cnt = 1
            new_blocks.append(block)
        return new_blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add one reference to each block, for a prefix hit or a fork. A free cached block leaves
        the queue, O(1) each.

        Raises (nothing has changed then):
            ForeignBlockError: for a block of another pool.
            UseAfterFreeError: for a free block without a hash, whose content is lost.
        """
        blocks = list(blocks)
        for block in blocks:
            self.check_own("BlockPool.touch", block)
            if block.ref_cnt == 0 and block.block_hash is None and not block.is_null:
                raise UseAfterFreeError(
                    f"BlockPool.touch: block {block.block_id} is free and holds nothing cached"
                )
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
                self._num_free_cached_blocks -= 1
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> list[KVCacheBlock]:
        """Drop one reference to each block; return those that became free, in the order given.

        Pass the tail of a sequence first, so that a shared prefix is evicted last. Blocks with a
        hash that become free go to the end of the queue in the order given. Those without go to its
        front in reverse order, so that the ids of a run ascend again.

        Raises (nothing has changed then):
            ForeignBlockError: for a block of another pool.
            DoubleFreeError: for a block with fewer references than occurrences.
        """
        released: list[KVCacheBlock] = []
        freed: list[KVCacheBlock] = []
        try:
            for block in ordered_blocks:
                self.check_own("BlockPool.free_blocks", block)
                if block.is_null:
                    continue
                if block.ref_cnt == 0:
                    raise DoubleFreeError(
                        f"BlockPool.free_blocks: block {block.block_id} is free already (ref_cnt 0)"
                    )
                block.ref_cnt -= 1
                released.append(block)
                if block.ref_cnt == 0:
                    freed.append(block)
        except BaseException:  # The caller's iterable may raise anything.
            for block in released:
                block.ref_cnt += 1
            raise
        cached = [block for block in freed if block.block_hash is not None]
        self.free_block_queue.append_n(cached)
        self.free_block_queue.prepend_n(
            [block for block in reversed(freed) if block.block_hash is None]
        )
        self._num_free_cached_blocks += len(cached)
        return freed

    def get_cached_block(self, block_hash: BlockHash) -> KVCacheBlock | None:
        """The block that holds this content, None on a miss. It may be free: ``touch`` it first."""
        return self.prefix_index.get(block_hash)

    def get_storable_block(self, block_hash: BlockHash) -> KVCacheBlock | None:
        """A block that holds this content and may go to a tier, because it is not foreign; None if
        there is none.
        """
        return self.prefix_index.get_storable(block_hash)

    def cache_full_blocks(
        self,
        blocks: Sequence[KVCacheBlock],
        block_hashes: Sequence[BlockHash],
        num_cached_blocks: int,
        num_full_blocks: int,
        is_foreign: bool = False,
    ) -> None:
        """Enter ``blocks[num_cached_blocks:num_full_blocks]`` into the prefix index, which freezes
        them.

        A block that already has the same hash is skipped: two forks may enter a shared block.

        Args:
            blocks: all blocks of a sequence, first token first.
            block_hashes: the hash of each, at least ``num_full_blocks`` of them.
            num_cached_blocks: how many blocks are in the index already.
            num_full_blocks: how many blocks are full. The pool can't check this;
                ``BlockTable.cache_full_blocks`` does.
            is_foreign: whether the new ones hold foreign K/V (:class:`KVCacheBlock`).

        Raises (nothing has changed then):
            ValueError: unless 0 <= num_cached_blocks <= num_full_blocks <= len(blocks),
                len(block_hashes).
            ForeignBlockError: for a block of another pool.
            UseAfterFreeError: for a block without a reference.
            FrozenBlockError: for a block that has another hash.
        """
        if not 0 <= num_cached_blocks <= num_full_blocks <= min(len(blocks), len(block_hashes)):
            raise ValueError(
                f"BlockPool.cache_full_blocks: blocks {num_cached_blocks} to {num_full_blocks} "
                f"of {len(blocks)} blocks and {len(block_hashes)} hashes"
            )
        entering: dict[int, tuple[KVCacheBlock, BlockHash]] = {}
        for index in range(num_cached_blocks, num_full_blocks):
            block, block_hash = blocks[index], block_hashes[index]
            self.check_own("BlockPool.cache_full_blocks", block)
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                raise UseAfterFreeError(
                    f"BlockPool.cache_full_blocks: block {block.block_id} is free (ref_cnt 0)"
                )
            if block.block_hash is None and block.block_id not in entering:
                entering[block.block_id] = (block, block_hash)
            elif block_hash != (block.block_hash or entering[block.block_id][1]):
                raise FrozenBlockError(
                    f"BlockPool.cache_full_blocks: block {block.block_id} already has another hash"
                )
        for block, block_hash in entering.values():
            block.block_hash = block_hash
            block.is_foreign = is_foreign
            self.prefix_index.add(block)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Remove these blocks from the prefix index, whether free or in use. A block that is not in
        it is skipped.

        A block in use stays in use, and its only holder may write into it again: this helps when
        the copy-on-write of a hashed tail finds no free block. A free one moves to the front of the
        queue.

        Raises (nothing has changed then):
            ForeignBlockError: for an id out of range.
        """
        cached = [
            block
            for block in map(self.get_block, dict.fromkeys(block_ids))
            if block.block_hash is not None
        ]
        for block in cached:
            self._uncache(block)
        free = [block for block in cached if block.ref_cnt == 0]
        for block in free:
            self.free_block_queue.remove(block)
        self.free_block_queue.prepend_n(free)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix index, or return False and change nothing while any block is in use (as
        vLLM does).

        The free queue is sorted by id again, so that runs are as long as in a new pool.
        """
        if self.num_used_blocks:
            return False
        self.prefix_index.clear()
        self.free_block_queue.popleft_n(self.num_free_blocks)
        for block in self.blocks:
            block.block_hash = None
            block.is_foreign = False
        self.free_block_queue.append_n(self.blocks[1:])
        self._num_free_cached_blocks = 0
        return True

    def grow(self, num_new_blocks: int) -> None:
        """Add empty blocks, whose ids continue the old ones, at the front of the free queue. Grow
        the slabs first.

        Raises:
            ValueError: for a negative number.
        """
        if num_new_blocks < 0:
            raise ValueError(
                f"BlockPool.grow: num_new_blocks must be at least 0, got {num_new_blocks}"
            )
        num_blocks = len(self.blocks)
        new_blocks = [KVCacheBlock(num_blocks + index) for index in range(num_new_blocks)]
        self.blocks += new_blocks
        self.free_block_queue.prepend_n(new_blocks)

    def shrink_to(self, num_blocks: int) -> bool:
        """Drop the blocks with id >= num_blocks, or return False and change nothing if one of them
        is in use.

        Cached ones among them are evicted. Shrink the slabs afterwards.

        Raises:
            ValueError: unless 1 <= num_blocks <= the present number.
        """
        if not 1 <= num_blocks <= len(self.blocks):
            raise ValueError(
                f"BlockPool.shrink_to: num_blocks must be 1..{len(self.blocks)}, got {num_blocks}"
            )
        dropped = self.blocks[num_blocks:]
        if any(block.ref_cnt for block in dropped):
            return False
        for block in dropped:
            if block.block_hash is not None:
                self._uncache(block)
            self.free_block_queue.remove(block)
        del self.blocks[num_blocks:]
        return True

    def shrink_by(self, num_blocks: int) -> list[tuple[int, int]]:
        """Drop free blocks, those that are taken next, whatever their ids; other blocks move to
        lower ids in their place. Copy them, and shrink the slabs afterwards.

        Returns:
            Old and new ids of the blocks that have moved, in any order. Block tables keep their
            blocks, and have to read the ids again.

        Raises:
            ValueError: for a negative number, or more than are free.
        """
        if not 0 <= num_blocks <= self.num_free_blocks:
            raise ValueError(
                f"BlockPool.shrink_by: num_blocks must be 0..{self.num_free_blocks}, "
                f"got {num_blocks}"
            )
        dropped = self.free_block_queue.popleft_n(num_blocks)
        for block in dropped:
            if block.block_hash is not None:
                self._uncache(block)
        end = len(self.blocks) - num_blocks
        ids = {block.block_id for block in dropped}
        moved = [block for block in self.blocks[end:] if block.block_id not in ids]
        moves = []
        for block, block_id in zip(moved, sorted(each for each in ids if each < end), strict=True):
            moves.append((block.block_id, block_id))
            self._move(block, block_id)
        del self.blocks[end:]
        return moves

    def _move(self, block: KVCacheBlock, block_id: int) -> None:
        is_cached = block.block_hash is not None
        if is_cached:
            self.prefix_index.remove(block)
        block.block_id, self.blocks[block_id] = block_id, block
        if is_cached:
            self.prefix_index.add(block)

    def check_own(self, operation: str, block: KVCacheBlock) -> None:
        """Raise ForeignBlockError, in the name of ``operation``, for a block of another pool."""
        if not (0 <= block.block_id < len(self.blocks) and self.blocks[block.block_id] is block):
            raise ForeignBlockError(
                f"{operation}: block {block.block_id} is not of this pool of "
                f"{len(self.blocks)} blocks"
            )

    def _uncache(self, block: KVCacheBlock) -> None:
        block_hash = block.block_hash
        self.prefix_index.remove(block)
        block.block_hash = None
        block.is_foreign = False
        self._num_free_cached_blocks -= block.ref_cnt == 0
        self.num_evictions += 1
        is_gone = block_hash is not None and self.get_cached_block(block_hash) is None
        if self.on_eviction is not None and block_hash and is_gone:
            self.on_eviction(block_hash)
