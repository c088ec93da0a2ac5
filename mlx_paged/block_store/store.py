"""``BlockStore``: blocks of one fingerprint in a folder that several processes use at once."""

from __future__ import annotations

import errno
import os
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from mlx_paged.block_store.block_files import BlockFiles, nbytes_on_disk, time_used
from mlx_paged.block_store.catalogue import Catalogue, Pause, WrittenBytes
from mlx_paged.block_store.directory import make_folder
from mlx_paged.block_store.layout import (
    BadBlockFileError,
    BlockName,
    BlockStoreError,
    Fingerprint,
    OtherVersionError,
    encode_header,
    refusals,
    shard_name_of,
)
from mlx_paged.core.tier import ANSWERS, BlockHeader, Payload, Tier, TierStats
from mlx_paged.errors import system_reason
from mlx_paged.options.config import DURATION, NBYTES, NBYTES_A_DAY

# The files are listed again, to find what other processes have written and removed: after this many
# seconds, sooner if this process writes, and before it has written this share of the limit.
_SECONDS_BETWEEN_LISTINGS = 600.0
_SECONDS_BETWEEN_LISTINGS_OF_A_WRITER = 60.0
_SHARE_BETWEEN_LISTINGS = 1 / 16
_LISTINGS_PER_TTL = 4

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# The process lacks a resource, or only this file can't be used: the next access may succeed.
_TEMPORARY = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EISDIR})
# The disk or the server of a network folder can't be reached. The files are as they were.
_UNREACHABLE = frozenset(
    {errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN}
)

# Seconds from a failure to the next try, which double with each try that fails.
_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 60.0
_MAX_PROBE_NBYTES = 4 * 2**20
_MAX_USES = 2**31


