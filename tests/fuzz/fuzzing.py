"""Running fuzzed inputs: each must succeed, or be refused in one line that names what is wrong, and
in time.

A case is made from a seed, its family and its index alone, so that each can be run again by itself.
"""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import mlx.core as mx
from tqdm import TMonitor

from mlx_paged.engine.thread import _idle

MAX_MESSAGE = 700  # characters
# What Python says itself of a call with too few or too many arguments.
PYTHONS_OWN = ("missing", "positional argument", "multiple values", "keyword argument")


class Hang(BaseException):
    """A case was not done when its time was up. No ``Exception``, so that nothing takes it for a
    refusal.
    """


class Defect(AssertionError):
    """A case ended in a way that no case may end."""


@dataclass(frozen=True)
class Case:
    """One input.

    Args:
        title: what is called with what, for the report.
        run: returns if the input is taken; raises ``Defect``, or what the package raised.
        names: at least one of these must be in the message of a refusal; empty asks for none.
        runs_own_code: a function of the caller's is called, and what it raises is the caller's.
    """

    title: str
    run: Callable[[], None]
    names: tuple[str, ...] = ()
    runs_own_code: bool = False


@dataclass
class Report:
    """How the cases ended."""

    ends: Counter[str] = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)

    def add(self, name: str, end: str, defect: str | None = None) -> None:
        self.ends[f"{name}: {end}"] += 1
        if defect is not None:
            self.defects.append(f"{name}: {defect}")


Family = Callable[[random.Random], Case]


def run_family(
    name: str, make_case: Family, indices: Iterator[int] | range, seed: int, deadline: float
) -> Report:
    """Make and run the cases of a family that have these indices."""
    report = Report()
    for index in indices:
        rng = random.Random(f"{seed}/{name}/{index}")
        case = make_case(rng)
        end, defect = run_case(case, deadline)
        report.add(name, end, None if defect is None else f"#{index} {case.title}\n{defect}")
    return report


def run_case(case: Case, deadline: float) -> tuple[str, str | None]:
    """How a case ended, in a word, and what is wrong with that, if anything is."""
    threads = set(threading.enumerate())
    try:
        with time_limit(deadline):
            case.run()
            end = "taken"
    except Hang:
        return "hang", f"  it was not done after {deadline} s\n{traceback.format_exc(limit=-6)}"
    except Defect as defect:
        return "defect", f"  {defect}"
    except (ValueError, TypeError, RuntimeError, LookupError) as error:
        wrong = None if case.runs_own_code else what_is_wrong(error, case.names)
        if wrong is not None:
            return (
                "defect",
                f"  {wrong}: {type(error).__name__}: {error!s:.500}\n"
                f"{traceback.format_exc(limit=-4)}",
            )
        end = "refused"
    except BaseException as error:
        return (
            "defect",
            f"  {type(error).__name__}: {error!s:.500}\n{traceback.format_exc(limit=-6)}",
        )
    left = [
        thread.name for thread in threading.enumerate() if thread not in threads and is_left(thread)
    ]
    if left:
        return "defect", f"  threads are left: {left}"
    if not random_numbers_work():
        return "defect", "  the random numbers of the process are broken"
    return end, None


def is_left(thread: threading.Thread) -> bool:
    """Whether a thread is one that a case should have ended. tqdm's own is one for the process, and
    those of an event loop's executor, and those that prepare requests, are the server's, which all
    cases share.
    """
    if thread.name in ("mlx_paged engine", "mlx_paged block reader"):
        # They end soon after their engine was dropped or closed, or wait for a one-shot call.
        gc.collect()
        end = time.monotonic() + 10
        while thread.is_alive() and time.monotonic() < end:
            if any(each._thread is thread for each in list(_idle)):
                return False
            thread.join(timeout=0.01)
    servers = ("asyncio_", "mlx_paged prompts", "mlx_paged grammars")
    is_shared = isinstance(thread, TMonitor) or thread.name.startswith(servers)
    return thread.is_alive() and not is_shared


def what_is_wrong(error: Exception, names: tuple[str, ...]) -> str | None:
    """Why an error is no clear refusal; ``None`` if it is one."""
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    is_pythons_own = isinstance(error, TypeError) and any(part in message for part in PYTHONS_OWN)
    is_ours = message.startswith("[") or "() has no argument " in message
    if not (is_ours or is_pythons_own):
        return "not an error of the package"
    if "\n" in message:
        return "the message has several lines"
    if len(message) > MAX_MESSAGE:
        return f"the message has {len(message)} characters"
    if is_ours and names and not any(name in message for name in names):
        return f"the message names none of {', '.join(names)}"
    return None


def random_numbers_work() -> bool:
    try:
        return 0 <= float(mx.random.uniform().item()) <= 1
    except RuntimeError:
        return False


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``Hang`` when the time is up; only the main thread can be interrupted, others have no
    limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(number: int, frame: FrameType | None) -> None:
        raise Hang

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
