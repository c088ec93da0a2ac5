"""``Tier``: a place that keeps the bytes of blocks beside the pool."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

Payload: TypeAlias = bytes | bytearray | memoryview

MOST_HASH_BYTES = 64
STATES = 0xFFFF
"""Stands for the recurrent layers where a group of layers is named. Their state after a block is
kept under a key of its own, beside the block's K/V."""
_place_in_sequence = struct.Struct("<HI").pack


@dataclass(frozen=True)
class BlockHeader:
    """Which block it is.

    Attributes:
        block_hash: the key under which it is found, of 1 to 64 bytes: its chained hash, or a
            :func:`private_key` where there is none.
        parent_hash: that of the block before it, ``None`` for the first one of a sequence.
        token_ids: its tokens, as signed integers of at most 64 bits.
        first_token: the position of its first token in the sequence.
        group: the group of layers whose rows it holds, below 65,535, or :data:`STATES`.

    Raises:
        ValueError: a hash is too long or empty, or a block its own parent.
    """

    block_hash: bytes
    parent_hash: bytes | None = None
    token_ids: tuple[int, ...] = ()
    first_token: int = 0
    group: int = 0

    def __post_init__(self) -> None:
        for block_hash in (self.block_hash, self.parent_hash or b"."):
            if not 1 <= len(block_hash) <= MOST_HASH_BYTES:
                raise ValueError(f"[tier] a hash of {len(block_hash)} bytes")
        if self.block_hash == self.parent_hash:
            raise ValueError(f"[tier] block {self.block_hash.hex()} is its own parent")


def private_key(owner: bytes, group: int, index: int) -> bytes:
    """The key of a block that no hash names, such as the partly filled last one of a sequence.

    Args:
        owner: stands for the sequence: bytes that nothing else has, in this process or another.
        group: of layers.
        index: of the block among those of the group.
    """
    return owner + _place_in_sequence(group, index)


class Tier:
    """Keeps blocks as ``KVCache.read_blocks`` returns them, by key. Any thread may call it.

    ``has``, ``load`` and ``store`` are all that a tier needs. A place that can fail, or keeps
    figures, has more to say.
    """

    _failure: str | None = None

    def has(self, key: bytes) -> bool:
        """Whether a block is there now. It may be gone when it is loaded."""
        raise NotImplementedError

    def load(self, key: bytes) -> bytes | None:
        """The bytes of a block; ``None`` if it is not there."""
        raise NotImplementedError

    def store(self, header: BlockHeader, content: Payload) -> bool:
        """Keep a block, unless it is there already; whether it is there now."""
        raise NotImplementedError

    def discard(self, keys: Iterable[bytes]) -> None:
        """These keys will not be asked for again."""

    def note_used(self, keys: Iterable[bytes]) -> None:
        """Blocks of one prefix were of use, first block first, whether they were found here or in
        memory.
        """

    def maintain(self, pause: Callable[[], None] | None = None) -> None:
        """Do what takes long and can wait. The thread that stores calls it when it is idle.

        Args:
            pause: called every few milliseconds of long work; what it raises ends the work.
        """

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter of ``stats``, such as ``"num_dropped"``."""

    @property
    def failure(self) -> str | None:
        """Why nothing is kept any more, in one line; ``None`` while all is well."""
        return self._failure

    def fail(self, why: str) -> None:
        """Keep nothing any more, for the reason given; the first one stays."""
        self._failure = self._failure or why

    def close(self, timeout: float = 1.0) -> None:
        """Nothing is asked for any more."""

    def stats(self) -> TierStats:
        """What is kept, and what was done."""
        return TierStats()


@dataclass(frozen=True)
class TierStats:
    """What a tier keeps, and what this process has done with it.

    Attributes:
        num_blocks: that it keeps, of all processes that share it, as far as is known here.
        nbytes: what they take.
        num_hits: blocks that were loaded.
        num_written: blocks that were stored.
        num_dropped: blocks that were offered and not stored: the queue or the place was full.
        num_corrupt: blocks that were damaged, and are gone.
        num_evicted: blocks that were removed to keep the limits.
    """

    num_blocks: int = 0
    nbytes: int = 0
    num_hits: int = 0
    num_written: int = 0
    num_dropped: int = 0
    num_corrupt: int = 0
    num_evicted: int = 0


class HostMemory(Tier):
    """Blocks in a dictionary, of which the caller knows how many there may be."""

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
