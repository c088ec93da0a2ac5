"""``python -m benchmarks``: the list of benchmarks, and running one by its name."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.__main__ import HERE, kept_results, read_programs
from benchmarks.lib.card import COMMAND

PROGRAMS = read_programs()
REPOSITORY = HERE.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"COLUMNS": "120"},
    )


def test_every_benchmark_is_listed_with_what_it_measures_and_its_results():
    listed = run()
    assert listed.returncode == 0, listed.stderr
    shown = {line.split()[0] for line in listed.stdout.splitlines() if re.match(r"  \w", line)}
    assert shown == set(PROGRAMS)
    assert all(program.says.endswith((".", ")")) for program in PROGRAMS.values())
    text = " ".join(listed.stdout.split())
    assert all(file in text for name in PROGRAMS for file in kept_results()[name])


def test_every_kept_result_belongs_to_a_benchmark():
    # The register counts come from Mesa's compiler for Apple's GPUs, outside of this repository.
    assert set(kept_results()) - {"registers_agx"} <= set(PROGRAMS)


def test_a_benchmark_is_run_by_its_name_and_an_unknown_one_is_refused():
    helped = run("charts", "--help")
    assert helped.returncode == 0 and helped.stdout.startswith("usage: python -m benchmarks charts")
    unknown = run("sharts")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr == ("no benchmark is called 'sharts'; python -m benchmarks lists them\n")


@pytest.mark.parametrize(
    "page", [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")], ids=lambda page: page.name
)
def test_pages_name_benchmarks_that_exist(page: Path):
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"python\s+-m\s+benchmarks\s+(\w+)", text)) <= set(PROGRAMS)
    for file in re.findall(r"benchmarks/[\w/]+\.py", text):
        assert (REPOSITORY / file).is_file(), file
