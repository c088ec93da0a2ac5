"""``TriedOnce``: one trial, whatever threads ask, and its warnings said once."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlx_paged.ops.tried_once import GoOn, TrialResult, TrialStoppedError, TriedOnce


class Trials:
    """Trials that wait until they are let go, and note their threads."""

    def __init__(self) -> None:
        self.tried: list[tuple[int, str]] = []
        self.may_end = threading.Event()
        self.has_begun = threading.Event()
        self.once = TriedOnce(self.attempt)

    def attempt(self, number: int, go_on: GoOn) -> TrialResult[int]:
        self.tried.append((number, threading.current_thread().name))
        self.has_begun.set()
        assert self.may_end.wait(60)
        go_on()
        if number < 0:
            raise ValueError("negative")
        return TrialResult(number * 2, (f"{number} is small",) if number < 10 else ())


def test_others_wait_for_the_thread_that_tries() -> None:
    trials = Trials()
    with ThreadPoolExecutor(4, "asks") as pool:
        answers = [pool.submit(trials.once.quietly, 21) for _ in range(4)]
        assert trials.has_begun.wait(60)
        assert not any(answer.done() for answer in answers)
        trials.may_end.set()
        assert [answer.result(60) for answer in answers] == [42] * 4
    assert trials.once(21) == 42
    assert [number for number, _ in trials.tried] == [21]


def test_warnings_are_said_by_the_first_that_is_not_quiet() -> None:
    trials = Trials()
    trials.may_end.set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trials.once.quietly(3) == 6
    with pytest.warns(UserWarning, match="^3 is small$") as said:
        assert [trials.once(3), trials.once(3)] == [6, 6]
    assert len(said) == 1
    trials.once.forget()
    with pytest.warns(UserWarning, match="^3 is small$"):
        trials.once(3)


def test_a_trial_that_fails_is_tried_again() -> None:
    trials = Trials()
    trials.may_end.set()
    for _ in range(2):
        with pytest.raises(ValueError, match="negative"):
            trials.once(-1)
    assert len(trials.tried) == 2


def test_who_waits_for_a_trial_that_is_stopped_tries_it() -> None:
    trials, is_stopped = Trials(), threading.Event()

    def go_on() -> None:
        if is_stopped.is_set():
            raise TrialStoppedError

    with ThreadPoolExecutor(1, "first") as first, ThreadPoolExecutor(1, "second") as second:
        stopped = first.submit(trials.once.quietly, 21, go_on=go_on)
        assert trials.has_begun.wait(60)
        answer = second.submit(trials.once.quietly, 21)
        is_stopped.set()
        trials.may_end.set()
        with pytest.raises(TrialStoppedError):
            stopped.result(60)
        assert answer.result(60) == 42
    assert trials.tried == [(21, "first_0"), (21, "second_0")]


def test_an_interrupt_ends_the_wait_and_not_the_trial() -> None:
    trials = Trials()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(trials.once.quietly, 21)
        assert trials.has_begun.wait(60)
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            trials.once(21)
        trials.may_end.set()
        assert answer.result(60) == 42
    assert trials.once(21) == 42 and len(trials.tried) == 1
