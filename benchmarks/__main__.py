"""Run one benchmark, or list all of them with what each measures.

python -m benchmarks                     # the list
python -m benchmarks decode --help       # one of them; its arguments follow its name
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
FOLDERS = ("serving", "kernels", "cache", "mac", ".")


class Program(NamedTuple):
    """A module with a ``main``.

    Attributes:
        module: its name, for an import.
        folder: of ``FOLDERS``.
        says: the first paragraph of its docstring.
    """

    module: str
    folder: str
    says: str


def read_programs() -> dict[str, Program]:
    """Every benchmark by its name, folder by folder. None of them is imported."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((HERE / folder).glob("[!_]*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            if "main" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
                module = ".".join([HERE.name, *path.relative_to(HERE).with_suffix("").parts])
                says = (ast.get_docstring(tree) or "").split("\n\n")[0]
                found[path.stem] = Program(module, folder, " ".join(says.split()))
    return found


def kept_results() -> dict[str, list[str]]:
    """The files of ``results/``, by the benchmark that wrote them."""
    kept = defaultdict(list)
    for path in sorted((HERE / "results").glob("*.json")):
        kept[json.loads(path.read_text(encoding="utf-8"))["benchmark"]].append(path.stem)
    return kept


def print_list(programs: dict[str, Program]) -> None:
    # Processes that a benchmark starts import this module, and need no tables.
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("python -m benchmarks", no_wrap=True)
    table.add_column("what it measures", ratio=1)
    table.add_column("kept in results/", overflow="fold")
    kept, folder = kept_results(), None
    for name, program in programs.items():
        if program.folder != folder:
            folder = program.folder
            table.add_row(f"[bold]{folder}/")
        table.add_row(f"  {name}", program.says, "\n".join(kept[name]))
    Console(highlight=False).print(table)


def main() -> int:
    programs = read_programs()
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print_list(programs)
        return 0
    name, *arguments = sys.argv[1:]
    if name not in programs:
        print(f"no benchmark is called {name!r}; python -m benchmarks lists them", file=sys.stderr)
        return 2
    sys.argv = [f"python -m benchmarks {name}", *arguments]
    return int(importlib.import_module(programs[name].module).main() or 0)


if __name__ == "__main__":
    sys.exit(main())
