"""Calls of tools by grammar: every answer is read by mlx-lm's parser for the format, and its
arguments are valid.
"""

from __future__ import annotations

import importlib
import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest
from helpers.grammar_walks import random_answer
from helpers.json_schemas import is_valid, random_schema

from mlx_paged import demo_model_path, load
from mlx_paged.engine.grammar import GrammarCompiler
from mlx_paged.errors import ArgumentError
from mlx_paged.model_dialect import ModelDialect, ToolFormat
from mlx_paged.server.grammars.tool_grammar import reasoning_before, required_calls, strict_calls

MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>"]
FORMATS = {
    "json_tools": ("<tool_call>", "</tool_call>", ""),
    "json_tools, marks of text": ("<call>", "</call>", ""),
    "mistral": ("[TOOL_CALLS]", "", "[ARGS]"),
    "mistral, older": ("[TOOL_CALLS]", "", ""),
    "qwen3_coder": ("<tool_call>", "</tool_call>", ""),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = load(demo_model_path())[1]
    tokenizer.add_tokens([mark for mark in MARKS if mark[0] == "<"])  # as Qwen3 has them
    tokenizer.add_tokens([mark for mark in MARKS if mark[0] == "["], special_tokens=True)
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, len(tokenizer))


def format_of(kind: str, tokenizer: Any) -> ToolFormat:
    start, end, arguments = FORMATS[kind]
    vocabulary = tokenizer.get_vocab()
    token_ids = {mark: vocabulary[mark] for mark in (start, end, arguments) if mark in vocabulary}
    return written_as(kind.split(", ")[0], start, end, arguments, token_ids)


def written_as(name: str, start: str, end: str, *marks: Any) -> ToolFormat:
    """A format with mlx-lm's parser of that name."""
    parser = importlib.import_module(f"mlx_lm.tool_parsers.{name}").parse_tool_call
    return ToolFormat(name, start, end, parser, *marks)


def tool(
    name: str, parameters: dict[str, Any] | None, strict: bool | None = None
) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "strict": strict}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def an_object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def random_tools(rng: random.Random) -> list[dict[str, Any]]:
    schemas = [an_object(a=random_schema(rng, 1), b=random_schema(rng, 0)), an_object()]
    return [tool(f"tool_{number}", schema) for number, schema in enumerate(schemas)]


def read_calls(text: str, call_format: ToolFormat, tools: list[Any]) -> list[dict[str, Any]]:
    """The calls of a text, by mlx-lm's parser."""
    parser = importlib.import_module(f"mlx_lm.tool_parsers.{call_format.name}").parse_tool_call
    calls = []
    for piece in text.split(call_format.start)[1:]:
        if call_format.end:
            piece, mark, _ = piece.partition(call_format.end)
            assert mark, "a call has an end"
        parsed = parser(piece.strip("\n"), tools)
        calls += parsed if isinstance(parsed, list) else [parsed]
    return calls


