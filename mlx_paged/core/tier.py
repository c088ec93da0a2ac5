"""``Tier``: storage for the bytes of blocks outside the pool."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

Payload: TypeAlias = bytes | bytearray | memoryview

MOST_HASH_BYTES = 64
STATES = 0xFFFF
"""The group of the recurrent layers. Their state after a block is stored under a separate key."""
ANSWERS = 0xFFFE
"""The group of answers that conversations continue from: tokens and text, and no rows of layers."""
_place_in_sequence = struct.Struct("<HI").pack


@dataclass(frozen=True)
class BlockHeader:
    """Identifies a block in a tier.

    Attributes:
        block_hash: its key, of 1 to 64 bytes: its chained hash, or a :func:`private_key` if it has
            none.
        parent_hash: the hash of the previous block, ``None`` for the first one of a sequence.
        token_ids: its tokens, as signed integers of at most 64 bits.
        first_token: the position of its first token in the sequence.
        group: the group of layers whose rows it holds, below 65,534, or :data:`STATES` or
            :data:`ANSWERS`.

    Raises:
        ValueError: a hash is too long or empty, or the two hashes are equal.
    """

    block_hash: bytes
    parent_hash: bytes | None = None
    token_ids: tuple[int, ...] = ()
    first_token: int = 0
    group: int = 0

    def __post_init__(self) -> None:
        for block_hash in (self.block_hash, self.parent_hash or b"."):
            if not 1 <= len(block_hash) <= MOST_HASH_BYTES:
                raise ValueError(
                    f"[tier] a hash must have 1 to {MOST_HASH_BYTES} bytes, got {len(block_hash)}"
                )
        if self.block_hash == self.parent_hash:
            raise ValueError(f"[tier] block {self.block_hash.hex()} is its own parent")


def private_key(owner: bytes, group: int, index: int) -> bytes:
    """The key of a block without a hash, such as the partly filled last one of a sequence.

    Args:
        owner: identifies the sequence, uniquely over all processes.
        group: of layers.
        index: of the block among those of the group.
    """
    return owner + _place_in_sequence(group, index)


class Tier:
    """Stores blocks as ``KVCache.read_blocks`` returns them, by key. Any thread may call it.

    A tier has to implement ``has``, ``load`` and ``store``; the other methods are for storage that
    can fail, is limited or counts what it does.
    """

    _failure: str | None = None

    def has(self, key: bytes) -> bool:
        """Whether a block is stored now. It may be gone by the time it is loaded."""
        raise NotImplementedError

    def load(self, key: bytes) -> bytes | None:
        """The bytes of a block; ``None`` if it is not stored."""
        raise NotImplementedError

    def store(self, header: BlockHeader, content: Payload) -> bool:
        """Store a block unless it is stored already; return whether it is stored now."""
        raise NotImplementedError

    def discard(self, keys: Iterable[bytes]) -> None:
        """Called with the keys of blocks that are not needed any more."""

    def note_used(self, keys: Iterable[bytes]) -> None:
        """Mark the blocks of a prefix as recently used, first block first, whether the hits were in
        this tier or in the pool.
        """

    def maintain(self, pause: Callable[[], None] | None = None) -> None:
        """Do long work that can wait. The storing thread calls it when it is idle.

        Args:
            pause: called every few milliseconds; an exception that it raises ends the work.
        """

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter of ``stats``, such as ``"num_dropped"``."""

    @property
    def min_uses(self) -> int:
        """How many requests have to use a block before it is stored: 1 for at once, 2 for when a
        second request finds it in memory, and more for not at all.
        """
        return 1

    @property
    def failure(self) -> str | None:
        """Why the tier stopped storing, in one line; ``None`` while it works."""
        return self._failure

    def fail(self, why: str) -> None:
        """Stop storing, for the given reason; the first reason is kept."""
        self._failure = self._failure or why

    def close(self, timeout: float = 1.0) -> None:
        """Called when the tier is not needed any more."""

    def stats(self) -> TierStats:
        """Current figures."""
        return TierStats()


@dataclass(frozen=True)
class TierStats:
    """What a tier holds, and what this process has done with it.

    Attributes:
        num_blocks: blocks stored by all processes that share the tier, as far as this one knows.
        nbytes: their size.
        num_hits: blocks that were loaded.
        num_written: blocks that were stored.
        num_dropped: blocks that were not stored because the queue or the storage was full.
        num_corrupt: damaged blocks that were deleted.
        num_evicted: blocks that were deleted to stay within the limits.
        nbytes_written: size of what was stored.
    """

    num_blocks: int = 0
    nbytes: int = 0
    num_hits: int = 0
    num_written: int = 0
    num_dropped: int = 0
    num_corrupt: int = 0
    num_evicted: int = 0
    nbytes_written: int = 0


class HostMemory(Tier):
    """Blocks in a dictionary. The caller limits how many."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, bytes] = {}

    def has(self, key: bytes) -> bool:
        return key in self._blocks

    def load(self, key: bytes) -> bytes | None:
        return self._blocks.get(key)

    def store(self, header: BlockHeader, content: Payload) -> bool:
        self._blocks[header.block_hash] = bytes(content)
        return True

    def discard(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._blocks.pop(key, None)
