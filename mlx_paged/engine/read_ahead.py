"""Which waiting requests have blocks on disk, and whose are being read. Pure Python, no arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from mlx_paged.core import AbsentBlock, BlockHash
from mlx_paged.request import Request, RequestStatus, SeqId

# Waiting requests whose blocks are read before their turn comes.
MAX_READ_AHEAD = 4


class BlockTier(Protocol):
    """A place for full blocks beside the pool, named by their hashes."""

    @property
    def pays_for_preempted(self) -> bool:
        """Whether bringing a block takes less than computing it."""
        ...

    def has(self, block_hash: BlockHash) -> bool:
        """Whether a block is there now. It may be gone when it is read."""
        ...

    def read(self, seq_id: SeqId, blocks: Sequence[AbsentBlock]) -> None:
        """Begin to bring blocks into the pool, where the request will find them cached."""

    def is_reading(self, seq_id: SeqId) -> bool:
        """Whether some of what was asked for is still to come."""
        ...

    def forget(self, seq_id: SeqId) -> int:
        """Bring no more for a request; returns how many tokens came."""
        ...

    def keep(self, request: Request) -> None:
        """A request is preempted, and its blocks are about to be given back."""

    def clear(self) -> None:
        """Bring no more for anybody."""


class ReadAhead:
    """Asks a tier once for each stay of a request in the queue, as soon as the pool has room.

    Args:
        tier: ``None`` where there is none.
    """

    def __init__(self, tier: BlockTier | None):
        self._tier = tier
        self._asked: set[SeqId] = set()

    def look(
        self,
        waiting: Sequence[Request],
        has_room: Callable[[Sequence[Request]], bool],
        absent_blocks: Callable[[Request, BlockTier], Sequence[AbsentBlock]],
    ) -> None:
        """Begin to read for the first requests that wait.

        Args:
            has_room: whether so many requests, together, would find room for all their tokens.
            absent_blocks: what a request would need of the tier.
        """
        if self._tier is None:
            return
        for index, request in enumerate(waiting[:MAX_READ_AHEAD]):
            if request.seq_id in self._asked:
                continue
            if not has_room(waiting[: index + 1]):
                return
            self._asked.add(request.seq_id)
            is_preempted = request.status is RequestStatus.PREEMPTED
            if is_preempted and not self._tier.pays_for_preempted:
                continue
            blocks = absent_blocks(request, self._tier)
            if blocks:
                self._tier.read(request.seq_id, blocks)

    def first_ready(self, waiting: Iterable[Request]) -> Request | None:
        """The first request for which nothing is being read."""
        tier = self._tier
        if tier is None:
            return next(iter(waiting), None)
        return next((each for each in waiting if not tier.is_reading(each.seq_id)), None)

    def end(self, request: Request) -> int:
        """A request does not wait any more; returns how many tokens were brought for it."""
        if self._tier is None:
            return 0
        self._asked.discard(request.seq_id)
        return self._tier.forget(request.seq_id)

    def keep(self, request: Request) -> None:
        """A request is preempted, and the K/V of it that are worth it are to be read again."""
        if self._tier is not None and self._tier.pays_for_preempted:
            self._tier.keep(request)

    def clear(self) -> None:
        self._asked.clear()
        if self._tier is not None:
            self._tier.clear()
