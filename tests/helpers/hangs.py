"""A test that hangs fails, and the tests after it run.

The alarm of pytest-timeout raises in the main thread: the test fails with a traceback, what waits
for a child process kills it, and the process goes on. But a native call never sees the alarm, and
an ``except BaseException`` may keep it to itself, as Hypothesis does to try an example again. So a
watchdog follows: a thread of ``faulthandler`` that needs no GIL, which writes the stacks of all
threads and ends the process. pytest-xdist reports the test as failed, and starts another process
for the others; ``-n 0`` has no other, and ends there.
"""

from __future__ import annotations

import faulthandler
import os
from typing import Any

import pytest

# Of a test's time limit, what the watchdog leaves for the alarm to fail it.
GRACE = 0.15
STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    # Here it isn't captured yet.
    config.stash[STDERR] = os.dup(2)


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    limit = settings.timeout * (1 + GRACE)
    faulthandler.dump_traceback_later(limit, exit=True, file=item.config.stash[STDERR])


def pytest_runtest_logfinish() -> None:
    faulthandler.cancel_dump_traceback_later()


def pytest_enter_pdb() -> None:
    faulthandler.cancel_dump_traceback_later()


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[STDERR])
