"""A benchmark of this tree beside the same benchmark of a commit, in turns on one machine.

    python -m benchmarks against COMMIT overhead --steps 100 --rounds 5

The commit is exported into a temporary folder. In each round ``overhead.py`` of both trees
runs once, wherever below ``benchmarks`` it is, in a process of its own and with the packages of
this environment; arguments that this command does not know go to the benchmark. This tree is the
working tree, with what is not committed.

A ratio is this tree over the commit: the median of the ratios within a round, and the ratio of the
smallest figures of all rounds, which other work on the machine disturbs less. Figures that only one
of the trees has are named and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.lib.card import machine_card, print_card, print_json, print_table

ROOT = Path(__file__).resolve().parents[1]
INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended

PROBE = "import mlx_paged; print(mlx_paged.__file__)"


class AgainstError(Exception):
    """Why the two trees can't be compared."""


def git(*arguments: str) -> str:
    """What git prints about this tree. Raises ``AgainstError`` with its message where it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise AgainstError(done.stderr.strip() or f"git {arguments[0]} failed")
    return done.stdout.strip()


def find_commit(name: str) -> str:
    try:
        return git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    except AgainstError:
        raise AgainstError(f"{name!r} is no commit of {ROOT}") from None


def export(commit: str, folder: Path) -> Path:
    """The files of a commit, in a new folder ``tree`` of ``folder``."""
    archive, tree = folder / "tree.zip", folder / "tree"
    git("archive", "--format=zip", f"--output={archive}", commit)
    shutil.unpack_archive(archive, tree)
    archive.unlink()
    return tree


def run_in(tree: Path, script: Path, arguments: list[str]) -> str:
    """What a script prints whose imports find the packages and the tools of ``tree``."""
    # The script's own folder: before benchmarks were a package, they imported one another from it.
    paths = [str(tree), str(tree / "tools"), str(script.parent)]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        # Processes that the script starts do not import what is in the current folder, either.
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"},
    )
    if done.returncode:
        raise AgainstError(
            f"{script} failed with status {done.returncode}:\n{done.stderr or done.stdout}"
        )
    return done.stdout


def check_import(tree: Path, folder: Path) -> None:
    """Raises ``AgainstError`` unless the scripts of a tree import its own package."""
    probe = folder / "probe.py"
    probe.write_text(PROBE)
    imported = Path(run_in(tree, probe, []).strip()).resolve()
    if not imported.is_relative_to(tree.resolve()):
        raise AgainstError(f"benchmarks of {tree} would import {imported}")


def find_script(tree: Path, name: str) -> Path | None:
    """The benchmark of this name, in whatever folder of benchmarks the tree has it."""
    return next((tree / "benchmarks").rglob(f"{name}.py"), None)


def run_benchmark(tree: Path, script: Path, arguments: list[str]) -> dict[str, float]:
    """The figures of a benchmark of ``tree``, by name."""
    lines = run_in(tree, script, arguments).splitlines()
    try:
        return dict(figures_of(json.loads(lines[-1])["results"]))
    except (IndexError, KeyError, TypeError, ValueError):
        raise AgainstError(f"the last line that {script} prints is not its JSON line") from None


def figures_of(results: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Each number in the results of a benchmark, named by the keys and indexes that lead to it."""
    if isinstance(results, dict):
        entries = list(results.items())
    elif isinstance(results, list):
        entries = list(enumerate(results))
    else:
        if isinstance(results, int | float) and not isinstance(results, bool):
            yield name, results
        return
    for key, value in entries:
        yield from figures_of(value, f"{name}.{key}" if name else str(key))


def ratio(here: float, there: float) -> float | None:
    return here / there if there else None


def compared(here: list[float], there: list[float]) -> dict[str, float | None]:
    """One figure of this tree and of the commit, by round."""
    ratios = [each for each in map(ratio, here, there) if each is not None]
    return {
        "commit": statistics.median(there),
        "this": statistics.median(here),
        "ratio": statistics.median(ratios) if ratios else None,
        "ratio_of_smallest": ratio(min(here), min(there)),
    }


def compare(args: argparse.Namespace, arguments: list[str]) -> None:
    commit = find_commit(args.commit)
    setting = machine_card() | {
        "benchmark": " ".join([args.benchmark, *arguments]),
        "commit": commit,
        "this": git("describe", "--always", "--abbrev=12", "--dirty"),
        "rounds": args.rounds,
    }
    with tempfile.TemporaryDirectory(prefix="mlx-paged-against-") as name:
        folder = Path(name)
        sides = {"commit": export(commit, folder), "this": ROOT}
        scripts = {}
        for side, tree in sides.items():
            script = find_script(tree, args.benchmark)
            if script is None:
                where = "this tree" if side == "this" else f"commit {args.commit}"
                raise AgainstError(f"{where} has no benchmark {args.benchmark}")
            scripts[side] = script
            check_import(tree, folder)
        print_card("This tree beside a commit", setting)
        rounds: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for number in range(args.rounds):
            # Each side is the first one in every other round.
            for side in sorted(sides, reverse=bool(number % 2)):
                rounds[side].append(run_benchmark(sides[side], scripts[side], arguments))
    everywhere = [*rounds["commit"], *rounds["this"]]
    names = [name for name in rounds["this"][0] if all(name in figures for figures in everywhere)]
    results = {
        name: compared(
            [figures[name] for figures in rounds["this"]],
            [figures[name] for figures in rounds["commit"]],
        )
        for name in names
    }
    rows = [[name, *map(shown, row.values())] for name, row in results.items()]
    print_table(["figure", "commit", "this", "ratio", "of the smallest"], rows)
    left_out = sorted({name for figures in everywhere for name in figures} - set(names))
    if left_out:
        print(f"Not in every run, and left out: {', '.join(left_out)}\n")
    print_json("against", setting, results, args.out)


def shown(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.4g}"


def whole_rounds(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("commit", help="the commit, branch or tag to compare with")
    parser.add_argument("benchmark", help="its name; its arguments follow")
    parser.add_argument(
        "--rounds", type=whole_rounds, default=5, help="runs of each side (default: 5)"
    )
    parser.add_argument("--out", type=Path, help="write the JSON there, too")
    args, arguments = parser.parse_known_args()
    try:
        compare(args, arguments)
    except AgainstError as error:
        raise SystemExit(f"[against] {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    main()
