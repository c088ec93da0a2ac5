"""``KeyPositions``: the positions of the keys in a block table, and how they follow a window."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mlx_paged.core.block_pool import BlockPool
from mlx_paged.core.free_queue import KVCacheBlock
from mlx_paged.core.retention import Retention


class KeyShift(NamedTuple):
    """Blocks whose K a sequence needs at other positions: copy each source block to its
    destination, which may be the same block, with K rotated by ``distance`` positions.
    """

    sources: list[int]
    destinations: list[int]
    distance: int


class KeyPositions:
    """The positions of the keys of one block table whose tokens may be evicted.

    Sinks have the positions right before the window, and positions start over after
    ``retention.position_wrap``. Keys are rotated in place in blocks that only this table holds, and
    in copies of shared blocks.

    Attributes:
        position_origin: the token whose position is 0.
        sinks: the sinks as they were computed, if the table has shifted copies of them.
        distance: by how many positions the copies are shifted.
    """

    __slots__ = ("_pool", "_retention", "_shifts", "distance", "position_origin", "sinks")

    def __init__(self, pool: BlockPool, retention: Retention) -> None:
        self._pool = pool
        self._retention = retention
        self._shifts: list[KeyShift] = []
        self.position_origin = 0
        self.sinks: list[KVCacheBlock] = []
        self.distance = 0

    def continue_from(self, other: KeyPositions) -> None:
        """Copy the positions of another table, without its pending shifts."""
        self.position_origin, self.sinks, self.distance = (
            other.position_origin,
            other.sinks.copy(),
            other.distance,
        )

    def num_copies(
        self, blocks: Sequence[KVCacheBlock], num_tokens: int, num_evicted_tokens: int
    ) -> int:
        """How many blocks :meth:`move` takes.

        Args:
            blocks: of the table.
            num_tokens: of the sequence, including ``num_evicted_tokens``.
        """
        sinks, others = self._stale(blocks, num_tokens, num_evicted_tokens)
        moved = blocks[: len(self.sinks)] if sinks else ()
        num_own = sum(block.ref_cnt == 1 for block in moved)
        return len(sinks) - num_own + sum(block.ref_cnt > 1 for block in others)

    def move(
        self,
        blocks: list[KVCacheBlock],
        block_ids: array[int],
        num_tokens: int,
        num_evicted_tokens: int,
        num_reserved_blocks: int,
    ) -> bool:
        """Shift all keys to the positions of the next step, in the blocks of the table or in copies
        that replace them; return False and change nothing unless there are free blocks for the
        copies and ``num_reserved_blocks`` more.
        """
        sinks, others = self._stale(blocks, num_tokens, num_evicted_tokens)
        if not sinks and not others:
            return True
        num_copies = self.num_copies(blocks, num_tokens, num_evicted_tokens)
        if num_copies + num_reserved_blocks > self._pool.num_free_blocks:
            return False
        new_blocks = self._pool.get_new_blocks(num_copies)
        assert new_blocks is not None, "the blocks were counted"
        copies = iter(new_blocks)
        shifts: list[tuple[int, Sequence[KVCacheBlock], list[KVCacheBlock], int]] = []
        origin = self._retention.position_origin(num_tokens)
        if sinks:
            self.distance = num_evicted_tokens - origin
            moved = self._own(blocks[: len(self.sinks)], copies)
            # The first time, the table has the sinks as they were computed, which are kept.
            moved += itertools.islice(copies, len(sinks) - len(moved))
            shifts.append((0, sinks, moved, self.distance))
            self.sinks = sinks
        if others:
            # Requests that hit them would expect the positions at which they were computed.
            self._pool.evict_blocks([block.block_id for block in others if block.ref_cnt == 1])
            begin = len(blocks) - len(others)
            shifts.append((begin, others, self._own(others, copies), self.position_origin - origin))
            self.position_origin = origin
        for begin, sources, destinations, distance in shifts:
            source_ids, new_ids = (
                [block.block_id for block in each] for each in (sources, destinations)
            )
            end = begin + len(destinations)
            blocks[begin:end], block_ids[begin:end] = destinations, array("i", new_ids)
            self._shifts.append(KeyShift(source_ids, new_ids, distance))
        return True

    def _stale(
        self, blocks: Sequence[KVCacheBlock], num_tokens: int, num_evicted_tokens: int
    ) -> tuple[list[KVCacheBlock], list[KVCacheBlock]]:
        """The sinks as they were computed, if those in the table are not right before the window;
        and the blocks after them, if positions start over.
        """
        origin = self._retention.position_origin(num_tokens)
        num_sinks = self._retention.num_sink_tokens // self._pool.block_size
        has_sinks = self.distance == num_evicted_tokens - origin
        sinks = [] if has_sinks else self.sinks or list(blocks[:num_sinks])
        return sinks, [] if self.position_origin == origin else list(blocks[num_sinks:])

    def _own(
        self, blocks: Sequence[KVCacheBlock], copies: Iterator[KVCacheBlock]
    ) -> list[KVCacheBlock]:
        """The destinations of the keys of these blocks: the same blocks, or copies of shared
        blocks, which are freed.
        """
        own = [block if block.ref_cnt == 1 else next(copies) for block in blocks]
        self._pool.free_blocks(
            [old for old, new in zip(blocks, own, strict=True) if old is not new]
        )
        return own

    def take_shifts(self) -> list[KeyShift]:
        """The shifts to apply before a step reads the table; each is returned once."""
        shifts, self._shifts = self._shifts, []
        return shifts

    def free(self) -> list[KVCacheBlock]:
        """Free the sinks as they were computed; return those that became free."""
        freed = self._pool.free_blocks(reversed(self.sinks))
        self.sinks, self._shifts = [], []
        return freed
