"""Tokens of several ranks are those of one process, whatever comes, forks, waits, fails or goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.rank_workloads import WORKLOADS, run_workload
from helpers.ranks import Ended, run_program


def reports(ended: list[Ended]) -> list[dict[str, Any]]:
    """What each rank says of each workload."""
    assert [(each.status, each.err) for each in ended] == [(0, "")] * len(ended)
    return [
        {name: told for line in each.out.splitlines() for name, told in json.loads(line).items()}
        for each in ended
    ]


def in_one_process(names: list[str]) -> dict[str, Any]:
    # Through JSON, as the others: tuples become lists.
    return {name: json.loads(json.dumps(run_workload(WORKLOADS[name]))) for name in names}


def check(num_ranks: int, names: list[str], folder: Path) -> dict[str, Any]:
    expected = in_one_process(names)
    assert reports(run_program(num_ranks, "workloads", folder, *names)) == [expected] * num_ranks
    for report in expected.values():
        assert report["blocks left in use"] == report["requests left"] == 0
    return expected


def reasons(expected: dict[str, Any]) -> set[str]:
    """Why answers ended."""
    answers = [answer for report in expected.values() for answer in report["answers"]]
    return {ending[1] for answer in answers for ending in answer[2:]}


@pytest.mark.slow
def test_two_ranks_give_the_tokens_of_one_process(tmp_path: Path):
    names = ["swaps", "one step ahead", "users", "budgets"]
    expected = check(2, names, tmp_path)
    assert all(expected[name]["preemptions"] > 0 for name in names[:3])
    answers = [answer for name in names for answer in expected[name]["answers"]]
    assert any(len(answer) > 3 for answer in answers), "some have several completions"
    assert any(answer[0] for answer in answers), "some hit the prefix cache"
    assert reasons(expected) == {"length", "stop", "abort", "error"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*no memory for more than 64 blocks")
def test_two_ranks_give_the_tokens_of_one_process_with_every_kind_of_cache_and_drafts(
    tmp_path: Path,
):
    """Also where the pool of one rank can't grow: then it grows on none."""
    names = ["drafts", "basic", "eight bits", "a window", "no memory"]
    expected = check(2, names, tmp_path)
    assert expected["no memory"]["blocks"] == 64
    assert {"length", "stop", "abort"} <= reasons(expected)
    assert expected["drafts"]["accepted drafts"] > 0


@pytest.mark.slow
def test_four_ranks_give_the_tokens_of_one_process(tmp_path: Path):
    expected = check(4, ["few"], tmp_path)
    assert expected["few"]["preemptions"] > 0
    assert any(len(answer) > 3 for answer in expected["few"]["answers"])
