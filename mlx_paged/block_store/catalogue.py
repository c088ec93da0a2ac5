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

``WrittenBytes`` counts what all processes have written, in total and in the last 24 hours: that
wears out an SSD, and a limit can be set on it.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import functools
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

from mlx_paged.block_store.block_files import BlockFiles, nbytes_on_disk, time_used
from mlx_paged.block_store.directory import Directory
from mlx_paged.block_store.layout import (
    OLD_INDEX,
    WRITTEN_NAME,
    BadBlockFileError,
    BlockName,
)
from mlx_paged.options.argument_values import is_plain_integer

Pause: TypeAlias = Callable[[], None]

_SECONDS_BETWEEN_PAUSES = 0.001
_FILES_AT_A_TIME = 256
_EVICTED_AT_A_TIME = 16
_MAX_REFUSALS = 16  # files that can't be removed, before an eviction gives up
# The share of all blocks that a listing keeps as the next to evict, and the least number.
_SHARE_OF_OLDEST = 1 / 16
_MIN_OLDEST = 4096
# A new block gets the time of its parent if that was used in the last minute, and in the last
# quarter of a time to live.
_SAME_USE_SECONDS = 60.0
_SAME_USE_SHARE_OF_TTL = 1 / 4
_LAST_PLACE = (float("inf"), 0)
_SECONDS_BETWEEN_UPDATES = 10.0
_SECONDS_OF_AN_HOUR = 3600
_HOURS_OF_A_DAY = 24


class ListedBlock(NamedTuple):
    """A block as its directory entry describes it.

    Attributes:
        used: when it was last used, in nanoseconds since 1970.
        nbytes: size of its file on disk.
        is_outdated: whether no engine uses it any more (``Fingerprint.is_outdated``).
    """

    name: BlockName
    used: int
    nbytes: int
    is_outdated: bool = False

    @property
    def rank(self) -> tuple[bool, float]:
        """Its place in the order of eviction: outdated blocks first, then by their times."""
        return not self.is_outdated, self.used


class Oldest:
    """The least recently used of the blocks that were added.

    A block and its successors often have the same time. So blocks of the same rank are kept or
    dropped together, and are evicted by their position in the sequence, the last one first.

    Args:
        number: how many blocks are kept; more only if they have the same rank.
        place: returns the position of a block in its sequence, by which blocks of the same rank
            are ordered. It is called only when they are about to be evicted.
    """

    def __init__(self, number: int, place: Callable[[BlockName], tuple[float, int]]) -> None:
        self._number = number
        self._place = place
        self._ranks: list[tuple[bool, float]] = []  # sorted
        self._blocks: dict[tuple[bool, float], list[ListedBlock]] = {}  # by their rank
        self._num_blocks = 0
        self._end = (True, math.inf)  # all blocks of lower ranks are kept
        self._rank_in_order: tuple[bool, float] | None = None  # whose blocks are sorted

    def add(self, block: ListedBlock) -> None:
        rank = block.rank
        if rank >= self._end:
            return
        if rank not in self._blocks:
            self._blocks[rank] = []
            bisect.insort(self._ranks, rank)
        elif rank == self._rank_in_order:
            self._rank_in_order = None
        self._blocks[rank].append(block)
        self._num_blocks += 1
        while self._num_blocks - len(self._blocks[self._ranks[-1]]) >= self._number:
            self._end = self._ranks.pop()
            self._num_blocks -= len(self._blocks.pop(self._end))

    def pop(self) -> ListedBlock | None:
        """Remove and return the next block to evict; ``None`` if none is left."""
        if not self._ranks:
            return None
        rank = self._ranks[0]
        blocks = self._blocks[rank]
        if rank != self._rank_in_order:
            if len(blocks) > 1:
                blocks.sort(key=lambda block: self._place(block.name))
            self._rank_in_order = rank
        self._num_blocks -= 1
        block = blocks.pop()
        if not blocks:
            del self._blocks[rank], self._ranks[0]
        return block


