"""``KVCacheBlock``: what is known about one block, whose bytes lie in the slabs."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlx_paged.core.block_hash import BlockHash


# eq=False: a block equals only itself. Comparing fields would follow the links of the free queue.
@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """One fixed-size block of K/V slots (vLLM's name; elsewhere: page, physical block).

    A block is free if and only if ``ref_cnt == 0``. Its ``block_hash`` is set while the prefix
    index knows it, even when it is free; its content is then full and frozen (elsewhere:
    finalized).
    """

    block_id: int
    ref_cnt: int = 0
    """How many block tables hold the block. Also known as ``ref_count``."""
    block_hash: BlockHash | None = None
    is_null: bool = False
    """True for the placeholder block 0, which is never allocated, cached or freed."""

    # Owned by FreeKVCacheBlockQueue; None while the block is not in the queue.
    prev_free_block: KVCacheBlock | None = field(default=None, repr=False)
    next_free_block: KVCacheBlock | None = field(default=None, repr=False)

    @property
    def is_writable(self) -> bool:
        """One holder and no hash: only then may new rows be written into the block."""
        return self.ref_cnt == 1 and self.block_hash is None
