"""The tables of options, sampling parameters, commands, flags, endpoints and metrics in
`docs/guide/`, from what is declared: ``python -m paged_testing.option_tables`` writes them between
their markers.

    <!-- engine options -->                 all, with their types and other projects' names
    <!-- engine options: window, kv -->     these, in short
    <!-- engine options: kv, ... -->        these, and the names of the others
    <!-- end of engine options -->

Whole tables of the flags of a program leave out those whose option has the same help and default.
The other tables are ``sampling parameters``, ``chat commands``, ``chat flags``, ``server flags``,
``cache verbs``, ``cache flags``, ``fit flags``, ``list flags``, ``endpoints`` and ``metrics``.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ForwardRef

from mlx_paged import Engine, demo_model_path, load
from mlx_paged.cli.cache.program import setup_arg_parser as cache_parser
from mlx_paged.cli.chat.commands import COMMAND_TABLE
from mlx_paged.cli.chat.program import setup_arg_parser as chat_parser
from mlx_paged.cli.fit.program import setup_arg_parser as fit_parser
from mlx_paged.cli.fit.program import setup_list_parser as list_parser
from mlx_paged.options.argument_values import Argument
from mlx_paged.options.engine_options import ENGINE_OPTIONS, EngineOptions
from mlx_paged.options.foreign_arguments import NAMES_ELSEWHERE
from mlx_paged.options.sampling_declarations import SAMPLING_PARAMS
from mlx_paged.options.sampling_params import SamplingParams
from mlx_paged.server.app import ROUTES
from mlx_paged.server.metrics import EngineCollector
from mlx_paged.server.program import setup_arg_parser as server_parser

ROOT = Path(__file__).parents[2]
# The columns where all rows are shown, and where some are.
_COLUMNS = {
    "engine options": (
        ("name", "type", "default", "", "flag", "also called"),
        ("option", "default", ""),
    ),
    "sampling parameters": (
        ("name", "type", "default", "", "flag", "also called"),
        ("parameter", ""),
    ),
    "chat commands": (("command", ""), ("command", "")),
    "chat flags": (("flag", ""), ("flag", "")),
    "server flags": (("flag", ""), ("flag", "")),
    "cache verbs": (("verb", ""), ("verb", "")),
    "cache flags": (("flag", "of", ""), ("flag", "of", "")),
    **dict.fromkeys(("fit flags", "list flags"), (("flag", ""), ("flag", ""))),
    "endpoints": (("path", ""), ("path", "")),
    "metrics": (("metric", "type", ""), ("metric", "type", "")),
}
_MARKED = re.compile(
    rf"(<!-- ({'|'.join(_COLUMNS)})(?:: ([^>]+))? -->\n).*?(<!-- end of \2 -->)", re.DOTALL
)

Row = Mapping[str, str]
"""The cells of a row, by column."""


def pages() -> list[Path]:
    """The pages that have such tables."""
    paths = sorted((ROOT / "docs/guide").rglob("*.md"))
    return [path for path in paths if _MARKED.search(path.read_text())]


def with_tables(page: str) -> str:
    """The text of a page with the tables between its markers as they must be."""
    tables = _tables()

    def marked(match: re.Match[str]) -> str:
        begin, title, names, end = match.groups()
        rows = _OF_A_SERVER[title]() if title in _OF_A_SERVER else tables[title]
        columns = _COLUMNS[title][names is not None]
        if names is None:
            shown = _own(rows, tables) if title in ("chat flags", "server flags") else rows.values()
            return "\n".join((begin.rstrip("\n"), *_table(columns, shown), end))
        chosen = re.split(r",\s+", names)
        lines = [*_table(columns, [_short(rows[name]) for name in chosen if name != "..."])]
        if "..." in chosen:
            listed = ", ".join(f"`{name}`" for name in rows if name not in chosen)
            further = f"Further ones, in [options.md](options.md): {listed}."
            lines += ["", textwrap.fill(further, 100, break_on_hyphens=False)]
        return "\n".join((begin.rstrip("\n"), *lines, end))

    return _MARKED.sub(marked, page)


def _own(flags: Mapping[str, Row], tables: Mapping[str, Mapping[str, Row]]) -> list[Row]:
    """The flags of a program but for those that say what the row of their option says."""
    said = set()
    for row in [*tables["engine options"].values(), *tables["sampling parameters"].values()]:
        default = row["default"].strip("`")
        said.add(f"{row[''].rstrip('.')} (default: {default})")
        if default == "False":
            said.add(row[""].rstrip("."))
    return [row for row in flags.values() if row[""] not in said]


def _short(row: Row) -> Row:
    """A row with the first sentence of its help, and with what that says of the default."""
    first = re.sub(r"\. (?=[A-Z]).*?(?= \(default: |$)", "", row[""]).rstrip(".")
    return {**row, "": first}


def _tables() -> dict[str, dict[str, Row]]:
    types = {name: each.__origin__ for name, each in EngineOptions.__annotations__.items()}
    types["draft_model"] = inspect.signature(Engine).parameters["draft_model"].annotation
    options, params = {}, {}
    for name, option in ENGINE_OPTIONS.items():
        default = "none" if option.default is None else f"`{option.default}`"
        options[name] = _row(name, option, types[name], option.default_text or default)
    for each in fields(SamplingParams):
        default = f"`{getattr(SamplingParams(), each.name)}`"
        params[each.name] = _row(each.name, SAMPLING_PARAMS[each.name], _type_of(each), default)
    return {
        "engine options": options,
        "sampling parameters": params,
        "chat commands": {
            each.name: {"command": f"`{each.usage}`", "": each.help} for each in COMMAND_TABLE
        },
        "chat flags": _flags(chat_parser("chat")),
        "server flags": _flags(server_parser("serve")),
        "cache verbs": {
            each.dest: {"verb": _usage(each.dest, _cache_verbs().choices[each.dest]), "": each.help}
            for each in _cache_verbs()._choices_actions
        },
        "cache flags": _cache_flags(),
        "fit flags": _flags(fit_parser("fit")),
        "list flags": _flags(list_parser("list")),
    }


def _row(name: str, argument: Argument, annotation: object, default: str) -> Row:
    return {
        "name": f"`{name}`",
        "option": f"`{name}`",
        "parameter": f"`{name}`",
        "type": f"`{_type_in_words(annotation)}`",
        "default": default,
        "": _help(argument.help),
        "flag": _flag_in_words(name, argument),
        "also called": ", ".join(f"`{other}`" for other in NAMES_ELSEWHERE.get(name, "").split()),
    }


def _help(text: str) -> str:
    return text.replace("``", "`").replace("<", "&lt;")


def _flag_in_words(name: str, argument: Argument) -> str:
    if argument.flag is None:
        return ""
    programs = argument.flag.programs
    where = "" if len(programs) == 2 else f" ({', '.join(programs)})"
    return f"`{argument.flag_name(name)}`{where}"


def _type_of(field: Field[Any]) -> str:
    """The type of a field that is annotated with ``Annotated[type, declaration]``."""
    annotated: Any = ast.parse(str(field.type), mode="eval").body
    return ast.unparse(annotated.slice.elts[0])


def _type_in_words(annotation: Any) -> str:
    if isinstance(annotation, ForwardRef):  # of types that are imported for type checkers only
        annotation = annotation.__forward_arg__
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text)


def _flags(parser: argparse.ArgumentParser) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for action in parser._actions:
        if not action.option_strings or action.option_strings[-1] in ("--help", "--version"):
            continue
        value = action.metavar or (action.choices and f"{{{','.join(map(str, action.choices))}}}")
        if value is None and action.nargs != 0:
            value = action.dest.upper()
        names = ", ".join(f"`{name}`" for name in action.option_strings)
        flag = f"{names[:-1]} {value}`" if value else names
        text = (action.help or "") % {**vars(action), "prog": parser.prog}
        rows[action.option_strings[0]] = {"flag": flag, "": _help(text)}
    return rows


def _cache_verbs() -> Any:
    [verbs] = (each for each in cache_parser("cache")._actions if each.dest == "verb")
    return verbs


def _usage(name: str, verb: argparse.ArgumentParser) -> str:
    """A verb with its positional arguments."""
    forms = {"+": "{0} ...", "*": "[{0} ...]", None: "{0}"}
    positional = [each for each in verb._actions if not each.option_strings]
    words = [forms[each.nargs].format(each.metavar) for each in positional]  # type: ignore[index]
    return f"`{' '.join((name, *words))}`"


def _cache_flags() -> dict[str, Row]:
    """The flags of the verbs; one that several verbs have for the same is one row."""
    rows: dict[str, Row] = {}
    for name, verb in _cache_verbs().choices.items():
        for row in _flags(verb).values():
            key = f"{row['flag']}: {row['']}"
            verbs = f"{rows[key]['of']}, `{name}`" if key in rows else f"`{name}`"
            rows[key] = {**row, "of": verbs}
    return rows


def _metrics() -> dict[str, Row]:
    """Those of an engine with a disk and drafts, which has all of them."""
    rows: dict[str, Row] = {}
    with TemporaryDirectory() as folder:
        engine = Engine(*load(demo_model_path()), cache_dir=folder, num_draft_tokens=1)
        for metric in EngineCollector(engine, "", {}).collect():
            names: Sequence[str] = getattr(metric, "_labelnames", ())
            labels = [name for name in names if name not in ("model_name", "engine")]
            name = metric.name + "_total" * (metric.type == "counter")
            if labels and not name.endswith("_info"):
                name += "{" + ",".join(labels) + "}"
            text = metric.documentation
            rows[name] = {"metric": f"`{name}`", "type": metric.type, "": _help(text)}
        engine.close()
    return rows


def _endpoints() -> dict[str, Row]:
    """The routes of a server; those that answer the same in one row."""
    paths: dict[str, list[str]] = {}
    for route in ROUTES:
        if route.path_format.endswith("{path}"):
            continue  # stored responses, of which there are none
        methods = ", ".join(sorted((route.methods or set()) - {"HEAD"}))
        paths.setdefault(route.summary, []).append(f"`{methods} {route.path_format}`")
    return {
        summary: {"path": ", ".join(found), "": _help(summary).rstrip(".")}
        for summary, found in paths.items()
    }


_OF_A_SERVER = {"endpoints": _endpoints, "metrics": _metrics}


def _table(columns: Sequence[str], rows: Iterable[Row]) -> Iterable[str]:
    yield f"| {' | '.join(columns)} |".replace("|  |", "| |")
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(row[each].replace("|", "\\|") for each in columns) + " |"


if __name__ == "__main__":
    for path in pages():
        path.write_text(with_tables(path.read_text()))
