"""The tables of `docs/options.md`, from what is declared: ``python -m paged_testing.option_tables``
writes them between their markers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ForwardRef

from mlx_paged.declarations import Argument
from mlx_paged.engine_options import ENGINE_OPTIONS, EngineOptions
from mlx_paged.sampling_declarations import SAMPLING_PARAMS, DeclaredSamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
HEADER = (
    "| name | type | default | | flag | also called |",
    "|---|---|---|---|---|---|",
)


def tables() -> dict[str, str]:
    """The tables by the names of their markers."""
    defaults = {each.name: each.default for each in fields(DeclaredSamplingParams)}
    defaults["logit_bias"] = {}
    params = _rows(SAMPLING_PARAMS, DeclaredSamplingParams.__annotations__, defaults)
    defaults = {name: each.default for name, each in ENGINE_OPTIONS.items()}
    options = _rows(ENGINE_OPTIONS, EngineOptions.__annotations__, defaults)
    return {
        "sampling parameters": "\n".join((*HEADER, *params)),
        "engine options": "\n".join((*HEADER, *options)),
    }


def with_tables(page: str) -> str:
    """The text of the page with the tables between its markers as they must be."""
    for name, table in tables().items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        assert page.count(begin) == page.count(end) == 1, f"the page needs markers for {name}"
        before, rest = page.split(begin)
        page = before + begin + table + end + rest.split(end)[1]
    return page


def _rows(
    arguments: Mapping[str, Argument], annotations: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Iterable[str]:
    for name, argument in arguments.items():
        default = defaults[name]
        # An option's default may be in words.
        is_words = isinstance(default, str) and " " in default
        cells = [
            f"`{name}`",
            f"`{_type_in_words(annotations[name].__origin__)}`",
            default if is_words or default == "none" else f"`{default}`",
            re.sub("``", "`", argument.help),
            "" if argument.flag is None else _flag_in_words(name, argument),
            ", ".join(f"`{other}`" for other in argument.elsewhere.split()),
        ]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _flag_in_words(name: str, argument: Argument) -> str:
    assert argument.flag is not None
    programs = argument.flag.programs
    where = "" if len(programs) == 2 else f" ({', '.join(programs)})"
    return f"`{argument.flag_name(name)}`{where}"


def _type_in_words(annotation: Any) -> str:
    if isinstance(annotation, ForwardRef):
        return annotation.__forward_arg__
    if isinstance(annotation, type) and not getattr(annotation, "__args__", ()):
        return annotation.__name__
    text = re.sub(r"ForwardRef\('([^']*)'\)", r"\1", str(annotation))
    return re.sub(r"\b(?:\w+\.)+(?=\w)|'", "", text)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
