"""The plain text of an argument becomes a value of its schema, or stays a text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlx_paged.answers.json_schema import Parameters
from mlx_paged.answers.literals import as_json

ANY_OF = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
HUGE = "9" * 5000


def converted(schema: Any, text: str, **definitions: Any) -> str:
    parameters = {"type": "object", "properties": {"x": schema}, **definitions}
    return Parameters(parameters).convert("x", text)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "  a\n", "  a\n"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "string"}, "02139", "02139"),
        ({"type": "str"}, "3", "3"),
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, " -17\n", -17),
        ({"type": "integer"}, "007", 7),
        ({"type": "integer"}, "1e3", 1000),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "integer"}, "1_000", "1_000"),
        ({"type": "integer"}, "three", "three"),
        ({"type": "integer"}, "", ""),
        ({"type": "number"}, "1e20", 1e20),
        ({"type": "number"}, ".5", 0.5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "2026-11-27", "2026-11-27"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "object"}, "{'a': None, 'b': [1,]}", {"a": None, "b": [1]}),
        ({"type": "array"}, "[1, 2", "[1, 2"),
        ({"type": "array"}, "a, b", "a, b"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", "None"),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "integer"]}, "05", "05"),
        ({"type": "integer", "nullable": True}, "null", None),
        (ANY_OF, "5", 5),
        (ANY_OF, "null", None),
        (ANY_OF, "None", None),
        ({"oneOf": [{"type": "array", "items": {}}, {"type": "boolean"}]}, "[true]", [True]),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "5", 5),
        ({"$ref": "#/$defs/size"}, "5", 5),
        ({"anyOf": [{"$ref": "#/$defs/size"}, {"type": "null"}]}, "null", None),
        ({"$ref": "#/$defs/loop"}, "5", 5),
        ({"$ref": "#/$defs/none"}, "5", 5),
        ({"enum": ["1", 2, None]}, "1", "1"),
        ({"enum": ["1", 2, None]}, "2", 2),
        ({"enum": ["1", 2, None]}, "null", None),
        ({"const": "true"}, "true", "true"),
        ({"const": True}, "True", True),
        ({"properties": {"a": {}}}, '{"a": 1}', {"a": 1}),
        ({}, "5", 5),
        ({}, "05", "05"),
        ({}, "plain", "plain"),
        (True, "true", True),
        ({}, "True", "True"),
        ({"type": {"a": 1}}, "x", "x"),
        ({"format": "date"}, "2026-11-27", "2026-11-27"),
    ],
    ids=str,
)  # fmt: skip
def test_values_follow_their_schema(schema, text, value):
    definitions = {"size": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}
    found = json.loads(converted(schema, text, **{"$defs": definitions}))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("schema", [{"type": "integer"}, {"type": "number"}, ANY_OF, {}])
def test_integers_of_any_size_stay_as_they_are(schema):
    assert converted(schema, HUGE) == HUGE


@pytest.mark.parametrize("schema", [None, 7, [], {"properties": 3}, {"type": "object"}])
def test_parameters_may_be_anything_that_a_client_sends(schema):
    parameters = Parameters(schema)
    assert parameters.names == [] and parameters.convert("x", "a") == '"a"'


def test_other_parameters_have_the_schema_of_additional_ones():
    parameters = Parameters({"additionalProperties": {"type": "string"}})
    assert parameters.convert("x", "5") == '"5"'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (' {"a": 1.50} ', '{"a": 1.50}'),
        ('{"a": "x\ny"}', '{"a": "x\\ny"}'),
        ('{"a": "C:\\dir\\new"}', '{"a": "C:\\\\dir\\new"}'),
        ("{'a': 'it\\'s', }", '{"a": "it\'s"}'),
        ("{'a': (1, 2)}", '{"a": [1, 2]}'),
        ('{"a": Infinity, "a": NaN}', '{"a": "NaN"}'),
        ('{"a": ' + "[" * 200 + "]" * 200 + "}", None),
        ('{"a": oops}', None),
        ('{"a": 1} x', None),
        ('{"a" 1}', None),
        ("", None),
    ],
)
def test_json_is_put_right_or_refused(text, expected):
    found = as_json(text)
    if expected is None and text.count("[") == 200:
        assert found is None or found == text  # within Python's own limit
    else:
        assert found == expected


def test_each_reference_is_followed_once():
    many = [{"$ref": "#/$defs/a"}] * 50
    schema = {"$ref": "#/$defs/a"}
    defs = {"a": {"anyOf": [*many, {"$ref": "#/$defs/b"}]}, "b": {"anyOf": [{"const": 5}, *many]}}
    assert converted(schema, "5", **{"$defs": defs}) == "5"
    assert converted(schema, "x", **{"$defs": defs}) == '"x"'
