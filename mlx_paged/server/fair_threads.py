"""``FairThreads``: a few threads for the work of many users, which no user can hold all of."""

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

SECONDS_OF_A_USER = 10.0  # for which one counts as there, after each request
FREE_SECONDS = 0.002  # of work, which small requests take, without a pause
PAUSE_RATIO = 3.0
MAX_PAUSE = 1.0  # seconds


class CancelledWorkError(Exception):
    """The result of the work is not wanted any more."""


@dataclass(frozen=True)
class Work:
    """Work that waits for a thread, or that a thread does.

    Attributes:
        future: its result.
    """

    call: Callable[[Work], Any]
    context: Context = field(default_factory=copy_context)  # of who asks, such as the log's id
    future: Future[Any] = field(default_factory=Future)
    _is_cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Leave the work out, or end it where it next asks :meth:`check`."""
        self._is_cancelled.set()
        self.future.cancel()

    def check(self) -> None:
        """Raise :class:`CancelledWorkError` if the result is not wanted any more. Long work calls
        this now and then.
        """
        if self._is_cancelled.is_set():
            raise CancelledWorkError


class FairThreads:
    """Threads that are shared fairly: the work of each user waits in a line of its own, the lines
    take turns, and one user's work runs in ``num_per_user`` threads at most. From any thread.

    While other users are there, one user has one thread. After work that took long it pauses for
    ``PAUSE_RATIO`` times as long: what reads and encodes a request holds the interpreter for most
    of its time, which the steps and answers of all others need.

    Args:
        name: of the threads.
        clock: in seconds.
        sleep: for some seconds.
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
        self._lines: OrderedDict[str, deque[Work]] = OrderedDict()  # whose turn is next, first
        self._running: Counter[str] = Counter()
        self._last_asked: dict[str, float] = {}  # by user

    async def run(self, user: str, call: Callable[[Work], T]) -> T:
        """What ``call`` returns, from one of the threads. Cancelling this cancels the work."""
        work = self.submit(user, call)
        future = asyncio.wrap_future(work.future)
        try:
            result: T = await future
            return result
        except asyncio.CancelledError:
            work.cancel()
            raise
        finally:
            # An error's frames would hold what holds the error, and with it the texts of a request
            # until Python looks for cycles, which can take minutes.
            del work, future

    def submit(self, user: str, call: Callable[[Work], Any]) -> Work:
        """Put work into the line of a user."""
        work = Work(call)
        with self._lock:
            self._last_asked[user] = self._clock()
            self._lines.setdefault(user, deque()).append(work)
            self._begin_what_may()
        return work

    def _begin_what_may(self) -> None:
        """Hand work to the threads that are free; with the lock."""
        while self._running.total() < self._num_threads:
            may = (name for name in self._lines if self._running[name] < self._most_of(name))
            user = next(may, None)
            if user is None:
                return
            line = self._lines[user]
            work = line.popleft()
            if line:
                self._lines.move_to_end(user)
            else:
                del self._lines[user]
            self._running[user] += 1
            self._threads.submit(self._run, user, work)

    def _has_others(self, user: str) -> bool:
        """Whether other users asked for something lately."""
        since = self._clock() - SECONDS_OF_A_USER
        return any(last > since for name, last in self._last_asked.items() if name != user)

    def _most_of(self, user: str) -> int:
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
                self._begin_what_may()


def _finish(work: Work) -> None:
    try:
        work.future.set_result(work.context.run(work.call, work))
    except BaseException as error:
        work.future.set_exception(error)
    finally:
        del work  # as in run
