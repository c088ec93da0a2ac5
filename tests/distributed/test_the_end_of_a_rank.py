"""A rank that dies, raises, falls silent or goes astray ends the others: soon, with one line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, cast

import pytest
from helpers.ranks import PROGRAMS, Ended, FakeGroup, ends, started

from mlx_paged.distributed.ranks import Ranks

SECONDS = 10.0  # in which the others have to end; machines that run tests are slow


def ends_after(fault: str, bad_rank: int, folder: Path, num_ranks: int = 2) -> list[Ended]:
    """How the ranks end when one of them is in the middle of an answer, and something happens."""
    arguments = [str(PROGRAMS / "endless.py"), fault, str(bad_rank)]
    with started(num_ranks, arguments, folder) as processes:
        bad = processes[bad_rank]
        if fault in ("killed", "idle", "silence"):
            # Of the other faults, another rank may hear before it is as far.
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "in the middle\n"
        begin = time.monotonic()
        if fault in ("killed", "idle"):
            bad.kill()
        elif fault == "silence":
            os.kill(bad.pid, signal.SIGSTOP)
        others = [process for process in processes if process is not bad]
        ended = ends(others, 60)
        if fault in ("killed", "idle", "silence"):
            assert time.monotonic() - begin < SECONDS
        if fault == "silence":
            os.kill(bad.pid, signal.SIGCONT)
        elif fault == "deaf":
            bad.kill()
        [last] = ends([bad], SECONDS)
        ended.insert(bad_rank, last)
        return ended


def said(ended: Ended) -> list[str]:
    """The lines on stderr, but for those that MLX's ring writes when it loses a connection: it does
    so piece by piece, and others may come in between.
    """
    assert "Traceback" not in ended.err
    return re.findall(r"\[ranks\] [^\[\n]*", ended.err)


@pytest.mark.parametrize("bad_rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_in_the_middle_of_an_answer_ends_the_other(
    tmp_path: Path, bad_rank: int
):
    ended = ends_after("killed", bad_rank, tmp_path)
    assert ended[bad_rank].status == -signal.SIGKILL
    other = ended[1 - bad_rank]
    assert (other.status, said(other)) == (
        1,
        [f"[ranks] rank {1 - bad_rank} ends, since rank {bad_rank} died"],
    )


@pytest.mark.slow
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_an_exception_in_a_step_of_one_rank_ends_all(tmp_path: Path, bad_rank: int):
    ended = ends_after("raises", bad_rank, tmp_path)
    bad, good = ended[bad_rank], ended[1 - bad_rank]
    assert [bad.status, good.status] == [1, 1]
    (line,) = said(bad)
    # No message, which may quote what a user wrote.
    words = re.fullmatch(rf"\[ranks\] rank {bad_rank} (failed: MemoryError at \S+)", line)
    assert words is not None, line
    assert said(good) == [f"[ranks] rank {1 - bad_rank} ends, since rank {bad_rank} {words[1]}"]


@pytest.mark.slow
def test_a_rank_that_falls_silent_ends_the_other(tmp_path: Path):
    other = ends_after("silence", 1, tmp_path)[0]
    assert (other.status, said(other)) == (
        1,
        ["[ranks] rank 0 ends, since rank 1 has sent nothing for 2 seconds"],
    )


@pytest.mark.slow
def test_a_rank_that_takes_no_messages_ends_the_other(tmp_path: Path):
    other = ends_after("deaf", 1, tmp_path)[0]
    assert (other.status, said(other)) == (
        1,
        ["[ranks] rank 0 ends, since rank 1 has accepted no message for 2 seconds"],
    )


@pytest.mark.slow
def test_a_rank_whose_scheduler_goes_astray_is_noticed_before_it_computes_wrong_tokens(
    tmp_path: Path,
):
    ended = ends_after("other tokens", 1, tmp_path)
    assert [each.status for each in ended] == [1, 1]
    assert re.match(
        r"\[ranks\] rank 1 failed: its scheduler differs from that of rank 0 before "
        r"step \d+: \(.*\), not \(.*\)",
        ended[1].err,
    ), ended


@pytest.mark.slow
def test_one_of_four_ranks_that_dies_ends_the_three_others(tmp_path: Path):
    # No answer runs: sums of more ranks than a machine has cores take long.
    ended = ends_after("idle", 2, tmp_path, num_ranks=4)
    assert [each.status for each in ended] == [1, 1, -signal.SIGKILL, 1]
    first = "ends, since rank 2 died"
    assert said(ended[0]) == [f"[ranks] rank 0 {first}"]
    for rank in (1, 3):
        assert said(ended[rank]) == [f"[ranks] rank {rank} ends, since rank 0 {first}"]


@pytest.mark.slow
def test_an_interrupt_that_all_ranks_hear_ends_the_call_on_all_and_they_go_on(tmp_path: Path):
    """Ctrl-C in a terminal reaches all ranks of a machine, and rank 0 says what it means."""
    with started(2, [str(PROGRAMS / "endless.py"), "interrupted", "0"], tmp_path) as processes:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "in the middle\n"
        for process in reversed(processes):  # It stops no follower before rank 0 has said so.
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        ended = ends(processes, 60)
    expected = (0, "interrupted\ngoes on\n", "")
    assert [(each.status, each.out, each.err) for each in ended] == [expected] * 2


@pytest.mark.slow
def test_a_group_that_never_forms_is_given_up(tmp_path: Path):
    program = (
        "from mlx_paged.distributed import ranks; ranks.START_SECONDS = 1; ranks.launched_ranks()"
    )
    with started(2, ["-c", program], tmp_path, {}) as (first, second):
        second.kill()
        try:
            [ended] = ends([first], SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail("it waits without end")
    assert ended.status != 0
    assert said(ended) == [
        "[ranks] rank 0 ends, since MLX did not form the group within 1 seconds: a rank is "
        "missing, or can't be reached"
    ]


def test_a_connection_that_mlx_lost_first_is_left_to_the_thread_that_reads_from_that_rank(
    monkeypatch: pytest.MonkeyPatch,
):
    waits: list[float] = []
    ends: list[str] = []
    monkeypatch.setattr("mlx_paged.distributed.ranks.time.sleep", waits.append)
    monkeypatch.setattr(Ranks, "_end", lambda _, text: ends.append(text))
    ranks = Ranks(cast(Any, FakeGroup(2)), {})
    ranks.fail(RuntimeError("[ring] connection to a peer was lost"))
    assert len(waits) == 1
    ranks.fail(MemoryError("too large"))
    assert (len(waits), len(ends)) == (1, 2)


def test_an_interrupt_in_the_middle_of_a_step_ends_the_process(monkeypatch: pytest.MonkeyPatch):
    """Whether the caller raised it or a second Ctrl-C sent it: other ranks have begun that step."""
    ends: list[str] = []
    monkeypatch.setattr(Ranks, "_end", lambda _, text: ends.append(text))
    ranks = Ranks(cast(Any, FakeGroup(2)), {})
    for error in (KeyboardInterrupt(), SystemExit()):
        ranks.fail(error)
    assert ends == ["failed: KeyboardInterrupt", "failed: SystemExit"]
