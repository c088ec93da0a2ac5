"""``ReadAhead``: reads the blocks of waiting requests from disk. Pure Python, no arrays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from mlx_paged.core import BlockHash
from mlx_paged.engine.prefix_cache import PrefixCache
from mlx_paged.engine.request import Completion, CompletionStatus
from mlx_paged.engine.request_queues import RequestQueues
from mlx_paged.request import SeqId

if TYPE_CHECKING:  # The scheduler imports no arrays.
    from mlx_paged.engine.disk_tier import DiskTier

# The number of requests at the front of the queue whose blocks are read ahead.
MAX_READ_AHEAD = 4


@dataclass(slots=True, eq=False)
class _Asked:
    completion: Completion
    block_hashes: set[BlockHash] = field(default_factory=set)  # requested so far
    is_over: bool = False  # the tier has nothing else for it


class ReadAhead:
    """Requests the missing blocks of waiting requests from a tier, once for each stay in the queue,
    when the pool has room for them, and again if some could not be read and others help instead.

    Args:
        tier: ``None`` if there is none.
        queues: say whether waiting requests fit.
        prefix_cache: says which of their blocks are absent.
    """

    def __init__(self, tier: DiskTier | None, queues: RequestQueues, prefix_cache: PrefixCache):
        self._tier = tier
        self._queues = queues
        self._prefix_cache = prefix_cache
        self._asked: dict[SeqId, _Asked] = {}

    def look(self, waiting: Iterable[Completion]) -> None:
        """Begin to read the blocks of the first waiting requests, long before they are admitted."""
        if self._tier is not None:
            for completion in islice(waiting, MAX_READ_AHEAD):
                if not self._may_ask(self._tier, completion):
                    return
                self._ask(self._tier, completion)

    def first_ready(self, waiting: Iterable[Completion]) -> Completion | None:
        """The first waiting request that does not have to wait for its blocks."""
        tier = self._tier
        if tier is None:
            return next(iter(waiting), None)
        for completion in waiting:
            if not self._may_ask(tier, completion):
                # Space for the reads of others is reserved for them. Without such reads, the
                # request may still fit: blocks that it shares with running requests take no space.
                return None if self._reading(tier) else completion
            self._ask(tier, completion)
            if not tier.is_reading(completion.seq_id) and not self._ask_again(tier, completion):
                return completion
        return None

    def end(self, completion: Completion) -> int:
        """A request leaves the queue; returns how many tokens were loaded for it."""
        if self._tier is None:
            return 0
        self._asked.pop(completion.seq_id, None)
        return self._tier.forget(completion.seq_id)

    def keep(self, completion: Completion) -> None:
        """A request is preempted: save its K/V if reading them is cheaper than computing them."""
        if self._tier is not None and self._tier.pays_for_preempted:
            self._tier.keep(completion)

    def clear(self) -> None:
        self._asked.clear()
        if self._tier is not None:
            self._tier.clear()

    def _reading(self, tier: DiskTier) -> list[Completion]:
        completions = [asked.completion for asked in self._asked.values()]
        return [each for each in completions if tier.is_reading(each.seq_id)]

    def _may_ask(self, tier: DiskTier, completion: Completion) -> bool:
        is_asked = completion.seq_id in self._asked
        return is_asked or self._queues.fit([*self._reading(tier), completion])

    def _ask(self, tier: DiskTier, completion: Completion) -> None:
        if completion.seq_id in self._asked:
            return
        asked = self._asked[completion.seq_id] = _Asked(completion)
        if completion.status is CompletionStatus.PREEMPTED and not tier.pays_for_preempted:
            return
        self._read(tier, asked)

    def _ask_again(self, tier: DiskTier, completion: Completion) -> bool:
        """After all requested blocks were read: whether others have to be read. A block or a state
        may have been lost, and a shorter prefix may end with another state.
        """
        asked = self._asked[completion.seq_id]
        return bool(asked.block_hashes) and not asked.is_over and self._read(tier, asked)

    def _read(self, tier: DiskTier, asked: _Asked) -> bool:
        """Begin to read the missing blocks of a request; whether any were not requested before."""
        blocks = self._prefix_cache.absent_blocks(asked.completion, tier)
        hashes = {block.block_hash for block in blocks}
        asked.is_over = hashes <= asked.block_hashes
        if not asked.is_over:
            asked.block_hashes |= hashes
            tier.read(asked.completion.seq_id, blocks)
        return not asked.is_over
