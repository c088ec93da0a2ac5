"""An option of an engine, a sampling parameter and a setting of the server take one declaration
each: flags, checks, refusals, types and tables follow from it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from paged_testing.option_tables import pages, with_tables

from mlx_paged.options.config import SchedulerConfig
from mlx_paged.options.engine_options import ENGINE_OPTIONS, EngineOptions
from mlx_paged.options.sampling_declarations import SAMPLING_PARAMS
from mlx_paged.options.sampling_params import SamplingParams

REPOSITORY = Path(__file__).parent.parent

PARAM = """    dummy_share: Annotated[
        float,
        Param(
            "a share that does nothing, 0 to 1.",
            SHARE,
            Flag(),
        ),
    ] = 0.25
"""
OPTION = """    dummy_limit: Annotated[
        int | None,
        Option(
            "a limit that does nothing.",
            or_none(AT_LEAST_1),
        ),
    ]
"""
SETTING = """    dummy_names: Annotated[
        tuple[str, ...],
        _setting("names that do nothing", matching("a name", bool), "--dummy-name"),
    ] = ()
"""
NAMES = """    "dummy_share": "their_share",
    "dummy_limit": "their_limit",
"""
PROBE = """
from mlx_paged import Engine, LLM, SamplingParams, demo_model_path, load
from mlx_paged.cli.chat.program import setup_arg_parser as chat_parser
from mlx_paged.cli.flags import chosen_sampling, engine_options
from mlx_paged.engine.sampling.sampling_state import _CROSS_ROW_DEFAULTS
from mlx_paged.server.program import read_settings, setup_arg_parser as server_parser
from mlx_paged.server.fields import SamplingFields

for program, parser in (("chat", chat_parser("x")), ("server", server_parser("x"))):
    args = parser.parse_args(["--dummy-limit", "7", "--dummy-share", "0.5"])
    print(engine_options(args, program)["dummy_limit"], chosen_sampling(args, {})["dummy_share"])
    print(engine_options(parser.parse_args([]), program)["dummy_limit"])
settings = read_settings(parser.parse_args(["--dummy-name", "a", "--dummy-name", "b"]))
print(settings.dummy_names, read_settings(parser.parse_args([])).dummy_names)
print(SamplingFields.read({"dummy_share": 0.75}).sampling(SamplingParams()).dummy_share)
print(("dummy_share", 0.25) in _CROSS_ROW_DEFAULTS)
engine = Engine(*load(demo_model_path()), kv_cache_bytes="64blocks", dummy_limit=3)
engine.add_request("a", "Once", SamplingParams(dummy_share=1, max_tokens=1))
print(engine.step()[0].finished)

def refused(call, **arguments):
    try:
        call(**arguments)
    except (TypeError, ValueError) as error:
        print(error)

refused(SamplingParams, dummy_share=2)
refused(SamplingParams, their_share=1)
refused(LLM, model="x", their_limit=1)
refused(SamplingParams, dummy_limit=1)
"""
SAID = """\
7 0.5
None
7 0.5
None
('a', 'b') ()
0.75
True
True
[sampling_params] dummy_share must be a number within 0..1, got 2
SamplingParams() has no argument 'their_share': use dummy_share
LLM() has no argument 'their_limit': use dummy_limit
SamplingParams() has no argument 'dummy_limit': give it where the engine is made, \
LLM(..., dummy_limit=...)
"""
USER = """
from mlx_paged import LLM, AsyncEngine, Engine, SamplingParams, load

model, tokenizer = load("a model")
LLM("x", dummy_limit=3)
Engine(model, dummy_limit=None)
AsyncEngine(model, dummy_limit=3)
SamplingParams(dummy_share=0.5)
LLM("x", dummy_limit="many")
SamplingParams(dummy_share="some")
"""
CONFIG = """
[mypy]
strict = true