class Catalogue:
    """The number and size of the blocks in a folder, and the order in which they are evicted.

    Any thread may read the attributes and call ``list_files`` and ``remove``; the other methods are
    called by one thread at a time.

    Args:
        files: of the folder.
        digest: of the fingerprint whose blocks have a time to live.
        ttl: the time to live, in seconds. Each listing removes expired blocks.

    Attributes:
        num_blocks: as of the last listing, and of what this process has changed since.
        nbytes: what they take on disk.
        nbytes_added: what this process has written since the last listing.
        listed: the time of the last listing, by ``time.monotonic``; ``-inf`` for never.
        num_expired: expired blocks that listings have removed.
    """

    def __init__(self, files: BlockFiles, digest: str = "", ttl: float | None = None) -> None:
        self.num_blocks = self.nbytes = self.nbytes_added = self.num_expired = 0
        self.listed = -float("inf")
        self._files = files
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
        self._oldest.add(ListedBlock(name, used, nbytes))

    def remove(self, name: BlockName) -> bool:
        """Remove the file of a block; whether there was one. Raises OSError."""
        status = self._files.status(name)
        is_removed = self._files.remove(name)
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
        while self.nbytes > max_nbytes and len(refusals) <= _MAX_REFUSALS:
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
            used = self.time_of_use(digest, self._files.parent(names[0]), used)
        for name in names:
            self._files.note_used(name, used)

    def time_of_use(self, digest: str, parent: bytes | None, now: int) -> int:
        """The time for a block that is used ``now``: not later than that of any ancestor.
        Ancestors whose last use was long ago count as used now. Raises OSError.
        """
        older: dict[bytes, None] = {}
        while parent is not None and parent not in older:
            status = self._files.status((digest, parent))
            if status is None:
                break
            if now - time_used(status) <= self._same_use:
                now = min(now, time_used(status))
                break
            older[parent] = None
            parent = self._files.parent((digest, parent))
        for block_hash in reversed(older):
            self._files.note_used((digest, block_hash), now)
        return now

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
        self._files.refresh()
        num_blocks = nbytes = 0
        number = max(_MIN_OLDEST, round(self.num_blocks * _SHARE_OF_OLDEST))
        oldest = Oldest(number, self._place)
        with contextlib.suppress(OSError):
            top, blocks = Directory.at(self._files.path), self._files.blocks()
            for folder in (top, blocks):
                folder.remove_abandoned(folder.entries())
            for index_name in filter(OLD_INDEX.fullmatch, top.names()):
                with contextlib.suppress(OSError):
                    top.remove(index_name)
        for digest in self._files.digests():
            pinned = self._files.kept(digest)
            fingerprint = self._files.fingerprint(digest)
            is_outdated = fingerprint is not None and fingerprint.is_outdated
            expired_before = (
                time.time_ns() - self._ttl * 1e9 if self._ttl and digest == self._digest else -1
            )
            for name, status in self._files.files(digest):
                nbytes_of_file = nbytes_on_disk(status.st_size)
                block = ListedBlock(name, time_used(status), nbytes_of_file, is_outdated)
                is_pinned = name[1] in pinned
                if not is_pinned and block.used < expired_before and self._expire(block):
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

    def _expire(self, block: ListedBlock) -> bool:
        """Remove an expired block; whether that was possible. It is a miss in any case."""
        with contextlib.suppress(OSError), self._evicting() as is_kept:
            if not is_kept(block.name) and self._files.remove(block.name):
                self.num_expired += 1
                return True
        return False

    def _remove_some(
        self, max_nbytes: int, refusals: dict[BlockName, OSError]
    ) -> tuple[list[ListedBlock], bool]:
        """Remove some of the oldest blocks; returns them, and whether no candidates are left."""
        removed: list[ListedBlock] = []
        with self._evicting() as is_kept:
            for _ in range(_EVICTED_AT_A_TIME):
                if self.nbytes <= max_nbytes or len(refusals) > _MAX_REFUSALS:
                    break
                block = self._oldest.pop()
                if block is None:
                    return removed, True
                status = self._files.status(block.name)
                if status is None:
                    if block.name not in self._removed:  # another process has removed it
                        self._count(-1, -block.nbytes)
                    continue
                if time_used(status) != block.used:  # It takes its new place in the order.
                    self._oldest.add(block._replace(used=time_used(status)))
                    continue
                if block.name in refusals or is_kept(block.name):
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
        with self._files.blocks().locked(fcntl.LOCK_SH):
            kept = functools.cache(self._files.kept)
            yield lambda name: name[1] in kept(name[0])

    def _count(self, num_blocks: int, nbytes: int) -> None:
        with self._sums_lock:
            self.num_blocks += num_blocks
            self.nbytes += nbytes

    def _place(self, name: BlockName) -> tuple[float, int]:
        """The position of a block in its sequence. Blocks without a readable header go first."""
        header = self._files.block(name)
        return _LAST_PLACE if header is None else (header.first_token, header.group)


