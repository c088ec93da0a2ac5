"""The lower bounds that pyproject.toml states, as pins for pip: ``numpy>=1.26`` becomes
``numpy==1.26``.

python .ci/lower_bounds.py           the pins of the dependencies and of these extras, one a line
python .ci/lower_bounds.py --python  the lowest Python, as 3.11
python .ci/lower_bounds.py --requirement ruff
                                     what the dev or the test extra asks for, as ruff>=0.8
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def lower_bound(specifiers: SpecifierSet, what: str) -> str:
    """The version behind ``>=``.

    Raises:
        ValueError: there is none, or there are several.
    """
    bounds = [specifier.version for specifier in specifiers if specifier.operator == ">="]
    if len(bounds) != 1:
        raise ValueError(
            f"[lower bounds] {what} must state one lower bound (>=), got {str(specifiers)!r}"
        )
    return bounds[0]


def pins(project: dict[str, Any]) -> list[str]:
    """What runs the tests on this machine, each at its lower bound."""
    extra = project["optional-dependencies"]
    texts = [*project["dependencies"], *extra["server"], *extra["charts"], *extra["test"]]
    found = []
    for requirement in map(Requirement, texts):
        if requirement.name == project["name"]:
            continue  # The test extra asks for the other two, whose own bounds are above.
        if requirement.marker is None or requirement.marker.evaluate():
            extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
            bound = lower_bound(requirement.specifier, requirement.name)
            found.append(f"{requirement.name}{extras}=={bound}")
    return found


def requirement(project: dict[str, Any], name: str) -> str:
    """What the dev or the test extra asks for under this name.

    Raises:
        ValueError: neither does.
    """
    extras = project["optional-dependencies"]
    for text in [*extras["dev"], *extras["test"]]:
        if Requirement(text).name == name:
            return str(text)
    raise ValueError(f"[lower bounds] neither the dev nor the test extra asks for {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="store_true")
    parser.add_argument("--requirement", metavar="NAME")
    arguments = parser.parse_args()
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    if arguments.python:
        print(lower_bound(SpecifierSet(project["requires-python"]), "requires-python"))
    elif arguments.requirement:
        print(requirement(project, arguments.requirement))
    else:
        print(*pins(project), sep="\n")


if __name__ == "__main__":
    main()
