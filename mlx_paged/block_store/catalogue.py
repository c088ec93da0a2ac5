"""``Catalogue``: what a folder of blocks contains, read from its directory entries.

The name of a file is the block's hash, and its status has its size and the time of its last use.
No index is stored. Only the sums and the blocks that are evicted next are kept in memory. Outdated
blocks, which no engine uses any more, are evicted before all others.

A block never has an earlier time than its successors, so the least recently used block has none,
and a prefix is evicted from its end. This invariant is maintained as follows:

- a use sets the times of a prefix from its first block on, and no block is ever made older;
- a new block gets the time of its parent if that was used recently; otherwise its ancestors count
  as used now, too.

Blocks with the same time are ordered by the positions in their headers. So the resolution of a file
system's times doesn't matter: rounding preserves the order, or makes two times equal.
"""

from __future__ import annotations

import contextlib
import fcntl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from mlx_paged.block_store.directory import Directory
from mlx_paged.block_store.earlier_versions import take_over
from mlx_paged.block_store.layout import BlockLayout, BlockName
from mlx_paged.block_store.oldest import Block, Oldest
from mlx_paged.block_store.pins import Pins
from mlx_paged.block_store.shards import Shards, nbytes_on_disk, time_used

Pause: TypeAlias = Callable[[], None]

_SECONDS_BETWEEN_PAUSES = 0.001
_FILES_AT_A_TIME = 256
_EVICTED_AT_A_TIME = 16
_MOST_REFUSALS = 16  # files that can't be removed, before an eviction gives up
# The share of all blocks that a listing keeps as the next to evict, and the least number.
_SHARE_OF_OLDEST = 1 / 16
_LEAST_OLDEST = 4096
# A new block gets the time of its parent if that was used in the last minute, and in the last
# quarter of a time to live.
_SAME_USE_SECONDS = 60.0
_SAME_USE_SHARE_OF_TTL = 1 / 4
_LAST_PLACE = (float("inf"), 0)


