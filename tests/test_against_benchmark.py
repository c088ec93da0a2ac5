"""``python -m benchmarks against`` runs a benchmark of two trees, each with its own package.

The repository is made for the test: a package with a number in it and a benchmark that prints it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

GIT = ["git", "-c", "user.name=test", "-c", "user.email=test@example.com"]

FIGURES = """
import json, sys
import mlx_paged
figures = {"us": mlx_paged.COST, "zero": 0, "steps": [{"count": len(sys.argv) - 1}], "name": "x"}
if mlx_paged.COST > 1:
    figures["new"] = 1
print("| a table |")
print(json.dumps({"benchmark": "figures", "setting": {}, "results": figures}))
"""
INTERRUPTS = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """With a commit in which a step costs 1, and a working tree in which it costs 3."""
    root = tmp_path / "repository"
    (root / "mlx_paged").mkdir(parents=True)
    (root / "benchmarks" / "lib").mkdir(parents=True)
    for name in ("__init__.py", "against.py", "lib/__init__.py", "lib/card.py"):
        shutil.copy(BENCHMARKS / name, root / "benchmarks" / name)
    package = root / "mlx_paged" / "__init__.py"
    package.write_text("__version__ = '0'\nCOST = 1\n")
    (root / "benchmarks" / "lib" / "figures.py").write_text(FIGURES)
    (root / "benchmarks" / "fails.py").write_text("raise ValueError('out of order')")
    (root / "benchmarks" / "silent.py").write_text("print('no figures today')")
    (root / "benchmarks" / "interrupts.py").write_text(INTERRUPTS)
    subprocess.run([*GIT, "init", "--quiet"], cwd=root, check=True)
    subprocess.run([*GIT, "add", "."], cwd=root, check=True)
    subprocess.run([*GIT, "commit", "--quiet", "-m", "All"], cwd=root, check=True)
    package.write_text("__version__ = '0'\nCOST = 3\n")
    (root / "benchmarks" / "unknown.py").write_text(FIGURES)
    return root


def against(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The finished command; checks that it leaves no temporary file."""
    temporary = repository.parent / "temporary"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.against", *arguments],
        cwd=repository,
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
        timeout=300,
        # Where SIGINT is ignored from above, as behind a script's &, this test is not of that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert not list(temporary.glob("mlx-paged-against-*"))
    return done


def test_each_tree_runs_its_own_package(repository: Path, tmp_path: Path):
    out = tmp_path / "out.json"
    arguments = ["HEAD", "figures", "--size", "7", "--rounds", "2", "--out", str(out)]
    done = against(repository, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == out.read_text().strip()
    report = json.loads(out.read_text())
    assert report["results"] == {
        "us": {"commit": 1, "this": 3, "ratio": 3.0, "ratio_of_smallest": 3.0},
        "zero": {"commit": 0, "this": 0, "ratio": None, "ratio_of_smallest": None},
        "steps.0.count": {"commit": 2, "this": 2, "ratio": 1.0, "ratio_of_smallest": 1.0},
    }
    assert "left out: new" in done.stdout
    assert report["setting"]["benchmark"] == "figures --size 7"
    assert report["setting"]["this"] == report["setting"]["commit"][:12] + "-dirty"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, message",
    [
        (("nowhere", "figures"), "'nowhere' is no commit"),
        (("HEAD", "missing"), "has no benchmark missing"),
        (("HEAD", "unknown"), "commit HEAD has no benchmark unknown"),
        (("HEAD", "fails"), "ValueError: out of order"),
        (("HEAD", "silent"), "is not its JSON line"),
    ],
)
def test_what_cannot_be_compared_is_said(repository: Path, arguments: tuple[str], message: str):
    done = against(repository, *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("[against] ") and message in done.stderr
    assert "Traceback" not in done.stderr.splitlines()[0]


@pytest.mark.slow
def test_an_interrupt_leaves_nothing_behind(repository: Path):
    assert against(repository, "HEAD", "interrupts").returncode == 130
