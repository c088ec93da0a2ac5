"""The tables of ``docs/guide/models.md``, which the tests hold to what they find.

PYTHONPATH=tests:tools/metal-emulator python -m helpers.model_zoo.page

runs every architecture and writes them again.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import mlx_lm
from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING

from helpers.model_zoo.configs import ARCHITECTURES
from helpers.model_zoo.runs import Row, run

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "models.md"
MARK = "<!-- {}: written by tests/helpers/model_zoo/page.py -->"


def rows_on_page() -> dict[str, Row]:
    """By architecture, in the order of the page."""
    cells = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+?) \|$", _part("table"), re.MULTILINE)
    return {name: Row(name, way, traits) for name, way, traits in cells}


def version_on_page() -> str:
    """Of mlx-lm, which the page is about."""
    found = re.search(r"mlx-lm (\S+) has", _part("counts"))
    assert found, "the page names no version"
    return found[1]


def write_page(rows: Sequence[Row]) -> None:
    parts = {"counts": _counts(rows), "table": _table(rows), "names": _names()}
    text = PAGE.read_text()
    for name, part in parts.items():
        mark = MARK.format(name)
        before, _, after = text.split(mark)
        text = f"{before}{mark}\n{part}\n{mark}{after}"
    PAGE.write_text(text)


def _part(name: str) -> str:
    """What lies between the marks."""
    mark = MARK.format(name)
    _, part, _ = PAGE.read_text().split(mark)
    return part


def _counts(rows: Sequence[Row]) -> str:
    counts = Counter(row.way.partition(":")[0] for row in rows)
    return (
        f"mlx-lm {mlx_lm.__version__} has {len(rows)} architectures. Here {counts['packed']} of "
        f"them run packed,\n{counts['per sequence']} per sequence and "
        f"{counts['packed, with state']} packed with state; {counts['refused']} are refused."
    )


def _table(rows: Sequence[Row]) -> str:
    lines = ["| architecture | runs | has |", "|---|---|---|", *map(str, rows)]
    return "\n".join(lines)


def _names() -> str:
    """The model types that are read by the module of another."""
    types = defaultdict(list)
    for model_type, module in MODEL_REMAPPING.items():
        types[module].append(f"`{model_type}`")
    for (model_type, kind), module in MODEL_ARCHITECTURE_REMAPPING.items():
        types[module].append(f"`{model_type}` ({kind})")
    lines = [f"| {', '.join(names)} | `{module}` |" for module, names in types.items()]
    return "\n".join(["| model type | architecture |", "|---|---|", *sorted(lines)])


if __name__ == "__main__":
    write_page([run(architecture) for architecture in ARCHITECTURES])
