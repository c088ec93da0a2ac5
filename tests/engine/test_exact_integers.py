"""Integers beyond 2^53 in JSON schemas: answers have exactly the schema's, or it is refused."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from helpers.engine_runs import greedy, make_engine, run
from helpers.grammar_walks import random_answer
from llguidance import LLMatcher

from mlx_paged import StructuredOutputsParams
from mlx_paged.engine.sampling.exact_integers import (
    InexactError,
    exact_json,
    has_exact_bounds,
    is_rounded,
    pattern_within_bounds,
    with_exact_integers,
)
from mlx_paged.engine.sampling.grammar import GrammarCompiler
from mlx_paged.errors import ArgumentError

BIG = 1234567890123456789  # in float64, ...768
INT64, UINT64 = 2**63 - 1, 2**64 - 1
IDS = {"type": "integer", "enum": [BIG, BIG + 1]}
RECORD = {
    "type": "object",
    "properties": {"id": IDS, "s": {"type": "string"}, "n": {"type": ["integer", "null"]}},
    "required": ["id"],
}
NODE = {
    "type": "object",
    "properties": {"v": {"const": BIG}, "next": {"$ref": "#/$defs/n"}, "s": {"$ref": "#/$defs/s"}},
    "required": ["v"],
    "additionalProperties": False,
}
LIST = {"$defs": {"n": NODE, "s": {"type": "string", "maxLength": 2}}, "$ref": "#/$defs/n"}
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    # The schema, JSON that is valid for it, and JSON that is not.
    ({"const": BIG}, [f"{BIG}"], [f"{BIG - 21}", f"{BIG + 1}", f"{BIG}0"]),
    ({"const": -INT64}, [f"{-INT64}"], [f"{-INT64 - 1}"]),
    ({"const": 10**25 + 1}, [f"{10**25 + 1}"], [f"{10**25}"]),
    ({"enum": [BIG, 1, "x", None]}, [f"{BIG}", "1", '"x"', "null"], [f"{BIG - 21}"]),
    ({"enum": [BIG, "x"], "type": "string"}, ['"x"'], [f"{BIG}"]),
    ({"const": {"a": [BIG, {"b": "x"}]}}, [f'{{"a": [{BIG}, {{"b": "x"}}]}}'], ['{"a": [1]}']),
    ({"type": "integer", "minimum": BIG, "maximum": BIG}, [f"{BIG}"], [f"{BIG + 1}", f"{BIG - 1}"]),
    ({"type": "integer", "minimum": BIG}, [f"{BIG}", f"{BIG}0"], [f"{BIG - 1}", f"-{BIG}", "0"]),
    ({"type": "integer", "maximum": -BIG}, [f"{-BIG}", f"{-BIG}0"], [f"{-BIG + 1}", "0"]),
    ({"type": "integer", "exclusiveMinimum": 2**53}, [f"{2**53 + 1}"], [f"{2**53}"]),
    ({"type": "integer", "exclusiveMaximum": 2**53 + 2}, [f"{2**53 + 1}"], [f"{2**53 + 2}"]),
    (
        {"type": "integer", "maximum": 2**60, "exclusiveMaximum": True},
        [f"{2**60 - 1}"],
        [f"{2**60}"],
    ),
    (
        {"type": "integer", "minimum": -INT64 - 1, "maximum": INT64},
        ["0", "-1", f"{INT64}", f"{-INT64 - 1}"],
        [f"{INT64 + 1}", f"{-INT64 - 2}"],
    ),
    ({"type": "integer", "minimum": 0, "maximum": UINT64}, ["0", f"{UINT64}"], ["-1", f"{2**64}"]),
    (
        {"type": "number", "minimum": 0, "maximum": UINT64},
        ["0", "0.5", f"{UINT64}", f"{UINT64}.0", f"{UINT64 - 1}.99"],
        ["-1", "-0.5", f"{2**64}", f"{UINT64}.1"],
    ),
    (
        {"type": "number", "exclusiveMinimum": -(2**53) - 1, "exclusiveMaximum": -1},
        ["-1.1", f"-{2**53}.5", f"-{2**53}"],
        [f"-{2**53 + 1}", "-1", "-1.0", "0"],
    ),
    ({"type": "integer", "minimum": 1e19}, [f"{10**19}"], [f"{10**19 - 1}"]),
    ({"minimum": BIG}, [f"{BIG}", f"{BIG}.5", '"x"', "{}", "[]", "null"], [f"{BIG - 1}"]),
    (
        RECORD,
        [
            f'{{"id": {BIG}}}',
            f'{{"id":{BIG + 1},"s":"a","n":null}}',
            f'{{"id": {BIG}, "n": 5, "more": [1, {{"id": 2}}], "x": 1}}',
        ],
        ['{"s": "a"}', f'{{"id": {BIG + 2}}}', f'{{"id": {BIG}, "id": 1}}', f'{{"id": {BIG},}}'],
    ),
    (
        {**RECORD, "additionalProperties": False, "required": []},
        ["{}", f'{{"id": {BIG}}}', '{"s": "a"}', '{"n": 1}'],
        ['{"z": 1}', '{"n": 1, "s": "a"}'],
    ),
    (
        {"type": "object", "additionalProperties": {"const": BIG}},
        ["{}", f'{{"a": {BIG}, "b\\"": {BIG}}}'],
        ['{"a": 1}'],
    ),
    (
        {"type": "object", "properties": {'a/b"': IDS}, "required": ["z"]},
        [f'{{"a/b\\"": {BIG}, "z": 1}}'],
        ['{"a/b\\"": 1, "z": 1}', f'{{"a/b\\"": {BIG}}}'],
    ),
    (
        {"type": "array", "items": IDS, "minItems": 1, "maxItems": 2},
        [f"[{BIG}]", f"[{BIG}, {BIG + 1}]"],
        ["[]", "[1]", f"[{BIG}, {BIG}, {BIG}]"],
    ),
    (
        {"type": "array", "prefixItems": [IDS, {"type": "string"}], "items": False},
        ["[]", f"[{BIG}]", f'[{BIG}, "a"]'],
        ['["a"]', f'[{BIG}, "a", 1]'],
    ),
    (
        {"type": "array", "prefixItems": [IDS], "minItems": 2},
        [f"[{BIG}, 1]", f'[{BIG}, "a", {{}}]'],
        [f"[{BIG}]", "[1, 1]"],
    ),
    (
        LIST,
        [f'{{"v": {BIG}}}', f'{{"v": {BIG}, "next": {{"v": {BIG}, "s": "ab"}}, "s": "a"}}'],
        ['{"v": 1}', f'{{"v": {BIG}, "s": "abc"}}', f'{{"v": {BIG}, "next": {{}}}}'],
    ),
    ({"anyOf": [{"minimum": BIG, "type": "integer"}, {"type": "null"}]}, [f"{BIG}", "null"], ["1"]),
    ({"oneOf": [{"minimum": BIG, "type": "integer"}, {"type": "null"}]}, [f"{BIG}", "null"], ["1"]),
    ({"allOf": [{"const": BIG}], "title": "a"}, [f"{BIG}"], ["1"]),
]


@pytest.fixture(scope="module")
def compiler(demo: tuple[Any, Any]) -> GrammarCompiler:
    model, tokenizer = demo
    return GrammarCompiler(tokenizer, model.args.vocab_size)


def is_taken(compiler: GrammarCompiler, tokenizer: Any, params: Any, text: str) -> bool:
    """Whether a text is a whole answer."""
    matcher: LLMatcher = compiler.compile(params).matcher.deep_copy()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("whitespace_flexible", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: json.dumps(case[0])[:60])
def test_an_answer_has_exactly_the_integers_of_its_schema(
    demo: tuple[Any, Any],
    compiler: GrammarCompiler,
    case: tuple[dict[str, Any], list[str], list[str]],
    whitespace_flexible: bool,
):
    schema, valid, invalid = case
    params = StructuredOutputsParams(json=schema, whitespace_flexible=whitespace_flexible)
    for text in valid:
        assert is_taken(compiler, demo[1], params, text), text
    for text in invalid:
        assert not is_taken(compiler, demo[1], params, text), text


def test_white_space_is_where_it_is_allowed(demo: tuple[Any, Any], compiler: GrammarCompiler):
    loose = f'{{\n  "id" : {BIG} ,\n  "n" : null\n}}'
    for flexible in (False, True):
        params = StructuredOutputsParams(json=RECORD, whitespace_flexible=flexible)
        assert is_taken(compiler, demo[1], params, loose) == flexible


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": BIG, "multipleOf": 5}, "beside multipleOf"),
        ({"type": "integer", "multipleOf": BIG}, "'multipleOf' has too many digits"),
        ({"type": "number", "minimum": 0.5, "maximum": BIG}, "beside a bound with a fraction"),
        ({"allOf": [{"minimum": BIG}, {"maximum": BIG + 5}]}, "beside allOf"),
        ({"not": {"const": BIG}}, "beside not"),
        ({"enum": [BIG], "minimum": 5}, "beside minimum"),
        ({**RECORD, "patternProperties": {"^x": {}}}, "beside patternProperties"),
        ({**RECORD, "minProperties": 2}, "beside minProperties"),
        ({"type": "array", "items": IDS, "uniqueItems": True}, "beside uniqueItems"),
        ({"type": "array", "items": [IDS]}, "beside a list of items"),
        ({"oneOf": [{"minimum": BIG}, {"maximum": 5}]}, "beside oneOf"),
        ({"type": "integer", "minimum": BIG, "maximum": BIG - 1}, "bounds that no integer is"),
        ({"enum": [BIG], "type": "string"}, "not of their schema's type"),
        (
            {"properties": {"a": IDS, "b": {"$ref": "#/properties/c"}, "c": {}}},
            "the reference '#/properties/c'",
        ),
        # What is no schema is refused as before.
        ({"enum": BIG}, "enum must be an array"),
        ({"properties": {"a": BIG, "b": IDS}}, "must be an object or boolean"),
        ({"items": IDS, "minItems": True}, "Expected positive integer"),
        ({"minimum": True, "const": BIG}, "Expected f64"),
        ({"type": "nothing", "minimum": BIG}, "Invalid type"),
    ],
)
def test_what_can_not_be_kept_exactly_is_refused_by_name(
    compiler: GrammarCompiler, schema: dict[str, Any], words: str
):
    with pytest.raises(ArgumentError) as refused:
        compiler.compile(StructuredOutputsParams(json=schema))
    message = str(refused.value)
    assert words in message and "\n" not in message and refused.value.argument == "json"
    assert message.startswith("[structured_outputs] json ")


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**53},
        {"const": 2**60},  # float64 has it
        {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1},  # as zod writes it
        {"type": "integer", "minimum": 0, "maximum": INT64},
        {"type": "integer", "minimum": 0, "maximum": 10**18, "multipleOf": 5},
        {"type": "string", "description": f"{BIG}", "default": BIG, "examples": [BIG]},
        {"properties": {f"{BIG}": {"type": "string"}}},
    ],
)
def test_what_llguidance_keeps_is_left_to_it(schema: dict[str, Any]):
    assert exact_json(schema, {}) is None


def test_schemas_in_a_grammar_are_rewritten_and_its_texts_are_not(
    demo: tuple[Any, Any], compiler: GrammarCompiler
):
    lark = (
        f'start: "%json {{{BIG}" a | /%json [0-9]{{1,3}}{BIG}/ // %json {{"const": {BIG}}}\n'
        f'a: %json {{"const": {BIG}}} | "b" %json {{"const": {BIG + 2}}} "c"\n'
    )
    exact = with_exact_integers(lark)
    assert exact.count("%json") == 3  # in two texts and in a comment
    params = StructuredOutputsParams(grammar=lark)
    for text in (f"%json {{{BIG}{BIG}", f"%json {{{BIG}b{BIG + 2}c", f"%json 12{BIG}"):
        assert is_taken(compiler, demo[1], params, text)
    assert not is_taken(compiler, demo[1], params, f"%json {{{BIG}{BIG - 21}")
    with pytest.raises(ArgumentError, match=r"grammar has an integer beyond 2\^53 .* beside not"):
        compiler.compile(
            StructuredOutputsParams(grammar=f'start: %json {{"not": {{"const": {BIG}}}}}')
        )


def test_a_lenient_schema_ignores_what_llguidance_does_not_know():
    schema = {"type": "array", "items": IDS, "uniqueItems": True, "contains": {"const": 1}}
    assert exact_json(schema, {"lenient": True}) is not None
    assert exact_json({"not": {"const": BIG}, "type": "string"}, {"lenient": True}) is not None


def random_bounds(rng: random.Random) -> dict[str, Any]:
    around = rng.choice([0, 7, 2**53, 10**18, BIG, INT64, UINT64, 10**30]) * rng.choice([1, -1])
    low, high = sorted(around + rng.randint(-200, 200) for _ in range(2))
    if rng.random() < 0.3:
        low = -low if low > 0 else low
    names = {"low": rng.choice(["minimum", "exclusiveMinimum", ""])}
    names["high"] = rng.choice(["maximum", "exclusiveMaximum", ""])
    bounds = {names["low"]: min(low, high), names["high"]: high}
    return {name: bound for name, bound in bounds.items() if name}


def is_within(number: int, bounds: dict[str, Any]) -> bool:
    return (
        number >= bounds.get("minimum", number)
        and number <= bounds.get("maximum", number)
        and number > bounds.get("exclusiveMinimum", number - 1)
        and number < bounds.get("exclusiveMaximum", number + 1)
    )


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_a_pattern_has_exactly_the_numbers_of_its_bounds(kind: str):
    rng = random.Random(kind)
    num_within = 0
    for _ in range(400):
        bounds = random_bounds(rng)
        pattern = pattern_within_bounds({"type": kind, **bounds})
        near = [*bounds.values(), 0, 1, -1, 10**19, -(10**19)]
        for number in {each + rng.randint(-3, 3) for each in near for _ in range(6)} | set(near):
            expected = is_within(number, bounds)
            num_within += expected
            taken = bool(pattern) and re.fullmatch(pattern, f"{number}") is not None
            assert taken == expected, (bounds, number, pattern)
            if kind == "number" and number >= 0:
                between = is_within(number, bounds) and is_within(number + 1, bounds)
                half = bool(pattern) and re.fullmatch(pattern, f"{number}.5") is not None
                is_edge = bounds.get("exclusiveMinimum") == number or (
                    bounds.get("exclusiveMaximum") == number + 1
                )
                assert half >= between and (half or not (between or is_edge) or not taken)
    assert num_within > 1000


def test_the_numbers_that_llguidance_rounds_are_known():
    """Each number beyond 2^53 that counts as exact is, by llguidance's own grammar."""
    rng = random.Random(5)
    for _ in range(300):
        value = rng.choice([2**53, 2**60, INT64, UINT64, 10**25]) + rng.randint(-3000, 3000)
        value *= rng.choice([1, -1])
        as_float = float(value)
        if not is_rounded(value) and abs(value) <= INT64:
            assert int(as_float) == value
        if has_exact_bounds({"type": "integer", "minimum": value, "maximum": value}):
            assert int(as_float) == value or value == INT64
    assert not is_rounded(True) and not is_rounded(1.5) and not is_rounded("9" * 30)


