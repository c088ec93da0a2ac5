"""``EngineThread``: the thread in which an engine works, while its callers wait."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import math
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import mlx.core as mx

from mlx_paged.errors import STUCK_STATUS, EngineStoppedError, words_for_all

T = TypeVar("T")

# The longest time for which a wait may miss an interrupt.
POLL_SECONDS = 0.1
# A second interrupt of the same wait, at least this much later, stops the engine.
STUCK_SECONDS = 0.5
# How long the end of Python waits for a call that was told to end.
SECONDS_TO_STOP = 1.0


class ForkedError(EngineStoppedError):
    """The engine was made before a fork, and its thread does not run in the child."""


class StuckStepError(RuntimeError):
    """A step did not end when it was interrupted, or when the program ended."""


class EngineCall(Generic[T]):
    """A function to be called in an engine's thread, and its future result.

    It is no ``concurrent.futures.Future``, because an interrupt at the wrong moment leaves the
    condition of such a future locked.

    Attributes:
        is_next: whether the thread was idle when the call was queued.
        interrupted: the call that ran when the last interrupt ended a wait for this one, and the
            time of that.
    """

    def __init__(self, thread: EngineThread, work: Callable[[], T], change: str | None = None):
        is_idle = thread.running is None and thread._background is None
        self.is_next = is_idle and not thread.is_current
        self.interrupted: tuple[EngineCall[Any] | None, float] = None, 0.0
        self._thread = thread
        self._work: Callable[[], T] | None = work
        self._change = change
        self._result: T | None = None
        self._error: BaseException | None = None
        self._is_done = False
        self._done = threading.Lock()
        self._done.acquire()

    @property
    def is_done(self) -> bool:
        """Whether the work has ended."""
        return self._is_done

    def run(self) -> None:
        """Do the work, in the thread."""
        assert self._work is not None
        thread = self._thread
        before, thread.running = thread.running, self
        try:
            with thread.changing(self._change):
                self._result = self._work()
        except BaseException as error:
            if not self._is_done:
                self._error = error
        thread.running = before  # A caller that waited finds an idle thread.
        self._end()

    def fail(self, error: BaseException) -> None:
        """End it with an error, unless it has ended already."""
        if not self._is_done:
            self._error = error
            self._end()

    def wait_uninterrupted(self) -> None:
        """Wait for the end of the work, ignoring interrupts."""
        try:
            while not self._is_done:
                self._done.acquire(timeout=POLL_SECONDS)
        except KeyboardInterrupt:
            self.wait_uninterrupted()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the end of the work; returns its result or raises its error. Only one thread may
        wait.

        An interrupt ends the wait, but not the work. A second one of a wait for the same call stops
        the engine if no step has ended in between, because the step may never end. Interrupts of
        waits for different calls never do.

        Raises:
            TimeoutError: the work has not ended after ``timeout`` seconds.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        try:
            while not self._is_done and (left := end - time.monotonic()) > 0:
                # A signal that comes just before the system call begins does not end it.
                self._done.acquire(timeout=min(left, POLL_SECONDS))
        except KeyboardInterrupt:
            self._thread.note_interrupt(self)
            raise
        if not self._is_done:
            raise TimeoutError(f"[engine] a call has not ended after {timeout} seconds")
        if self._error is not None:
            raise self._error
        return cast(T, self._result)

    def _end(self) -> None:
        self._work = None  # It may refer to the engine.
        if not self._is_done:
            self._is_done = True
            self._done.release()


class EngineThread:
    """Runs calls one after another in a separate thread, in which they can't be interrupted: Python
    delivers signals to the main thread, which only waits. MLX keeps its streams by thread, so all
    work of an engine is done here, whichever thread requests it.

    The thread ends with :meth:`end`, or when Python does, after the current call. It does not
    survive a fork: in the child, every call raises :class:`ForkedError`.

    Args:
        forget: drops the compiled functions that were called in the thread. It is called at the end
            of the thread, and keeps them alive until then: if another thread freed one while MLX
            clears this thread's streams, both would deadlock.

    Attributes:
        failure: the error that stopped the thread; ``None`` if there was none.
        has_ended: whether it takes no further call.
        running: the current call.
    """

    def __init__(
        self, name: str = "mlx_paged engine", forget: Callable[[], None] | None = None
    ) -> None:
        self.failure: BaseException | None = None
        self._forget = forget
        self.running: EngineCall[Any] | None = None
        self._calls: queue.SimpleQueue[EngineCall[Any]] = queue.SimpleQueue()
        self._background: Callable[[], float | None] | None = None
        self._at_end: Callable[[], None] | None = None
        self._interrupted: EngineCall[Any] | None = None  # the call that ran at the last interrupt
        self.has_ended = self._is_shared = self._is_forked = False
        self._is_changing = False
        self._may_be_cut, self._cutting = True, threading.Lock()
        self._has_cleared = threading.Event()  # its streams
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Not in the first call, where an interrupt could leave it half started.
        self._thread.start()
        _threads.add(self)
        _watch(self._thread.native_id, self._has_cleared.is_set)
        # The newest handler is called first: steps end before their K/V are written to a tier.
        atexit.unregister(_end_with_python)
        atexit.register(_end_with_python)

    @classmethod
    def shared(cls, forget: Callable[[], None] | None = None) -> EngineThread:
        """The thread that the last one-shot call has left, or a new one if there is none: the
        others are in use, hang or have ended. It is kept with :meth:`release`.

        A thread is not ended and made again for each call, because MLX keeps an OS thread for each
        stream that a process has ever had, on a CPU.
        """
        thread = None
        with contextlib.suppress(IndexError):
            while thread is None or thread.has_ended:
                thread = _idle.pop()
        if thread is None or thread.has_ended:
            thread = cls()
            thread._is_shared = True
        thread._forget = forget
        return thread

    @property
    def is_current(self) -> bool:
        """Whether the caller is in this thread."""
        return threading.get_ident() == self._thread.ident

    @property
    def has_queued(self) -> bool:
        """Whether calls wait for the current one."""
        return not self._calls.empty()

    @property
    def is_interrupted(self) -> bool:
        """Whether an interrupt has ended the wait for the current call."""
        return self.running is not None and self.running is self._interrupted

    def submit(self, work: Callable[[], T], change: str | None = None) -> EngineCall[T]:
        """Queue a call.

        Args:
            change: what the call changes in the engine's bookkeeping; see :meth:`changing`.

        Raises:
            EngineStoppedError: the thread has ended.
        """
        self.check()
        call = EngineCall(self, work, change)
        self._calls.put(call)
        if self.has_ended:
            self._fail_waiting()
        return call

    def call(self, work: Callable[[], T], change: str | None = None) -> T:
        """Call ``work`` in the thread; returns its result or raises its error. Arguments are those
        of :meth:`submit`. An interrupt ends the wait, but not the work.
        """
        if not self.is_current:
            return self.submit(work, change).result()
        with self.changing(change):
            return work()

    @contextlib.contextmanager
    def changing(self, change: str | None) -> Iterator[None]:
        """In the thread: change the engine's bookkeeping; ``None`` changes nothing.

        An exception may leave the bookkeeping inconsistent, so it stops the thread.
        ``KeyboardInterrupt`` can only come from the model or a function of a request, and its step
        was rolled back.

        Raises:
            RuntimeError: it is being changed already.
            EngineStoppedError: the change failed.
        """
        if change is None:
            yield
            return
        if self._is_changing:
            raise RuntimeError(
                f"[engine] {change} was called from inside a step; only add_request and abort may "
                "be"
            )
        self._is_changing = True
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.stop(error)
            raise self.stopped() from error
        finally:
            self._is_changing = False

    def run_queued(self) -> None:
        """In the thread: run the calls that wait, until none does or the thread is to end."""
        while self.has_queued and not self.has_ended:
            with contextlib.suppress(queue.Empty):  # Another thread may have stopped this one.
                self._calls.get_nowait().run()

    def run_in_background(
        self, background: Callable[[], float | None], at_end: Callable[[], None]
    ) -> None:
        """Call ``background`` whenever no call waits, and ``at_end`` at the end of the thread.

        Args:
            background: returns the seconds until it is to be called again; ``None`` is after the
                next call. An exception stops the thread.
        """
        self._background, self._at_end = background, at_end
        self._calls.put(EngineCall(self, _nothing))

    def stopped(self) -> EngineStoppedError:
        """The error for callers once the thread has ended."""
        if self._is_forked:
            return ForkedError(
                "[engine] it was made before this process was forked, and does not run here; make "
                "another one in this process"
            )
        failure = self.failure
        # Every caller gets it, so it must not quote what one of them has written.
        why = "it was shut down" if failure is None else words_for_all(failure)
        error = EngineStoppedError(f"[engine] it stopped: {why}")
        error.__cause__ = failure
        return error

    def check(self) -> None:
        """Raise :class:`EngineStoppedError` if the thread has ended."""
        if self.has_ended:
            raise self.stopped()

    def check_process(self) -> None:
        """Raise :class:`ForkedError` in a process that was forked after the thread was made."""
        if self._is_forked:
            raise self.stopped()

    def stop(self, error: BaseException) -> None:
        """Run no further call, and fail the queued ones with this error. ``SystemExit`` is raised
        in the current call, which ends it in Python code but not in native code.
        """
        self.failure = self.failure or error
        self.end()
        self._fail_waiting()
        running = self.running
        if not self.is_current:
            if running is not None:
                running.fail(self.stopped())
            self._cut()

    def end(self) -> None:
        """End the thread after the current call, without waiting for that."""
        self.has_ended = True
        self._calls.put(EngineCall(self, _nothing))

    def release(self) -> EngineCall[None] | None:
        """Called when the engine has ended: end the thread, or keep a shared one for the next call
        once the current one has ended.
        """
        if self._is_shared:
            with contextlib.suppress(EngineStoppedError):
                return self.submit(self._become_idle)
        self.end()
        return None

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end of the thread, unless this is the thread; whether it has ended."""
        if not self.is_current:
            end = math.inf if timeout is None else time.monotonic() + timeout
            # Thread.join takes a thread for ended if an interrupt ends the wait.
            while self.is_alive() and (left := end - time.monotonic()) > 0:
                self._has_cleared.wait(min(left, POLL_SECONDS))
            if not self.is_alive():
                self._thread.join(POLL_SECONDS)
        return not self.is_alive()

    def is_alive(self) -> bool:
        """Whether the thread has not ended yet."""
        return not self._has_cleared.is_set()

    def _become_idle(self) -> None:
        self._drop_compiled()
        self._interrupted = None  # It may refer to the engine.
        if not self.has_ended:
            _idle.append(self)

    def note_interrupt(self, call: EngineCall[Any]) -> None:
        """Record that an interrupt has ended the wait for a call (:meth:`EngineCall.result`)."""
        running, now = self.running, time.monotonic()
        before, then = call.interrupted
        call.interrupted = running, now
        self._interrupted = running
        if running is not None and running is before and now - then >= STUCK_SECONDS:
            self.stop(StuckStepError("it was interrupted twice while one step ran"))

    def _run(self) -> None:
        while self._may_be_cut:
            with contextlib.suppress(SystemExit):  # It may be cut more than once.
                try:
                    pause: float | None = None
                    while not self.has_ended:
                        with contextlib.suppress(queue.Empty):
                            self._calls.get(timeout=pause).run()
                        is_free = not self.has_queued and not self.has_ended
                        if self._background is not None and is_free:
                            pause = self._background()
                    self._refuse_cuts()
                except BaseException as error:
                    self.failure = self.failure or error
                    self.has_ended = True
        try:
            self.has_ended = True
            if self._at_end is not None:
                self._at_end()
        finally:
            self._fail_waiting()
            self._background = self._at_end = None
            self._drop_compiled()
            # MLX's streams belong to a thread; on Linux they abort the process if they outlive it.
            # Their work has to end first, because it may need the GIL, which clearing holds.
            with contextlib.suppress(Exception):
                mx.synchronize()
            mx.clear_streams()
            self._has_cleared.set()

    def _drop_compiled(self) -> None:
        if self._forget is not None:
            self._forget()
            self._forget = None  # It holds the cache.

    def _fail_waiting(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._calls.get_nowait().fail(self.stopped())

    def _cut(self) -> None:
        """Raise ``SystemExit`` in the thread, unless it has left its calls."""
        with self._cutting:
            if self._may_be_cut:
                _raise_in(self._thread, SystemExit)

    def _refuse_cuts(self) -> None:
        """The thread has left its calls: it can't be cut from now on."""
        with self._cutting:
            _raise_in(self._thread, None)
            self._may_be_cut = False

    def _forked(self) -> None:
        self.has_ended = self._is_forked = True
        self._has_cleared = threading.Event()  # Another thread may hold the lock of the old one.
        self._has_cleared.set()


def _nothing() -> None:
    """Wakes the thread."""


def wait_until_idle(released: EngineCall[None] | None) -> None:
    """Wait until a shared thread that was released can be used again, since the next call may come
    at once. A thread that was stopped meanwhile is not used again, and fails no caller.
    """
    if released is not None:
        with contextlib.suppress(EngineStoppedError):
            released.result()


def run_in_engine_thread(work: Callable[[], T]) -> T:
    """Call ``work``; returns its result or raises its error. Outside of the main thread it runs in
    an :class:`EngineThread`, because MLX's streams, on Linux, abort the process if they outlive
    their thread. So it does in a forked child, where the streams of its main thread don't run.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and os.getpid() == _pid_of_streams:
        return work()
    thread = EngineThread.shared()
    try:
        return thread.call(work)
    finally:
        wait_until_idle(thread.release())


def _raise_in(thread: threading.Thread, error: type[BaseException] | None) -> None:
    """Raise an error in another thread, as soon as it runs Python code; ``None`` cancels it."""
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), raised)


# The end of Python, and forks

_threads: weakref.WeakSet[EngineThread] = weakref.WeakSet()
_idle: deque[EngineThread] = deque()  # shared threads that no call uses
_watched: dict[int, Callable[[], bool]] = {}  # whether a thread of the OS has ended for Python
_stuck: list[EngineThread] = []  # they did not end with Python
_pid_of_streams = os.getpid()  # the main thread of this process may use MLX


def end_before_python(thread: threading.Thread) -> None:
    """Let the end of Python wait for the native end of a thread that uses MLX.

    It comes after the end that ``join`` waits for, and needs the GIL if MLX keeps Python objects
    for the thread, such as the state of ``mx.random``. A thread that asks for the GIL of an
    interpreter that has ended is unwound, and that aborts the process on Linux.
    """
    alive = weakref.ref(thread)
    _watch(thread.native_id, lambda: (it := alive()) is None or not it.is_alive())


def random_key() -> int:
    """The random state of this thread, for ``mx.random.seed`` in another one: that continues with
    the same numbers.
    """
    here = threading.current_thread()
    if here is not threading.main_thread():
        end_before_python(here)
    state: Any = mx.random.state  # Each thread has its own.
    high, low = state[0].tolist()
    return int(high) << 32 | int(low)


def _watch(native_id: int | None, has_ended: Callable[[], bool]) -> None:
    if native_id is None:
        return
    known = _watched.get(native_id)
    if known is None or known():  # The system uses the id of a thread that has ended again.
        for each in [each for each in list(_watched) if not _exists(each)]:
            _watched.pop(each, None)
        _watched[native_id] = has_ended


def _end_with_python() -> None:
    """End all engine threads: Python must not end in the middle of a step.

    Steps are waited for, except those that were interrupted twice. An interrupt ends them if they
    run Python code; others are left to :func:`_exit_if_stuck`.
    """
    threads = [each for each in list(_threads) if each.is_alive()]
    for each in threads:
        each.end()
    try:
        for each in threads:
            each.join(None if each.failure is None else SECONDS_TO_STOP)
    except KeyboardInterrupt as interrupt:
        for each in threads:
            each.stop(interrupt)
        _wait_uninterrupted(threads)
    _stuck[:] = [each for each in threads if each.is_alive()]
    _wait_for_native_ends()


def _wait_uninterrupted(threads: Iterable[EngineThread]) -> None:
    """Wait for threads that were told to end, ignoring interrupts."""
    end = time.monotonic() + SECONDS_TO_STOP
    while any(each.is_alive() for each in threads) and time.monotonic() < end:
        with contextlib.suppress(KeyboardInterrupt):
            for each in threads:
                each._cut()  # It may have caught the last one.
            time.sleep(POLL_SECONDS)


def _wait_for_native_ends() -> None:
    end = time.monotonic() + SECONDS_TO_STOP
    with contextlib.suppress(KeyboardInterrupt):
        # Threads that have ended for Python and not for the system.
        while any(_watched[each]() and _exists(each) for each in list(_watched)):
            if time.monotonic() >= end:
                break
            time.sleep(0.001)


def _exists(native_id: int) -> bool:
    """Whether the system still has a thread. Systems without this folder are not affected."""
    return Path(f"/proc/self/task/{native_id}").exists()


def _exit_if_stuck() -> None:
    """The last handler: end the process at once if a step still runs. Finalising Python and MLX
    meanwhile would abort it.
    """
    if not any(thread.is_alive() for thread in _stuck):
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    logging.shutdown()
    os._exit(STUCK_STATUS)


def _forget_in_child() -> None:
    for thread in list(_threads):
        thread._forked()
    for each in (_threads, _idle, _watched, _stuck):
        each.clear()


# Before the handlers of tier caches and their writers, which are called first.
atexit.register(_exit_if_stuck)
os.register_at_fork(after_in_child=_forget_in_child)