def check_calls(calls: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
    for call in calls:
        assert is_valid(call["arguments"], schemas[call["name"]]), (call, schemas[call["name"]])


@pytest.mark.parametrize("kind", [each for each in FORMATS if each != "qwen3_coder"])
def test_required_calls_are_valid_and_read_by_the_models_own_parser(
    tokenizer: Any, compiler: GrammarCompiler, kind: str
):
    call_format, rng = format_of(kind, tokenizer), random.Random(kind)
    counts, names = set(), set()
    for _ in range(12):
        tools = random_tools(rng)
        grammar = required_calls(tools, call_format)
        assert not grammar.is_json
        text = random_answer(compiler, tokenizer, grammar.structured_outputs, rng)
        assert text.startswith(call_format.start)
        calls = read_calls(text, call_format, tools)
        check_calls(calls, tools)
        counts.add(len(calls))
        one = required_calls(tools, call_format, name="tool_1", parallel_tool_calls=False)
        text = random_answer(compiler, tokenizer, one.structured_outputs, rng)
        (call,) = read_calls(text, call_format, tools)
        assert call["name"] == "tool_1"
        names |= {each["name"] for each in calls}
    assert min(counts) == 1 and max(counts) > 1 and names == {"tool_0", "tool_1"}


CODER_PARAMETERS: dict[str, dict[str, Any]] = {
    "word": {"type": "string", "enum": ["red", "dark blue"]},
    "count": {"type": "integer", "description": "how many"},
    "small": {"type": "integer", "minimum": 3, "maximum": 40},
    "share": {"type": "number"},
    "is_new": {"type": "boolean"},
    "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
}


def test_calls_of_qwen3_coder_are_in_its_own_tags(tokenizer: Any, compiler: GrammarCompiler):
    call_format, rng = format_of("qwen3_coder", tokenizer), random.Random(4)
    parameters = an_object(**CODER_PARAMETERS) | {
        "required": ["word", "tags"],
        "$defs": {"tag": {"enum": ["a", None, 3]}},
    }
    tools = [tool("paint_it", parameters, strict=True), tool("ping", None)]
    grammar = required_calls(tools, call_format)
    assert not grammar.is_json
    names, seen = [], set()
    for _ in range(25):
        text = random_answer(compiler, tokenizer, grammar.structured_outputs, rng)
        for call in read_calls(text, call_format, tools):
            names.append(call["name"])
            arguments = call["arguments"]
            seen |= arguments.keys()
            if call["name"] == "ping":
                assert arguments == {}
                continue
            assert {"word", "tags"} <= arguments.keys() <= CODER_PARAMETERS.keys()
            assert arguments["word"] in ("red", "dark blue")
            assert all(each in ("a", None, 3) for each in arguments["tags"])
            assert type(arguments.get("count", 0)) is int
            assert 3 <= arguments.get("small", 3) <= 40
            assert isinstance(arguments.get("share", 0), int | float)
            assert isinstance(arguments.get("is_new", True), bool)
    assert len(names) > 25 and set(names) == {"paint_it", "ping"}
    assert seen == CODER_PARAMETERS.keys()


@pytest.mark.parametrize("value", ["a < b && c", "two\nlines", "", '{"a": "}"}', "</param>"])
def test_text_of_qwen3_coder_goes_through_as_it_is(
    tokenizer: Any, compiler: GrammarCompiler, value: str
):
    call_format, ids = format_of("qwen3_coder", tokenizer), tokenizer.get_vocab()
    tools = [tool("say", an_object(text={"type": "string"}))]
    matcher = compiler.compile(required_calls(tools, call_format).structured_outputs).matcher
    inner = f"\n<function=say>\n<parameter=text>\n{value}\n</parameter>\n</function>\n"
    tokens = tokenizer.encode(inner, add_special_tokens=False)
    answer = [ids["<tool_call>"], *tokens, ids["</tool_call>"]]
    assert matcher.deep_copy().validate_tokens(answer) == len(answer)
    (call,) = read_calls(f"<tool_call>{inner}</tool_call>", call_format, tools)
    assert call == {"name": "say", "arguments": {"text": value}}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 1},
        {"type": "string", "enum": ["a", "null"]},
        {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        {"type": ["string", "null"]},
        {"enum": [1, "a"]},
        {"type": "string", "enum": 3},
        {"type": {"a": 1}},
        {},
        7,
    ],
    ids=str,
)
def test_what_the_parser_of_qwen3_coder_would_misread_is_json(tokenizer: Any, schema: Any):
    call_format = format_of("qwen3_coder", tokenizer)
    assert required_calls([tool("f", an_object(a=schema))], call_format).is_json
    assert required_calls([tool("f g", an_object())], call_format).is_json
    strict = [tool("f", an_object(a=schema), strict=True)]
    with pytest.raises(ArgumentError, match="that writes qwen3_coder"):
        strict_calls(strict, call_format)


