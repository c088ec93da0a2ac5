"""Which tests are in which lane, asked of pytest itself in small folders of tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.lanes import GATE, NOT_SMOKE

REPOSITORY = Path(__file__).parent.parent
CONFTEST = """
import pytest
from helpers.lanes import mark_lanes

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    mark_lanes(items)
"""
TESTS = """
import pytest

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.parametrize("number", [1, 2])
def test_quick(number): pass

def test_another(): pass
"""


@pytest.mark.parametrize(
    ("lane", "found"),
    [
        (
            "smoke",
            ["tests/core/test_a.py::test_quick[1]", "tests/core/test_a.py::test_quick[2]"],
        ),
        (
            "not slow",
            [
                "tests/core/test_a.py::test_quick[1]",
                "tests/core/test_a.py::test_quick[2]",
                "tests/core/test_a.py::test_another",
                "tests/test_llm.py::test_quick",
            ],
        ),
        (
            "gate",
            [
                "tests/fuzz/test_a.py::test_slow",
                "tests/fuzz/test_a.py::test_quick[1]",
                "tests/fuzz/test_a.py::test_quick[2]",
                "tests/fuzz/test_a.py::test_another",
            ],
        ),
        (
            "slow and not gate",
            ["tests/core/test_a.py::test_slow"],
        ),
    ],
)
def test_each_lane_has_its_tests(tmp_path: Path, lane: str, found: list[str]):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow\n  smoke\n  gate\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for file in ("core/test_a.py", "fuzz/test_a.py", "test_llm.py"):
        path = tmp_path / "tests" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TESTS if file != "test_llm.py" else "def test_quick(): pass")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--import-mode=importlib"]
    done = subprocess.run(
        [*command, "-m", lane, "tests"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "tests")},
        capture_output=True,
        text=True,
    )
    assert [line for line in done.stdout.splitlines() if "::" in line] == found, done.stdout


@pytest.mark.parametrize("pattern", GATE + NOT_SMOKE)
def test_a_lane_names_files_that_exist(pattern: str):
    assert list(REPOSITORY.glob(pattern))
