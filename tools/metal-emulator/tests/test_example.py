"""The example in the README is a program that runs and prints what the README says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent.parent


@pytest.mark.usefixtures("compiler")
def test_the_example_of_the_readme_prints_what_the_readme_says():
    readme = (PROJECT / "README.md").read_text()
    example, printed = re.findall(r"<!-- example -->\n```\w*\n(.*?)```", readme, re.S)
    assert example == (PROJECT / "example.py").read_text()
    run = subprocess.run(
        [sys.executable, "example.py"], cwd=PROJECT, capture_output=True, text=True
    )
    assert (run.stdout, run.stderr) == (printed, "")


def test_the_emulator_needs_nothing_but_mlx_and_numpy():
    imported = {
        name
        for path in (PROJECT / "metal_emulator").glob("*.py")
        for name in re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.M)
    }
    # pytest is for the fixtures only, which nothing in the package imports.
    assert imported - sys.stdlib_module_names == {"metal_emulator", "mlx", "numpy", "pytest"}
