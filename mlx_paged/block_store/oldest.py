"""``Oldest``: the blocks to evict next, of many: outdated ones, then the least recently used."""

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
        is_outdated: whether no engine uses it any more (``Fingerprint.is_outdated``).
    """

    name: BlockName
    used: int
    nbytes: int
    is_outdated: bool = False

    @property
    def rank(self) -> tuple[bool, float]:
        """Its place in the order of eviction: outdated blocks first, then by their times."""
        return not self.is_outdated, self.used


class Oldest:
    """The least recently used of the blocks that were added.

    A block and its successors often have the same time. So blocks of the same rank are kept or
    dropped together, and are evicted by their position in the sequence, the last one first.

    Args:
        number: how many blocks are kept; more only if they have the same rank.
        place: returns the position of a block in its sequence, by which blocks of the same rank
            are ordered. It is called only when they are about to be evicted.
    """

    def __init__(self, number: int, place: Callable[[BlockName], tuple[float, int]]) -> None:
        self._number = number
        self._place = place
        self._ranks: list[tuple[bool, float]] = []  # sorted
        self._blocks: dict[tuple[bool, float], list[Block]] = {}  # by their rank
        self._num_blocks = 0
        self._end = (True, math.inf)  # all blocks of lower ranks are kept
        self._rank_in_order: tuple[bool, float] | None = None  # whose blocks are sorted

    def add(self, block: Block) -> None:
        rank = block.rank
        if rank >= self._end:
            return
        if rank not in self._blocks:
            self._blocks[rank] = []
            bisect.insort(self._ranks, rank)
        elif rank == self._rank_in_order:
            self._rank_in_order = None
        self._blocks[rank].append(block)
        self._num_blocks += 1
        while self._num_blocks - len(self._blocks[self._ranks[-1]]) >= self._number:
            self._end = self._ranks.pop()
            self._num_blocks -= len(self._blocks.pop(self._end))

    def pop(self) -> Block | None:
        """Remove and return the next block to evict; ``None`` if none is left."""
        if not self._ranks:
            return None
        rank = self._ranks[0]
        blocks = self._blocks[rank]
        if rank != self._rank_in_order:
            if len(blocks) > 1:
                blocks.sort(key=lambda block: self._place(block.name))
            self._rank_in_order = rank
        self._num_blocks -= 1
        block = blocks.pop()
        if not blocks:
            del self._blocks[rank], self._ranks[0]
        return block
