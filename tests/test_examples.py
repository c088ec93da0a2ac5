"""The examples run as they stand, each as a program on the bundled model, and end well."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@cache
def run(name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def answers_of_generate_text(out: str) -> None:
    assert "4821" in out


def answers_of_many_requests(out: str) -> None:
    assert "-> The code of stone is 905." in out and "-> Your name is Tom." in out
    assert out.count("(32 tokens were there already)") == 3
    assert "0 blocks in use after it" in out
    assert out.count("\ncompletion ") == 3
    assert "stopped: '20 21 22 23 24 25 26 27 28 29 30" in out and out.endswith("(abort)\n")


def answers_of_many_sequences(out: str) -> None:
    assert "-> The code of stone is 905." in out
    assert "after a fork: " in out


ANSWERS: dict[str, Callable[[str], None]] = {
    "generate_text.py": answers_of_generate_text,
    "many_requests.py": answers_of_many_requests,
    "many_sequences.py": answers_of_many_sequences,
}

each_example = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "generate_text.py" else pytest.mark.slow)
        for name in ANSWERS
    ],
)


def test_no_example_is_left_out() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(ANSWERS)


@each_example
def test_an_example_ends_with_status_0_and_without_a_complaint(name: str) -> None:
    done = run(name)
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr}"
    for complaint in ("terminate called", "Traceback", "Exception ignored"):
        assert complaint not in done.stderr, done.stderr


@each_example
def test_an_example_answers_what_it_says(name: str) -> None:
    ANSWERS[name](run(name).stdout)
