"""``FairThreads``: a thread pool in which no user can occupy all threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

SECONDS_OF_A_USER = 10.0  # how long a user counts as active after a request
FREE_SECONDS = 0.002  # of work without a pause: what small requests take
PAUSE_RATIO = 3.0
MAX_PAUSE = 1.0  # seconds


class CancelledWorkError(Exception):
    """The result of the work is not needed any more."""


@dataclass(frozen=True)
class Work:
    """Work that is queued or running.

    Attributes:
        future: its result.
    """

    call: Callable[[Work], Any]
    context: Context = field(default_factory=copy_context)  # the caller's, with the log's id
    future: Future[Any] = field(default_factory=Future)
    _is_cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Drop the work, or end it at its next :meth:`check`."""
        self._is_cancelled.set()
        self.future.cancel()

    def check(self) -> None:
        """Raise :class:`CancelledWorkError` if the work was cancelled; long work calls this
        regularly.
        """
        if self._is_cancelled.is_set():
            raise CancelledWorkError


class FairThreads:
    """A thread pool with one queue per user: the queues take turns, and the work of a user runs in
    at most ``num_per_user`` threads. Thread-safe.

    While other users are active, a user has one thread. After long work it pauses for
    ``PAUSE_RATIO`` times as long: reading and encoding a request holds the GIL most of the time,
    which the engine's steps and the answers to other users need.

    Args:
        name: a prefix for the names of the threads.
        clock: returns seconds.
        sleep: sleeps for a number of seconds.
    """

    def __init__(
        self,
        name: str,
        num_threads: int,
        num_per_user: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._num_threads = num_threads
        self._num_per_user = num_per_user
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._queues: OrderedDict[str, deque[Work]] = OrderedDict()  # by user, the next one first
        self._running: Counter[str] = Counter()
        self._last_asked: dict[str, float] = {}  # by user

    async def run(self, user: str, call: Callable[[Work], T]) -> T:
        """Run ``call`` in one of the threads. Cancelling this cancels the work."""
        work = self.submit(user, call)
        future = asyncio.wrap_future(work.future)
        try:
            result: T = await future
            return result
        except asyncio.CancelledError:
            work.cancel()
            raise
        finally:
            # Otherwise an error, its frames and the future form a cycle that keeps the texts of a
            # request until the next garbage collection, which can be minutes away.
            del work, future

    def submit(self, user: str, call: Callable[[Work], Any]) -> Work:
        """Add work to the queue of a user."""
        work = Work(call)
        with self._lock:
            self._last_asked[user] = self._clock()
            self._queues.setdefault(user, deque()).append(work)
            self._start_work()
        return work

    def _start_work(self) -> None:
        """Pass queued work to free threads. Called with the lock held."""
        while self._running.total() < self._num_threads:
            ready = (name for name in self._queues if self._running[name] < self._max_threads(name))
            user = next(ready, None)
            if user is None:
                return
            queue = self._queues[user]
            work = queue.popleft()
            if queue:
                self._queues.move_to_end(user)
            else:
                del self._queues[user]
            self._running[user] += 1
            self._threads.submit(self._run, user, work)

    def _has_others(self, user: str) -> bool:
        """Whether other users are active."""
        since = self._clock() - SECONDS_OF_A_USER
        return any(last > since for name, last in self._last_asked.items() if name != user)

    def _max_threads(self, user: str) -> int:
        return 1 if self._has_others(user) else self._num_per_user

    def _run(self, user: str, work: Work) -> None:
        begin = self._clock()
        try:
            if work.future.set_running_or_notify_cancel():
                _finish(work)
            del work
            pause = PAUSE_RATIO * (self._clock() - begin - FREE_SECONDS)
            if pause > 0 and self._has_others(user):
                self._sleep(min(pause, MAX_PAUSE))
        finally:
            with self._lock:
                self._running[user] -= 1
                if not self._running[user]:
                    del self._running[user]
                self._start_work()


def _finish(work: Work) -> None:
    try:
        work.future.set_result(work.context.run(work.call, work))
    except BaseException as error:
        work.future.set_exception(error)
    finally:
        del work  # as in run
