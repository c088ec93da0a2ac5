"""A thousand clients that come, stall, vanish and cancel leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from helpers.odd_clients import run_clients

NUM_CLIENTS = 1000
AT_ONCE = 100


@contextmanager
def server_process(*flags: str) -> Iterator[tuple[str, int]]:
    """``mlx-paged serve`` in a process of its own: its address and its id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlx_paged.server", "--port", str(port), *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            assert process.poll() is None, process.stderr.read()  # type: ignore[union-attr]
            try:
                httpx.get(f"{url}/health")
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield url, process.pid
        assert process.poll() is None
        process.terminate()
        _, log = process.communicate(timeout=30)
        assert process.returncode == 0, log
        assert "Traceback" not in log
    finally:
        process.kill()
        process.wait()


def status(pid: int) -> tuple[int, int, int]:
    """Threads, resident KiB and open files of a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    numbers = [re.search(rf"{name}:\s+(\d+)", text) for name in ("Threads", "VmRSS")]
    threads, resident = (int(found[1]) for found in numbers if found)
    return threads, resident, len(os.listdir(f"/proc/{pid}/fd"))


def wait_until(holds: Callable[[], bool], otherwise: str) -> None:
    """Asks again for a while: a server sees a moment later than its clients that they have gone."""
    for _ in range(400):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError(otherwise)


def wait_until_idle(url: str) -> None:
    def is_idle() -> bool:
        return httpx.get(f"{url}/v1/cache?limit=0").json()["num_used_blocks"] == 0

    wait_until(is_idle, "blocks are held, and nobody asks for them")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts threads in /proc")
def test_a_thousand_clients_leave_no_block_no_thread_no_file_and_no_memory():
    flags = ("--kv-cache-bytes", "600blocks", "--max-num-seqs", "24", "--max-queue-len", "40")
    with server_process(*flags, "--log-level", "error") as (url, pid):
        ends = asyncio.run(run_clients(url, NUM_CLIENTS // 2, AT_ONCE, seed=0))
        wait_until_idle(url)
        before = status(pid)
        ends += asyncio.run(run_clients(url, NUM_CLIENTS // 2, AT_ONCE, seed=1))
        wait_until_idle(url)
        wait_until(lambda: status(pid)[2] <= before[2], "sockets are left")
        after = status(pid)
        assert httpx.get(f"{url}/health").status_code == 200
    assert ends.total() == NUM_CLIENTS
    # Who stayed got a whole answer, or was told to come again.
    allowed = {"200", "200, whole", "503", "503, cut off", "400"}
    answers = {end: count for end, count in ends.items() if ": " in end}
    assert {end.split(": ")[1] for end in answers} <= allowed, ends
    assert ends["stream: 200, whole"] > NUM_CLIENTS // 20, ends
    # Thread pools start threads when these are needed: up to 8 for prompts, 2 for grammars, and 6
    # of the event loop on two cores. A thread left by each client would be 500 more.
    assert after[0] - before[0] <= 50, "threads are left"
    # The second half made as many requests as the first, and needs no more memory than it.
    assert after[1] - before[1] < 16 * 1024, "memory is not given back"
