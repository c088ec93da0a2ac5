"""Charts of the figures under `benchmarks/results/`, in `docs/images/`, and the tables of the docs.

    python -m benchmarks charts                 # draw what was measured, and write the tables
    python -m benchmarks charts --measure       # measure first: some 40 minutes on a quiet machine
    python -m benchmarks charts restart-demo    # one chart, and the tables
    python -m benchmarks charts --results RUN --docs RUN/docs    # others' figures

Needs matplotlib: ``pip install 'mlx-paged[charts]'``. ``--measure`` runs each benchmark as its page
says, one after another, with OpenBLAS for those of random weights where Linux has it, or with what
LD_PRELOAD names. A chart is of one setting, which it says below; the JSON has all of it. Pages mark
the tables and sentences that are written from the same files (`lib/doc_figures.py`).

    few-rows      few_rows: estimates of what a step costs over its rows
    approaches    approaches: longest context, tokens per second, times to first token, K/V
    serving       throughput_curves: speed and K/V over requests at once, first tokens over
                  shared prefix
    restart-demo, restart-qwen3-0.6b
                  restart: times to first token over length, computed and read, and ratios
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.lib.card import COMMAND
from benchmarks.lib.chart_panels import draw_approaches, draw_few_rows, draw_restart, draw_serving
from benchmarks.lib.chart_style import save
from benchmarks.lib.doc_figures import write_figures

ROOT = Path(__file__).parents[1]
OPENBLAS = Path("/usr/lib/x86_64-linux-gnu/libopenblas.so.0")


@dataclass(frozen=True)
class Chart:
    """A chart of one result, and the commands that measure it one after another."""

    draw: Callable[[dict[str, Any]], Figure]
    file: str
    commands: tuple[tuple[str, ...], ...]
    uses_openblas: bool = False


# Each takes less than 8 minutes. A long prompt is measured twice, in folders of its own.
_QWEN3 = ("restart", "--model", "qwen3-0.6b", "--dtype", "float32", "--turns", "1", "--lengths")
CHARTS = {
    "few-rows": Chart(draw_few_rows, "few-rows-estimates.json", (("few_rows",),)),
    "approaches": Chart(draw_approaches, "approaches-demo-cpu.json", (("approaches",),)),
    "serving": Chart(draw_serving, "throughput-curves-cpu.json", (("throughput_curves",),), True),
    "restart-demo": Chart(draw_restart, "restart-demo-cpu.json", (("restart",),)),
    "restart-qwen3-0.6b": Chart(
        draw_restart,
        "restart-qwen3-0.6b-float32-cpu.json",
        (
            (*_QWEN3, "500", "1000", "2000"),
            (*_QWEN3, "500", "1000", "2000", "--add"),
            (*_QWEN3, "4000", "--add"),
            (*_QWEN3, "4000", "--add"),
        ),
        True,
    ),
}


def measure(chart: Chart, results: Path) -> None:
    environment = dict(os.environ)
    if chart.uses_openblas and OPENBLAS.exists():
        environment["LD_PRELOAD"] = str(OPENBLAS)
    for arguments in chart.commands:
        command = [*COMMAND, *arguments, "--out", str(results / chart.file)]
        print(" ".join(command), file=sys.stderr, flush=True)
        subprocess.run(command, check=True, env=environment)


def read(chart: Chart, results: Path) -> tuple[dict[str, Any], str]:
    """The result, and the digest of its file."""
    path = results / chart.file
    if not path.is_file():
        raise SystemExit(f"charts.py: there is no {path}; --measure makes it")
    content = path.read_bytes()
    return json.loads(content), f"{chart.file} {hashlib.sha256(content).hexdigest()}"


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("charts", nargs="*", metavar="CHART", help=f"{', '.join(CHARTS)}; all")
    parser.add_argument("--measure", action="store_true", help="run the benchmarks first")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="with a folder images")
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    for name in args.charts:
        if name not in CHARTS:
            raise SystemExit(
                f"charts.py: there is no chart {name!r}; there are {', '.join(CHARTS)}"
            )
    chosen = [(name, CHARTS[name]) for name in args.charts or CHARTS]
    if args.measure:
        for _, chart in chosen:
            measure(chart, args.results)
    for name, chart in chosen:
        result, drawn_from = read(chart, args.results)
        print(save(chart.draw(result), args.docs / "images", name, drawn_from))
    for path in write_figures(args.docs, args.results):
        print(path)


if __name__ == "__main__":
    main()