class BlockStore(Tier):
    """Blocks of one fingerprint in a folder that several processes use at once.

    Any thread may call any method. ``has``, ``load`` and ``note_used`` never wait for a write or a
    listing; ``store``, ``maintain`` and ``close`` may take long, and are called by the writer.

    No method raises for errors of the disk. A bad file is removed and counts as a miss. When the
    disk itself fails, ``failure`` has the reason, and nothing is found or written until
    ``maintain`` has written a file there as a probe, which it tries after a second, then after
    longer and longer times, up to a minute. A full disk is a failure only if evicting blocks
    doesn't help.

    Args:
        folder: made, with mode 0700, if it doesn't exist.
        max_nbytes: the most that all blocks in the folder take, whatever their fingerprint.
            Processes that share a folder should use the same value: each enforces its own, and may
            exceed it by a sixteenth, which it may write before it finds what others have written.
        fingerprint: what the blocks depend on besides their tokens.
        ttl: seconds after its last use when a block expires. It applies to the blocks written here,
            in all processes, and in this process to all blocks of the fingerprint, which it removes
            within a quarter of the time. Pinned blocks don't expire.
        max_nbytes_a_day: the most bytes that all processes write to the folder in 24 hours, as far
            as they know of each other; ``None`` for no limit. When half of it is written, blocks
            are stored at their second use, and then not at all.

    Raises:
        BlockStoreError: the folder can't be used.
        ArgumentError: a limit is invalid (``cache_dir_size``, ``cache_dir_ttl``,
            ``cache_dir_writes``).
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_nbytes: int,
        fingerprint: Fingerprint,
        ttl: float | None = None,
        max_nbytes_a_day: str | int | None = None,
    ) -> None:
        self.files = BlockFiles(folder)
        self.folder = self.files.path
        self.max_nbytes = NBYTES.check("block store", "cache_dir_size", max_nbytes)
        self.ttl = None if ttl is None else DURATION.check("block store", "cache_dir_ttl", ttl)
        self.max_nbytes_a_day: int | None = None
        if max_nbytes_a_day is not None:
            self.max_nbytes_a_day = NBYTES_A_DAY.check(
                "block store", "cache_dir_writes", max_nbytes_a_day
            )
        self.fingerprint = fingerprint
        self._digest = fingerprint.digest
        make_folder(self.folder)
        self._catalogue = Catalogue(self.files, self._digest, self.ttl)
        with refusals(self.folder):
            self.files.make_fingerprint_folder(fingerprint)
        self._uses: deque[tuple[tuple[bytes, ...], int]] = deque()  # not in the files yet
        self._is_closed = False
        self._retry_seconds = _FIRST_RETRY_SECONDS
        self._retry_at = self._worked_again_at = -float("inf")
        self._probe_nbytes = 0
        self._blocked: set[str] = set()  # shards
        self._lock = threading.Lock()  # of the counters and the failure
        self._counts: Counter[str] = Counter()
        self._written = WrittenBytes(self.folder)
        self._has_warned_of_limit = False
        self._writing = threading.RLock()

    def has(self, key: bytes) -> bool:
        """Whether the folder has a file of that name. It isn't read, and may be unreadable."""
        if self._is_off:
            return False
        status = self.files.status(self._name(key))
        if status is None:
            return False
        return self.ttl is None or not self._is_expired(key, time_used(status) / 1e9, None)

    def load(self, key: bytes) -> bytes | None:
        """The payload of a block, checked; ``None`` for a miss. A bad file is removed."""
        if self._is_off:
            return None
        try:
            header, payload, last_used = self.files.read(self._name(key))
        except (FileNotFoundError, NotADirectoryError, OtherVersionError):
            return None
        except OSError as error:
            if error.errno in _UNREACHABLE:
                self._fail_for("a block could not be read", error)
            elif error.errno not in _TEMPORARY:
                self._discard(key, "num_corrupt")
            return None
        except BadBlockFileError:
            self._discard(key, "num_corrupt")
            return None
        if self._is_expired(key, last_used, header.ttl):
            self._discard(key, "num_evicted")
            return None
        if header.block.group != ANSWERS:
            self.count("num_hits")
        return payload

    def store(self, header: BlockHeader, content: Payload) -> bool:
        """Write a block unless it exists, after evicting others if necessary. An answer replaces an
        earlier one to the same conversation.

        Returns:
            Whether it is in the folder now.
        """
        if self._is_off:
            return False
        is_answer = header.group == ANSWERS
        if not is_answer and self.has(header.block_hash):
            return True
        is_written = False
        with self._writing, self._failing("a block could not be written", header.block_hash):
            is_written = self._write(header, content)
        if not (is_written and is_answer):
            self.count("num_written" if is_written else "num_dropped")
        return is_written

    def note_used(self, keys: Iterable[bytes]) -> None:
        """Record the use of blocks of one prefix, in order, whether they were found in memory or on
        disk. They and their ancestors become the most recently used, and their time to live starts
        again. The files are updated by ``maintain`` or the next ``store``.
        """
        if not self._is_off:
            self._uses.append((tuple(keys), time.time_ns()))

    def maintain(self, pause: Pause | None = None) -> None:
        """Update the times of used blocks, and enforce the limits. The writer calls it when it is
        idle, and every few seconds.

        Args:
            pause: called every few milliseconds of long work, without a lock. An exception that it
                raises interrupts the work, which the next call resumes.
        """
        if self._is_off and not self._works_again():
            return
        # The first listing may take long: finish it before taking the lock that ``store`` takes.
        with self._failing("the files could not be listed"):
            self._catalogue.list_files(pause)
        with self._writing, self._failing("the folder could not be maintained"):
            self.files.refresh()
            self._note_uses()
            self._written.update(is_due=False)
            self._list_if_due(pause)
            self._make_room(0, pause)

    def close(self, timeout: float = 1.0) -> None:
        """Update the times of used blocks. Nothing is found any more.

        Args:
            timeout: the most seconds to wait for a write of another thread.
        """
        was_off, self._is_closed = self._is_off, True
        if was_off or not self._writing.acquire(timeout=timeout):
            return
        try:
            with self._failing("the folder could not be maintained"):
                self._note_uses()
            self._written.update()
        finally:
            self._writing.release()

    def fail(self, why: str) -> None:
        """Turn the store off until ``maintain`` finds that the folder works again. The first reason
        is kept.
        """
        with self._lock:
            if self._failure is None:
                self._failure = f"[block store] {self.folder}: {why}"
                has_just_worked = time.monotonic() - self._worked_again_at < _MAX_RETRY_SECONDS
                self._retry_later(2 * self._retry_seconds if has_just_worked else 0.0)

    def stats(self) -> TierStats:
        """The current figures. Sums are of the whole folder, in multiples of 4,096 bytes per file.
        They are zero until the files are listed, and include changes of other processes as of the
        last listing.
        """
        known = self._catalogue
        with self._lock:
            counts = self._counts + Counter(num_evicted=known.num_expired)
            return TierStats(num_blocks=known.num_blocks, nbytes=known.nbytes, **counts)

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter of ``stats``."""
        with self._lock:
            self._counts[name] += number

    @property
    def min_uses(self) -> int:
        """See :class:`Tier`."""
        if self.max_nbytes_a_day is None:
            return 1
        num_left = self.max_nbytes_a_day - self._written.nbytes_last_day
        if num_left < self._probe_nbytes or num_left <= 0:
            return _MAX_USES
        return 1 if num_left > self.max_nbytes_a_day // 2 else 2

    @property
    def _is_off(self) -> bool:
        return self._is_closed or self._failure is not None

    def _retry_later(self, seconds: float) -> None:
        self._retry_seconds = min(max(seconds, _FIRST_RETRY_SECONDS), _MAX_RETRY_SECONDS)
        self._retry_at = time.monotonic() + self._retry_seconds

    def _works_again(self) -> bool:
        """After a failure, and if it is time to try: whether a file can be written again, of the
        size of the last block.
        """
        if self._is_closed or time.monotonic() < self._retry_at:
            return False
        try:
            with self._writing:
                self.files.refresh()
                self.files.blocks()  # A folder that was removed is not made again.
                make_folder(self.folder)
                self.files.probe(self.fingerprint, min(self._probe_nbytes, _MAX_PROBE_NBYTES))
        except (OSError, BlockStoreError):
            with self._lock:
                self._retry_later(2 * self._retry_seconds)
            return False
        self._catalogue.list_again()
        with self._lock:
            self._failure, self._worked_again_at = None, time.monotonic()
        return True

    def _name(self, block_hash: bytes) -> BlockName:
        return self._digest, block_hash

    def _is_expired(self, block_hash: bytes, last_used: float, ttl: float | None) -> bool:
        ttls = [limit for limit in (ttl, self.ttl) if limit is not None]
        if not ttls or time.time() - last_used <= min(ttls):
            return False
        return block_hash not in self.files.kept(self._digest)

    def _discard(self, block_hash: bytes, counter: str) -> None:
        """Remove a file that is bad or has expired."""
        try:
            if self._catalogue.remove(self._name(block_hash)):
                self.count(counter)
        except OSError as error:
            if not self._is_only_shard(block_hash, error):
                self._fail_for("a bad block could not be removed", error)

    def _write(self, header: BlockHeader, payload: Payload) -> bool:
        prefix = encode_header(header, self._digest, time.time(), self.ttl, payload)
        nbytes = self._probe_nbytes = nbytes_on_disk(len(prefix) + memoryview(payload).nbytes)
        if nbytes > self.max_nbytes or self._exceeds_limit_of_day(nbytes):
            return False
        self._note_uses()
        self._list_if_due()
        used = self._catalogue.time_of_use(self._digest, header.parent_hash, time.time_ns())
        if not self._make_room(nbytes):
            return False
        name = self._name(header.block_hash)
        if header.group == ANSWERS:
            self._catalogue.remove(name)
        elif self.ttl is not None and self._catalogue.remove(name):  # an expired one
            self.count("num_evicted")
        self._write_file(header.block_hash, [prefix, payload], nbytes, used)
        self._catalogue.added(name, used, nbytes)
        self._written.add(nbytes)
        self._written.update(is_due=False)
        self.count("nbytes_written", nbytes)
        return True

    def _exceeds_limit_of_day(self, nbytes: int) -> bool:
        """Whether so much more may not be written today, of which a warning tells."""
        limit, written = self.max_nbytes_a_day, self._written.now().nbytes_last_day
        if limit is None or written + nbytes <= limit:
            # A smaller block may still fit: that does not make a second warning due.
            self._has_warned_of_limit &= limit is not None and written > limit // 2
            return False
        if not self._has_warned_of_limit:
            self._has_warned_of_limit = True
            _warn(
                f"[block store] {self.folder}: as much was written in the last 24 hours as "
                f"cache_dir_writes allows ({limit:,} bytes); until there is less, new K/V are kept "
                "in memory only"
            )
        return True

    def _write_file(self, block_hash: bytes, pieces: list[Payload], nbytes: int, used: int) -> None:
        try:
            self.files.write(self.fingerprint, block_hash, pieces, used)
        except OSError as error:
            if error.errno not in _FULL or not self._shrink(self._catalogue.nbytes - 2 * nbytes):
                raise
            self.files.write(self.fingerprint, block_hash, pieces, used)

    def _list_if_due(self, pause: Pause | None = None) -> None:
        """List the files again if other processes may have changed much since the last time."""
        known = self._catalogue
        seconds = _SECONDS_BETWEEN_LISTINGS
        if known.nbytes_added:
            seconds = min(seconds, _SECONDS_BETWEEN_LISTINGS_OF_A_WRITER)
        if self.ttl is not None:
            seconds = min(seconds, self.ttl / _LISTINGS_PER_TTL)
        is_much = known.nbytes_added > _SHARE_BETWEEN_LISTINGS * self.max_nbytes
        if is_much or time.monotonic() - known.listed >= seconds:
            known.list_again()
        known.list_files(pause)

    def _make_room(self, nbytes: int, pause: Pause | None = None) -> bool:
        """Evict until ``nbytes`` more fit within the limit; whether they do."""
        self._shrink(self.max_nbytes - nbytes, pause)
        return self._catalogue.nbytes + nbytes <= self.max_nbytes

    def _shrink(self, max_nbytes: int, pause: Pause | None = None) -> int:
        num_evicted, num_freed = self._catalogue.shrink(max(0, max_nbytes), pause)
        self.count("num_evicted", num_evicted)
        return num_freed

    def _note_uses(self) -> None:
        """Set the times of the files that were used."""
        while self._uses:
            self._catalogue.use(self._digest, *self._uses.popleft())

    @contextmanager
    def _failing(self, what: str, block_hash: bytes | None = None) -> Iterator[None]:
        """Turn an error of the disk into ``failure``, or ignore it if it is temporary, or if only
        the folder of this block can't be used.
        """
        try:
            yield
        except OSError as error:
            is_only_shard = block_hash is not None and self._is_only_shard(block_hash, error)
            if error.errno not in _TEMPORARY and not is_only_shard:
                self._fail_for(what, error)

    def _is_only_shard(self, block_hash: bytes, error: OSError) -> bool:
        """Whether only the shard of this block can't be used, of which a warning tells once."""
        name = self._name(block_hash)
        if not self.files.is_blocked(name):
            return False
        shard = str(self.files.path_of(name[0]) / shard_name_of(block_hash))
        if shard not in self._blocked:
            self._blocked.add(shard)
            why = system_reason(error)
            where = "" if shard in why else f"{shard}: "
            _warn(f"[block store] {where}{why}; the blocks that belong there are not kept")
        return True

    def _fail_for(self, what: str, error: OSError) -> None:
        path = error.filename
        where = f" ({path})" if isinstance(path, str) and os.path.isabs(path) else ""
        self.fail(f"{what}: {system_reason(error)}{where}")


def _warn(text: str) -> None:
    with suppress(Warning):  # If warnings are errors, this one would end the thread.
        warnings.warn(text, stacklevel=3)
