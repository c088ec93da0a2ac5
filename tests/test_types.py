"""``py.typed`` is a promise: what a type checker sees of the package, from a user's side."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import mlx_paged
from mlx_paged import generation
from mlx_paged.engine.options import RequestOptions
from mlx_paged.generation import GenerationOptions
from mlx_paged.options.engine_options import EngineOptions
from mlx_paged.options.foreign_arguments import argument_names

REPOSITORY = Path(__file__).parent.parent

# Strict, but for two things. Reading transformers, which mlx-lm imports, takes most of the time.
# And examples and snippets call mlx-lm's apply_chat_template, which has no annotations.
CONFIG = """
[mypy]
strict = true

[mypy-transformers.*]
follow_imports = skip

[mypy-example]
disallow_untyped_calls = false
"""

# What the programs below take for granted; snippets of the pages stand alone.
GIVEN = """
import mlx_paged
from mlx_paged import SamplingParams

model, tokenizer = mlx_paged.load("a model")
prompt_a, prompt_b, prompt_c, token_a = [1, 2, 3], [4], [5, 6], 7
"""


def snippets() -> list[str]:
    """Those of the README and the guide, but for mlx-lm's programs: ``mlx_lm.load`` returns a
    union.
    """
    pages = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs/guide").rglob("*.md"))]
    text = "".join(page.read_text() for page in pages)
    found = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    return [snippet for snippet in found if "mlx_lm" not in snippet]


@pytest.fixture(scope="module")
def run_mypy(tmp_path_factory, mypy_cache) -> Callable[..., list[str]]:
    """What mypy says about a user's file, one line each: none where it finds nothing."""
    pytest.importorskip("mypy", reason="mypy is not installed; pip install -e '.[test]' brings it")
    folder = tmp_path_factory.mktemp("user")
    (folder / "mypy.ini").write_text(CONFIG)
    mypy = [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", str(mypy_cache)]

    def run(source: str, file: str = "user.py") -> list[str]:
        (folder / file).write_text(source)
        done = subprocess.run([*mypy, file], cwd=folder, capture_output=True, text=True)
        assert done.returncode in (0, 1) and not done.stderr, done.stderr
        return done.stdout.splitlines()

    return run


@pytest.mark.slow
def test_mypy_finds_nothing_in_the_snippets_of_the_readme_and_the_guide(run_mypy):
    functions = [
        f"\n\ndef snippet_{number}() -> None:\n{textwrap.indent(snippet, '    ')}"
        for number, snippet in enumerate(snippets(), 1)
    ]
    assert len(functions) > 10
    assert run_mypy("".join(functions), "example.py") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(path.name for path in (REPOSITORY / "examples").glob("*.py"))
)
def test_mypy_finds_nothing_in_the_examples(run_mypy, name):
    assert run_mypy((REPOSITORY / "examples" / name).read_text(), "example.py") == []


@pytest.mark.slow
def test_mypy_knows_what_comes_back(run_mypy):
    """One line for each function whose arguments change what it returns; a wrong type is an error,
    and so is Any.
    """
    program = """
from collections.abc import AsyncGenerator, Generator
from typing import Any, assert_type

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged import RequestOutput
from mlx_paged.cache import ContiguousKVCache, KVCache, PagedKVCache

flag, kind = bool(prompt_a), str(prompt_a)
Loaded = tuple[Module, TokenizerWrapper]
LoadedWithConfig = tuple[Module, TokenizerWrapper, dict[str, Any]]
assert_type(mlx_paged.load("x"), Loaded)
assert_type(mlx_paged.load("x", return_config=False), Loaded)
assert_type(mlx_paged.load("x", return_config=True), LoadedWithConfig)
assert_type(mlx_paged.load("x", None, None, None, False, True), LoadedWithConfig)
assert_type(mlx_paged.load("x", return_config=flag), Loaded | LoadedWithConfig)

cache = mlx_paged.make_kv_cache(model)
assert_type(cache, PagedKVCache)
assert_type(mlx_paged.make_kv_cache(model, "paged", block_size=8), PagedKVCache)
assert_type(mlx_paged.make_kv_cache(model, "basic"), ContiguousKVCache)
assert_type(mlx_paged.make_kv_cache(model, kind), KVCache)

sequences = mlx_paged.Sequences(cache)
assert_type(mlx_paged.run_step(model, sequences, {"a": [1]}), mx.array)
assert_type(mlx_paged.Engine(model).cache, KVCache)
assert_type(mlx_paged.AsyncEngine(model).generate("x"), AsyncGenerator[RequestOutput, None])
assert_type(mlx_paged.AsyncEngine(model).stream("x"), Generator[RequestOutput, None, None])
"""
    assert run_mypy(GIVEN + program) == []


