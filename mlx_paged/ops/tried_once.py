"""``TriedOnce``: a trial that runs once per process for each set of arguments."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from typing import Generic, NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")

# How often a wait checks for an interrupt.
POLL_SECONDS = 0.1


class TrialStoppedError(Exception):
    """Raised by ``go_on`` of a trial whose outcome is not needed any more."""


# Called between two steps of a trial; raises TrialStoppedError to end it.
GoOn: TypeAlias = Callable[[], None]


class TrialResult(NamedTuple, Generic[T]):
    """The outcome of a trial, and the warnings to issue."""

    outcome: T
    warnings: tuple[str, ...] = ()


class TriedOnce(Generic[T]):
    """The outcome of a trial by its arguments. The first thread that calls runs the trial while
    others wait. The first call that is not :meth:`quietly` issues the warnings.

    Args:
        attempt: the trial, called with the arguments and ``go_on``.
    """

    def __init__(self, attempt: Callable[..., TrialResult[T]]):
        self._attempt = attempt
        self._lock = threading.Lock()
        self._trials: dict[tuple[Hashable, ...], Future[TrialResult[T]]] = {}
        self._unissued: dict[tuple[Hashable, ...], tuple[str, ...]] = {}

    def __call__(self, *arguments: Hashable) -> T:
        outcome = self.quietly(*arguments)
        with self._lock:
            unissued = self._unissued.pop(arguments, ())
        for text in unissued:
            warnings.warn(text, stacklevel=3)
        return outcome

    def quietly(self, *arguments: Hashable, go_on: GoOn = lambda: None) -> T:
        """The outcome; its warnings are left for a later call."""
        while True:
            with self._lock:
                trial = self._trials.get(arguments)
                is_ours = trial is None
                if trial is None:
                    trial = self._trials[arguments] = Future()
            if is_ours:
                self._run(trial, arguments, go_on)
            while not trial.done():
                with contextlib.suppress(TimeoutError, CancelledError):
                    trial.exception(POLL_SECONDS)
            try:
                return trial.result().outcome
            except CancelledError:
                continue  # The trial was stopped or raised in another thread.

    def forget(self) -> None:
        """Drop all outcomes."""
        self._trials.clear()
        self._unissued.clear()

    def _run(
        self, trial: Future[TrialResult[T]], arguments: tuple[Hashable, ...], go_on: GoOn
    ) -> None:
        try:
            found = self._attempt(*arguments, go_on)
        except BaseException:
            with self._lock:
                del self._trials[arguments]
            trial.cancel()
            raise
        with self._lock:
            self._unissued[arguments] = found.warnings
        trial.set_result(found)
