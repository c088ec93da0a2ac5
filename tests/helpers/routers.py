"""A router as a process of its own, with processes of the demo model below it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from helpers.server_programs import Program

LONG = {
    "prompt": "The code of apple is 4821.",
    "stream": True,
    "ignore_eos": True,
    "temperature": 0,
    "max_tokens": 3500,
}
CONFIG = """
kv-cache-bytes = "500blocks"
cache-dir = "none"
drain-seconds = 20
{top}

[models.one]
model = "demo"
aliases = ["uno", "1st/one"]

[models.two]
model = "demo"

[models.broken]
model = "{broken}"
"""
RUN = (
    "\nimport sys\nfrom mlx_paged.router.program import main\nsys.exit(main(sys.argv[1:], 'serve'))"
)


@contextlib.contextmanager
def running_router(config: Path, *flags: str, patch: str = "") -> Iterator[Program]:
    """A router with a configuration file, beside which it keeps conversations.

    Args:
        patch: code that the router runs first, but not its processes.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", patch + RUN, "--config", str(config), "--port", "0", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(config.parent / "caches")},
    )
    try:
        yield Program(process)
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def pids_below(program: Program) -> dict[str, int]:
    """The ids of the models' processes, by the names of the models."""
    # -ww, since ps cuts its lines where COLUMNS says so, even in a pipe.
    listed = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,command="], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in listed.stdout.splitlines()]
    return {
        row[-1]: int(row[0])
        for row in rows
        if row[1] == str(program.process.pid) and "mlx_paged.router.child" in row
    }


def write_config(folder: Path, top: str = "") -> Path:
    broken = folder / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    file = folder / "models.toml"
    file.write_text(CONFIG.format(broken=broken, top=top))
    return file


def is_running(pid: int) -> bool:
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(found.stdout.strip()) and not found.stdout.strip().startswith("Z")


def errors_of(lines: Iterator[str]) -> list[dict[str, str]]:
    """The errors among the events of a stream."""
    events = (line.removeprefix("data: ") for line in lines if line.startswith('data: {"error"'))
    return [json.loads(event)["error"] for event in events]


@contextlib.contextmanager
def streaming(router: Program, model: str, key: str = "none", **fields: Any) -> Iterator[Any]:
    """The response to a long stream."""
    body = {**LONG, "model": model, **fields}
    with httpx.stream(
        "POST", f"{router.url}/v1/completions", json=body, headers={"x-api-key": key}, timeout=60
    ) as answer:
        yield answer
