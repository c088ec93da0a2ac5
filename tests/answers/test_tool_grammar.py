"""Calls of tools by grammar: the server reads every answer, and its arguments are valid."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from helpers.call_writers import TOKENS, WRITERS
from helpers.fast_lane import mostly_slow
from helpers.grammar_walks import random_answer
from helpers.json_schemas import is_valid, random_schema

from mlx_paged import demo_model_path, load
from mlx_paged.answers.dialect import PLAIN_DIALECT, AnswerFormat, Dialect
from mlx_paged.answers.formats import FORMATS, REASONING, format_named
from mlx_paged.answers.reader import read_answer
from mlx_paged.answers.tool_grammar import Tool, ToolGrammar, grammar_of_calls, reasoning_before
from mlx_paged.engine.sampling.grammar import GrammarCompiler
from mlx_paged.errors import ArgumentError

STRICT = ["json_tools", "mistral", "glm47", "kimi_k2", "gemma4", "deepseek_v3", "qwen3_coder"]
# Formats whose marks are spelled out, because the vocabulary has no such tokens.
SPELLED_OUT = ("json_tools", "qwen3_coder", "minimax_m2", "phi4")
KINDS = [each.name for each in FORMATS]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = load(demo_model_path())[1]
    tokenizer.add_tokens(list(TOKENS), special_tokens=True)
    return tokenizer


@pytest.fixture(scope="module")
def plain_tokenizer() -> Any:
    return load(demo_model_path())[1]


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, len(tokenizer))


def dialect_of(kind: str | None, tokenizer: Any) -> Dialect:
    name, _, spelled_out = (kind or "").partition(", ")
    vocabulary = tokenizer.get_vocab()
    tokens = {} if spelled_out else {text: (vocabulary[text], True) for text in TOKENS}
    start = "<|channel|>analysis<|message|>" if name == "harmony" else "<think>"
    reasoning = next(each for each in REASONING if each.start == start)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return Dialect.of_tokens(format_named(name), reasoning, tokens, encode)


def tool(name: str, parameters: dict[str, Any] | None, strict: bool | None = None) -> Tool:
    function: dict[str, Any] = {"name": name, "strict": strict}
    if parameters is not None:
        function["parameters"] = parameters
    return Tool({"type": "function", "function": function}, f"tools.{name}")


def required(*arguments: Any) -> ToolGrammar:
    grammar = grammar_of_calls(*arguments)
    assert grammar is not None
    return grammar


def an_object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def random_tools(rng: random.Random) -> list[Tool]:
    schemas = [an_object(a=random_schema(rng, 1), b=random_schema(rng, 0)), an_object()]
    return [tool(f"tool_{number}", schema) for number, schema in enumerate(schemas)]


SIMPLE: list[dict[str, Any]] = [
    {"type": "integer", "minimum": 3, "maximum": 40},
    {"type": "boolean"},
    {"type": "null"},
    {"anyOf": [{"type": "integer", "maximum": 5, "minimum": 1}, {"type": "null"}]},
    {"type": "string", "enum": ["red", "dark blue", "a, b"]},
    {"enum": [3, 12, None]},
    {"type": "array", "items": {"enum": ["a", "b c"]}, "minItems": 1, "maxItems": 2},
    {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"],
     "additionalProperties": False},
]  # fmt: skip


def simple_tools(rng: random.Random) -> list[Tool]:
    """Tools whose arguments every format can hold, some of them optional."""
    properties = {f"key_{index}": rng.choice(SIMPLE) for index in range(rng.randrange(1, 4))}
    required = [name for name in properties if rng.random() < 0.6]
    parameters = {**an_object(**properties), "required": required}
    return [tool("tool_0", parameters), tool("tool_1", an_object())]


def read_calls(text: str, dialect: Dialect, tools: list[Tool]) -> list[dict[str, Any]]:
    """The calls of an answer, as the server reads it."""
    form = AnswerFormat.for_prompt(dialect, "", [each.form for each in tools])
    for token in TOKENS:  # This tokenizer decodes the sign for a space even in added tokens.
        text = text.replace(token.replace("▁", " "), token)
    reading = read_answer(form, form.marks.encode(text))
    return [{"name": name, "arguments": json.loads(arguments)} for name, arguments in reading.calls]


def check_calls(calls: list[dict[str, Any]], tools: list[Tool]) -> None:
    schemas = {each.name: each.parameters for each in tools}
    for call in calls:
        assert is_valid(call["arguments"], schemas[call["name"]]), (call, schemas[call["name"]])


@mostly_slow(
    "kind", [*KINDS, *(f"{name}, spelled out" for name in SPELLED_OUT)], quick=(0, 1, 4, 7, 12, 13)
)
def test_required_calls_are_valid_and_read_by_the_server(
    tokenizer: Any, plain_tokenizer: Any, kind: str
):
    tokenizer = plain_tokenizer if ", " in kind else tokenizer
    compiler = GrammarCompiler(tokenizer, len(tokenizer))
    dialect, rng = dialect_of(kind, tokenizer), random.Random(kind)
    counts, names = set(), set()
    for _ in range(12):
        tools = simple_tools(rng)
        grammar = required(tools, dialect)
        assert not grammar.is_json
        text = random_answer(compiler, tokenizer, grammar.structured_outputs, rng)
        calls = read_calls(text, dialect, tools)
        check_calls(calls, tools)
        counts.add(len(calls))
        one = required(tools, dialect, "tool_1", False)
        text = random_answer(compiler, tokenizer, one.structured_outputs, rng)
        (call,) = read_calls(text, dialect, tools)
        assert call["name"] == "tool_1"
        names |= {each["name"] for each in calls}
    assert names == {"tool_0", "tool_1"}
    assert 0 not in counts and (max(counts) > 1 or kind == "harmony")


# Variants that models write and the grammar doesn't.
NOT_WRITTEN = (
    "glm47, with line breaks", "mistral, older",
    "llama4, with marks", "llama3, with a mark", "phi4, functools",
)  # fmt: skip


@pytest.mark.parametrize("writer", [each for each in WRITERS if each not in NOT_WRITTEN])
def test_the_grammar_of_a_format_allows_what_its_models_write(
    tokenizer: Any, compiler: GrammarCompiler, writer: str
):
    dialect = dialect_of(writer.partition(",")[0], tokenizer)
    parameters = an_object(
        text={"type": "string"}, limit={"type": "integer"}, tags={"type": "array"}
    )
    tools = [tool("read", {**parameters, "required": ["text"]}), tool("list", an_object())]
    is_one = writer == "harmony"
    matcher = compiler.compile(required(tools, dialect).structured_outputs).matcher
    for text in ("a < b && c", "two\nlines", "", '{"a": "}"}', "</arg>", "é ☕"):
        calls = [("read", {"text": text, "limit": 3}), ("list", {}), ("read", {"text": text})]
        calls = calls[:1] if is_one else calls
        answer = WRITERS[writer](calls)
        tokens = tokenizer.encode(answer, add_special_tokens=False)
        assert matcher.deep_copy().validate_tokens(tokens) == len(tokens), answer
        expected = [{"name": name, "arguments": each} for name, each in calls]
        assert read_calls(answer, dialect, tools) == expected


CODER_PARAMETERS: dict[str, dict[str, Any]] = {
    "word": {"type": "string", "enum": ["red", "dark blue"]},
    "count": {"type": "integer", "description": "how many"},
    "small": {"type": "integer", "minimum": 3, "maximum": 40},
    "share": {"type": "number"},
    "is_new": {"type": "boolean"},
    "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
}


def test_calls_of_qwen3_coder_are_in_its_own_tags(tokenizer: Any, compiler: GrammarCompiler):
    dialect, rng = dialect_of("qwen3_coder", tokenizer), random.Random(4)
    parameters = an_object(**CODER_PARAMETERS) | {
        "required": ["word", "tags"],
        "$defs": {"tag": {"enum": ["a", None, 3]}},
    }
    tools = [tool("paint_it", parameters, strict=True), tool("ping", None)]
    grammar = required(tools, dialect)
    assert not grammar.is_json
    names, seen = [], set()
    for _ in range(25):
        text = random_answer(compiler, tokenizer, grammar.structured_outputs, rng)
        for call in read_calls(text, dialect, tools):
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


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 1},
        {"type": ["string", "integer"]},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"enum": [1, "a"]},
        {"type": "string", "enum": 3},
        {"type": {"a": 1}},
        {},
        7,
    ],
    ids=str,
)
def test_what_tags_would_not_tell_apart_is_json(tokenizer: Any, schema: Any):
    dialect = dialect_of("qwen3_coder", tokenizer)
    assert required([tool("f", an_object(a=schema))], dialect).is_json
    assert required([tool("f g", an_object())], dialect).is_json
    strict = [tool("f", an_object(a=schema), strict=True)]
    with pytest.raises(ArgumentError, match="that writes qwen3_coder"):
        grammar_of_calls(strict, dialect, "auto")


@pytest.mark.parametrize("reference", ["#", "#/$defs/tree", "#/$defs/none", "elsewhere#/a"])
def test_a_reference_that_gemmas_notation_can_not_follow_is_json(tokenizer: Any, reference: str):
    tree = an_object(inner={"$ref": reference})
    parameters = {**tree, "$defs": {"tree": tree}}
    assert required([tool("f", parameters)], dialect_of("gemma4", tokenizer)).is_json


def test_a_model_without_a_format_writes_a_json_array(tokenizer: Any, compiler: GrammarCompiler):
    rng, counts, dialect = random.Random(5), set(), dialect_of(None, tokenizer)
    for _ in range(8):
        tools = random_tools(rng)
        grammar = required(tools, dialect)
        assert grammar.is_json
        calls = json.loads(random_answer(compiler, tokenizer, grammar.structured_outputs, rng))
        check_calls(calls, tools)
        assert all(call.keys() == {"name", "arguments"} for call in calls)
        counts.add(len(calls))
        one = required(tools, dialect, "required", False).structured_outputs
        assert len(json.loads(random_answer(compiler, tokenizer, one, rng))) == 1
    assert min(counts) == 1 and max(counts) > 1


@mostly_slow("kind", STRICT, quick=(0, 1, 3))
@pytest.mark.parametrize("is_parallel", [True, False])
def test_strict_tools_leave_text_free_and_keep_calls_valid(
    tokenizer: Any, compiler: GrammarCompiler, kind: str, is_parallel: bool
):
    dialect, rng = dialect_of(kind, tokenizer), random.Random(kind)
    assert dialect.calls is not None
    preferred = {*tokenizer.eos_token_ids, *dialect.marks.token_ids.values()}
    counts, texts = set(), set()
    for _ in range(25):
        tools = simple_tools(rng)
        tools[0].form["function"]["strict"] = True
        grammar = grammar_of_calls(tools, dialect, "auto", is_parallel)
        assert grammar is not None and not grammar.is_json
        text = random_answer(compiler, tokenizer, grammar.structured_outputs, rng, preferred)
        calls = read_calls(text, dialect, tools)
        check_calls(calls, tools)
        counts.add(len(calls))
        texts.add(text.partition(dialect.calls.start)[0])
    assert 0 in counts and 1 in counts and len(texts) > 3
    assert is_parallel or max(counts) == 1


def test_marks_that_are_text_begin_a_call_wherever_they_come(
    tokenizer: Any, compiler: GrammarCompiler
):
    tools = [tool("f", an_object(n={"enum": [7]}), strict=True)]
    grammar = grammar_of_calls(tools, dialect_of("json_tools, spelled out", tokenizer), "auto")
    assert grammar is not None
    matcher = compiler.compile(grammar.structured_outputs).matcher

    def is_begin(text: str) -> bool:
        tokens = [
            token
            for character in text
            for token in tokenizer.encode(character, add_special_tokens=False)
        ]
        return matcher.deep_copy().validate_tokens(tokens) == len(tokens)

    # No token of this vocabulary, so that the mark is text.
    call = '<tool_call>\n{"name": "f", "arguments": {"n": 7}}\n</tool_call>'
    for right in ("Hi", "a <tool", f"Hi {call}", f"{call}\n{call} done. <x>", call[:25]):
        assert is_begin(right), right
    for wrong in ("<tool_call>Hi", call.replace("7", "8"), f"{call}<tool_call>{{}}"):
        assert not is_begin(wrong), wrong


def test_tools_that_are_not_strict_leave_the_answer_free(tokenizer: Any):
    tools = [tool("a", an_object(), strict=False), tool("b", None)]
    assert grammar_of_calls(tools, dialect_of("json_tools", tokenizer), "auto") is None
    assert grammar_of_calls([], PLAIN_DIALECT, "auto") is None


def test_what_a_schema_that_is_not_strict_says_beyond_grammars_is_left_out(
    compiler: GrammarCompiler, tokenizer: Any
):
    schema = an_object(a={"type": "integer", "minimum": 1, "maximum": 2, "not": {"const": 1}})
    dialect = dialect_of("json_tools", tokenizer)
    compiler.compile(required([tool("a", schema)], dialect).structured_outputs)
    strict = required([tool("a", schema, strict=True)], dialect)
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
    dialect, rng = dialect_of("json_tools", tokenizer), random.Random(0)
    params = required(tools, dialect, "required", False).structured_outputs
    kinds = set()
    for _ in range(10):
        [call] = read_calls(random_answer(compiler, tokenizer, params, rng), dialect, tools)
        kinds.add(call["arguments"]["pet"]["kind"])
    assert kinds == {"cat", "dog"}


@pytest.mark.parametrize(
    ("tools", "choice", "argument", "message"),
    [
        ([], "required", "tools", "tool_choice requires a call, but there are no tools"),
        ([tool("a", None)], "b", "tool_choice", "tool_choice names 'b', which is not in tools"),
        ([tool("a", {"type": "array"})], "required", "tools.a.parameters", "of an object"),
        ([tool("b", None), tool("a", 3)], "b", "tools.a.parameters", "got 3"),  # type: ignore[arg-type]
    ],
)
def test_calls_that_can_not_be_required_are_refused_by_name(
    tools: list[Tool], choice: str, argument: str, message: str
):
    with pytest.raises(ArgumentError, match=re.escape(message)) as refused:
        grammar_of_calls(tools, PLAIN_DIALECT, choice)
    assert refused.value.argument == argument


@pytest.mark.parametrize("kind", [None, "llama3", "llama4", "harmony"])
def test_a_strict_tool_that_no_grammar_can_keep_to_is_refused_by_name(tokenizer: Any, kind: Any):
    tools = [tool("a", None), tool("b", an_object(), strict=True)]
    with pytest.raises(ArgumentError, match="can't be enforced with tool_choice 'auto'") as refused:
        grammar_of_calls(tools, dialect_of(kind, tokenizer), "auto")
    assert refused.value.argument == "tools.b.strict"


def test_reasoning_is_what_the_prompt_has_left_open(tokenizer: Any):
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    thinking = TokenizerWrapper(tokenizer._tokenizer)
    assert thinking.has_thinking, "the marks are in its vocabulary"
    ids = tokenizer.get_vocab()
    start, end = (ids["<think>"],), (ids["</think>"],)

    def marks(prompt: str) -> tuple[Any, Any]:
        found = reasoning_before(Dialect.of(thinking), prompt)
        return found["reasoning_start"], found["begin_after"]

    assert marks("Hello") == (start, end)
    assert marks("Hello<think>\n") == ((), end)
    assert marks("Hello<think>\n\n</think>\n\n") == ((), ())
    assert marks("What is <think>?") == marks("<think>Old.</think>Yes. And now?") == (start, end)
    plain = load(demo_model_path())[1]
    nothing = {"reasoning_start": (), "begin_after": ()}
    assert reasoning_before(Dialect.of(plain), "Hello") == nothing


def test_the_structure_of_an_answer_in_harmony_begins_after_a_header(tokenizer: Any):
    dialect, ids = dialect_of("harmony", tokenizer), tokenizer.get_vocab()
    found = reasoning_before(dialect, "<|start|>assistant")
    assert found["reasoning_start"] == ()
    text = tokenizer.decode(list(found["begin_after"]), skip_special_tokens=False)
    assert text.replace(" ", "") == "<|channel|>final<|message|>"
    calls = required([tool("f", an_object())], dialect)
    found = reasoning_before(dialect, "<|start|>assistant", calls)
    assert found["begin_after"] == (ids["<|end|>"],)
    assert found["reasoning_start"][0] == ids["<|channel|>"]
