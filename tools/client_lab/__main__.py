"""Run clients against the server of :mod:`client_lab.server`, each in an environment of its own,
which is made on demand: ``python -m client_lab [NAME ...]``. Exit status 1: some client failed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from client_lab.clients import CLIENTS, Client
from mlx_paged import demo_model_path

FOLDER = Path(__file__).parent
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mlx_paged_client_lab"
_SECONDS = 600  # of one client


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m client_lab", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CLIENTS))
    parser.add_argument("--cache", type=Path, default=_CACHE, help="folder of the environments")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in CLIENTS]
    if unknown:
        parser.error(f"there is no client {unknown[0]}; there are {', '.join(CLIENTS)}")
    results = {}
    for name in args.names or CLIENTS:
        results[name] = _result_of(CLIENTS[name], args.cache)
        print(f"{name}: {results[name]}", flush=True)
    return 1 if any(result.startswith("failed") for result in results.values()) else 0


def _result_of(client: Client, cache: Path) -> str:
    """``ok``, or how it failed, or why it was skipped."""
    if client.is_node and shutil.which("npm") is None:
        return "skipped: there is no npm on this machine"
    digest = hashlib.sha256(" ".join(client.packages).encode()).hexdigest()[:12]
    environment = cache / f"{client.script}-{digest}"
    start = time.perf_counter()
    if not (environment / "installed").exists():
        failure = _install(client, environment)
        if failure:
            return f"failed: its packages can't be installed: {failure}"
    with running(*client.server) as url, tempfile.TemporaryDirectory() as work:
        command, folder = _command_of(client, environment), Path(work)
        settings = {
            "LAB_URL": url,
            "LAB_BIN": str(environment / "node_modules" / ".bin"),
            "LAB_WORK": str(folder),
            "LAB_DEMO": str(demo_model_path()),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or it asks for one on the network
        }
        log = environment / "last_run.log"
        with log.open("w") as output:
            try:
                done = subprocess.run(
                    command,
                    cwd=folder,
                    env={**os.environ, **settings},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=_SECONDS,
                )
            except subprocess.TimeoutExpired:
                return f"failed: it ran for {_SECONDS} seconds; see {log}"
    if done.returncode:
        return f"failed: status {done.returncode}; see {log}"
    said = [line for line in log.read_text().splitlines() if line.startswith("lab: ")]
    facts = "".join(f"; {line.removeprefix('lab: ')}" for line in said)
    return f"ok in {time.perf_counter() - start:.0f} s ({', '.join(client.packages)}){facts}"


def _install(client: Client, environment: Path) -> str:
    """Make a client's environment; what went wrong, or nothing."""
    shutil.rmtree(environment, ignore_errors=True)
    environment.mkdir(parents=True)
    if client.is_node:
        (environment / "package.json").write_text('{"private": true}')
        command = ["npm", "install", "--no-audit", "--no-fund", *client.packages]
    else:
        venv.create(environment, with_pip=True)
        command = [str(environment / "bin" / "python"), "-m", "pip", "install", *client.packages]
    done = subprocess.run(command, cwd=environment, capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
    (environment / "installed").touch()
    return ""


def _command_of(client: Client, environment: Path) -> list[str]:
    if client.script.endswith(".mjs"):
        # Node finds packages beside a script.
        script = environment / client.script
        shutil.copy(FOLDER / "node" / client.script, script)
        return ["node", str(script)]
    python = sys.executable if client.is_node else str(environment / "bin" / "python")
    return [python, str(FOLDER / "python" / client.script)]


@contextmanager
def running(*command: str) -> Iterator[str]:
    """A server as a process of its own, and its address."""
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


if __name__ == "__main__":
    raise SystemExit(main())
