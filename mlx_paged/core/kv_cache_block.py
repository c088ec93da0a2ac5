"""`KVCacheBlock`: what is known about one block. It owns no bytes; those lie in the slabs, at row
`block_id`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mlx_paged.core.block_hash import BlockHash


@dataclass(
    slots=True, eq=False
)  # eq=False: a block is itself; comparing free-list links would walk the whole list.
class KVCacheBlock:
    """One fixed-size block of K/V slots (names as in vLLM's v1 core; elsewhere: page, physical
    block).

    A block is free if and only if `ref_cnt == 0`. `block_hash` is set while the prefix index knows
    the block: its content is then full and frozen (elsewhere: finalized), also while it is free.
    """

    block_id: int
    ref_cnt: int = 0
    """How many block tables hold the block. Also known as `ref_count`."""
    block_hash: BlockHash | None = None
    is_null: bool = False
    """True for the placeholder block 0, which is never allocated, cached or freed."""

    # Owned by FreeKVCacheBlockQueue; None while the block is not in the queue.
    prev_free_block: KVCacheBlock | None = field(default=None, repr=False)
    next_free_block: KVCacheBlock | None = field(default=None, repr=False)

    @property
    def is_writable(self) -> bool:
        """One holder and no hash: the only state in which new rows may be written into the block."""
        return self.ref_cnt == 1 and self.block_hash is None
