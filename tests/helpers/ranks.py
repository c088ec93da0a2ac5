"""Processes of one group over loopback, each a rank; the ring backend, without the launcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
PROGRAMS = REPOSITORY / "tests" / "distributed" / "programs"
SECONDS = 100.0  # after which a group that came to no end is killed


@dataclass(frozen=True)
class Ended:
    """What a rank has said, and its exit status."""

    status: int
    out: str
    err: str


class FakeGroup:
    """A group without members, for code that only reads its size."""

    def __init__(self, size: int, rank: int = 0):
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


@contextmanager
def started(
    num_ranks: int, arguments: list[str], folder: Path, env: dict[str, str] | None = None
) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes of a group, which don't outlive the block."""
    hostfile = folder / "hosts.json"
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(num_ranks)]))
    paths = [str(REPOSITORY), str(REPOSITORY / "tests"), str(REPOSITORY / "tools")]
    paths.append(str(REPOSITORY / "tools" / "metal-emulator"))
    shared = {
        **os.environ,
        "MLX_HOSTFILE": str(hostfile),
        "PYTHONPATH": os.pathsep.join(paths),
        **(env or {}),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=shared | {"MLX_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def ends(processes: list[subprocess.Popen[str]], seconds: float = SECONDS) -> list[Ended]:
    """How the processes end; raises ``TimeoutExpired`` if one of them does not."""
    deadline = time.monotonic() + seconds
    ended = []
    for process in processes:
        out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        ended.append(Ended(process.returncode, out, err))
    return ended


def run_program(num_ranks: int, name: str, folder: Path, *arguments: str) -> list[Ended]:
    """Run a program of ``tests/distributed/programs`` on several ranks, to its end."""
    with started(num_ranks, [str(PROGRAMS / f"{name}.py"), *arguments], folder) as processes:
        return ends(processes)
