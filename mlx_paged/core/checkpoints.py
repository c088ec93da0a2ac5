"""``Checkpoints``: recurrent states at the ends of blocks, for requests with the same prefix.

K/V of a prefix can be cut anywhere, but a state can't be cut: a hit needs a state that was kept at
its end. Which states are kept depends on how many fit
(``python -m benchmarks checkpoint_policies`` has the figures):

- *few*: the end of each prompt. Eviction is LRU, but a checkpoint that a later prompt has continued
  is evicted first, since its conversation has moved on.
- *many*, from ``MANY`` on: also where a prompt diverges from an earlier one, and the end of each
  answer. The checkpoint whose loss costs the fewest tokens, by its hits and its age, is evicted
  first (GreedyDual: Young 1994; Cherkasova 1998), and before it, again, one that a later one has
  superseded.
- *everywhere*, from ``EVERYWHERE`` on: also every ``INTERVAL`` tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_paged.core.block_hash import BlockHash

MANY = 20
EVERYWHERE = 1024
INTERVAL = 512


class Checkpoint(NamedTuple):
    """The recurrent state after a block.

    Attributes:
        is_foreign: whether it came from a file or was computed after foreign K/V, as blocks are
            foreign (:class:`KVCacheBlock`).
    """

    block_hash: BlockHash
    content: Any
    is_foreign: bool = False


@dataclass(slots=True, eq=False)
class _Kept:
    content: Any
    is_foreign: bool
    num_lost_tokens: int  # that are computed again without it, from the checkpoint before it
    before: BlockHash | None  # the nearest one of its prefix that is kept
    is_junction: bool
    num_hits: int = 0
    num_continuations: int = 0
    # The lowest is evicted first.
    priority: tuple[float, int] = (0.0, 0)

    @property
    def is_superseded(self) -> bool:
        """Whether the only prompt that has continued from it has left a later checkpoint."""
        return self.num_continuations == 1 and not self.is_junction

    @property
    def worth(self) -> int:
        """Tokens that its loss costs, once for each hit so far and one to come."""
        return 0 if self.is_superseded else self.num_lost_tokens * (1 + self.num_hits)


class Checkpoints:
    """States at the ends of blocks, by the hash of the block.

    Args:
        num_checkpoints: the most checkpoints that are kept.

    Attributes:
        num_free: returns how many more there is memory for, where they share a budget; negative if
            there are too many.
        on_eviction: called with each checkpoint before it is evicted.
    """

    def __init__(self, num_checkpoints: int):
        self.num_checkpoints = num_checkpoints
        self.num_free: Callable[[], int] = lambda: sys.maxsize
        self.on_eviction: Callable[[Checkpoint], None] | None = None
        self.clear()

    def clear(self) -> None:
        self._kept: dict[BlockHash, _Kept] = {}
        self._num_uses = 0
        self._clock = 0.0  # the highest priority evicted so far
        # Where they share a budget with K/V: more than there are after one was evicted that no
        # other had superseded, fewer after one was lost with its K/V.
        self.num_wanted = 0

    @property
    def keeps_many(self) -> bool:
        """Whether junctions and answers are kept as well."""
        return self.num_checkpoints >= MANY

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._kept

    def has_storable(self, block_hash: BlockHash) -> bool:
        """Whether there is a checkpoint after this block that is not foreign."""
        kept = self._kept.get(block_hash)
        return kept is not None and not kept.is_foreign

    def is_shared(self, block_hash: BlockHash) -> bool:
        """Whether at least two prompts have continued from this checkpoint; a junction counts as
        one.
        """
        kept = self._kept.get(block_hash)
        return kept is not None and kept.num_hits + kept.is_junction >= 2

    def get(self, block_hash: BlockHash) -> Checkpoint:
        """The checkpoint after this block; ``KeyError`` if there is none."""
        kept = self._kept[block_hash]
        return Checkpoint(block_hash, kept.content, kept.is_foreign)

    def of_prefix(self, block_hash: BlockHash, num_tokens: int) -> list[tuple[BlockHash, int]]:
        """The checkpoint after a prefix and those before it that are kept, the last one first, with
        the number of tokens of each.
        """
        found = []
        before: BlockHash | None = block_hash
        while before is not None and (kept := self._kept.get(before)) is not None:
            found.append((before, num_tokens))
            before, num_tokens = kept.before, num_tokens - kept.num_lost_tokens
        return found

    def put(
        self,
        checkpoint: Checkpoint,
        num_lost_tokens: int = 0,
        is_junction: bool = False,
        before: BlockHash | None = None,
    ) -> None:
        """Keep a checkpoint.

        Args:
            num_lost_tokens: tokens that have to be recomputed without it.
            is_junction: whether prompts diverge there.
            before: the checkpoint from which they would be.
        """
        if not self.num_checkpoints:
            return
        kept = self._kept.get(checkpoint.block_hash)
        if kept is None:
            kept = _Kept(
                checkpoint.content, checkpoint.is_foreign, num_lost_tokens, before, is_junction
            )
            self._kept[checkpoint.block_hash] = kept
        kept.is_junction |= is_junction
        self._renew(kept)
        while len(self._kept) > self.num_checkpoints or (self._kept and self.num_free() < 0):
            self._replace(num_wanted=len(self._kept))

    def use(self, checkpoint: Checkpoint, num_tokens: int = 0) -> None:
        """Count a hit of a checkpoint of ``num_tokens`` tokens, and keep it again if it was evicted
        since it was found.
        """
        self.put(checkpoint, num_tokens)
        if checkpoint.block_hash in self._kept:
            kept = self._kept[checkpoint.block_hash]
            kept.num_hits += 1
            self._renew(kept)

    def make_room(self, num_new: int, num_lost_tokens: int) -> bool:
        """Evict checkpoints, if there is too little memory for new ones that a step computes;
        whether there is enough now.

        Args:
            num_lost_tokens: tokens that have to be recomputed without the last of the new ones.
        """
        while self.num_free() < num_new:
            first = self._first()
            worth = self._clock + num_lost_tokens
            if first is None or (self.keeps_many and self._kept[first].priority[0] > worth):
                return False
            self._replace(num_wanted=len(self._kept) + num_new)
        return True

    def evict(self) -> bool:
        """Evict the checkpoint with the lowest priority; False if there is none."""
        first = self._first()
        if first is None:
            return False
        self._clock = max(self._clock, self._kept[first].priority[0])
        self._evict(first)
        return True

    def drop(self, block_hash: BlockHash) -> None:
        """Evict the checkpoint after a block that was evicted itself, if there is one."""
        if block_hash in self._kept:
            if not self._kept[block_hash].is_superseded:
                self.num_wanted = len(self._kept) - 1
            self._evict(block_hash)

    def _replace(self, num_wanted: int) -> None:
        """Evict a checkpoint for another; without that, there would be ``num_wanted``."""
        first = self._first()
        if first is not None and not self._kept[first].is_superseded:
            self.num_wanted = num_wanted
        self.evict()

    def _evict(self, block_hash: BlockHash) -> None:
        if self.on_eviction is not None:
            self.on_eviction(self.get(block_hash))
        self.remove([block_hash])

    def _first(self) -> BlockHash | None:
        """The checkpoint to evict next."""
        return min(self._kept, key=lambda each: self._kept[each].priority, default=None)

    def supersede(self, block_hash: BlockHash) -> None:
        """Record that a prompt which began with this checkpoint has a new one at its end. If it is
        the only such prompt, later ones will continue from the new checkpoint.
        """
        kept = self._kept.get(block_hash)
        if kept is None:
            return
        kept.num_continuations += 1
        if kept.is_superseded:
            kept.priority = (self._clock if self.keeps_many else -1.0, self._num_uses)

    def _renew(self, kept: _Kept) -> None:
        self._num_uses += 1
        worth = kept.num_lost_tokens * (1 + kept.num_hits) if self.keeps_many else 0
        kept.priority = (self._clock + worth, self._num_uses)

    def remove(self, block_hashes: Iterable[BlockHash]) -> None:
        for block_hash in block_hashes:
            removed = self._kept.pop(block_hash, None)
            if removed is None:
                continue
            # Without those that follow it, more tokens are lost from now on.
            for kept in self._kept.values():
                if kept.before == block_hash:
                    worth, kept.before = kept.worth, removed.before
                    kept.num_lost_tokens += removed.num_lost_tokens
                    if self.keeps_many:
                        priority, use = kept.priority
                        kept.priority = priority + kept.worth - worth, use
