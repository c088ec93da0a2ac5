"""kill -9 of processes that use a folder of K/V blocks, at random moments, with readers in others.

    python -m benchmarks kill_writers                 # 1,000 kills, some 7 minutes on 2 cores
    python -m benchmarks kill_writers --kills 100 --seed 7

A quarter of the kills hits writers of a folder in which there is room for everything, and a tool
that pins, unpins, shrinks and lists it; a quarter the same on a folder that holds a
fifth of what is written; the rest hits whole engines (demo model, float32) that answer prompts with
a folder that holds a third of their K/V. One time in ten an index of an earlier version is put
there, too. Two processes (with engines: one) read and compare all the while, and after every ten
kills a new process starts on the folder and looks at everything:

- a block that can be read has the right bytes, and an answer the tokens of an engine without a
  folder;
- no file is bad or half written, and none that was said to be written or pinned is missing, where
  nothing had to be evicted;
- the sums agree with the files, and these are within the limit;
- no process has crashed, and no store has given up.

The exit status is 1 if anything was wrong, which is printed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table


def engine_kills(folder: Path, seed: int) -> Any:
    from paged_testing.killed_engines import EngineKills

    return EngineKills(folder, seed)


def roomy_kills(folder: Path, seed: int) -> Any:
    from paged_testing.killed_writers import ROOMY
    from paged_testing.store_kills import StoreKills

    return StoreKills(folder, ROOMY, seed)


def tight_kills(folder: Path, seed: int) -> Any:
    from paged_testing.killed_writers import TIGHT
    from paged_testing.store_kills import StoreKills

    return StoreKills(folder, TIGHT, seed)


PARTS: dict[str, tuple[Callable[[Path, int], Any], float]] = {
    "writers, room for all": (roomy_kills, 0.25),
    "writers, limit of 2 MiB": (tight_kills, 0.25),
    "engines, limit of 3 MiB": (engine_kills, 0.5),
}


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    setting = machine_card() | {"kills": args.kills, "seed": args.seed}
    print_card("Kills", setting)
    results: dict[str, Any] = {}
    for name, (make, share) in PARTS.items():
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            findings = make(Path(folder), args.seed).run(round(args.kills * share))
        seconds = time.perf_counter() - start
        results[name] = vars(findings) | {"seconds": seconds}
        print(f"{name}: {findings.num_kills} kills in {seconds:.0f} s", file=sys.stderr)
    print_table(
        ["", "kills", "looks afterwards", "compared", "problems", "seconds"],
        [
            [
                name,
                part["num_kills"],
                part["num_looks"],
                part["counts"].get("answers", part["counts"].get("reads")),
                len(part["problems"]),
                f"{part['seconds']:.0f}",
            ]
            for name, part in results.items()
        ],
    )
    for name, part in results.items():
        print(f"{name}: {dict(part['counts'])}, killed while {dict(part['killed_while'])}")
    print_json("kill_writers", setting, results, args.out)
    problems = [problem for part in results.values() for problem in part["problems"]]
    for problem in problems:
        print(f"wrong: {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
