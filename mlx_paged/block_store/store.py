"""``BlockStore``: blocks of one fingerprint in a folder that several processes use at once."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from mlx_paged.block_store.block_file import encode_header
from mlx_paged.block_store.catalogue import Catalogue, Pause
from mlx_paged.block_store.errors import (
    BadBlockFileError,
    BlockStoreError,
    OtherVersionError,
    refusals,
)
from mlx_paged.block_store.files import make_folder
from mlx_paged.block_store.fingerprint import Fingerprint
from mlx_paged.block_store.layout import BlockLayout, BlockName
from mlx_paged.block_store.shards import last_use_of, nbytes_on_disk
from mlx_paged.core.tier import BlockHeader, Payload, Tier, TierStats
from mlx_paged.domains import AT_LEAST_1
from mlx_paged.errors import shown, system_reason

# When the files are listed again, to see what other processes have written and removed: after so
# many seconds, sooner if this process writes, and before it has written this share of the limit.
_SECONDS_BETWEEN_LISTINGS = 600.0
_SECONDS_BETWEEN_LISTINGS_OF_A_WRITER = 60.0
_SHARE_BETWEEN_LISTINGS = 1 / 16
_LISTINGS_PER_TTL = 4

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# The process lacks something, or this one file can't be used: the next may succeed.
_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EISDIR})


class BlockStore(Tier):
    """Blocks of one fingerprint in a folder that several processes use at once.

    Any thread may call anything. ``has``, ``load`` and ``note_used`` never wait for a write or for
    a listing; ``store``, ``maintain`` and ``close`` may take long, and are the writer's.

    No method raises for what the disk does. A bad file is removed, and is a miss. When
    the disk itself fails, ``failure`` says why, and from then on nothing is found and nothing is
    written. A full disk is a failure if evicting blocks doesn't help.

    Args:
        folder: made, with the rights 0700, if it isn't there.
        max_nbytes: what all blocks in the folder may take, whatever their fingerprint. Processes
            that use a folder should agree on it: each one keeps to its own, and may exceed it by a
            sixteenth, which it may write before it sees what the others have written.
        fingerprint: what the blocks depend on beside their tokens.
        ttl: seconds after its last use at which a block isn't found any more. It holds for the
            blocks that are written here, whichever process asks for them, and in this process for
            all of this fingerprint; this process removes those, too, within a quarter of the time.
            Pinned blocks stay.

    Raises:
        BlockStoreError: the folder can't be used (``cache_dir``), or a limit is not one
            (``cache_dir_size``, ``cache_dir_ttl``).
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_nbytes: int,
        fingerprint: Fingerprint,
        ttl: float | None = None,
    ) -> None:
        self.layout = BlockLayout(folder)
        self.max_nbytes = AT_LEAST_1.check("block store", "cache_dir_size", max_nbytes)
        self.ttl = _checked_ttl(ttl)
        self.fingerprint = fingerprint
        self._digest = fingerprint.digest
        make_folder(self.layout.folder)
        self._catalogue = Catalogue(self.layout, self._digest, self.ttl)
        self._shards = self._catalogue.shards
        with refusals(self.layout.folder):
            self._shards.make_fingerprint_folder(fingerprint)
        self._uses: deque[tuple[tuple[bytes, ...], int]] = deque()  # not in the files yet
        self._is_off = False
        self._lock = threading.Lock()  # of the counters
        self._counts: Counter[str] = Counter()
        self._writing = threading.RLock()

    def has(self, key: bytes) -> bool:
        """Whether the folder has the block, by its name alone: nothing of it is read, and it may
        turn out to be unreadable.
        """
        if self._is_off:
            return False
        status = self._shards.status(self._name(key))
        if status is None:
            return False
        return self.ttl is None or not self._is_over(key, last_use_of(status), None)

    def load(self, key: bytes) -> bytes | None:
        """The payload of a block, checked; ``None`` if it isn't there. A bad file is removed."""
        if self._is_off:
            return None
        try:
            header, payload, last_used = self._shards.read(self._name(key))
        except (FileNotFoundError, NotADirectoryError, OtherVersionError):
            return None
        except OSError as error:
            if error.errno not in _PASSING:
                self._discard(key, "num_corrupt")
            return None
        except BadBlockFileError:
            self._discard(key, "num_corrupt")
            return None
        if self._is_over(key, last_used, header.ttl):
            self._discard(key, "num_evicted")
            return None
        self.count("num_hits")
        return payload

    def store(self, header: BlockHeader, content: Payload) -> bool:
        """Write a block, and first evict as many as it needs room for.

        Returns:
            Whether it is in the folder now, written just now or before.
        """
        if self._is_off:
            return False
        if self.has(header.block_hash):
            return True
        is_written = False
        with self._writing, self._failing("a block could not be written"):
            is_written = self._write(header, content)
        self.count("num_written" if is_written else "num_dropped")
        return is_written

    def note_used(self, keys: Iterable[bytes]) -> None:
        """Say that blocks of one prefix were used, first block first, whether they were found in
        memory or on disk. They and those before them stay longest, and their time starts again. It
        is remembered here, and the files get it by ``maintain`` or the next ``store``.
        """
        if not self._is_off:
            self._uses.append((tuple(keys), time.time_ns()))

    def maintain(self, pause: Pause | None = None) -> None:
        """Write down what has happened, and bring the folder within its limits. The writer calls it
        when it has nothing to write, and every few seconds.

        Args:
            pause: called every few milliseconds of long work, without a lock. What it raises ends
                the work, which is taken up again next time.
        """
        if self._is_off:
            return
        # Finish the first listing before the lock that a put takes is taken.
        with self._failing("the files could not be listed"):
            self._catalogue.list_files(pause)
        with self._writing, self._failing("the folder could not be maintained"):
            self._shards.refresh()
            self._note_uses()
            self._list_if_due(pause)
            self._make_room(0, pause)

    def close(self, timeout: float = 1.0) -> None:
        """Write down what was used. Nothing is found any more.

        Args:
            timeout: how many seconds to wait for a write of another thread that hangs.
        """
        was_off, self._is_off = self._is_off, True
        if was_off or not self._writing.acquire(timeout=timeout):
            return
        try:
            with self._failing("the folder could not be maintained"):
                self._note_uses()
        finally:
            self._writing.release()

    def fail(self, why: str) -> None:
        """Give up, for the reason given; the first one stays."""
        with self._lock:
            self._is_off = True
            self._failure = self._failure or f"[block store] {self.layout.folder}: {why}"

    def stats(self) -> TierStats:
        """What is known now. Sums are of the whole folder, in steps of 4,096 bytes, as file systems
        give them: zero until the files were listed, and of what other processes do, as of the last
        listing.
        """
        known = self._catalogue
        with self._lock:
            counts = self._counts + Counter(num_evicted=known.num_expired)
            return TierStats(num_blocks=known.num_blocks, nbytes=known.nbytes, **counts)

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter of ``stats``."""
        with self._lock:
            self._counts[name] += number

    def _name(self, block_hash: bytes) -> BlockName:
        return self._digest, block_hash

    def _is_over(self, block_hash: bytes, last_used: float, ttl: float | None) -> bool:
        ttls = [limit for limit in (ttl, self.ttl) if limit is not None]
        if not ttls or time.time() - last_used <= min(ttls):
            return False
        return not self._catalogue.pins.keeps(self._name(block_hash))

    def _discard(self, block_hash: bytes, counter: str) -> None:
        """Remove a file that can't be used."""
        try:
            if self._catalogue.remove(self._name(block_hash)):
                self.count(counter)
        except OSError as error:
            self.fail(f"a bad block could not be removed: {system_reason(error)}")

    def _write(self, header: BlockHeader, payload: Payload) -> bool:
        prefix = encode_header(header, self._digest, time.time(), self.ttl, payload)
        nbytes = nbytes_on_disk(len(prefix) + memoryview(payload).nbytes)
        if nbytes > self.max_nbytes:
            return False
        self._note_uses()
        self._list_if_due()
        used = self._catalogue.time_behind(self._digest, header.parent_hash, time.time_ns())
        if not self._make_room(nbytes):
            return False
        name = self._name(header.block_hash)
        if self.ttl is not None and self._catalogue.remove(name):  # one whose time is over
            self.count("num_evicted")
        self._write_file(header.block_hash, [prefix, payload], nbytes, used)
        self._catalogue.added(name, used, nbytes)
        return True

    def _write_file(self, block_hash: bytes, pieces: list[Payload], nbytes: int, used: int) -> None:
        try:
            self._shards.write(self.fingerprint, block_hash, pieces, used)
        except OSError as error:
            if error.errno not in _FULL or not self._shrink(self._catalogue.nbytes - 2 * nbytes):
                raise
            self._shards.write(self.fingerprint, block_hash, pieces, used)

    def _list_if_due(self, pause: Pause | None = None) -> None:
        """List the files again if others may have changed much since the last time."""
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
        """Evict until ``nbytes`` more are within the limit; whether they are."""
        self._shrink(self.max_nbytes - nbytes, pause)
        return self._catalogue.nbytes + nbytes <= self.max_nbytes

    def _shrink(self, max_nbytes: int, pause: Pause | None = None) -> int:
        num_evicted, num_freed = self._catalogue.shrink(max(0, max_nbytes), pause)
        self.count("num_evicted", num_evicted)
        return num_freed

    def _note_uses(self) -> None:
        """Give files the times at which they were used."""
        while self._uses:
            self._catalogue.use(self._digest, *self._uses.popleft())

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """Turn what the disk does into ``failure``, or into nothing if it may pass."""
        try:
            yield
        except OSError as error:
            if error.errno not in _PASSING:
                self.fail(f"{what}: {system_reason(error)}")


def _checked_ttl(ttl: float | None) -> float | None:
    if ttl is None or (isinstance(ttl, (int, float)) and 0 < ttl < float("inf")):
        return ttl
    raise BlockStoreError(
        f"cache_dir_ttl must be a positive number of seconds, got {shown(ttl)}", "cache_dir_ttl"
    )
