"""``Checkpoints``: states at the ends of blocks, for requests that begin with the same tokens.

K/V of a prefix can be cut anywhere, a state nowhere: a hit needs one that was kept there. Which
ones are worth their memory depends on how many there is room for
(``python -m benchmarks checkpoint_policies`` has the figures):

- *few*: the end of each prompt. The least recently used one goes first, and before all others one
  from which a later prompt has gone on, since its conversation has moved on.
- *many*, from ``MANY`` on: also where a prompt leaves an earlier one, and the end of each answer.
  The one goes first whose loss would cost the fewest tokens, by its hits and its age (GreedyDual:
  Young 1994; Cherkasova 1998), and again before all others one that a later one has superseded.
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
    """The state after a block, of all tokens up to its last one."""

    block_hash: BlockHash
    content: Any


@dataclass(slots=True, eq=False)
class _Kept:
    content: Any
    num_lost_tokens: int
    is_junction: bool
    num_hits: int = 0
    num_continuations: int = 0
    # The least goes first.
    priority: tuple[float, int] = (0.0, 0)


class Checkpoints:
    """States at the ends of blocks, by the hash of the block.

    Args:
        num_checkpoints: how many are kept, at most.

    Attributes:
        on_eviction: gets each one that is about to go because others have taken its place.
    """

    def __init__(self, num_checkpoints: int):
        self.num_checkpoints = num_checkpoints
        self.on_eviction: Callable[[Checkpoint], None] | None = None
        self.clear()

    def clear(self) -> None:
        self._kept: dict[BlockHash, _Kept] = {}
        self._num_uses = 0
        self._clock = 0.0  # the priority of the last one that was evicted for another

    @property
    def keeps_many(self) -> bool:
        """Whether junctions and answers are kept, too."""
        return self.num_checkpoints >= MANY

    @property
    def keeps_everywhere(self) -> bool:
        return self.num_checkpoints >= EVERYWHERE

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._kept

    def is_shared(self, block_hash: BlockHash) -> bool:
        """Whether a second prompt has gone on from this one, beside that of the junction or the
        first one.
        """
        kept = self._kept.get(block_hash)
        return kept is not None and kept.num_hits + kept.is_junction >= 2

    def get(self, block_hash: BlockHash) -> Checkpoint:
        """The one after this block; ``KeyError`` if there is none."""
        return Checkpoint(block_hash, self._kept[block_hash].content)

    def put(
        self, checkpoint: Checkpoint, num_lost_tokens: int = 0, is_junction: bool = False
    ) -> None:
        """Keep one.

        Args:
            num_lost_tokens: to be computed again without it.
            is_junction: whether prompts go different ways there.
        """
        if not self.num_checkpoints:
            return
        kept = self._kept.get(checkpoint.block_hash)
        if kept is None:
            kept = _Kept(checkpoint.content, num_lost_tokens, is_junction)
            self._kept[checkpoint.block_hash] = kept
        kept.is_junction |= is_junction
        self._renew(kept)
        while len(self._kept) > self.num_checkpoints:
            first = min(self._kept, key=lambda block_hash: self._kept[block_hash].priority)
            if self.on_eviction is not None:
                self.on_eviction(self.get(first))
            self._clock = max(self._clock, self._kept.pop(first).priority[0])

    def use(self, checkpoint: Checkpoint) -> None:
        """A request begins with one, which is kept, or was when the request found it."""
        self.put(checkpoint)
        if checkpoint.block_hash in self._kept:
            kept = self._kept[checkpoint.block_hash]
            kept.num_hits += 1
            self._renew(kept)

    def supersede(self, block_hash: BlockHash) -> None:
        """A prompt that went on from this one has a checkpoint of its own at its end. Where only
        one has, what comes next will go on from there.
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
