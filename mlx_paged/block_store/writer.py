"""``BlockWriter``: a thread that writes blocks, behind a queue that drops rather than blocks."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque

from mlx_paged.block_store.block_file import BlockHeader, Payload
from mlx_paged.block_store.store import BlockStore
from mlx_paged.errors import reason


class BlockWriter:
    """Writes what it is offered to a store, in order, in one daemon thread of its own.

    The thread ends with ``close``, with the writer, or with the interpreter, after what was queued
    by then; in the last two cases it has two seconds. It doesn't survive a fork.

    Args:
        max_queued_nbytes: of payloads that wait. One is always taken, however large it is.
    """

    def __init__(self, store: BlockStore, max_queued_nbytes: int) -> None:
        self._queue = _Queue(store, max_queued_nbytes)
        self._thread = threading.Thread(
            target=self._queue.run, name="mlx_paged block writer", daemon=True
        )
        self._thread.start()
        # At exit, too.
        self._finalizer = weakref.finalize(self, _end, self._queue, self._thread, _SECONDS_AT_EXIT)

    def offer(self, header: BlockHeader, payload: Payload) -> bool:
        """Queue a block; never waits. The payload must not change any more.

        Returns:
            Whether it was queued. If not, it is dropped and counted: the queue is full, the writer
            closed, or the store has failed.
        """
        return self._queue.append(header, payload)

    def has_room(self, nbytes: int) -> bool:
        """Whether a payload of so many bytes would be queued now."""
        return self._queue.has_room(nbytes)

    def is_queued(self, block_hash: bytes) -> bool:
        """Whether a block waits to be written, or is being written."""
        return block_hash in self._queue.hashes

    def flush(self, timeout: float) -> bool:
        """Wait, for ``timeout`` seconds at most, until all that was offered is written; whether it
        is.
        """
        return self._queue.wait_until_empty(timeout)

    def close(self, timeout: float = 2.0) -> bool:
        """Take nothing more, write what is queued for at most ``timeout`` seconds, drop the rest.

        Returns:
            Whether everything was written. May be called again.
        """
        self._finalizer.detach()
        return _end(self._queue, self._thread, timeout)


_SECONDS_AT_EXIT = 2.0


def _end(queue: _Queue, thread: threading.Thread, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    is_empty = queue.close(timeout)
    if thread is not threading.current_thread():
        thread.join(max(0.0, deadline - time.monotonic()))
    return is_empty


class _Queue:
    """What the thread and the writer share; the thread holds no reference to the writer itself."""

    def __init__(self, store: BlockStore, max_nbytes: int) -> None:
        self._store = store
        self._max_nbytes = max_nbytes
        self._changed = threading.Condition()
        self._waiting: deque[tuple[BlockHeader, Payload]] = deque()
        self.hashes: set[bytes] = set()  # of those that wait, and of the one being written
        self._nbytes = 0
        self._is_busy = False
        self._is_closed = False

    def append(self, header: BlockHeader, payload: Payload) -> bool:
        nbytes = memoryview(payload).nbytes
        with self._changed:
            if self._has_room(nbytes):
                self._waiting.append((header, payload))
                self.hashes.add(header.block_hash)
                self._nbytes += nbytes
                self._changed.notify_all()
                return True
        self._store.count(num_dropped=1)
        return False

    def has_room(self, nbytes: int) -> bool:
        with self._changed:
            return self._has_room(nbytes)

    def _has_room(self, nbytes: int) -> bool:
        is_short = self._waiting and self._nbytes + nbytes > self._max_nbytes
        return not is_short and not self._is_closed and self._store.failure is None

    def wait_until_empty(self, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._is_busy, timeout)

    def close(self, timeout: float) -> bool:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        is_empty = self.wait_until_empty(timeout)
        with self._changed:
            num_dropped = len(self._waiting)
            self._waiting.clear()
            self._nbytes = 0
        self._store.count(num_dropped=num_dropped)
        return is_empty

    def run(self) -> None:
        while (item := self._next()) is not None:
            try:
                self._store.put(*item)
                self.hashes.discard(item[0].block_hash)
                with self._changed:
                    is_last = not self._waiting
                if is_last:
                    self._store.tend()
            except Exception as error:
                # Nobody reads what a thread raises; a store that has failed says so.
                self._store.fail(f"the writer's thread stopped: {reason(error)}")
            del item

    def _next(self) -> tuple[BlockHeader, Payload] | None:
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if not self._waiting:
                return None
            self._is_busy = True
            header, payload = self._waiting.popleft()
            self._nbytes -= memoryview(payload).nbytes
            return header, payload