@pytest.mark.parametrize("kind", ["glm47", "kimi_k2", "gemma4", "pythonic", "minimax_m2", None])
def test_formats_without_a_grammar_are_a_json_array(
    tokenizer: Any, compiler: GrammarCompiler, kind: str | None
):
    call_format = None if kind is None else written_as(kind, "<tool_call>", "</tool_call>")
    rng, counts = random.Random(5), set()
    for _ in range(8):
        tools = random_tools(rng)
        grammar = required_calls(tools, call_format)
        assert grammar.is_json
        calls = json.loads(random_answer(compiler, tokenizer, grammar.structured_outputs, rng))
        check_calls(calls, tools)
        assert all(call.keys() == {"name", "arguments"} for call in calls)
        counts.add(len(calls))
        one = required_calls(tools, call_format, parallel_tool_calls=False).structured_outputs
        assert len(json.loads(random_answer(compiler, tokenizer, one, rng))) == 1
    assert min(counts) == 1 and max(counts) > 1


@pytest.mark.parametrize("kind", ["json_tools", "mistral"])
@pytest.mark.parametrize("is_parallel", [True, False])
def test_strict_tools_leave_text_free_and_keep_calls_valid(
    tokenizer: Any, compiler: GrammarCompiler, kind: str, is_parallel: bool
):
    call_format, rng = format_of(kind, tokenizer), random.Random(kind)
    preferred = {*tokenizer.eos_token_ids, *call_format.token_ids.values()}
    counts, texts = set(), set()
    for _ in range(25):
        tools = random_tools(rng)
        tools[0]["function"]["strict"] = True
        grammar = strict_calls(tools, call_format, parallel_tool_calls=is_parallel)
        assert grammar is not None and not grammar.is_json
        text = random_answer(compiler, tokenizer, grammar.structured_outputs, rng, preferred)
        calls = read_calls(text, call_format, tools)
        check_calls(calls, tools)
        counts.add(len(calls))
        texts.add(text.partition(call_format.start)[0])
    assert 0 in counts and 1 in counts and len(texts) > 3
    assert is_parallel or max(counts) == 1


def test_marks_that_are_text_begin_a_call_wherever_they_come(
    tokenizer: Any, compiler: GrammarCompiler
):
    tools = [tool("f", an_object(n={"enum": [7]}), strict=True)]
    grammar = strict_calls(tools, format_of("json_tools, marks of text", tokenizer))
    assert grammar is not None
    matcher = compiler.compile(grammar.structured_outputs).matcher

    def is_begin(text: str) -> bool:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return matcher.deep_copy().validate_tokens(tokens) == len(tokens)

    call = '<call>\n{"name": "f", "arguments": {"n": 7}}\n</call>'
    for right in ("Hi", "a <call", f"Hi {call}", f"{call}\n{call} done. <x>", call[:20]):
        assert is_begin(right), right
    for wrong in ("<call>Hi", call.replace("7", "8"), f"{call}<call>{{}}", "x<call>\n{}"):
        assert not is_begin(wrong), wrong


def test_tools_that_are_not_strict_leave_the_answer_free(tokenizer: Any):
    tools = [tool("a", an_object(), strict=False), tool("b", None)]
    assert strict_calls(tools, format_of("json_tools", tokenizer)) is None
    assert strict_calls([], None) is None


def test_what_a_schema_that_is_not_strict_says_beyond_grammars_is_left_out(
    compiler: GrammarCompiler, tokenizer: Any
):
    schema = an_object(a={"type": "integer", "minimum": 1, "maximum": 2, "not": {"const": 1}})
    call_format = format_of("json_tools", tokenizer)
    compiler.compile(required_calls([tool("a", schema)], call_format).structured_outputs)
    strict = required_calls([tool("a", schema, strict=True)], call_format)
    with pytest.raises(ArgumentError, match=r'Unimplemented keys: ."not"'):
        compiler.compile(strict.structured_outputs)


