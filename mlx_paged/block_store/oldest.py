"""``Oldest``: of many blocks those that were used longest ago, in the order in which they go."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import NamedTuple

from mlx_paged.block_store.layout import BlockName


class Block(NamedTuple):
    """What a directory entry says of a block.

    Attributes:
        used: when it was last used, in nanoseconds since 1970.
        nbytes: what its file takes on disk.
    """

    name: BlockName
    used: int
    nbytes: int


class Oldest:
    """The least recently used of the blocks that were added.

    A block and those that follow it often have the same time. So blocks of one time are kept or
    left out together, and when their turn comes, they go in the order of their places in the
    sequence, the last one first.

    Args:
        number: of blocks that are kept; more only if they have one time.
        place: of a block in its sequence, by which those of one time are ordered. It is asked for
            when their turn comes.
    """

    def __init__(self, number: int, place: Callable[[BlockName], tuple[float, int]]) -> None:
        self._number = number
        self._place = place
        self._times: list[int] = []  # sorted
        self._blocks: dict[int, list[Block]] = {}  # by their time
        self._num_blocks = 0
        self._end = math.inf  # all blocks that were used before this are here
        self._time_in_order: int | None = None  # whose blocks are in order

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
        """Take the block that goes first; ``None`` if there is none left."""
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
