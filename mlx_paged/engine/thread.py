"""``EngineThread``: the thread in which an engine works, while its callers wait."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import mlx.core as mx

from mlx_paged.errors import words_for_all

T = TypeVar("T")

# The longest time for which a wait may miss an interrupt.
LOOK_SECONDS = 0.1
# A second interrupt of the same call, at least this much later, stops the engine.
STUCK_SECONDS = 0.5
# How long the end of Python waits for a call that was told to end.
SECONDS_TO_STOP = 1.0


class EngineStoppedError(RuntimeError):
    """The engine was shut down, or stopped by a failure, which is then the ``__cause__``."""


class StuckStepError(RuntimeError):
    """A step did not end when it was interrupted."""


class Call(Generic[T]):
    """A function to be called in an engine's thread, and its result."""

    def __init__(self, work: Callable[[], T]):
        self._work: Callable[[], T] | None = work
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._is_done = False
        self._done = threading.Lock()
        self._done.acquire()

    def run(self) -> None:
        assert self._work is not None
        try:
            self._results.append(self._work())
        except BaseException as error:
            self.fail(error)
        else:
            self._end()

    def fail(self, error: BaseException) -> None:
        """End it with an error, unless it has ended already."""
        if not self._is_done:
            self._error = error
            self._end()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the work, for at most ``timeout`` seconds; returns whether it has
        ended. An interrupt ends the wait, but not the work. Only one thread may wait.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self._is_done and (left := end - time.monotonic()) > 0:
            # A signal that comes just before the system call begins does not end it.
            self._done.acquire(timeout=min(left, LOOK_SECONDS))
        return self._is_done

    def outlast(self) -> None:
        """Wait for the end of the work, ignoring interrupts."""
        try:
            self.wait()
        except KeyboardInterrupt:
            self.outlast()

    def result(self) -> T:
        """The return value of the work; raises its error."""
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _end(self) -> None:
        self._work = None  # It may refer to the engine.
        if not self._is_done:
            self._is_done = True
            self._done.release()


