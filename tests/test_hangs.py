"""A test that hangs fails, wherever it hangs, and all others are reported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.hangs import GRACE

TESTS = Path(__file__).parent
HANGING = """
import ctypes
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, strategies

def lock_twice(library):
    mutex = ctypes.create_string_buffer(256)
    library.pthread_mutex_init(mutex, None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)

def test_at_first():
    pass

def test_python():
    while True:
        pass

def test_a_lock():
    threading.Event().wait()

def test_a_thread():
    thread = threading.Thread(target=threading.Event().wait)
    thread.start()
    thread.join()

def test_a_child_process():
    child = "import os, time; open('child', 'w').write(str(os.getpid())); time.sleep(600)"
    subprocess.run([sys.executable, "-c", child])

def test_between():
    pass

@given(strategies.integers())
def test_an_example(number):
    threading.Event().wait()

def test_an_alarm_that_is_kept():
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass

def test_a_native_call():
    lock_twice(ctypes.CDLL(None))

def test_a_native_call_that_holds_the_gil():
    lock_twice(ctypes.PyDLL(None))

@pytest.fixture
def endless():
    yield
    threading.Event().wait()

def test_a_fixture(endless):
    pass

@pytest.mark.timeout(60)
def test_that_is_given_more_time():
    time.sleep(3)

def test_at_last():
    pass
"""


def test_no_test_hangs_for_two_minutes(pytestconfig: pytest.Config):
    assert pytestconfig.pluginmanager.has_plugin("helpers.hangs")
    assert float(pytestconfig.getini("timeout")) * (1 + GRACE) < 120


@pytest.mark.slow
def test_a_test_that_hangs_fails_and_the_others_are_reported(tmp_path: Path):
    (tmp_path / "test_hanging.py").write_text(HANGING)
    command = ["pytest", "-c", TESTS.parent / "pyproject.toml", "--rootdir", tmp_path]
    options = ["-p", "helpers.hangs", "-p", "no:cacheprovider", "--timeout", "2", "-n", "3"]
    done = subprocess.run(
        [sys.executable, "-m", *command, *options, "-rA", "test_hanging.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
    )
    ends = re.findall(r"^(PASSED|FAILED|ERROR) test_hanging\.py::test_(\w+)", done.stdout, re.M)
    assert sorted(ends) == [
        ("ERROR", "a_fixture"),
        ("FAILED", "a_child_process"),
        ("FAILED", "a_lock"),
        ("FAILED", "a_native_call"),
        ("FAILED", "a_native_call_that_holds_the_gil"),
        ("FAILED", "a_thread"),
        ("FAILED", "an_alarm_that_is_kept"),
        ("FAILED", "an_example"),
        ("FAILED", "python"),
        ("PASSED", "a_fixture"),
        ("PASSED", "at_first"),
        ("PASSED", "at_last"),
        ("PASSED", "between"),
        ("PASSED", "that_is_given_more_time"),
    ], done.stdout + done.stderr
    # The stacks of all threads are written, whichever way the process goes.
    assert "lock_twice" in done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "child").read_text()), 0)
