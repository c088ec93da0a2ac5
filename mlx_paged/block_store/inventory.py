"""``Inventory``: what lies in a folder, by an index that may fail and be replaced at any time."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias, TypeVar

from mlx_paged.block_store.index import Index, delete_index
from mlx_paged.block_store.layout import BlockLayout, BlockName
from mlx_paged.block_store.pins import Pins
from mlx_paged.block_store.reconcile import reconcile
from mlx_paged.block_store.shards import Shards

T = TypeVar("T")
Pause: TypeAlias = Callable[[], None]

_BUSY_SECONDS = 5.0  # for another process to end its transaction, which takes milliseconds
_BUSY_SECONDS_AT_START = 0.2  # the thread that starts an engine waits for these
_MOST_TRIES = 4
_SECONDS_BETWEEN_PAUSES = 0.001
_EVICTED_AT_A_TIME = 16
_MOST_REFUSALS = 16  # of files that can't be removed, before an eviction ends
_SECONDS_BETWEEN_LISTINGS = 60.0  # without an index that other processes write to

# SQLite's own messages, and values in a broken index, may be no text or of another type.
_INDEX_ERRORS = (sqlite3.Error, ValueError, TypeError, OverflowError)
# Others hold the index, or the disk does not let it be used. Everything else is a broken index.
_LOCKED = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})
_REFUSED = frozenset(
    {
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_MISUSE,
    }
)


class Inventory:
    """Sizes, ages and parents of the blocks in a folder. Any thread may call anything.

    The index is opened when it is first needed, and the files are listed before it is believed. A
    broken one is made again. Where there can be none on disk (it is locked for ever, the file
    system has no locks, the folder is somebody else's), one in memory takes its place, and the
    folder is listed every minute to see what other processes do, and the index on disk is tried
    again.

    Attributes:
        shards: the files.
        pins: the blocks that stay.
        bad_files: files that were no blocks and were removed in a listing.
    """

    def __init__(self, layout: BlockLayout) -> None:
        self.shards = Shards(layout)
        self.pins = Pins(self.shards)
        self.bad_files: list[BlockName] = []
        self._layout = layout
        self._lock = threading.RLock()
        self._index: Index | None = None
        self._listing: Iterator[None] | None = None
        self._listed = 0.0
        self._must_be_private = False

    def act(self, action: Callable[[Index], T], pause: Pause | None = None) -> T:
        """The result of ``action`` on an index that knows the files. It is called again, on another
        index, when the one it had fails.

        Args:
            pause: called, without a lock, every few milliseconds while files are listed.
        """
        for num_failed in range(_MOST_TRIES):
            try:
                self._finish_listing(pause)
                with self._lock:
                    return action(self._current_index())
            except _INDEX_ERRORS as error:
                with self._lock:
                    self._replace(error, is_last_try=num_failed >= 1)
        raise sqlite3.OperationalError("the index fails again and again")

    def glance(self) -> tuple[int, int]:
        """Blocks and bytes by what an index says that is there already, without waiting for
        anything; zero if there is none.
        """
        with self._lock:
            try:
                return self._current_index(_BUSY_SECONDS_AT_START).totals()
            except _INDEX_ERRORS:
                self._close_index()
                return 0, 0

    def evict(self, nbytes: int, pause: Pause | None = None) -> tuple[int, int]:
        """Remove the least recently used blocks until ``nbytes`` are free, or nothing is left that
        may go. How many went, and their bytes. A file that can't be removed is passed over.

        Raises:
            OSError: files can't be removed, and without them too little is free.
        """
        self.shards.refresh()
        num_evicted = num_freed = 0
        refusals: dict[BlockName, OSError] = {}

        def evict_some(index: Index) -> bool:
            nonlocal num_evicted, num_freed
            # A file goes before its row: a row too many is harmless.
            with index.transaction():
                pins, now = self.pins.now(), time.time()
                for _ in range(_EVICTED_AT_A_TIME):
                    if num_freed >= nbytes or len(refusals) > _MOST_REFUSALS:
                        return False
                    leaf = index.oldest_leaf(lambda name: name in refusals or pins(name), now)
                    if leaf is None:
                        return False
                    name, size = leaf
                    try:
                        num_evicted += self.shards.remove(name)
                    except OSError as error:
                        refusals[name] = error
                        continue
                    index.remove([name])
                    num_freed += size
            return True

        while self.act(evict_some, pause):
            if pause is not None:
                pause()
        if refusals and num_freed < nbytes:
            raise next(iter(refusals.values()))
        return num_evicted, num_freed

    def sweep(self, digest: str, ttl: float | None) -> int:
        """Remove the blocks whose time is over: by what their writer said, or, of one fingerprint,
        by ``ttl``. How many went. One that can't be removed is a miss all the same.
        """
        now = time.time()
        over, used = [], []
        pins = self.pins.now()
        for name, last_used in self.act(lambda index: index.expired(now, digest, ttl)):
            # The file's own time is the truth: a process without the index may have used it.
            use = self.shards.last_use(name)
            if use is not None and use > last_used + 1:
                used.append((name, use))
            elif not pins(name):
                over.append(name)
        if used:
            self.act(lambda index: index.set_last_used(used))
        return len(over) - len(self.remove(over))

    def remove(self, names: Iterable[BlockName]) -> dict[BlockName, OSError]:
        """Remove files and their rows; which ones the system refuses to remove, and why."""
        gone: list[BlockName] = []
        refusals: dict[BlockName, OSError] = {}
        for name in names:
            try:
                self.shards.remove(name)
                gone.append(name)
            except OSError as error:
                refusals[name] = error
        if gone:
            self.act(lambda index: index.remove(gone))
        return refusals

    def list_again(self) -> None:
        """Let the next action wait for another look at the files."""
        with self._lock:
            index = self._current_index()
            self._listing = reconcile(index, self.shards, self.bad_files)

    def list_again_if_alone(self) -> None:
        """Do so now and then, if other processes can't be heard of in another way. What kept the
        index on disk from being used may have passed, so that is tried first.
        """
        with self._lock:
            is_old = time.monotonic() - self._listed > _SECONDS_BETWEEN_LISTINGS
            if self._index is not None and not self._index.is_shared and is_old:
                self._must_be_private = False
                self._close_index()

    def wait_for_evictions(self) -> None:
        """Wait for the end of those that have looked at the pins already."""
        self.act(Index.wait)

    def close(self) -> None:
        with self._lock:
            self._close_index()

    def _finish_listing(self, pause: Pause | None) -> None:
        began = time.monotonic()
        while self._list_on():
            if pause is not None and time.monotonic() - began > _SECONDS_BETWEEN_PAUSES:
                pause()
                began = time.monotonic()

    def _list_on(self) -> bool:
        """List some more files; whether there are more to come."""
        with self._lock:
            self._current_index()
            if self._listing is None:
                return False
            try:
                next(self._listing)
            except StopIteration:
                self._listing = None
                self._listed = time.monotonic()
                return False
            return True

    def _current_index(self, busy_seconds: float | None = None) -> Index:
        """The index, opened now if somebody has deleted the one that was open."""
        if self._index is not None and not self._index.is_current():
            self._close_index()
        if self._index is None:
            path = self._layout.index if self._may_share() else None
            self._index = Index(path, _BUSY_SECONDS if busy_seconds is None else busy_seconds)
            self._index.set_busy_seconds(_BUSY_SECONDS)
            self._listing = reconcile(self._index, self.shards, self.bad_files)
        return self._index

    def _may_share(self) -> bool:
        if self._must_be_private:
            return False
        try:
            # An administrator's index could not be opened by the folder's owner.
            return self._layout.folder.stat().st_uid == os.geteuid()
        except OSError:
            return False

    def _replace(self, error: Exception, is_last_try: bool) -> None:
        """Let the next try find another index: a new one, or, in the end, one in memory."""
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        was_current = self._index is None or self._index.is_current()
        self._close_index()
        if code in _LOCKED or is_last_try:
            self._must_be_private = True
        elif was_current and code not in _REFUSED:
            with contextlib.suppress(OSError):
                delete_index(self._layout.index)

    def _close_index(self) -> None:
        if self._index is not None:
            self._index.close()
        self._index = self._listing = None