class Catalogue:
    """The number and size of the blocks in a folder, and the order in which they are evicted.

    Any thread may read the attributes and call ``list_files`` and ``remove``; the other methods are
    called by one thread at a time.

    Args:
        layout: of the folder.
        digest: of the fingerprint whose blocks have a time to live.
        ttl: the time to live, in seconds. Each listing removes expired blocks.

    Attributes:
        shards: the files.
        pins: the pinned blocks.
        num_blocks: as of the last listing, and of what this process has changed since.
        nbytes: what they take on disk.
        nbytes_added: what this process has written since the last listing.
        listed: the time of the last listing, by ``time.monotonic``; ``-inf`` for never.
        num_expired: expired blocks that listings have removed.
    """

    def __init__(self, layout: BlockLayout, digest: str = "", ttl: float | None = None) -> None:
        self.shards = Shards(layout)
        self.pins = Pins(self.shards)
        self.num_blocks = self.nbytes = self.nbytes_added = self.num_expired = 0
        self.listed = -float("inf")
        self._layout = layout
        self._digest = digest
        self._ttl = ttl
        longest = float("inf") if ttl is None else ttl * _SAME_USE_SHARE_OF_TTL
        self._same_use = int(min(_SAME_USE_SECONDS, longest) * 1e9)
        self._list_lock = threading.RLock()
        self._sums_lock = threading.Lock()
        self._oldest = Oldest(0, self._place)
        self._removed: set[BlockName] = set()  # by this process, since the last listing
        self._is_listing_due = True
        self._listing: Iterator[None] | None = None

    def list_files(self, pause: Pause | None = None) -> None:
        """Finish the first listing, or one that ``list_again`` has requested. Raises OSError.

        Args:
            pause: called every few milliseconds, without a lock. An exception that it raises
                interrupts the listing, which the next call resumes.
        """
        began = time.monotonic()
        while self._list_on():
            if pause is not None and time.monotonic() - began > _SECONDS_BETWEEN_PAUSES:
                pause()
                began = time.monotonic()

    def list_again(self) -> None:
        """Make the next ``list_files`` list all files."""
        self._is_listing_due = True

    def added(self, name: BlockName, used: int, nbytes: int) -> None:
        """A new block was written."""
        self._count(1, nbytes)
        self.nbytes_added += nbytes
        self._removed.discard(name)
        self._oldest.add(Block(name, used, nbytes))

    def remove(self, name: BlockName) -> bool:
        """Remove the file of a block; whether there was one. Raises OSError."""
        status = self.shards.status(name)
        is_removed = self.shards.remove(name)
        if is_removed and status is None:  # It was not a block's file.
            self.list_again()
        elif is_removed and status is not None:
            self._removed.add(name)
            self._count(-1, -nbytes_on_disk(status.st_size))
        return is_removed

    def shrink(self, max_nbytes: int, pause: Pause | None = None) -> tuple[int, int]:
        """Evict outdated and then the least recently used blocks until the rest takes at most
        ``max_nbytes``, or only pinned blocks are left. Files that can't be removed are skipped.

        Returns:
            The number and the bytes of the evicted blocks.

        Raises:
            OSError: files can't be removed, and the others don't free enough.
        """
        num_removed = num_freed = 0
        refusals: dict[BlockName, OSError] = {}
        num_before_listing = -1
        while self.nbytes > max_nbytes and len(refusals) <= _MOST_REFUSALS:
            removed, is_end = self._remove_some(max_nbytes, refusals)
            num_removed += len(removed)
            num_freed += sum(block.nbytes for block in removed)
            if is_end and num_before_listing == num_removed:
                break
            if is_end:
                num_before_listing = num_removed
                self.list_again()
                self.list_files(pause)
            if pause is not None:
                pause()
        if refusals and self.nbytes > max_nbytes:
            raise next(iter(refusals.values()))
        return num_removed, num_freed

    def use(self, digest: str, block_hashes: Iterable[bytes], used: int) -> None:
        """Record the use of blocks of one prefix, given in order. Raises OSError.

        Args:
            used: the time, in nanoseconds since 1970.
        """
        names = [(digest, block_hash) for block_hash in block_hashes]
        if names:
            used = self.time_behind(digest, self.shards.parent(names[0]), used)
        for name in names:
            self.shards.note_used(name, used)

    def time_behind(self, digest: str, parent: bytes | None, now: int) -> int:
        """The time for a block that is used ``now``: not later than that of any ancestor.
        Ancestors whose last use was long ago count as used now. Raises OSError.
        """
        older: dict[bytes, None] = {}
        while parent is not None and parent not in older:
            status = self.shards.status((digest, parent))
            if status is None:
                break
            if now - time_used(status) <= self._same_use:
                now = min(now, time_used(status))
                break
            older[parent] = None
            parent = self.shards.parent((digest, parent))
        for block_hash in reversed(older):
            self.shards.note_used((digest, block_hash), now)
        return now

    def wait_for_evictions(self) -> None:
        """Wait for evictions that have already read the pins. Raises OSError."""
        with self.shards.blocks().locked(fcntl.LOCK_EX):
            pass

    def _list_on(self) -> bool:
        """List some more files; whether the listing goes on."""
        with self._list_lock:
            if self._listing is None:
                if not self._is_listing_due:
                    return False
                self._is_listing_due = False
                self._listing = self._list()
            try:
                next(self._listing)
            except BaseException as error:
                self._listing = None
                if not isinstance(error, StopIteration):
                    raise
            return True

    def _list(self) -> Iterator[None]:
        self.shards.refresh()
        num_blocks = nbytes = 0
        number = max(_LEAST_OLDEST, round(self.num_blocks * _SHARE_OF_OLDEST))
        oldest = Oldest(number, self._place)
        with contextlib.suppress(OSError):
            top, blocks = Directory.at(self._layout.folder), self.shards.blocks()
            for folder in (top, blocks):
                folder.remove_abandoned(folder.entries())
            yield from take_over(top, self.shards)
        for digest in self.shards.digests():
            pinned = self.pins.kept(digest)
            fingerprint = self.shards.fingerprint(digest)
            is_outdated = fingerprint is not None and fingerprint.is_outdated
            over = time.time_ns() - self._ttl * 1e9 if self._ttl and digest == self._digest else -1
            for name, status in self.shards.files(digest):
                nbytes_of_file = nbytes_on_disk(status.st_size)
                block = Block(name, time_used(status), nbytes_of_file, is_outdated)
                is_pinned = name[1] in pinned
                if not is_pinned and block.used < over and self._expire(block):
                    continue
                num_blocks += 1
                nbytes += block.nbytes
                if not is_pinned:
                    oldest.add(block)
                if num_blocks % _FILES_AT_A_TIME == 0:
                    yield
            yield
        with self._sums_lock:
            self.num_blocks, self.nbytes, self.nbytes_added = num_blocks, nbytes, 0
        self._oldest = oldest
        self._removed.clear()
        self.listed = time.monotonic()

    def _expire(self, block: Block) -> bool:
        """Remove an expired block; whether that was possible. It is a miss in any case."""
        with contextlib.suppress(OSError), self._evicting() as is_kept:
            if not is_kept(block.name) and self.shards.remove(block.name):
                self.num_expired += 1
                return True
        return False

    def _remove_some(
        self, max_nbytes: int, refusals: dict[BlockName, OSError]
    ) -> tuple[list[Block], bool]:
        """Remove some of the oldest blocks; returns them, and whether no candidates are left."""
        removed: list[Block] = []
        with self._evicting() as is_kept:
            for _ in range(_EVICTED_AT_A_TIME):
                if self.nbytes <= max_nbytes or len(refusals) > _MOST_REFUSALS:
                    break
                block = self._oldest.pop()
                if block is None:
                    return removed, True
                status = self.shards.status(block.name)
                if status is None:
                    if block.name not in self._removed:  # another process has removed it
                        self._count(-1, -block.nbytes)
                    continue
                is_as_it_was = time_used(status) == block.used
                if not is_as_it_was or block.name in refusals or is_kept(block.name):
                    continue
                try:
                    if self.remove(block.name):
                        removed.append(block)
                except OSError as error:
                    refusals[block.name] = error
        return removed, False

    @contextlib.contextmanager
    def _evicting(self) -> Iterator[Callable[[BlockName], bool]]:
        """Yields a test for pinned blocks. A process that adds a pin waits for the end."""
        with self.shards.blocks().locked(fcntl.LOCK_SH):
            yield self.pins.now()

    def _count(self, num_blocks: int, nbytes: int) -> None:
        with self._sums_lock:
            self.num_blocks += num_blocks
            self.nbytes += nbytes

    def _place(self, name: BlockName) -> tuple[float, int]:
        """The position of a block in its sequence. Blocks without a readable header go first."""
        header = self.shards.block(name)
        return _LAST_PLACE if header is None else (header.first_token, header.group)
