"""``BlockWriter``: a thread that writes blocks, behind a queue that drops rather than blocks."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque

from mlx_paged.core.tier import BlockHeader, Payload, Tier
from mlx_paged.errors import reason

SECONDS_AT_EXIT = 10.0
_SECONDS_BETWEEN_MAINTENANCE = 5.0
_SECONDS_OF_A_PAUSE = 0.001


class BlockWriter:
    """Writes what it is offered to a store, in order, in one daemon thread of its own.

    The same thread looks after the folder: it lists the files when it starts, a little at a time,
    notes down what was used, and keeps the limits. Nothing is written before it knows what is
    there.

    The thread ends with ``close``, with the writer, or with the interpreter; first it writes what
    is queued, for which it has ten seconds at exit. It doesn't survive a fork.

    Args:
        max_queued_nbytes: of payloads that wait. One is always taken, however large it is.
    """

    def __init__(self, store: Tier, max_queued_nbytes: int) -> None:
        self._queue = _Queue(store, max_queued_nbytes)
        self._thread = threading.Thread(
            target=self._queue.run, name="mlx_paged block writer", daemon=True
        )
        _running.add(self._queue)
        self._thread.start()
        self._stop = weakref.finalize(self, self._queue.stop)
        self._stop.atexit = False

    def offer(self, header: BlockHeader, payload: Payload) -> bool:
        """Queue a block; never waits. The payload must not change any more.

        Returns:
            Whether it was queued. If not, it is dropped and counted: the queue is full, the writer
            closed, or the store has failed.
        """
        return self._queue.append(header, payload)

    def has_room(self, nbytes: int) -> bool:
        """Whether a payload of this many bytes would be queued now."""
        return self._queue.has_room(nbytes)

    def is_queued(self, block_hash: bytes) -> bool:
        """Whether a block waits to be written, or is being written."""
        return block_hash in self._queue.hashes

    def flush(self, timeout: float) -> bool:
        """Wait, for ``timeout`` seconds at most, until all that was offered and noted as used is
        written; whether it is.
        """
        return self._queue.flush(timeout)

    def finish(self) -> None:
        """Take nothing more, and never wait: the thread writes what is queued, closes the store and
        ends.
        """
        self._queue.must_close_store = True
        self._queue.stop()

    def close(self, timeout: float = SECONDS_AT_EXIT) -> bool:
        """Take nothing more, write what is queued for at most ``timeout`` seconds, drop the rest.

        Returns:
            Whether everything was written. May be called again.
        """
        deadline = time.monotonic() + timeout
        is_written = self._queue.close(timeout)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return is_written


class _Closing(Exception):
    """Nothing waits to be written any more, and a caller waits for the thread to end."""


class _Queue:
    """What the thread and the writer share; the thread holds no reference to the writer itself."""

    def __init__(self, store: Tier, max_nbytes: int) -> None:
        self._store = store
        self._max_nbytes = max_nbytes
        self._changed = threading.Condition()
        self._waiting: deque[tuple[BlockHeader, Payload]] = deque()
        self.hashes: set[bytes] = set()  # of those that wait, and of the one being written
        self._nbytes = 0
        self._must_maintain = True
        self._is_busy = True
        self._is_closed = False
        self.must_close_store = False

    def append(self, header: BlockHeader, payload: Payload) -> bool:
        nbytes = memoryview(payload).nbytes
        with self._changed:
            if self._has_room(nbytes):
                self._waiting.append((header, payload))
                self.hashes.add(header.block_hash)
                self._nbytes += nbytes
                self._must_maintain = True
                self._changed.notify_all()
                return True
        self._store.count("num_dropped")
        return False

    def has_room(self, nbytes: int) -> bool:
        with self._changed:
            return self._has_room(nbytes)

    def _has_room(self, nbytes: int) -> bool:
        is_short = self._waiting and self._nbytes + nbytes > self._max_nbytes
        return not is_short and not self._is_closed and self._store.failure is None

    def flush(self, timeout: float) -> bool:
        with self._changed:
            self._must_maintain = not self._is_closed
            self._changed.notify_all()
            return self._changed.wait_for(self._is_at_rest, timeout)

    def stop(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def close(self, timeout: float) -> bool:
        self.stop()
        with self._changed:
            is_at_rest = self._changed.wait_for(self._is_at_rest, timeout)
            num_dropped = len(self._waiting)
            self._waiting.clear()
            self.hashes.clear()
            self._nbytes = 0
        self._store.count("num_dropped", num_dropped)
        _running.discard(self)  # Python's end has waited, or is not to.
        return is_at_rest

    def run(self) -> None:
        self._maintain()  # list the files while there is nothing to write yet
        while self._wait():
            block = self._next()
            if block is None:
                self._maintain()
            else:
                self._write(*block)
        self._maintain()
        if self.must_close_store:
            self._store.close()
        with self._changed:
            self._is_busy = self._must_maintain = False
            self._changed.notify_all()
        _running.discard(self)

    def _is_at_rest(self) -> bool:
        return not (self._waiting or self._must_maintain or self._is_busy)

    def _wait(self) -> bool:
        """Wait until there is something to do; whether there is, rather than an end."""
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
            # What a thread raises is not read; a store that has failed says so.
            self._store.fail(f"a block could not be written: {reason(error)}")
        self.hashes.discard(header.block_hash)

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
        # Steps are computed meanwhile: a thread that runs Python all the time would delay them.
        time.sleep(_SECONDS_OF_A_PAUSE)


_running: set[_Queue] = set()


def _close_all() -> None:
    deadline = time.monotonic() + SECONDS_AT_EXIT
    for queue in list(_running):
        queue.close(max(0.0, deadline - time.monotonic()))


atexit.register(_close_all)
