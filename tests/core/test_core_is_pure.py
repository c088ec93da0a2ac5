"""core/ is bookkeeping: standard library and its own modules, no MLX, no numpy, nothing else of
ours.
"""

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import mlx_paged.core

MODULES = sorted(Path(mlx_paged.core.__file__).parent.glob("*.py"))


def imports_of(path):
    """Every module that is imported anywhere in the file, for type checkers alone included."""
    imported = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported.append("." * node.level + (node.module or ""))
    return imported


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_module_of_core_imports_only_the_standard_library_and_its_neighbours(path):
    foreign = [
        name
        for name in imports_of(path)
        if not name.startswith("mlx_paged.core.")
        and name.split(".")[0] not in sys.stdlib_module_names
    ]
    assert foreign == []


def test_no_module_of_core_imports_one_that_imports_it():
    imports = {f"mlx_paged.core.{path.stem}": imports_of(path) for path in MODULES}
    order = list(TopologicalSorter(imports).static_order())  # raises CycleError for a circle
    assert order.index("mlx_paged.core.block_pool") < order.index("mlx_paged.core.block_table")