@pytest.mark.slow
def test_mypy_takes_a_mapping_whose_keys_are_texts_or_numbers(run_mypy):
    """A dict[str, int] is no Mapping[Hashable, int]: Mapping is invariant in its keys."""
    program = """
from mlx_paged.cache import PagedKVCache
cache = PagedKVCache(mlx_paged.KVCacheConfig.uniform(1, 1, 8))
by_name: dict[str, int] = {"a": 1}
by_number: dict[int, int] = {1: 1}
sequences = mlx_paged.Sequences(cache)
with sequences.step(by_name), sequences.step(by_number):
    pass
tokens_by_name: dict[str, list[int]] = {"a": [1]}
tokens_by_number: dict[int, list[int]] = {1: [1]}
mlx_paged.run_step(model, sequences, tokens_by_name)
mlx_paged.run_step(model, sequences, tokens_by_number)
"""
    assert run_mypy(GIVEN + program) == []


@pytest.mark.slow
def test_mypy_finds_what_a_user_does_wrong(run_mypy):
    """Types that say Any would find nothing in a correct program either."""
    wrong = {
        "SamplingParams(max_tokens='many')": "arg-type",
        "SamplingParams(maximum=1)": "call-arg",
        "mlx_paged.make_kv_cache(model, kv_cache_bytes=[2])": "call-overload",
        "mlx_paged.run_step(model, model, {})": "arg-type",
        "mlx_paged.LLM('x', kv_cash_bytes='2G')": "call-arg",
        "mlx_paged.LLM('x', max_num_seqs='many')": "arg-type",
        "mlx_paged.Engine(model, max_number_of_seqs=1)": "call-arg",
        "mlx_paged.AsyncEngine(tokenizer)": "arg-type",
        "mlx_paged.AsyncEngine(model).stream('x', cache_salt=1)": "arg-type",
        "mlx_paged.generate(model, tokenizer, 'x', max_token=1)": "call-arg",
        "mlx_paged.LLM('x').generate('x')[0].outputs[0].txt": "attr-defined",
        "mlx_paged.KVCacheConfig.uniform('2', 1, 1)": "arg-type",
        "mlx_paged.no_such_name": "attr-defined",
    }
    first_line = len(GIVEN.splitlines()) + 1
    errors = [line for line in run_mypy(GIVEN + "\n".join(wrong)) if ": error: " in line]
    found = [(int(line.split(":")[1]) - first_line, line.rpartition("[")[2]) for line in errors]
    assert found == [(index, f"{code}]") for index, code in enumerate(wrong.values())]


@pytest.mark.slow
def test_every_public_name_has_a_type(run_mypy):
    names = mlx_paged.__all__
    revealed = run_mypy(GIVEN + "\n".join(f"reveal_type(mlx_paged.{name})" for name in names))
    untyped = [line for line in revealed if "note: Revealed type is" not in line or '"Any"' in line]
    assert untyped == []
    assert len(revealed) == len(names)


def public_functions() -> Iterator[tuple[str, Callable[..., object]]]:
    """The functions among the package's public names, and the methods and properties of its
    classes.
    """
    for name in mlx_paged.__all__:
        thing = getattr(mlx_paged, name)
        if inspect.isfunction(thing):
            yield name, thing
        elif inspect.isclass(thing):
            for owner in thing.__mro__:
                if owner.__module__.partition(".")[0] != "mlx_paged":
                    continue
                for attribute, value in vars(owner).items():
                    if attribute.startswith("_") and attribute != "__init__":
                        continue
                    value = getattr(value, "__func__", value)
                    function = value.fget if isinstance(value, property) else value
                    if inspect.isfunction(function):
                        yield f"{name}.{attribute}", function


def test_every_public_function_is_annotated_in_full():
    checked, lacking = [], []
    for name, function in public_functions():
        signature = inspect.signature(function)
        checked.append(name)
        lacking += [
            f"{name}: {parameter.name}"
            for parameter in signature.parameters.values()
            if parameter.annotation is parameter.empty and parameter.name not in ("self", "cls")
        ]
        # mypy takes an __init__ with annotated parameters for one that returns None.
        if signature.return_annotation is signature.empty and not name.endswith(".__init__"):
            lacking.append(f"{name}: what it returns")
    assert lacking == []
    assert {"load", "LLM.generate", "KVCacheConfig.nbytes", "KVCacheConfig.within"} <= set(checked)


def test_options_that_are_passed_on_are_those_of_the_function_that_takes_them():
    """A TypedDict repeats names, and a type checker does not compare it with the function."""
    asked = {"request_id", "prompt", "params"}
    own = argument_names(mlx_paged.Engine.add_request) - asked
    assert RequestOptions.__annotations__.keys() == own
    options = argument_names(generation._stream) | EngineOptions.__annotations__.keys()
    assert GenerationOptions.__annotations__.keys() <= options
    mine = argument_names(generation._stream) - {"model", "tokenizer", "prompt"}
    assert mine <= GenerationOptions.__annotations__.keys()
