"""All that could not be measured without a Mac, in one command and under ten minutes.

    python -m benchmarks on_a_mac                        # a random Qwen3-0.6B
    python -m benchmarks on_a_mac --model PATH_OR_REPO   # a real model
    python -m benchmarks on_a_mac --quick                # does it run at all

It writes `on_a_mac.json`, every figure, and `on_a_mac.md`, a card with the verdicts that can be
pasted into an issue as it is. The sections are in `mac_sections.py`: the device; whether the
estimates of matmuls of few rows (`few_rows.py`) hold; whether slabs are written in place; copy
bandwidth; every kernel against plain MLX; what a launch costs; what was assumed of the kernels,
each question with the expected answer (`mac_kernels.py`); what a step costs by its rows, in the
form of the table that decides on drafts; attention beside MLX's SDPA; prefill and decode beside
mlx-lm, one step ahead and waiting; what decodes allocate, and the activations of a prompt; the
streams with larger command buffers.

Each section is a process of its own, so one that fails, crashes or hangs does not take the others
along. Ctrl-C writes what there is. Without Metal the sections that need it say so, and the others
are small enough for two slow cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks.lib.card import COMMAND
from benchmarks.mac.mac_card import Result, make_card, verdicts_of
from benchmarks.mac.mac_sections import SECTIONS, SIZES, Section

MINUTES = 9.5
# A section is ended this much after its time, if a single row of it takes so long.
GRACE_SECONDS = 30


def write_rows(path: Path, rows: list[dict[str, Any]], ended: str) -> None:
    """In one piece, as the process may be ended at any time."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"rows": rows, "ended": ended}))
    part.replace(path)


def run_section(section: Section, args: argparse.Namespace) -> None:
    """In the section's own process: rows into a file, as they come."""
    kind = "quick" if args.quick else "gpu" if mx.default_device() == mx.gpu else "cpu"
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    try:
        for row in section.measure(SIZES[kind], args.model):
            rows.append(row)
            write_rows(args.rows, rows, "it crashed")
            if time.perf_counter() - start > section.seconds:
                write_rows(args.rows, rows, f"stopped after {section.seconds} s")
                return
    except KeyboardInterrupt:
        write_rows(args.rows, rows, "interrupted")
        return
    except Exception as error:
        traceback.print_exc()
        write_rows(args.rows, rows, f"{type(error).__name__}: {error}")
        return
    write_rows(args.rows, rows, "complete")


def read_rows(path: Path) -> Result:
    if not path.exists():
        return {"rows": [], "ended": "it crashed before its first figure"}
    result: Result = json.loads(path.read_text())
    return result


def start_section(
    section: Section, args: argparse.Namespace, rows: Path
) -> subprocess.Popen[bytes]:
    command = [*COMMAND, "on_a_mac", "--section", section.name, "--rows", str(rows)]
    command += ["--model", args.model, *(["--quick"] if args.quick else [])]
    return subprocess.Popen(command, env=os.environ | (section.environment or {}))


def watch_section(
    section: Section, args: argparse.Namespace, limit: float, results: dict[str, Result]
) -> None:
    """Put into ``results`` what the section's process leaves within ``limit`` seconds, and whatever
    it left if that is interrupted.
    """
    start = time.perf_counter()
    ended, process = "interrupted", None
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        try:
            process = start_section(section, args, rows)
            process.wait(limit)
            ended = "" if process.returncode >= 0 else f"ended by signal {-process.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"ended after {limit:.0f} s"
        finally:
            if process is not None:
                process.kill()
                process.wait()
            result = read_rows(rows)
            result["ended"] = ended or result["ended"]
            results[section.name] = result | {"seconds": round(time.perf_counter() - start, 1)}


def measure_all(
    sections: list[Section], args: argparse.Namespace, results: dict[str, Result]
) -> None:
    deadline = time.perf_counter() + 60 * MINUTES
    for section in sections:
        limit = min(section.seconds + GRACE_SECONDS, deadline - time.perf_counter())
        if limit < 1:
            results[section.name] = {"rows": [], "ended": "no time was left", "seconds": 0}
            continue
        results[section.name] = {"rows": [], "ended": "interrupted", "seconds": 0}
        print(f"{section.name} ...", file=sys.stderr, flush=True)
        watch_section(section, args, limit, results)
        for line in verdicts_of(section.name, results[section.name]):
            print(f"  {line}", file=sys.stderr)


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [section.name for section in SECTIONS]
    parser.add_argument(
        "--model",
        default="random",
        help="random (weights, as Qwen3-0.6B), demo, a folder, a hub id",
    )
    parser.add_argument("--quick", action="store_true", help="a small model, few figures")
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="SECTION", help=", ".join(names)
    )
    parser.add_argument(
        "--out", type=Path, default=Path("on_a_mac"), help="both files, without their endings"
    )
    parser.add_argument("--section", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> None:
    args = setup_arg_parser().parse_args(argv)
    by_name = {section.name: section for section in SECTIONS}
    if args.section is not None:
        run_section(by_name[args.section], args)
        return
    results: dict[str, Result] = {}
    try:
        measure_all([by_name[name] for name in args.only or by_name], args, results)
    except KeyboardInterrupt:
        print("interrupted; this is what there is", file=sys.stderr)
    card = make_card(results)
    json_path, card_path = (Path(f"{args.out}.{ending}") for ending in ("json", "md"))
    json_path.write_text(json.dumps({"benchmark": "on_a_mac", "sections": results}) + "\n")
    card_path.write_text(card)
    print(card)
    print(f"Every figure: {json_path}. Please paste {card_path} into an issue.", file=sys.stderr)


if __name__ == "__main__":
    main()
