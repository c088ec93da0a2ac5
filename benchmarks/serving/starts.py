"""CPU time of starts, in processes of their own: of the server until it listens and ends, of the
chat with one message, and of imports.

    python -m benchmarks starts
    python -m benchmarks starts --against FOLDER     # another checkout, in turns

What is counted is user and system time of the whole process. The smallest of all rounds is what
other work on the machine disturbs least. The model is the bundled one, and modules are compiled.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table

ROOT = Path(__file__).resolve().parents[2]
LISTENS = "listening on"
STARTS = {
    "import mlx_paged": ["-c", "import mlx_paged"],
    "import of the server's app": ["-c", "import mlx_paged.loading, mlx_paged.server.app"],
    "mlx-paged serve": ["-m", "mlx_paged", "serve", "--port", "0"],
    "mlx-paged chat hello": ["-m", "mlx_paged", "chat", "hello"],
}


def main() -> int:
    args = parse_args()
    trees = {"this": ROOT} | ({} if args.against is None else {"against": args.against.resolve()})
    setting = machine_card() | {"rounds": args.rounds, "starts": list(STARTS)}
    print_card("CPU time of starts, ms", setting)
    results: list[dict[str, Any]] = []
    for name, command in STARTS.items():
        run(command, ROOT)  # compiles modules, reads files
        times: dict[str, list[float]] = {tree: [] for tree in trees}
        for turn in range(args.rounds + 1):
            for tree in sorted(trees, reverse=turn % 2 == 0):
                seconds = run(command, trees[tree])
                if turn:  # the first one compiles the other tree's modules
                    times[tree].append(seconds)
        results.append({"start": name, "ms": {tree: in_ms(each) for tree, each in times.items()}})
    print_table(
        ["start", *(f"{tree}: smallest, median" for tree in trees)],
        [
            [each["start"], *(f"{ms['smallest']}, {ms['median']}" for ms in each["ms"].values())]
            for each in results
        ],
    )
    print_json("starts", setting, results, args.out)
    return 0


def parse_args() -> argparse.Namespace:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout")
    return parser.parse_args()


def in_ms(seconds: list[float]) -> dict[str, int]:
    return {
        "smallest": round(min(seconds) * 1000),
        "median": round(statistics.median(seconds) * 1000),
    }


def run(command: list[str], tree: Path) -> float:
    """The seconds of CPU time that a command takes with the package of a checkout. A server is
    ended when it listens.
    """
    env = {**os.environ, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(
        [sys.executable, "-P", *command], env=env, stdin=subprocess.DEVNULL, text=True, **options
    )
    assert process.stdout is not None
    output = []
    for line in process.stdout:
        output.append(line)
        if LISTENS in line:
            process.send_signal(signal.SIGTERM)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{command} of {tree} failed:\n{''.join(output)}")
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main())
