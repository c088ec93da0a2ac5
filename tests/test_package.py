"""The package as it is imported and shipped."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Set
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import mlx_paged
from mlx_paged.errors import REMOVED
from mlx_paged.ops.metal_sources import METAL_FOLDER, read_source

REPOSITORY = Path(__file__).parent.parent


def test_every_name_of_the_package_can_be_imported():
    for name in mlx_paged.__all__:
        assert getattr(mlx_paged, name) is not None
    assert set(mlx_paged.__all__) <= set(dir(mlx_paged))
    with pytest.raises(AttributeError, match="module 'mlx_paged' has no attribute 'paged'"):
        mlx_paged.paged  # noqa: B018


@pytest.mark.parametrize("name", [name for name in REMOVED if "." not in name])
def test_a_name_that_was_removed_says_what_to_write_instead(name: str):
    text = f"mlx_paged.{name} was removed: {REMOVED[name]}"
    with pytest.raises(ImportError, match=re.escape(text)):
        getattr(mlx_paged, name)
    with pytest.raises(ImportError, match=re.escape(text)):
        exec(f"from mlx_paged import {name}")


def test_a_method_that_was_removed_says_what_to_write_instead():
    methods = [name.removeprefix("Engine.") for name in REMOVED if "." in name]
    assert methods == ["hold_prompt_cache", "pin_prompt_cache"]
    engine = mlx_paged.Engine.__new__(mlx_paged.Engine)
    for name in methods:
        text = f"Engine.{name} was removed: {REMOVED[f'Engine.{name}']}"
        with pytest.raises(AttributeError, match=re.escape(text)):
            getattr(engine, name)
    with pytest.raises(AttributeError, match="'Engine' object has no attribute 'cash'"):
        engine.cash  # noqa: B018


def test_importing_the_package_imports_no_mlx():
    probe = "import sys, mlx_paged; sys.exit('mlx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe]).returncode == 0


def test_the_metal_sources_are_found():
    assert "head comment is the contract" in read_source("README.md")
    with pytest.raises(FileNotFoundError, match=r"metal/nothing\.metal"):
        read_source("nothing.metal")
    assert METAL_FOLDER.name == "metal"


def test_imports_go_one_way():
    """The order of DESIGN.md: a module imports only modules that come after it."""
    order = [
        "__main__",
        "chat",
        "router",
        "server",
        "cli.chat",
        "cli.cache",
        "cli.fit",
        "cli",
        "batch_generation",
        "generation",
        "llm",
        "loading",
        "engine",
        "snapshots",
        "distributed",
        "models",
        "cache",
        "ops",
        "answers",
        "request",
        "block_store",
        "options",
        "core",
        "errors",
    ]
    package = REPOSITORY / "mlx_paged"
    wrong = []
    for path in package.rglob("*.py"):
        first, *others = path.relative_to(package).parts
        part = first.removesuffix(".py")
        if part == "__init__":
            continue
        if part == "cli" and len(others) > 1:
            part = f"cli.{others[0]}"
        # An import for the type checker alone is none at run time.
        source = re.sub(r"^if TYPE_CHECKING:\n(?:    .*\n|\n)+", "", path.read_text(), flags=re.M)
        names = r"^\s*(?:from|import) mlx_paged\.(cli\.(?:chat|cache|fit)\b|\w+)"
        for imported in re.findall(names, source, re.M):
            if imported != part and order.index(imported) <= order.index(part):
                wrong.append(f"{path.relative_to(package)} imports {imported}")
    assert wrong == []


def test_each_class_has_a_name_of_its_own():
    names = [
        node.name
        for path in (REPOSITORY / "mlx_paged").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_no_modules_import_each_other_in_a_circle():
    """Imports for the type checker alone included, but for those of the package itself, which name
    what it imports on first use.
    """
    package = REPOSITORY / "mlx_paged"
    paths = {_module_name(path): path for path in package.rglob("*.py")}
    imports = {name: _imports_of(path, paths.keys() - {name}) for name, path in paths.items()}
    assert {"mlx_paged.request", "mlx_paged.core"} <= imports["mlx_paged.engine.request"]
    imports["mlx_paged"] = set()
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def _module_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports_of(path: Path, modules: Set[str]) -> set[str]:
    """Which of the modules a module imports outside of functions."""
    imported: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= names & modules or {str(node.module)}
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += ast.iter_child_nodes(node)
    return imported & modules


def test_the_readme_has_the_two_commands_in_one_line_each():
    readme = (REPOSITORY / "README.md").read_text()
    commands = re.findall(r"<!-- (chat|test) command -->\n```\w*\n(.+)\n```", readme)
    assert [name for name, _ in commands] == ["chat", "test"]
    assert all(command.startswith("python3 -m venv .venv && ") for _, command in commands)


@pytest.mark.parametrize("page", ["internals/kernels.md", "internals/engine.md"])
def test_functions_that_a_page_about_the_code_names_exist(page: str):
    text = (REPOSITORY / "docs" / page).read_text()
    quoted = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    names = {name for each in quoted for name in re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", each)}
    files = [
        path
        for folder in ("mlx_paged", "metal", "tools", "benchmarks", "tests")
        for path in (REPOSITORY / folder).rglob("*")
        if path.suffix in (".py", ".metal", ".h", ".md") and path != Path(__file__)
    ]
    known = {name for path in files for name in re.findall(r"\w+", path.read_text())}
    assert names - known - {path.stem for path in files} == set()
