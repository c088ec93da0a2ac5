"""Threads beside the engine's, so that no step waits for the disk: ``BlockReader`` reads blocks
ahead, and ``BlockWriter`` writes them from a queue, which drops what does not fit.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Hashable, Sequence

from mlx_paged.core.tier import BlockHeader, Payload, Tier
from mlx_paged.errors import reason

SECONDS_AT_EXIT = 10.0
_SECONDS_BETWEEN_MAINTENANCE = 5.0
_SECONDS_OF_A_PAUSE = 0.001


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


class BlockWriter:
    """Writes blocks to a tier, in order, in a daemon thread. Any thread may call it.

    The same thread maintains the folder: it lists the files when it starts, records what was used,
    and enforces the limits. Nothing is written before the files are listed.

    The thread runs until ``finish``, ``close`` or the end of the interpreter; then it writes what
    is queued, for at most ten seconds at exit. It doesn't survive a fork.

    Args:
        max_queued_nbytes: the most bytes of queued payloads. One payload is always queued, whatever
            its size.
    """

    def __init__(self, store: Tier, max_queued_nbytes: int) -> None:
        self._store = store
        self._max_nbytes = max_queued_nbytes
        self._changed = threading.Condition()
        self._waiting: deque[tuple[BlockHeader, Payload]] = deque()
        self._hashes: set[bytes] = set()  # of queued blocks and of the one being written
        self._nbytes = 0
        self._must_maintain = True
        self._is_busy = True
        self._is_closed = False
        self._must_close_store = False
        self._thread = threading.Thread(
            target=self._run, name="mlx_paged block writer", daemon=True
        )
        _running.add(self)
        # After the handlers that are registered before: the last of these may end the process.
        atexit.unregister(_close_all)
        atexit.register(_close_all)
        self._thread.start()

    def offer(self, header: BlockHeader, payload: Payload) -> bool:
        """Queue a block. Never waits. The payload must not change afterwards.

        Returns:
            Whether it was queued. It is dropped, and counted, if the queue is full, the writer is
            closed or the store has failed.
        """
        nbytes = memoryview(payload).nbytes
        with self._changed:
            if self._has_room(nbytes):
                self._waiting.append((header, payload))
                self._hashes.add(header.block_hash)
                self._nbytes += nbytes
                self._must_maintain = True
                self._changed.notify_all()
                return True
        self._store.count("num_dropped")
        return False

    def has_room(self, nbytes: int) -> bool:
        """Whether a payload of this size would be queued now."""
        with self._changed:
            return self._has_room(nbytes)

    def is_queued(self, block_hash: bytes) -> bool:
        """Whether a block is queued or being written."""
        return block_hash in self._hashes

    def flush(self, timeout: float) -> bool:
        """Wait for at most ``timeout`` seconds until all blocks offered and all uses noted so far
        are written; whether they are.
        """
        with self._changed:
            self._must_maintain = not self._is_closed
            self._changed.notify_all()
            return self._changed.wait_for(self._is_at_rest, timeout)

    def finish(self) -> None:
        """Accept no more blocks and return at once: the thread writes what is queued, closes the
        store and ends.
        """
        self._must_close_store = True
        self._stop()

    def close(self, timeout: float = SECONDS_AT_EXIT) -> bool:
        """Accept no more blocks, write what is queued for at most ``timeout`` seconds, and drop the
        rest.

        Returns:
            Whether everything was written. May be called again.
        """
        deadline = time.monotonic() + timeout
        self._stop()
        with self._changed:
            is_at_rest = self._changed.wait_for(self._is_at_rest, timeout)
            num_dropped = len(self._waiting)
            self._waiting.clear()
            self._hashes.clear()
            self._nbytes = 0
        self._store.count("num_dropped", num_dropped)
        _running.discard(self)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return is_at_rest

    def _stop(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _has_room(self, nbytes: int) -> bool:
        is_short = self._waiting and self._nbytes + nbytes > self._max_nbytes
        return not is_short and not self._is_closed and self._store.failure is None

    def _is_at_rest(self) -> bool:
        return not (self._waiting or self._must_maintain or self._is_busy)

    def _run(self) -> None:
        self._maintain()  # list the files while there is nothing to write yet
        while self._wait():
            block = self._next()
            if block is None:
                self._maintain()
            else:
                self._write(*block)
        self._maintain()
        if self._must_close_store:
            self._store.close()
        with self._changed:
            self._is_busy = self._must_maintain = False
            self._changed.notify_all()
        _running.discard(self)

    def _wait(self) -> bool:
        """Wait until there is work; False once the writer is closed and the queue is empty."""
        with self._changed:
            if not (self._waiting or self._must_maintain or self._is_closed):
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._waiting or self._must_maintain or self._is_closed,
                    _SECONDS_BETWEEN_MAINTENANCE,
                )
            self._is_busy = True
            return bool(self._waiting) or not self._is_closed

    def _next(self) -> tuple[BlockHeader, Payload] | None:
        with self._changed:
            if not self._waiting:
                return None
            header, payload = self._waiting.popleft()
            self._nbytes -= memoryview(payload).nbytes
            return header, payload

    def _write(self, header: BlockHeader, payload: Payload) -> None:
        try:
            self._store.store(header, payload)
        except Exception as error:
            # An error would end the thread unseen; as the store's failure it is reported.
            self._store.fail(f"a block could not be written: {reason(error)}")
        self._hashes.discard(header.block_hash)

    def _maintain(self) -> None:
        with self._changed:
            self._must_maintain = False
        try:
            self._store.maintain(self._pause)
        except _Closing:
            pass
        except Exception as error:
            self._store.fail(f"the folder could not be maintained: {reason(error)}")

    def _pause(self) -> None:
        with self._changed:
            if self._is_closed and not self._waiting:
                raise _Closing
        # Let the stepping thread run: a thread that executes Python continuously would delay it.
        time.sleep(_SECONDS_OF_A_PAUSE)


class _Closing(Exception):
    """The queue is empty, and a caller waits for the thread to end."""


_running: set[BlockWriter] = set()


def _close_all() -> None:
    deadline = time.monotonic() + SECONDS_AT_EXIT
    for writer in list(_running):
        writer.close(max(0.0, deadline - time.monotonic()))


os.register_at_fork(after_in_child=_running.clear)
