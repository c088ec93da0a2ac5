"""``BlockReader``: a thread that reads blocks ahead, so that no step waits for a disk."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import Counter, deque
from collections.abc import Hashable, Sequence

from mlx_paged.core.tier import Tier
from mlx_paged.errors import reason


@dataclasses.dataclass(frozen=True)
class ReadBlock:
    """A block that was read and checked.

    Attributes:
        key: whose it is, as ``BlockReader.read`` was told.
        block_hash: its chained hash.
        payload: its bytes.
    """

    key: Hashable
    block_hash: bytes
    payload: bytes


class BlockReader:
    """Reads blocks from a store in one daemon thread of its own, those of one key after another.

    A key says what wants the blocks, such as a request.

    Args:
        max_ready_nbytes: of payloads that were not taken yet. One block is always read, however
            large it is.
    """

    def __init__(self, store: Tier, max_ready_nbytes: int) -> None:
        self._shelf = _Shelf(store, max_ready_nbytes)
        thread = threading.Thread(
            target=self._shelf.run, name="mlx_paged block reader", daemon=True
        )
        thread.start()
        self._finalizer = weakref.finalize(self, self._shelf.close)
        # The thread ends with the interpreter by itself: there is nothing to finish.
        self._finalizer.atexit = False

    def read(self, key: Hashable, block_hashes: Sequence[bytes]) -> None:
        """Queue blocks to be read, in order, up to the first one that isn't there. What was queued
        under the key before comes first.
        """
        self._shelf.add(key, tuple(block_hashes))

    def take(self, max_nbytes: int) -> list[ReadBlock]:
        """The blocks that are ready, in the order in which they were read: as many as have at most
        ``max_nbytes`` together, but one at least if there is any. Never waits.
        """
        return self._shelf.take(max_nbytes)

    def is_reading(self, key: Hashable) -> bool:
        """Whether blocks of the key are still to be read, or to be taken."""
        return self._shelf.is_reading(key)

    def cancel(self, key: Hashable) -> None:
        """Forget the blocks of a key, those that are ready, too. The key may be used again."""
        self._shelf.cancel(key)

    def wait(self, timeout: float, nbytes: int = 1) -> bool:
        """Wait until ``nbytes`` of blocks are ready, or no more will be before some are taken, for
        ``timeout`` seconds at most. Returns whether a block is ready.
        """
        return self._shelf.wait(timeout, nbytes)

    def close(self) -> None:
        """Stop reading and forget everything. A read in progress may take a moment longer."""
        self._finalizer()


class _Read:
    """Blocks of one key, some of them read; the thread holds it while it reads."""

    def __init__(self, key: Hashable, block_hashes: Sequence[bytes]) -> None:
        self.key = key
        self.block_hashes = deque(block_hashes)
        self.is_wanted = True


class _Shelf:
    """What the thread and the reader share; the thread holds no reference to the reader itself."""

    def __init__(self, store: Tier, max_nbytes: int) -> None:
        self._store = store
        self._max_nbytes = max_nbytes
        self._changed = threading.Condition()
        self._reads: deque[_Read] = deque()  # the thread works on the first
        self._ready: deque[ReadBlock] = deque()
        self._num_ready: Counter[Hashable] = Counter()
        self._nbytes = 0
        self._is_closed = False

    def add(self, key: Hashable, block_hashes: Sequence[bytes]) -> None:
        with self._changed:
            if block_hashes and not self._is_closed:
                self._reads.append(_Read(key, block_hashes))
                self._changed.notify_all()

    def take(self, max_nbytes: int) -> list[ReadBlock]:
        taken: list[ReadBlock] = []
        with self._changed:
            while self._ready and (not taken or len(self._ready[0].payload) <= max_nbytes):
                block = self._ready.popleft()
                self._remove(block)
                taken.append(block)
                max_nbytes -= len(block.payload)
            if taken:
                self._changed.notify_all()
        return taken

    def is_reading(self, key: Hashable) -> bool:
        with self._changed:
            return self._num_ready[key] > 0 or any(read.key == key for read in self._reads)

    def cancel(self, key: Hashable) -> None:
        with self._changed:
            for read in [read for read in self._reads if read.key == key]:
                read.is_wanted = False
                self._reads.remove(read)
            for block in [block for block in self._ready if block.key == key]:
                self._ready.remove(block)
                self._remove(block)
            self._changed.notify_all()

    def wait(self, timeout: float, nbytes: int) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: self._nbytes >= nbytes or not self._reads or not self._has_room(), timeout
            )
            return bool(self._ready)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            for read in self._reads:
                read.is_wanted = False
            self._reads.clear()
            self._ready.clear()
            self._num_ready.clear()
            self._nbytes = 0
            self._changed.notify_all()

    def run(self) -> None:
        while (item := self._next()) is not None:
            read, block_hash = item
            try:
                payload = self._store.load(block_hash)
            except Exception as error:
                # What a thread raises is not read; a store that has failed says so.
                self._store.fail(f"a block could not be read: {reason(error)}")
                payload = None
            self._put(read, block_hash, payload)

    def _next(self) -> tuple[_Read, bytes] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (self._reads and self._has_room()))
            if self._is_closed:
                return None
            read = self._reads[0]
            return read, read.block_hashes.popleft()

    def _has_room(self) -> bool:
        return not self._ready or self._nbytes < self._max_nbytes

    def _put(self, read: _Read, block_hash: bytes, payload: bytes | None) -> None:
        with self._changed:
            if not read.is_wanted:
                return
            if payload is not None:
                self._ready.append(ReadBlock(read.key, block_hash, payload))
                self._num_ready[read.key] += 1
                self._nbytes += len(payload)
            if payload is None or not read.block_hashes:
                self._reads.remove(read)
            self._changed.notify_all()

    def _remove(self, block: ReadBlock) -> None:
        self._nbytes -= len(block.payload)
        self._num_ready[block.key] -= 1
        if not self._num_ready[block.key]:
            del self._num_ready[block.key]
