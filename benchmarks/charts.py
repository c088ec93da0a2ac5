"""Charts of the figures under `benchmarks/results/`, as PNG and SVG in `docs/images/`.

    python -m benchmarks charts                 # draw what was measured
    python -m benchmarks charts --measure       # measure first: some 30 minutes on a quiet machine
    python -m benchmarks charts restart         # one of them
    python -m benchmarks charts --results RUN --images RUN/images    # others' figures

Needs matplotlib: ``pip install 'mlx-paged[charts]'``. ``--measure`` runs each benchmark as its page
says, one after another, with OpenBLAS for those of random weights where Linux has it. A chart says
its setting below; the JSON has all of it.

    approaches    approaches: longest context, tokens per second, times to first token, K/V
    serving       throughput_curves: speed and K/V over requests at once, first tokens over
                  shared prefix
    restart       restart: times to first token over length, computed and from disk, and ratios
"""

from __future__ import annotations

import argparse
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
from benchmarks.lib.chart_panels import draw_approaches, draw_restart, draw_serving
from benchmarks.lib.chart_style import save

ROOT = Path(__file__).parents[1]
OPENBLAS = Path("/usr/lib/x86_64-linux-gnu/libopenblas.so.0")


@dataclass(frozen=True)
class Source:
    """A result, and the command that measures it."""

    file: str
    arguments: tuple[str, ...]
    uses_openblas: bool = False


@dataclass(frozen=True)
class Chart:
    draw: Callable[[list[dict[str, Any]]], Figure]
    sources: tuple[Source, ...]


CHARTS = {
    "approaches": Chart(draw_approaches, (Source("approaches-demo-cpu.json", ("approaches",)),)),
    "serving": Chart(
        draw_serving, (Source("throughput-curves-cpu.json", ("throughput_curves",), True),)
    ),
    "restart": Chart(
        draw_restart,
        (
            Source("restart-demo-cpu.json", ("restart",)),
            Source(
                "restart-qwen3-0.6b-float32-cpu.json",
                ("restart", "--model", "qwen3-0.6b", "--dtype", "float32", "--turns", "1"),
                True,
            ),
        ),
    ),
}


def measure(source: Source, results: Path) -> None:
    environment = dict(os.environ)
    if source.uses_openblas and OPENBLAS.exists():
        environment["LD_PRELOAD"] = str(OPENBLAS)
    out = results / source.file
    command = [*COMMAND, *source.arguments, "--out", str(out)]
    print(" ".join(command), file=sys.stderr, flush=True)
    subprocess.run(command, check=True, env=environment)


def read(source: Source, results: Path) -> dict[str, Any]:
    path = results / source.file
    if not path.is_file():
        raise SystemExit(f"charts.py: there is no {path}; --measure makes it")
    line: dict[str, Any] = json.loads(path.read_text())
    return line


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("charts", nargs="*", metavar="CHART", help=f"{', '.join(CHARTS)}; all")
    parser.add_argument("--measure", action="store_true", help="run the benchmarks first")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
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
            for source in chart.sources:
                measure(source, args.results)
    for name, chart in chosen:
        figure = chart.draw([read(source, args.results) for source in chart.sources])
        for path in save(figure, args.images, name):
            print(path)


if __name__ == "__main__":
    main()