def wrapped(rng: random.Random, leaf: dict[str, Any]) -> dict[str, Any]:
    """A schema around a leaf, of two levels."""
    for _ in range(2):
        kind = rng.randrange(4)
        if kind == 0:
            others = {"s": {"type": "string", "maxLength": 3}, "b": {"type": "boolean"}}
            names = rng.sample(["leaf", *others], 3)
            properties = {name: leaf if name == "leaf" else others[name] for name in names}
            required = [name for name in names if name == "leaf" or rng.random() < 0.5]
            leaf = {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": False,
            }
        elif kind == 1:
            leaf = {"type": "array", "items": leaf, "minItems": 1, "maxItems": 2}
        elif kind == 2:
            leaf = {"anyOf": [leaf, {"type": "null"}]}
        else:
            leaf = {"type": "array", "prefixItems": [leaf, {"enum": ["a", "b"]}], "items": False}
    return leaf


def numbers_in(value: Any) -> list[int]:
    if isinstance(value, dict):
        return [number for each in value.values() for number in numbers_in(each)]
    if isinstance(value, list):
        return [number for each in value for number in numbers_in(each)]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []


def test_random_answers_of_random_schemas_have_integers_of_the_schema(
    demo: tuple[Any, Any], compiler: GrammarCompiler
):
    rng = random.Random(3)
    num_numbers = 0
    for _ in range(60):
        least = rng.choice([2**53, BIG, INT64, UINT64]) + rng.randint(0, 100)
        leaf: dict[str, Any] = {
            "type": "integer",
            "minimum": least,
            "maximum": least + rng.choice([0, 7, 300]),
        }
        params = StructuredOutputsParams(json=wrapped(rng, leaf))
        answer = json.loads(random_answer(compiler, demo[1], params, rng))
        for number in numbers_in(answer):
            num_numbers += 1
            assert leaf["minimum"] <= number <= leaf["maximum"], (params.json, answer)
    assert num_numbers > 40


