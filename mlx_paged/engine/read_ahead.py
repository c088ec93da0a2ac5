"""Which waiting requests have blocks on disk, and whose are being read. Pure Python, no arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from mlx_paged.core import AbsentBlock, BlockHash
from mlx_paged.request import Request, RequestStatus, SeqId

# Waiting requests whose blocks are read though their turn is not near.
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


class BlockDemand(NamedTuple):
    """What requests need, as a scheduler knows it.

    Attributes:
        has_room: whether requests would find room for all their tokens, together.
        absent_blocks: what a request could have of a tier.
    """

    has_room: Callable[[Sequence[Request]], bool]
    absent_blocks: Callable[[Request, BlockTier], Sequence[AbsentBlock]]


@dataclass(slots=True, eq=False)
class _Asked:
    request: Request
    block_hashes: set[BlockHash] = field(default_factory=set)  # what was asked for
    is_over: bool = False  # nothing else is there


class ReadAhead:
    """Asks a tier once for what a request lacks in each stay in the queue, when the pool has room
    for it, and again for something else where not all of that came.

    Args:
        tier: ``None`` where there is none.
        needs: of the requests that wait.
    """

    def __init__(self, tier: BlockTier | None, demand: BlockDemand):
        self._tier = tier
        self._needs = demand
        self._asked: dict[SeqId, _Asked] = {}

    def look(self, waiting: Sequence[Request]) -> None:
        """Begin to read for the first requests that wait, whose turn may be far."""
        if self._tier is not None:
            for request in waiting[:MAX_READ_AHEAD]:
                if not self._may_ask(self._tier, request):
                    return
                self._ask(self._tier, request)

    def first_ready(self, waiting: Iterable[Request]) -> Request | None:
        """The first request for which nothing is to be read first."""
        tier = self._tier
        if tier is None:
            return next(iter(waiting), None)
        for request in waiting:
            if not self._may_ask(tier, request):
                # Room that others have asked for is theirs. Alone, it may still find some: what it
                # shares with requests that run takes none.
                return None if self._reading(tier) else request
            self._ask(tier, request)
            if not tier.is_reading(request.seq_id) and not self._ask_again(tier, request):
                return request
        return None

    def end(self, request: Request) -> int:
        """A request does not wait any more; returns how many tokens were brought for it."""
        if self._tier is None:
            return 0
        self._asked.pop(request.seq_id, None)
        return self._tier.forget(request.seq_id)

    def keep(self, request: Request) -> None:
        """A request is preempted, and the K/V of it that are worth it are to be read again."""
        if self._tier is not None and self._tier.pays_for_preempted:
            self._tier.keep(request)

    def clear(self) -> None:
        self._asked.clear()
        if self._tier is not None:
            self._tier.clear()

    def _reading(self, tier: BlockTier) -> list[Request]:
        requests = [asked.request for asked in self._asked.values()]
        return [each for each in requests if tier.is_reading(each.seq_id)]

    def _may_ask(self, tier: BlockTier, request: Request) -> bool:
        is_asked = request.seq_id in self._asked
        return is_asked or self._needs.has_room([*self._reading(tier), request])

    def _ask(self, tier: BlockTier, request: Request) -> None:
        if request.seq_id in self._asked:
            return
        asked = self._asked[request.seq_id] = _Asked(request)
        if request.status is RequestStatus.PREEMPTED and not tier.pays_for_preempted:
            return
        self._read(tier, asked)

    def _ask_again(self, tier: BlockTier, request: Request) -> bool:
        """When all that was asked for has been read: whether there is more to be read. A block or a
        state may have been lost, and a shorter prefix may end with another state.
        """
        asked = self._asked[request.seq_id]
        return bool(asked.block_hashes) and not asked.is_over and self._read(tier, asked)

    def _read(self, tier: BlockTier, asked: _Asked) -> bool:
        """Begin to read what a request lacks; whether it was not asked for before."""
        blocks = self._needs.absent_blocks(asked.request, tier)
        hashes = {block.block_hash for block in blocks}
        asked.is_over = hashes <= asked.block_hashes
        if not asked.is_over:
            asked.block_hashes |= hashes
            tier.read(asked.request.seq_id, blocks)
        return not asked.is_over