[mypy-transformers.*]
follow_imports = skip
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package in which each dummy is declared, and its name in other
    projects is in the table of them.
    """
    folder = tmp_path_factory.mktemp("copy")
    for name in ("mlx_paged", "metal", "tools/paged_testing"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, folder / name, ignore=ignored)
    (folder / "docs/guide").mkdir(parents=True)
    for page in ("chat.md", "library.md", "options.md"):
        shutil.copy(REPOSITORY / "docs/guide" / page, folder / "docs/guide" / page)
    for file, before, declaration in (
        ("options/sampling_declarations.py", "    output_kind: Annotated[", PARAM),
        ("options/engine_options.py", "    swap_bytes: Annotated[", OPTION),
        ("server/settings.py", "    log_prompts: Annotated[", SETTING),
        ("options/foreign_arguments.py", '    "adapter_path": "lora_path', NAMES),
    ):
        path = folder / "mlx_paged" / file
        text = path.read_text()
        assert text.count(before) == 1
        path.write_text(text.replace(before, declaration + before))
    return folder


def run(folder: Path, *words: str) -> str:
    """What Python says in the copy."""
    path = os.pathsep.join((str(folder), str(folder / "tools")))
    environment = {**os.environ, "PYTHONPATH": path, "MYPYPATH": str(folder), "COLUMNS": "100"}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("program", ["chat", "server"])
def test_a_declared_dummy_is_in_the_help_of_both_programs(copy: Path, program: str):
    text = run(copy, "-m", f"mlx_paged.{program}", "--help")
    assert re.search(r"--dummy-limit N +a limit that does nothing \(default: none\)\n", text)
    assert re.search(
        r"--dummy-share DUMMY_SHARE\n +a share that does nothing, 0 to 1 \(default: 0.25\)\n", text
    )


def test_a_declared_dummy_is_parsed_checked_read_from_the_wire_and_refused_by_other_names(
    copy: Path,
):
    assert run(copy, "-c", PROBE) == SAID


@pytest.mark.slow
def test_a_declared_dummy_is_in_the_tables_of_the_docs(copy: Path):
    run(copy, "-m", "paged_testing.option_tables")
    page = (copy / "docs/guide/options.md").read_text()
    own = (REPOSITORY / "docs/guide/options.md").read_text()
    assert set(page.splitlines()) - set(own.splitlines()) == {
        "| `dummy_limit` | `int \\| None` | none | a limit that does nothing. | `--dummy-limit` | "
        "`their_limit` |",
        "| `dummy_share` | `float` | `0.25` | a share that does nothing, 0 to 1. | "
        "`--dummy-share` | `their_share` |",
        "| `--dummy-name DUMMY_NAME` | names that do nothing |",
    }


@pytest.mark.slow
def test_a_declared_dummy_is_among_the_further_ones_of_the_guide(copy: Path):
    run(copy, "-m", "paged_testing.option_tables")
    for name, dummies in (
        ("chat.md", {"--dummy-limit", "--dummy-share"}),
        ("library.md", {"dummy_limit", "dummy_share"}),
    ):
        page, own = (
            set(re.findall(r"`([\w-]+)`", (folder / "docs/guide" / name).read_text()))
            for folder in (copy, REPOSITORY)
        )
        assert page - own == dummies


@pytest.mark.slow
def test_a_declared_dummy_is_a_typed_keyword_for_mypy(copy: Path, mypy_cache: Path):
    pytest.importorskip("mypy", reason="mypy is not installed; pip install -e '.[test]' brings it")
    (copy / "mypy.ini").write_text(CONFIG)
    (copy / "user.py").write_text(USER)
    words = ("-m", "mypy", "--no-error-summary", "--cache-dir", str(mypy_cache), "user.py")
    errors = [line for line in run(copy, *words).splitlines() if line.startswith("user.py")]
    assert [(line.split(":")[1], line.rpartition("[")[2]) for line in errors] == [
        ("9", "arg-type]"),
        ("10", "arg-type]"),
    ]


def test_the_tables_of_the_guide_are_those_of_the_declarations():
    """``python -m paged_testing.option_tables``, in tools/, writes them."""
    names = {str(path.relative_to(REPOSITORY)) for path in pages()}
    assert names == {
        *("docs/guide/cache-tool.md", "docs/guide/chat.md"),
        *("docs/guide/library.md", "docs/guide/options.md"),
        *("docs/guide/restarts.md", "docs/guide/server.md", "docs/guide/server/seeing.md"),
        *("docs/guide/adapters.md", "docs/guide/memory.md"),
    }
    assert [path for path in pages() if path.read_text() != with_tables(path.read_text())] == []


def test_everything_that_can_be_given_is_declared():
    assert list(SAMPLING_PARAMS) == [each.name for each in fields(SamplingParams)]
    assert list(ENGINE_OPTIONS) == [*EngineOptions.__annotations__, "draft_model"]
    # The scheduler's options have a typed name in its config, and the default in one place.
    for each in fields(SchedulerConfig):
        assert ENGINE_OPTIONS[each.name].default in (None, each.default)
    for name, each in {**SAMPLING_PARAMS, **ENGINE_OPTIONS}.items():
        assert each.help.endswith("."), name
        assert f"        {name}: " in (SamplingParams.__doc__ or "") or name in ENGINE_OPTIONS


def test_the_tables_of_the_library_name_what_is_declared():
    page = (REPOSITORY / "docs/guide/library.md").read_text()
    for header, declared in (
        ("| parameter | |", set(SAMPLING_PARAMS)),
        ("| option | default | |", set(ENGINE_OPTIONS)),
    ):
        rows = page.split(header + "\n")[1].split("\n\n")[0].splitlines()[1:]
        names = {name for row in rows for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}
        assert names <= declared
    assert set(re.findall(r"`(\w+)`", page)) >= set(SAMPLING_PARAMS)