class Written(NamedTuple):
    """What was written to a folder.

    Attributes:
        nbytes: in total.
        since: when the total was 0, in seconds since 1970.
        hours: bytes of the last day, by hours since 1970.
    """

    nbytes: int
    since: float
    hours: Counter[int]

    @property
    def nbytes_last_day(self) -> int:
        """In the last 24 hours, and in up to an hour before."""
        return self.hours.total()

    def plus(self, new: Counter[int]) -> Written:
        """With bytes that were written meanwhile, and without the hours that are over for a day. A
        time in the future is wrong, and is left out, too.
        """
        hours, now = self.hours + new, _hour()
        last_day = {each: hours[each] for each in hours if 0 <= now - each <= _HOURS_OF_A_DAY}
        return Written(self.nbytes + new.total(), self.since, Counter(last_day))


class WrittenBytes:
    """Counts the bytes that this process writes, and shares the sums with others in a file of the
    folder. Any thread may call it.

    The file is updated every ten seconds while something is written. A killed process loses what it
    has not added yet, and a damaged file begins with zero again. Failures are ignored.

    Attributes:
        nbytes_last_day: the bytes of all processes in the last 24 hours, as of the last call.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._new: Counter[int] = Counter()  # by hour, not in the file yet
        self._known = Written(0, time.time(), Counter())  # what the file had
        self._updated = -float("inf")
        self.nbytes_last_day = 0
        self.update()

    def add(self, nbytes: int) -> None:
        """This process has written so much more."""
        with self._lock:
            self._new[_hour()] += nbytes
        self.now()

    def now(self) -> Written:
        """The sums, with those of other processes as of the last update."""
        with self._lock:
            written = self._known.plus(self._new)
            self.nbytes_last_day = written.nbytes_last_day
            return written

    def update(self, is_due: bool = True) -> None:
        """Add the new bytes to the file, and read what others have added.

        Args:
            is_due: do it now; otherwise only if the last time was some seconds ago.
        """
        if not is_due and time.monotonic() - self._updated < _SECONDS_BETWEEN_UPDATES:
            return
        self._updated = time.monotonic()
        with contextlib.suppress(OSError):
            self._exchange()
        self.now()

    def _exchange(self) -> None:
        top = Directory.at(self._folder)
        with self._lock:
            new = self._new.copy()
        if not new:
            known = _read(top) or self._known
        else:
            with top.locked(fcntl.LOCK_EX):
                known = (_read(top) or Written(0, self._known.since, Counter())).plus(new)
                top.write_atomically(WRITTEN_NAME, [json.dumps(known._asdict()).encode()])
        with self._lock:
            self._new -= new
            self._known = known


def _read(top: Directory) -> Written | None:
    """The content of the file; ``None`` if there is none, or it is damaged."""
    try:
        fields = json.loads(top.read(WRITTEN_NAME))
        hours = Counter({int(hour): nbytes for hour, nbytes in fields["hours"].items()})
        sums = Written(fields["nbytes"], float(fields["since"]), hours)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, BadBlockFileError):
        return None  # It is damaged.
    is_valid = all(is_plain_integer(nbytes, 0) for nbytes in (sums.nbytes, *hours.values()))
    return sums if is_valid else None


def _hour() -> int:
    return int(time.time() // _SECONDS_OF_AN_HOUR)
