"""What every benchmark has around its figures: arguments, the setting on top, a table, one JSON
line at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm

import mlx_paged

COMMAND = [sys.executable, "-m", "benchmarks"]  # then a benchmark's name and its arguments


def make_arg_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with ``--out``, whose help begins with the docstring of the benchmark."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="also write the JSON line to this file")
    return parser


def machine_card() -> dict[str, Any]:
    """The machine and the versions that the figures hold for."""
    info = mx.device_info()
    return {
        "device": str(mx.default_device()),
        "processor": info.get("device_name", platform.processor()),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "blas": "OpenBLAS (preloaded)" if _has_openblas() else "as in the MLX wheel",
        "python": platform.python_version(),
        "mlx": mx.__version__,  # type: ignore[attr-defined]  # not in MLX's stub
        "mlx_lm": mlx_lm.__version__,
        "mlx_paged": mlx_paged.__version__,
    }


def _has_openblas() -> bool:
    """Whether it is loaded before MLX's own: the loader ignores a file that is not there."""
    names = [Path(name) for name in os.environ.get("LD_PRELOAD", "").replace(":", " ").split()]
    maps = Path("/proc/self/maps")
    loaded = maps.read_text() if maps.exists() else ""
    return any("openblas" in name.name and str(name.resolve()) in loaded for name in names)


def print_card(title: str, setting: dict[str, Any]) -> None:
    print(f"# {title}")
    for name, value in setting.items():
        print(f"{name:>16}: {value}")
    print()


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for i, row in enumerate(cells):
        print(
            "| "
            + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            + " |"
        )
        if i == 0:
            print("|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    print()


def print_json(benchmark: str, setting: dict[str, Any], results: Any, out: Path | None) -> None:
    """One line, and the same line in a file when ``out`` is given."""
    line = json.dumps({"benchmark": benchmark, "setting": setting, "results": results})
    print(line)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(line + "\n")
