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

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_paged.core.block_hash import BlockHash

MANY = 16
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
    num_lost_tokens: int
    is_junction: bool
    num_hits: int = 0
    num_continuations: int = 0
    # The lowest is evicted first.
    priority: tuple[float, int] = (0.0, 0)


class Checkpoints:
    """States at the ends of blocks, by the hash of the block.

    Args:
        num_checkpoints: the most checkpoints that are kept.

    Attributes:
        on_eviction: called with each checkpoint before it is evicted for another.
    """

    def __init__(self, num_checkpoints: int):
        self.num_checkpoints = num_checkpoints
        self.on_eviction: Callable[[Checkpoint], None] | None = None
        self.clear()

    def clear(self) -> None:
        self._kept: dict[BlockHash, _Kept] = {}
        self._num_uses = 0
        self._clock = 0.0  # the highest priority evicted so far

    @property
    def keeps_many(self) -> bool:
        """Whether junctions and answers are kept as well."""
        return self.num_checkpoints >= MANY

    @property
    def keeps_everywhere(self) -> bool:
        return self.num_checkpoints >= EVERYWHERE

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

    def put(
        self, checkpoint: Checkpoint, num_lost_tokens: int = 0, is_junction: bool = False
    ) -> None:
        """Keep a checkpoint.

        Args:
            num_lost_tokens: tokens that have to be recomputed without it.
            is_junction: whether prompts diverge there.
        """
        if not self.num_checkpoints:
            return
        kept = self._kept.get(checkpoint.block_hash)
        if kept is None:
            kept = _Kept(checkpoint.content, checkpoint.is_foreign, num_lost_tokens, is_junction)
            self._kept[checkpoint.block_hash] = kept
        kept.is_junction |= is_junction
        self._renew(kept)
        while len(self._kept) > self.num_checkpoints:
            first = min(self._kept, key=lambda block_hash: self._kept[block_hash].priority)
            if self.on_eviction is not None:
                self.on_eviction(self.get(first))
            self._clock = max(self._clock, self._kept.pop(first).priority[0])

    def use(self, checkpoint: Checkpoint) -> None:
        """Count a hit of a checkpoint, and keep it again if it was evicted since it was found."""
        self.put(checkpoint)
        if checkpoint.block_hash in self._kept:
            kept = self._kept[checkpoint.block_hash]
            kept.num_hits += 1
            self._renew(kept)

    def supersede(self, block_hash: BlockHash) -> None:
        """Record that a prompt which began with this checkpoint has a new one at its end. If it is
        the only such prompt, later ones will continue from the new checkpoint.
        """
        kept = self._kept.get(block_hash)
        if kept is None:
            return
        kept.num_continuations += 1
        if kept.num_continuations == 1 and not kept.is_junction:
            kept.priority = (self._clock if self.keeps_many else -1.0, self._num_uses)

    def _renew(self, kept: _Kept) -> None:
        self._num_uses += 1
        worth = kept.num_lost_tokens * (1 + kept.num_hits) if self.keeps_many else 0
        kept.priority = (self._clock + worth, self._num_uses)

    def remove(self, block_hashes: Iterable[BlockHash]) -> None:
        for block_hash in block_hashes:
            self._kept.pop(block_hash, None)
