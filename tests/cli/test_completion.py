"""``mlx-paged completion``: what the shells are told to complete."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_paged.cli.completion import SHELLS, main


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment with ``mlx-paged`` in its path and two models in the hub's cache."""
    program = tmp_path / "bin" / "mlx-paged"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mlx_paged "$@"\n')
    program.chmod(0o755)
    for name in ("models--owner--tiny", "models--owner--large", "datasets--owner--tiny"):
        (tmp_path / "hub" / name).mkdir(parents=True)
    path = f"{program.parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HF_HUB_CACHE": str(tmp_path / "hub")}


def completed(line: str, environment: dict[str, str]) -> list[str]:
    """The words that the program offers for the end of a line."""
    file = Path(environment["HF_HUB_CACHE"]) / "answer"
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(file),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    subprocess.run(["mlx-paged"], env={**environment, **asked}, check=True)
    return [word.strip() for word in file.read_text().splitlines()]


def test_commands_flags_values_and_models_are_completed(environment: dict[str, str]):
    assert completed("mlx-paged se", environment) == ["serve", "service"]
    assert {"--kv-bits", "--kv-cache-bytes"} <= set(completed("mlx-paged chat --kv", environment))
    assert completed("mlx-paged serve --kv ", environment) == ["basic", "paged"]
    assert completed("mlx-paged serve --model owner/", environment) == ["owner/large", "owner/tiny"]
    assert completed("mlx-paged rm owner/t", environment) == ["owner/tiny"]
    assert "demo" in completed("mlx-paged chat d", environment)
    assert completed("mlx-paged cache l", environment) == ["ls"]
    assert "status" in completed("mlx-paged service ", environment)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_one_that_the_shell_reads(
    shell: str, environment: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    assert main([shell]) == 0
    script = capsys.readouterr().out
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    file = Path(environment["HF_HUB_CACHE"]) / "script"
    file.write_text(script)
    run = [shell, "-n", str(file)]
    if shell == "fish":
        run = ["fish", "-c", f"source {file}; complete -C 'mlx-paged se'"]
    if shell == "bash":
        run = ["bash", "-c", f"source {file}; complete -p mlx-paged"]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    if shell == "fish":
        assert done.stdout.split() == ["serve", "service"]
    if shell == "bash":
        assert "_python_argcomplete" in done.stdout


def test_an_unknown_shell_is_an_error(capsys: pytest.CaptureFixture[str]):
    assert main(["tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
