"""``BlockWorker``: reads and writes the blocks of a tier in two threads, so that no step waits for
the disk.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mlx_paged.core.tier import BlockHeader, Payload, Tier
from mlx_paged.errors import reason

SECONDS_AT_EXIT = 10.0
_SECONDS_BETWEEN_MAINTENANCE = 5.0
_SECONDS_OF_A_PAUSE = 0.001

T = TypeVar("T")


@dataclass(eq=False)
class Read:
    """Blocks that are read in order, up to the first that is missing.

    Attributes:
        pending: hashes of blocks that are not read yet. The thread works on the first.
        ready: hashes and payloads of blocks that were read and checked, and are not taken yet.
    """

    pending: deque[bytes] = field(default_factory=deque)
    ready: deque[tuple[bytes, bytes]] = field(default_factory=deque)

    @property
    def is_reading(self) -> bool:
        """Whether blocks are still to be read or taken."""
        return bool(self.pending or self.ready)


class BlockWorker:
    """Reads and writes blocks of a tier, in order, in one daemon thread each. Any thread may call
    it.

    The writing thread also maintains the tier: a folder's files are listed when it starts, and
    before anything is written; later it records what was used and enforces the limits.

    The threads run until ``finish``, ``close`` or the end of the interpreter. Then the queue is
    written, for at most ten seconds at exit, and the tier is closed. They don't survive a fork.

    Args:
        max_queued_nbytes: the most bytes of payloads that wait to be written. One payload is always
            queued, whatever its size.
        max_ready_nbytes: the most bytes of payloads that are read and not taken. One block is
            always read, whatever its size.
    """

    def __init__(self, tier: Tier, max_queued_nbytes: int, max_ready_nbytes: int) -> None:
        self._tier = tier
        self._max_queued_nbytes, self._max_ready_nbytes = max_queued_nbytes, max_ready_nbytes
        self._changed = threading.Condition()
        self._reads: deque[Read] = deque()
        self._nbytes_ready = 0
        self._writes: deque[tuple[BlockHeader, Payload]] = deque()
        self._hashes: set[bytes] = set()  # of the queued blocks and of the one being written
        self._nbytes_queued = 0
        self._must_maintain = self._is_busy = True
        self._is_closed = False
        _running.add(self)
        # After the handlers that are registered before: the last of these may end the process.
        atexit.unregister(_close_all)
        atexit.register(_close_all)
        self._reader, self._writer = (
            threading.Thread(target=run, name=f"mlx_paged block {name}", daemon=True)
            for name, run in (("reader", self._run_reads), ("writer", self._run_writes))
        )
        self._reader.start()
        self._writer.start()

    # Reads

    def read(self, read: Read, block_hashes: Iterable[bytes]) -> None:
        """Begin to read blocks.

        Args:
            read: has the blocks as they are read; it must not be reading.
        """
        with self._changed:
            if not self._is_closed:
                read.pending.extend(block_hashes)
                self._reads.append(read)
                self._changed.notify_all()

    def take(self, read: Read, max_nbytes: int) -> list[tuple[bytes, bytes]]:
        """Remove and return the hashes and payloads of blocks that are ready, up to the one that
        exceeds ``max_nbytes``. Never waits.
        """
        taken: list[tuple[bytes, bytes]] = []
        if not read.ready or max_nbytes <= 0:
            return taken
        with self._changed:
            while read.ready and max_nbytes > 0:
                taken.append(read.ready.popleft())
                max_nbytes -= len(taken[-1][1])
            self._nbytes_ready -= sum(len(payload) for _, payload in taken)
            self._changed.notify_all()
        return taken

    def cancel(self, read: Read) -> None:
        """Drop all blocks of a read, ready ones included."""
        with self._changed:
            self._drop(read)
            self._changed.notify_all()

    def wait(self, timeout: float, nbytes: int = 1) -> bool:
        """Wait for at most ``timeout`` seconds until ``nbytes`` of blocks are ready, or until no
        more can become ready before some are taken. Returns whether a block is ready.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._nbytes_ready >= nbytes or self._next_read() is None, timeout
            )
            return any(read.ready for read in self._reads)

    def _run_reads(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._next_read())
                if (read := self._next_read()) is None:
                    return  # It is closed.
                block_hash = read.pending[0]
            payload = self._attempt("a block could not be read", self._tier.load, block_hash)
            with self._changed:
                if not read.pending or read.pending[0] != block_hash:
                    continue  # It was cancelled.
                if payload is None:
                    read.pending.clear()
                else:
                    read.ready.append((block_hash, payload))
                    read.pending.popleft()
                    self._nbytes_ready += len(payload)
                self._changed.notify_all()

    def _next_read(self) -> Read | None:
        """The first read with a block to be read, if there is room for it."""
        while self._reads and not self._reads[0].is_reading:
            self._reads.popleft()
        if self._nbytes_ready and self._nbytes_ready >= self._max_ready_nbytes:
            return None
        return next((read for read in self._reads if read.pending), None)

    def _drop(self, read: Read) -> None:
        self._nbytes_ready -= sum(len(payload) for _, payload in read.ready)
        read.pending.clear()
        read.ready.clear()

    # Writes

    def offer(self, header: BlockHeader, payload: Payload) -> bool:
        """Queue a block to be written. Never waits. The payload must not change afterwards.

        Returns:
            Whether it was queued. It is dropped, and counted, if the queue is full, the worker is
            closed or the tier has failed.
        """
        nbytes = memoryview(payload).nbytes
        with self._changed:
            if self._has_room(nbytes):
                self._writes.append((header, payload))
                self._hashes.add(header.block_hash)
                self._nbytes_queued += nbytes
                self._must_maintain = True
                self._changed.notify_all()
                return True
        self._tier.count("num_dropped")
        return False

    def has_room(self, nbytes: int) -> bool:
        """Whether a payload of this size would be queued now."""
        with self._changed:
            return self._has_room(nbytes)

    def has(self, block_hash: bytes) -> bool:
        """Whether a block is queued, being written, or in the tier."""
        return block_hash in self._hashes or self._tier.has(block_hash)

    def flush(self, timeout: float) -> bool:
        """Wait for at most ``timeout`` seconds until all blocks offered and all uses noted so far
        are written; whether they are.
        """
        with self._changed:
            self._must_maintain = not self._is_closed
            self._changed.notify_all()
            return self._changed.wait_for(self._is_at_rest, timeout)

    def finish(self) -> None:
        """Read and accept no more blocks, and return at once: the thread writes what is queued,
        closes the tier and ends.
        """
        with self._changed:
            self._is_closed = True
            for read in self._reads:
                self._drop(read)
            self._changed.notify_all()

    def close(self, timeout: float = SECONDS_AT_EXIT) -> bool:
        """Read and accept no more blocks, write what is queued for at most ``timeout`` seconds, and
        drop the rest.

        Returns:
            Whether everything was written. May be called again.
        """
        left = seconds_left(timeout)
        self.finish()
        with self._changed:
            is_at_rest = self._changed.wait_for(self._is_at_rest, timeout)
            num_dropped = len(self._writes)
            self._writes.clear()
            self._hashes.clear()
            self._nbytes_queued = 0
        self._tier.count("num_dropped", num_dropped)
        _running.discard(self)
        self._writer.join(left())
        return is_at_rest

    def _has_room(self, nbytes: int) -> bool:
        is_short = self._writes and self._nbytes_queued + nbytes > self._max_queued_nbytes
        return not is_short and not self._is_closed and self._tier.failure is None

    def _has_work(self) -> bool:
        return bool(self._writes) or self._must_maintain or self._is_closed

    def _is_at_rest(self) -> bool:
        return not (self._writes or self._must_maintain or self._is_busy)

    def _run_writes(self) -> None:
        self._maintain()  # list the files while there is nothing to write yet
        while True:
            with self._changed:
                if not self._has_work():
                    self._is_busy = False
                    self._changed.notify_all()
                    self._changed.wait_for(self._has_work, _SECONDS_BETWEEN_MAINTENANCE)
                    self._is_busy = True
                if self._is_closed and not self._writes:
                    break
                write = self._writes.popleft() if self._writes else None
                if write is not None:
                    self._nbytes_queued -= memoryview(write[1]).nbytes
            if write is None:
                self._maintain()
            else:
                self._attempt("a block could not be written", self._tier.store, *write)
                self._hashes.discard(write[0].block_hash)
        self._maintain()
        self._attempt("it could not be closed", self._tier.close)
        with self._changed:
            self._is_busy = self._must_maintain = False
            self._changed.notify_all()
        _running.discard(self)

    def _maintain(self) -> None:
        with self._changed:
            self._must_maintain = False
        self._attempt("the folder could not be maintained", self._tier.maintain, self._pause)

    def _pause(self) -> None:
        with self._changed:
            if self._is_closed and not self._writes:
                raise _Closing
        # Let the stepping thread run: a thread that executes Python continuously would delay it.
        time.sleep(_SECONDS_OF_A_PAUSE)

    def _attempt(self, what: str, call: Callable[..., T], *args: Any) -> T | None:
        """The result of a call. An error would end the thread unseen, so it is reported as the
        tier's failure.
        """
        try:
            return call(*args)
        except _Closing:
            return None
        except Exception as error:
            self._tier.fail(f"{what}: {reason(error)}")
            return None


def seconds_left(timeout: float) -> Callable[[], float]:
    """Returns how many of these seconds are left at the time of each call."""
    deadline = time.monotonic() + timeout
    return lambda: max(0.0, deadline - time.monotonic())


class _Closing(Exception):
    """The queue is empty, and a caller waits for the thread to end."""


_running: set[BlockWorker] = set()


def _close_all() -> None:
    left = seconds_left(SECONDS_AT_EXIT)
    for worker in list(_running):
        worker.close(left())


os.register_at_fork(after_in_child=_running.clear)