def test_an_engine_answers_with_the_integer(demo: tuple[Any, Any]):
    engine = make_engine(*demo)
    for name, schema in (("const", {"const": BIG}), ("record", RECORD)):
        params = greedy(60).clone(structured_outputs=StructuredOutputsParams(json=schema))
        engine.add_request(name, "Hello", params)
    texts = {name: output.outputs[0].text for name, output in run(engine).items()}
    assert texts["const"] == f"{BIG}" and str(BIG)[:18] in texts["record"]


def test_a_large_schema_takes_no_long_to_rewrite():
    many = {f"p{number}": {"$ref": f"#/$defs/d{number}"} for number in range(400)}
    defs = {
        f"d{number}": {"properties": {"n": {"$ref": f"#/$defs/d{number + 1}"}}}
        for number in range(400)
    }
    schema = {"properties": many, "$defs": {**defs, "d400": IDS}}
    exact = exact_json(schema, {"whitespace_flexible": False})
    assert exact is not None and exact.count("exact_0_ref_") > 400


def test_a_schema_whose_definitions_would_be_repeated_for_ever_is_refused():
    defs = {
        f"d{number}": {"properties": {"n": {"$ref": f"#/$defs/d{number + 1}"}}}
        for number in range(2500)
    }
    names = {f"p{number}": {"$ref": f"#/$defs/d{number}"} for number in range(2500)}
    schema = {"properties": {**names, "id": IDS}, "$defs": {**defs, "d2500": {"type": "string"}}}
    with pytest.raises(InexactError, match="beside too many references"):
        exact_json(schema, {"whitespace_flexible": False})


def test_a_definition_that_nothing_refers_to_may_be_malformed():
    exact = exact_json({"const": BIG, "$defs": {"a": {"minItems": True}}}, {})
    assert exact is not None and str(BIG) in exact and "minItems" not in exact
