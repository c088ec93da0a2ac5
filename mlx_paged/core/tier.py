"""``Tier``: storage for the bytes of blocks outside the pool."""

from __future__ import annotations

import struct
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import NoneType
from typing import TypeAlias, TypeVar

Payload: TypeAlias = bytes | bytearray | memoryview

T = TypeVar("T")

MAX_HASH_NBYTES = 64
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
            ``ANSWERS``.

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
            if not 1 <= len(block_hash) <= MAX_HASH_NBYTES:
                raise ValueError(
                    f"[tier] a hash must have 1 to {MAX_HASH_NBYTES} bytes, got {len(block_hash)}"
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


class LostBlockError(KeyError):
    """A block is not in the tier that was to keep it, or not with its own bytes."""


class Tier:
    """Stores blocks as ``KVCache.read_blocks`` returns them, by key. Any thread may call it.

    A tier has to implement ``has``, ``load`` and ``store``; the other methods are for storage that
    can fail or is limited. An engine calls a tier of the caller's through a ``GuardedTier``, which
    also counts what is loaded, stored and dropped.
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
        """Add to a counter of ``stats``, such as ``"num_dropped"``. Not called for a tier of the
        caller's.
        """

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


class GuardedTier(Tier):
    """A tier of the caller's, which may raise anything and return anything: that is a failure of
    the tier, which is not used any more, and never one of a request.

    The bytes of a block are stored with a checksum of them and of its key. Other bytes, such as
    those of another block, are a miss.

    What the engine does with the tier is counted here: of the tier's own ``stats``, the others are
    read, ``num_blocks``, ``nbytes`` and ``num_evicted``, and its corrupt blocks are added.

    Only an interrupt of the main thread is raised, because Ctrl-C may cause it.
    """

    def __init__(self, tier: Tier):
        self._tier = tier
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()

    def has(self, key: bytes) -> bool:
        return bool(self._ask("has", "looked up", False, (bool, int), lambda: self._tier.has(key)))

    def load(self, key: bytes) -> bytes | None:
        kinds = (bytes, bytearray, memoryview, NoneType)
        stored = self._ask("load", "read", None, kinds, lambda: self._tier.load(key))
        if stored is None:
            return None
        stored = bytes(stored)
        content, checksum = stored[:-_CHECKSUM_NBYTES], stored[-_CHECKSUM_NBYTES:]
        if checksum == _checksum(key, content):
            self.count("num_hits")
            return content
        self.count("num_corrupt")
        self.discard([key])
        return None

    def store(self, header: BlockHeader, content: Payload) -> bool:
        stored = b"".join((content, _checksum(header.block_hash, content)))
        kinds = (bool, int, NoneType)
        is_stored = bool(
            self._ask("store", "written", False, kinds, lambda: self._tier.store(header, stored))
        )
        if is_stored:
            self.count("nbytes_written", len(stored))
        if not (is_stored and header.group == ANSWERS):  # as a folder counts them
            self.count("num_written" if is_stored else "num_dropped")
        return is_stored

    def discard(self, keys: Iterable[bytes]) -> None:
        self._ask("discard", "discarded", None, (object,), lambda: self._tier.discard(keys))

    def note_used(self, keys: Iterable[bytes]) -> None:
        self._ask("note_used", "marked", None, (object,), lambda: self._tier.note_used(keys))

    def maintain(self, pause: Callable[[], None] | None = None) -> None:
        ends: list[BaseException] = []

        def noted_pause() -> None:
            try:
                if pause is not None:
                    pause()
            except BaseException as end:
                ends.append(end)
                raise

        def maintain() -> None:
            try:
                self._tier.maintain(noted_pause)
            except BaseException:
                if not ends:
                    raise

        self._ask("maintain", "maintained", None, (object,), maintain)
        if ends:
            raise ends[0]

    def count(self, name: str, number: int = 1) -> None:
        with self._counting:
            self._counts[name] += number

    @property
    def failure(self) -> str | None:
        if self._failure is None:
            try:
                failure = self._tier.failure
            except BaseException as error:
                failure = _reason(error)
            if failure is not None:
                self._failure = str(failure)
        return self._failure

    def fail(self, why: str) -> None:
        super().fail(why)
        self._try(lambda: self._tier.fail(why))

    def close(self, timeout: float = 1.0) -> None:
        self._try(lambda: self._tier.close(timeout))

    def stats(self) -> TierStats:
        stats, counts = self._try(self._tier.stats), self._counts
        held = stats if isinstance(stats, TierStats) else TierStats()
        return replace(
            held,
            num_hits=counts["num_hits"],
            num_written=counts["num_written"],
            num_dropped=counts["num_dropped"],
            num_corrupt=held.num_corrupt + counts["num_corrupt"],
            nbytes_written=counts["nbytes_written"],
        )

    def _ask(
        self, name: str, done: str, otherwise: T, kinds: tuple[type, ...], call: Callable[[], T]
    ) -> T:
        """The result of a method; ``otherwise`` if the tier fails now or has failed before."""
        if self.failure is not None:
            return otherwise
        try:
            answer = call()
        except BaseException as error:
            _raise_if_interrupt(error)
            self.fail(f"a block could not be {done}: {_reason(error)}")
            return otherwise
        if isinstance(answer, kinds):
            return answer
        self.fail(f"a block could not be {done}: {name} returned a {type(answer).__name__}")
        return otherwise

    def _try(self, call: Callable[[], T]) -> T | None:
        """The result of a method that is also called after a failure; ``None`` if it raises."""
        try:
            return call()
        except BaseException as error:
            _raise_if_interrupt(error)
            super().fail(_reason(error))
            return None


_CHECKSUM_NBYTES = 4


def _checksum(key: bytes, content: Payload) -> bytes:
    return zlib.crc32(content, zlib.crc32(key)).to_bytes(_CHECKSUM_NBYTES, "little")


def _reason(error: BaseException) -> str:
    """The type and the text of an error, on one line."""
    try:
        text = str(error)
    except BaseException:
        text = ""
    return " ".join(f"{type(error).__name__}: {text}".split())


def _raise_if_interrupt(error: BaseException) -> None:
    is_in_main_thread = threading.current_thread() is threading.main_thread()
    if isinstance(error, KeyboardInterrupt) and is_in_main_thread:
        raise error
