"""core/ is bookkeeping: standard library and its own modules, no MLX, no numpy, nothing else of
ours.
"""

import ast
import sys
from pathlib import Path

import pytest

import mlx_paged.core

MODULES = sorted(Path(mlx_paged.core.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_module_of_core_imports_only_the_standard_library_and_its_neighbours(path):
    imported = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported.append("." * node.level + (node.module or ""))
    foreign = [
        name
        for name in imported
        if not name.startswith("mlx_paged.core.")
        and name.split(".")[0] not in sys.stdlib_module_names
    ]
    assert foreign == []


def test_there_are_modules_to_look_at():
    assert "block_pool.py" in [path.name for path in MODULES]
