"""``BlockReader``: a thread that reads blocks ahead, so that no step waits for the disk."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter, deque
from collections.abc import Hashable, Sequence

from mlx_paged.core.tier import Tier
from mlx_paged.errors import reason


@dataclasses.dataclass(frozen=True)
class ReadBlock:
    """A block that was read and checked.

    Attributes:
        key: the key under which :meth:`BlockReader.read` queued it.
        block_hash: its chained hash.
        payload: its bytes.
    """

    key: Hashable
    block_hash: bytes
    payload: bytes


class BlockReader:
    """Reads blocks from a tier in a daemon thread, which runs until ``close``. Any thread may call
    it.

    Args:
        max_ready_nbytes: the most bytes of payloads that are read and not taken. One block is
            always read, whatever its size.
    """

    def __init__(self, store: Tier, max_ready_nbytes: int) -> None:
        self._store = store
        self._max_nbytes = max_ready_nbytes
        self._changed = threading.Condition()
        self._reads: deque[_Read] = deque()  # the thread works on the first
        self._ready: deque[ReadBlock] = deque()
        self._num_ready: Counter[Hashable] = Counter()
        self._nbytes = 0
        self._is_closed = False
        threading.Thread(target=self._run, name="mlx_paged block reader", daemon=True).start()

    def read(self, key: Hashable, block_hashes: Sequence[bytes]) -> None:
        """Queue blocks to be read in order, up to the first that is missing.

        Args:
            key: identifies the consumer, such as a request. Earlier reads of a key come first.
        """
        with self._changed:
            if block_hashes and not self._is_closed:
                self._reads.append(_Read(key, block_hashes))
                self._changed.notify_all()

    def take(self, max_nbytes: int) -> list[ReadBlock]:
        """Remove and return blocks that are ready, in the order in which they were read, of at most
        ``max_nbytes`` together, but at least one if any is ready. Never waits.
        """
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
        """Whether blocks of the key are still to be read or taken."""
        with self._changed:
            return self._num_ready[key] > 0 or any(read.key == key for read in self._reads)

    def cancel(self, key: Hashable) -> None:
        """Drop all blocks of a key, ready ones included. The key may be used again."""
        with self._changed:
            for read in [read for read in self._reads if read.key == key]:
                read.is_wanted = False
                self._reads.remove(read)
            for block in [block for block in self._ready if block.key == key]:
                self._ready.remove(block)
                self._remove(block)
            self._changed.notify_all()

    def wait(self, timeout: float, nbytes: int = 1) -> bool:
        """Wait for at most ``timeout`` seconds until ``nbytes`` of blocks are ready, or until no
        more can become ready before some are taken. Returns whether a block is ready.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._nbytes >= nbytes or not self._reads or not self._has_room(), timeout
            )
            return bool(self._ready)

    def close(self) -> None:
        """Stop reading and drop everything. A read in progress may take a moment longer."""
        with self._changed:
            self._is_closed = True
            for read in self._reads:
                read.is_wanted = False
            self._reads.clear()
            self._ready.clear()
            self._num_ready.clear()
            self._nbytes = 0
            self._changed.notify_all()

    def _run(self) -> None:
        while (item := self._next()) is not None:
            read, block_hash = item
            try:
                payload = self._store.load(block_hash)
            except Exception as error:
                # An error would end the thread unseen; as the store's failure it is reported.
                self._store.fail(f"a block could not be read: {reason(error)}")
                payload = None
            self._put(read, block_hash, payload)

    def _next(self) -> tuple[_Read, bytes] | None:
        """The next block to read; ``None`` when the reader is closed."""
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


class _Read:
    """Blocks of one key that are still to be read."""

    def __init__(self, key: Hashable, block_hashes: Sequence[bytes]) -> None:
        self.key = key
        self.block_hashes = deque(block_hashes)
        self.is_wanted = True  # until it is cancelled, perhaps during a read
