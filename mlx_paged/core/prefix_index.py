"""``PrefixIndex``: which blocks hold the content of a given hash."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_paged.core.block_hash import BlockHash
from mlx_paged.core.free_queue import KVCacheBlock


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