class EngineThread:
    """Runs calls one after another in a separate thread, in which they can't be interrupted: Python
    delivers signals to the main thread, which only waits. MLX keeps its streams by thread, so all
    work of an engine is done here, whichever thread requests it.

    The thread ends with :meth:`end`, or when Python does, after the current call.

    Args:
        forget: drops the compiled functions that were called in the thread. It is called at the end
            of the thread, and keeps them alive until then: if another thread freed one while MLX
            clears this thread's streams, both would deadlock.

    Attributes:
        failure: the error that stopped the thread; ``None`` if there was none.
    """

    def __init__(
        self, name: str = "mlx_paged engine", forget: Callable[[], None] | None = None
    ) -> None:
        self.failure: BaseException | None = None
        self._forget = forget
        self._calls: queue.SimpleQueue[Call[Any] | None] = queue.SimpleQueue()
        self._background: Callable[[], float | None] | None = None
        self._at_end: Callable[[], None] | None = None
        self._running: Call[Any] | None = None
        # The call that ran at the last interrupt, and the time of that.
        self._interrupted: tuple[Call[Any] | None, float] = None, 0.0
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Not in the first call, where an interrupt could leave it half started.
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller is in this thread."""
        return threading.get_ident() == self._thread.ident

    @property
    def is_idle(self) -> bool:
        """Whether a call would run at once."""
        return self._running is None and self._background is None

    @property
    def is_interrupted(self) -> bool:
        """Whether an interrupt has ended the wait for the current call."""
        return self._running is not None and self._running is self._interrupted[0]

    def submit(self, work: Callable[[], T]) -> Call[T]:
        """Queue a call.

        Raises:
            EngineStoppedError: the thread has ended.
        """
        self.check()
        call = Call(work)
        self._calls.put(call)
        if self._has_ended:
            self._fail_waiting()
        return call

    def call(self, work: Callable[[], T]) -> T:
        """Call ``work`` in the thread; returns its result or raises its error. An interrupt ends
        the wait, but not the work.
        """
        return work() if self.is_current else self.wait_for(self.submit(work))

    def wait_for(self, call: Call[T]) -> T:
        """Wait for a submitted call; returns its result or raises its error.

        An interrupt ends the wait. A second one during the same call stops the engine, because the
        call may never end.
        """
        try:
            call.wait()
        except KeyboardInterrupt:
            self._note_interrupt()
            raise
        return call.result()

    def run_in_background(
        self, background: Callable[[], float | None], at_end: Callable[[], None]
    ) -> None:
        """Call ``background`` whenever no call waits, and ``at_end`` at the end of the thread.

        Args:
            background: returns the seconds until it is to be called again; ``None`` is after the
                next call. An exception stops the thread.
        """
        self._background, self._at_end = background, at_end
        self._wake()

    def stopped(self) -> EngineStoppedError:
        """The error for callers once the thread has ended."""
        failure = self.failure
        # Every caller gets it, so it must not quote what one of them has written.
        why = "it was shut down" if failure is None else words_for_all(failure)
        error = EngineStoppedError(f"[engine] it stopped: {why}")
        error.__cause__ = failure
        return error

    def check(self) -> None:
        """Raise :class:`EngineStoppedError` if the thread has ended."""
        if self._has_ended:
            raise self.stopped()

    def stop(self, error: BaseException) -> None:
        """Run no further call, and fail the queued ones with this error. ``SystemExit`` is raised
        in the current call, which ends it in Python code but not in native code.
        """
        self.failure = self.failure or error
        self.end()
        self._fail_waiting()
        running = self._running
        if running is not None and not self.is_current:
            running.fail(self.stopped())
            ident, end = ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(SystemExit)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, end)

    def end(self) -> None:
        """End the thread after the current call, without waiting for that."""
        self._has_ended = True
        self._wake()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the thread, unless this is the thread."""
        if not self.is_current:
            self._thread.join(timeout)

    def _note_interrupt(self) -> None:
        running, now = self._running, time.monotonic()
        interrupted, before = self._interrupted
        self._interrupted = running, now
        if running is not None and running is interrupted and now - before >= STUCK_SECONDS:
            self.stop(StuckStepError("it was interrupted twice while one step ran"))

    def _wake(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        # Python must not end in the middle of a step.
        atexit.register(self._end_with_python)
        try:
            self._run_calls()
        except BaseException as error:
            self.failure = self.failure or error
        try:
            self._has_ended = True
            if self._at_end is not None:
                self._at_end()
        finally:
            self._fail_waiting()
            self._background = self._at_end = None
            if self._forget is not None:
                self._forget()
                self._forget = None  # It holds the cache.
            # MLX's streams belong to a thread; on Linux they abort the process if they outlive it.
            # Their work has to end first, because it may need the GIL, which clearing holds.
            with contextlib.suppress(Exception):
                mx.synchronize()
            mx.clear_streams()
            # Only now, because the end of Python has to wait for all of the above.
            atexit.unregister(self._end_with_python)

    def _run_calls(self) -> None:
        pause: float | None = None
        while not self._has_ended:
            with contextlib.suppress(queue.Empty):
                self._run_one(self._calls.get(timeout=pause))
                while not self._has_ended:
                    self._run_one(self._calls.get_nowait())
            if self._background is not None and not self._has_ended:
                pause = self._background()

    def _run_one(self, call: Call[Any] | None) -> None:
        if call is not None:
            self._running = call
            call.run()
            self._running = None

    def _fail_waiting(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                call = self._calls.get_nowait()
                if call is not None:
                    call.fail(self.stopped())

    def _end_with_python(self) -> None:
        self.end()
        try:
            self.join(None if self.failure is None else SECONDS_TO_STOP)
        except KeyboardInterrupt as interrupt:
            self.stop(interrupt)


def run_apart(work: Callable[[], T]) -> T:
    """Call ``work``; returns its result or raises its error. Outside of the main thread it runs in
    an :class:`EngineThread`, because MLX's streams, on Linux, abort the process if they outlive
    their thread.
    """
    if threading.current_thread() is threading.main_thread():
        return work()
    thread = EngineThread()
    try:
        return thread.call(work)
    finally:
        thread.end()
        thread.join()
