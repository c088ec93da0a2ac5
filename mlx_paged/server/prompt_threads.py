"""The threads that read and encode requests."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TypeVar

T = TypeVar("T")

SECONDS_OF_A_USER = 10.0  # how long a user counts as active after a request
FREE_SECONDS = 0.002  # of work without a pause: what small requests take
PAUSE_RATIO = 3.0  # times the threads of a user
MAX_PAUSE = 1.0  # seconds


class CancelledWorkError(Exception):
    """The result of the work is not needed any more."""


class Work:
    """Work that is queued or running."""

    def __init__(self) -> None:
        self._is_cancelled = threading.Event()

    def cancel(self) -> None:
        """End the work at its next :meth:`check`."""
        self._is_cancelled.set()

    def check(self) -> None:
        """Raise :class:`CancelledWorkError` if the work was cancelled; long work calls this
        regularly.
        """
        if self._is_cancelled.is_set():
            raise CancelledWorkError


class PromptThreads:
    """A few threads, of which each user has at most ``num_per_user`` at a time. Used from one event
    loop.

    While other users are active, a user pauses after long work for ``PAUSE_RATIO * num_per_user``
    times as long: reading and encoding a request holds the GIL most of the time, which the engine's
    steps and the answers to other users need.

    Args:
        name: a prefix for the names of the threads.
    """

    def __init__(self, name: str, num_threads: int, num_per_user: int):
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._num_per_user = num_per_user
        self._last_asked: dict[str | None, float] = {}  # by user
        self._turns: defaultdict[str | None, asyncio.Semaphore] = defaultdict(
            partial(asyncio.Semaphore, num_per_user)
        )

    async def run(self, user: str | None, call: Callable[[Work], T]) -> T:
        """Run ``call`` in one of the threads, in the caller's context, which has the id for the
        log. Cancelling this cancels the work.
        """
        turn, work, loop = self._turns[user], Work(), asyncio.get_running_loop()
        self._last_asked[user] = loop.time()
        await turn.acquire()
        begin = loop.time()
        running = self._threads.submit(copy_context().run, call, work)

        def end(_: Future[T]) -> None:
            with suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(self._end_turn, user, loop.time() - begin)

        # Not before the thread is free: cancelled work may run on for a while.
        running.add_done_callback(end)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            work.cancel()
            raise
        finally:
            # Otherwise an error, its frames and the future form a cycle that keeps the texts of a
            # request until the next garbage collection, which can be minutes away.
            del running

    def _end_turn(self, user: str | None, seconds: float) -> None:
        loop, turn = asyncio.get_running_loop(), self._turns[user]
        since = loop.time() - SECONDS_OF_A_USER
        if any(last > since for name, last in self._last_asked.items() if name != user):
            pause = PAUSE_RATIO * self._num_per_user * (seconds - FREE_SECONDS)
            loop.call_later(min(pause, MAX_PAUSE), turn.release)
        else:
            turn.release()
