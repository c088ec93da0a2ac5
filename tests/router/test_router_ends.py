"""How a router ends: signals, the drain, and a kill, after which nothing is left."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from helpers.routers import (
    errors_of,
    is_running,
    pids_below,
    running_router,
    streaming,
    write_config,
)
from helpers.server_programs import Program
from helpers.servers import wait_until


@contextmanager
def answering(
    folder: Path, *flags: str, max_tokens: int = 3500
) -> Iterator[tuple[Program, Iterator[str], int]]:
    """A router in the middle of an answer, the lines that are left of it, and the process."""
    with (
        running_router(write_config(folder), *flags) as router,
        streaming(router, "two", max_tokens=max_tokens) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        yield router, lines, pids_below(router)["two"]


def test_a_signal_lets_answers_end_and_then_ends_the_processes(tmp_path: Path):
    with answering(tmp_path, max_tokens=200) as (router, lines, pid):
        router.signal(signal.SIGTERM)
        router.wait_for("shutting down; 1 requests")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{router.url}/health")
        *_, choice, _, done, _ = lines
        assert '"finish_reason":"length"' in choice and done == "data: [DONE]"
        assert router.end() == 0
        assert not is_running(pid)
    assert "two: " in "".join(router.said) and "is killed" not in "".join(router.said)


def test_a_router_that_is_killed_leaves_no_process(tmp_path: Path):
    with answering(tmp_path) as (router, lines, pid):
        router.signal(signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            list(lines)
        wait_until(lambda: not is_running(pid), 30)


@pytest.mark.slow
def test_what_still_runs_after_the_drain_is_told_that_it_was_aborted(tmp_path: Path):
    with answering(tmp_path, "--drain-seconds", "0.2") as (router, lines, pid):
        router.signal(signal.SIGINT)
        assert [error["code"] for error in errors_of(lines)] == ["aborted"]
        assert router.end() == 0
        assert not is_running(pid)


@pytest.mark.slow
def test_the_second_interrupt_ends_all_at_once(tmp_path: Path):
    with answering(tmp_path) as (router, lines, pid):
        router.signal(signal.SIGINT)
        router.wait_for("Ctrl-C again to end at once")
        next(lines)
        router.signal(signal.SIGINT)
        assert router.end() == 130
        wait_until(lambda: not is_running(pid), 30)
