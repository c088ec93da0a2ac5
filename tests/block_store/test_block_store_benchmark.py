"""The benchmark of the block store runs, and says what it measured."""

from __future__ import annotations

import json
import subprocess

import pytest

from benchmarks.lib.card import COMMAND


@pytest.mark.slow
def test_the_benchmark_runs_each_side(tmp_path):
    out = tmp_path / "out.json"
    command = [*COMMAND, "block_store", "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == out.read_text().strip()
    results = json.loads(out.read_text())["results"]
    sides = {"put", "put, full folder", "get", "get, two threads", "plain write", "plain read"}
    assert [set(of) for of in results["blocks_ms"].values()] == [sides, sides]
    assert all(microseconds > 0 for microseconds in results["many_us"].values())


@pytest.mark.slow
def test_the_catalogue_of_a_folder_is_measured(tmp_path):
    out = tmp_path / "out.json"
    command = [*COMMAND, "catalogue", "--files", "500", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())["results"]
    sides = {"start, warm", "each: has", "each: used", "each: evicted", "each: written"}
    assert sides < set(results["seconds"])
    assert all(each["wall"] > 0 for each in results["seconds"].values())
    assert results["nbytes"] > 0
