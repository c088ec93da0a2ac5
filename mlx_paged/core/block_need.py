"""``BlockNeed``: how many blocks sequences need, by arithmetic alone."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence

from mlx_paged.core.computed_blocks import ComputedBlocks
from mlx_paged.core.free_queue import KVCacheBlock
from mlx_paged.core.retention import Retention


class BlockNeed:
    """Computes the blocks that sequences need, where each group of layers has its own retention.

    Args:
        retentions: one per group of layers.
        block_size: tokens of a block.
        whole_run: tokens that a step never cuts, except where windows cut all steps.
    """

    def __init__(
        self, retentions: Sequence[Retention], block_size: int, whole_run: int = 1
    ) -> None:
        self._whole_run = whole_run
        self._retentions = retentions
        self._block_size = block_size

    def max_num_held_blocks(self, num_tokens: int) -> int:
        """The peak number of blocks of a request that grows to ``num_tokens`` tokens, if its steps
        are limited to :meth:`KVCacheManager.max_fitting` tokens.
        """
        num_blocks = 0
        for retention in self._retentions:
            num_held = retention.max_num_held(num_tokens)
            if not retention.cuts_runs:
                num_held = min(num_tokens, num_held + self._whole_run - 1)
            num_blocks += -(-num_held // self._block_size)
        return num_blocks

    def max_num_tokens(self, num_blocks: int) -> int:
        """The most tokens of a request that fits in ``num_blocks`` blocks; ``sys.maxsize`` if any
        number fits.
        """
        if self.max_num_held_blocks(sys.maxsize) <= num_blocks:
            return sys.maxsize
        candidates = range(1, num_blocks * self._block_size + 1)
        return bisect_right(candidates, num_blocks, key=self.max_num_held_blocks)

    def num_blocks_to_begin(self, computed: ComputedBlocks, num_new_tokens: int) -> int:
        """Free blocks that a request takes for its first step, including those of ``computed``."""
        block_size = self._block_size
        num_blocks = computed.num_free_blocks - len(computed.blocks)
        if computed.resumed is not None:
            for retention, table in zip(self._retentions, computed.resumed.tables, strict=True):
                num_moved = retention.num_moved_sink_tokens(computed.num_tokens)
                num_blocks += table.num_sinks or num_moved // block_size
                num_blocks += -(-(table.num_held_tokens + num_new_tokens) // block_size)
            return num_blocks
        for retention in self._retentions:
            num_slots = computed.num_tokens - retention.num_evicted(computed.num_tokens)
            num_slots += retention.num_moved_sink_tokens(computed.num_tokens) + num_new_tokens
            num_blocks += -(-num_slots // block_size)
        return num_blocks

    def num_blocks_to_admit(self, num_tokens: int, computed: ComputedBlocks) -> int:
        """The most free blocks that a new request takes until it has ``num_tokens`` tokens,
        including those of ``computed``.
        """
        num_new = max(0, self.max_num_held_blocks(num_tokens) - len(computed.blocks))
        return computed.num_free_blocks + num_new

    def copied_blocks(self, computed: ComputedBlocks) -> list[KVCacheBlock]:
        """The blocks of a prefix hit that a step copies before it writes any rows: sinks whose keys
        are shifted to stay right before the window.
        """
        return [
            block
            for retention, blocks in zip(self._retentions, computed.groups, strict=False)
            for block in blocks[
                : retention.num_moved_sink_tokens(computed.num_tokens) // self._block_size
            ]
        ]
