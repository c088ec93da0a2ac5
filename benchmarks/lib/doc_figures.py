"""What docs say in figures, written from the JSON lines of benchmarks: tables and sentences.

A page marks them, and ``python -m benchmarks charts`` writes what is between the marks:

    <!-- figures restart_table of restart-demo-cpu.json -->
    <!-- end of figures -->
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cache.approach_report import table_of as approaches_of
from benchmarks.cache.restart import COMPUTED, FROM_CACHE, FROM_DEVICE

_MARKED = re.compile(
    r"(<!-- figures (\w+) of ([\w.-]+) -->\n)(.*?)(<!-- end of figures -->)", re.DOTALL
)


def restart_table(result: dict[str, Any]) -> str:
    setting = result["setting"]
    header = ["tokens", "on disk", "runs", COMPUTED, "from the page cache", "computed / page cache"]
    header += ["from the device", "computed / device"]
    table = markdown_table(
        header,
        [
            [
                f"{row['length']:,}",
                f"{row['nbytes_on_disk'] / 1e6:,.1f} MB",
                str(len(row["runs"][COMPUTED])),
                shown_seconds(row["seconds"][COMPUTED]),
                *(
                    text
                    for way in (FROM_CACHE, FROM_DEVICE)
                    for text in (shown_seconds(row["seconds"][way]), _ratio(row, way))
                ),
            ]
            for row in result["results"]
        ],
    )
    return f"{table}\n\n{setting['processor']}, {setting['cores']} cores; BLAS: {setting['blas']}."


def restart_sentence(result: dict[str, Any]) -> str:
    rows = result["results"]
    said = [_restart_of(row) for row in rows if row["length"] in (1000, rows[-1]["length"])]
    blas = result["setting"]["blas"]
    return textwrap.fill(
        f"{'; '.join(said)} (medians, on a CPU; BLAS: {blas}).", 100, break_on_hyphens=False
    )


def _restart_of(row: dict[str, Any]) -> str:
    seconds = row["seconds"]
    return (
        f"{row['length']:,} tokens: {shown_seconds(seconds[COMPUTED])} to compute, "
        f"{shown_seconds(seconds[FROM_CACHE])} from the page cache, "
        f"{shown_seconds(seconds[FROM_DEVICE])} from the device"
    )


def _ratio(row: dict[str, Any], way: str) -> str:
    """The median of the ratios, and where they lie if there are several."""
    runs = [
        [each["seconds_to_first_token"] for each in row["runs"][key]] for key in (COMPUTED, way)
    ]
    ratios = sorted(computed / read for computed, read in zip(*runs, strict=True))
    middle = f"{row['computed_over'][way]:.0f}"
    return middle if len(ratios) == 1 else f"{middle} ({ratios[0]:.0f} to {ratios[-1]:.0f})"


def approaches_table(result: dict[str, Any]) -> str:
    return markdown_table(*approaches_of(result["results"]["approaches"]))


FIGURES: dict[str, Callable[[dict[str, Any]], str]] = {
    each.__name__: each for each in (restart_table, restart_sentence, approaches_table)
}


def with_figures(page: str, results: Path) -> str:
    """The text of a page with what its marks ask for."""

    def between(marked: re.Match[str]) -> str:
        begin, kind, name, _, end = marked.groups()
        return f"{begin}{FIGURES[kind](json.loads((results / name).read_text()))}\n{end}"

    return _MARKED.sub(between, page)


def write_figures(docs: Path, results: Path) -> list[Path]:
    """Write the figures into the pages of a folder; returns those that have changed."""
    changed = []
    for path in sorted(docs.rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        if (written := with_figures(page, results)) != page:
            path.write_text(written, encoding="utf-8")
            changed.append(path)
    return changed


def shown_seconds(seconds: float) -> str:
    return f"{seconds:,.3g} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))