@pytest.mark.parametrize("is_strict", [True, False])
def test_unions_that_a_property_tells_apart_have_it_in_every_call(
    compiler: GrammarCompiler, tokenizer: Any, is_strict: bool
):
    """As pydantic writes a discriminated union whose tags have defaults."""
    members = {
        name: {**an_object(kind={"const": name, "default": name}, n={"enum": [1]}), "required": []}
        for name in ("cat", "dog")
    }
    pet = {
        "discriminator": {"propertyName": "kind"},
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in members],
    }
    tools = [tool("f", {**an_object(pet=pet), "$defs": members}, is_strict)]
    call_format, rng = format_of("json_tools", tokenizer), random.Random(0)
    params = required_calls(tools, call_format, parallel_tool_calls=False).structured_outputs
    kinds = set()
    for _ in range(10):
        [call] = read_calls(random_answer(compiler, tokenizer, params, rng), call_format, tools)
        kinds.add(call["arguments"]["pet"]["kind"])
    assert kinds == {"cat", "dog"}


@pytest.mark.parametrize(
    ("tools", "name", "argument", "message"),
    [
        ([], None, "tools", "tool_choice requires a call, but there are no tools"),
        ([tool("a", None)], "b", "tool_choice", "tool_choice names 'b', which is not in tools"),
        ([tool("a", {"type": "array"})], None, "tools[0].function.parameters", "of an object"),
        ([tool("b", None), tool("a", 3)], None, "tools[1].function.parameters", "got 3"),  # type: ignore[arg-type]
    ],
)
def test_calls_that_can_not_be_required_are_refused_by_name(
    tools: list[Any], name: str | None, argument: str, message: str
):
    with pytest.raises(ArgumentError, match=re.escape(message)) as refused:
        required_calls(tools, None, name=name)
    assert refused.value.argument == argument


@pytest.mark.parametrize("call_format", [None, written_as("glm47", "<tool_call>", "</tool_call>")])
def test_a_strict_tool_that_no_grammar_can_keep_to_is_refused_by_name(call_format: Any):
    tools = [tool("a", None), tool("b", an_object(), strict=True)]
    with pytest.raises(ArgumentError, match="can't be enforced with tool_choice 'auto'") as refused:
        strict_calls(tools, call_format)
    assert refused.value.argument == "tools[1].function.strict"


def test_the_format_is_the_one_that_mlx_lm_inferred(tokenizer: Any):
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from mlx_lm.tool_parsers import mistral

    assert ToolFormat.of(tokenizer) is None
    marks = mistral.tool_call_start, mistral.tool_call_end, mistral.parse_tool_call
    wrapped = TokenizerWrapper(
        tokenizer._tokenizer, tool_call_start=marks[0], tool_call_end=marks[1], tool_parser=marks[2]
    )
    found, expected = ToolFormat.of(wrapped), format_of("mistral", tokenizer)
    ids = tokenizer.encode(found.start, add_special_tokens=False)
    assert found == replace(expected, start_token_ids=tuple(ids))


def test_reasoning_is_what_the_prompt_has_left_open(tokenizer: Any):
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    thinking = TokenizerWrapper(tokenizer._tokenizer)
    assert thinking.has_thinking, "the marks are in its vocabulary"
    ids = tokenizer.get_vocab()
    start, end = (ids["<think>"],), (ids["</think>"],)

    def marks(prompt: str) -> tuple[Any, Any]:
        found = reasoning_before(ModelDialect.of(thinking).reasoning, prompt)
        return found["reasoning_start"], found["begin_after"]

    assert marks("Hello") == (start, end)
    assert marks("Hello<think>\n") == ((), end)
    assert marks("Hello<think>\n\n</think>\n\n") == ((), ())
    assert marks("What is <think>?") == marks("<think>Old.</think>Yes. And now?") == (start, end)
    plain = load(demo_model_path())[1]
    nothing = {"reasoning_start": (), "begin_after": ()}
    assert reasoning_before(ModelDialect.of(plain).reasoning, "Hello") == nothing
