"""``Oldest``: the least recently used of many blocks, in the order of eviction."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import NamedTuple

from mlx_paged.block_store.layout import BlockName


class Block(NamedTuple):
    """A block as its directory entry describes it.

    Attributes:
        used: when it was last used, in nanoseconds since 1970.
        nbytes: size of its file on disk.
    """

    name: BlockName
    used: int
    nbytes: int


class Oldest:
    """The least recently used of the blocks that were added.

    A block and its successors often have the same time. So blocks with the same time are kept or
    dropped together, and are evicted by their position in the sequence, the last one first.

    Args:
        number: how many blocks are kept; more only if they have the same time.
        place: returns the position of a block in its sequence, by which blocks with the same time
            are ordered. It is called only when they are about to be evicted.
    """

    def __init__(self, number: int, place: Callable[[BlockName], tuple[float, int]]) -> None:
        self._number = number
        self._place = place
        self._times: list[int] = []  # sorted
        self._blocks: dict[int, list[Block]] = {}  # by their time
        self._num_blocks = 0
        self._end = math.inf  # all blocks that were used before this are kept
        self._time_in_order: int | None = None  # the time whose blocks are sorted

    def add(self, block: Block) -> None:
        if block.used >= self._end:
            return
        if block.used not in self._blocks:
            self._blocks[block.used] = []
            bisect.insort(self._times, block.used)
        elif block.used == self._time_in_order:
            self._time_in_order = None
        self._blocks[block.used].append(block)
        self._num_blocks += 1
        while self._num_blocks - len(self._blocks[self._times[-1]]) >= self._number:
            self._end = self._times.pop()
            self._num_blocks -= len(self._blocks.pop(self._end))

    def pop(self) -> Block | None:
        """Remove and return the next block to evict; ``None`` if none is left."""
        if not self._times:
            return None
        used = self._times[0]
        blocks = self._blocks[used]
        if used != self._time_in_order:
            if len(blocks) > 1:
                blocks.sort(key=lambda block: self._place(block.name))
            self._time_in_order = used
        self._num_blocks -= 1
        block = blocks.pop()
        if not blocks:
            del self._blocks[used], self._times[0]
        return block
