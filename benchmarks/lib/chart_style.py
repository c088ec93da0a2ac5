"""How charts look, and how they are saved: readable on light and on dark pages and in print, the
same bytes each time.

A chart brings its own background, as one without could be read on one kind of page only. Colours
are those of Okabe and Ito, which people who see colours differently can tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import matplotlib
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

BACKGROUND = "#ffffff"
TEXT = "#1f2328"
FAINT = "#6e7781"
GRID = "#d8dee4"
OURS = "#0072b2"
THEIRS = "#b34700"  # a darker vermillion, to be read as text, too
OTHER = "#007a5a"  # a darker green
NEUTRAL = "#6e7781"

INCHES_WIDE = 10.0
PIXELS_PER_INCH = 160

_SETTINGS: Any = {  # Matplotlib spells its names out as literals, which differ by version.
    "font.family": "DejaVu Sans",  # comes with matplotlib, so text is as wide on every machine
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": TEXT,
    "axes.edgecolor": FAINT,
    "axes.facecolor": BACKGROUND,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": BACKGROUND,
    "savefig.facecolor": BACKGROUND,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 2.0,
    "lines.markersize": 5.5,
    "text.color": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "savefig.dpi": PIXELS_PER_INCH,
}


def make_panels(num_panels: int, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side; no window is opened."""
    for name, value in _SETTINGS.items():
        matplotlib.rcParams[cast(Any, name)] = value
    figure = Figure(figsize=(INCHES_WIDE, height), layout="constrained")
    made = figure.subplots(1, num_panels, squeeze=False, **options)
    return figure, list(made[0])


def write_setting(figure: Figure, text: str) -> None:
    """What the figures hold for, below the panels."""
    figure.supxlabel(text, fontsize=9, x=0.01, ha="left")


def powers_of_two(axes: Axes, values: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(values), [f"{value:,}" for value in values])
    axes.xaxis.set_minor_locator(ticker.NullLocator())


def plain_numbers(axis: Any) -> None:
    """1,000 instead of 10 to the 3rd."""
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def save(figure: Figure, folder: Path, name: str, drawn_from: str) -> Path:
    """``name.png``, without dates and versions in it.

    Args:
        drawn_from: is kept in the file; :func:`drawn_from` reads it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.savefig(path, metadata={"Software": None, "Description": drawn_from})
    return path


def drawn_from(path: Path) -> str:
    """What a chart that was saved says that it was drawn from."""
    with Image.open(path) as image:
        return str(image.info.get("Description", ""))
