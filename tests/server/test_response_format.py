"""``response_format`` and vLLM's fields, read into StructuredOutputsParams, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher

from mlx_paged import StructuredOutputsParams
from mlx_paged.server.errors import ApiError
from mlx_paged.server.fields import FormatFields
from mlx_paged.server.responses.body import TextOptions

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON = StructuredOutputsParams(json=SCHEMA)


def structured(body: dict[str, Any]) -> StructuredOutputsParams | None:
    return FormatFields.read(body).structured().params


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"response_format": None, "guided_json": None}, None),
        ({"response_format": {"type": "text"}}, None),
        (
            {"response_format": {"type": "json_object"}},
            StructuredOutputsParams(json_object=True),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            JSON,
        ),
        ({"guided_json": SCHEMA}, JSON),
        ({"guided_json": '{"type": "object"}'}, StructuredOutputsParams(json={"type": "object"})),
        ({"guided_regex": "a+"}, StructuredOutputsParams(regex="a+")),
        ({"json_schema": SCHEMA}, JSON),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, JSON),
        ({"guided_choice": ["a", "b"]}, StructuredOutputsParams(choice=["a", "b"])),
        ({"guided_grammar": 'start: "a"'}, StructuredOutputsParams(grammar='start: "a"')),
        (
            {"structured_outputs": {"json_object": True, "whitespace_flexible": True}},
            StructuredOutputsParams(json_object=True, whitespace_flexible=True),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            JSON,
        ),
        ({"response_format": {"type": "text"}, "guided_json": SCHEMA}, JSON),
    ],
)
def test_what_clients_send_is_read(body: dict[str, Any], expected: StructuredOutputsParams | None):
    assert structured(body) == expected


def test_a_grammar_of_llama_cpp_is_one_of_llguidance():
    params = structured({"grammar": 'root ::= "yes" | "no"'})
    assert params is not None and params.grammar is not None
    assert 'start: "yes"' in params.grammar
    assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(params.grammar))
    lark = 'start: "yes" | "no"'
    expected = StructuredOutputsParams(grammar=lark)
    assert structured({"grammar": lark}) == expected


def test_the_format_of_responses_has_its_schema_beside_the_type():
    text = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    for answer_format, expected in ((text, JSON), ({"type": "text"}, None)):
        found = TextOptions.read({"format": answer_format}).format
        assert found is not None
        assert found.requested("text.format").params == expected


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"response_format": "json"}, "response_format", "must be an object"),
        ({"response_format": {}}, "response_format.type", "is missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be 'text' or "),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "is missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
            "is missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "response_format.json_schema.schema",
            "must be a JSON schema",
        ),
        (
            {"response_format": {"type": "json_object", "schema": 5}},
            "response_format.schema",
            "must be a JSON schema",
        ),
        ({"grammar": "root ::= ("}, "grammar", "it is not GBNF"),
        ({"grammar": "(" * 100_000}, "grammar", "it is not GBNF"),
        ({"grammar": "a" * (2**18 + 1)}, "grammar", "has 262,145 characters"),
        ({"grammar": 5}, "grammar", "must be a text"),
        ({"json_schema": "{"}, "json_schema", "is not a JSON schema"),
        ({"guided_json": "{"}, "guided_json", "is not a JSON schema"),
        ({"guided_regex": 3}, "guided_regex", "must be a text"),
        ({"guided_choice": []}, "guided_choice", "must be texts"),
        ({"guided_choice": "yes"}, "guided_choice", "must be texts"),
        (
            {"guided_json": {}, "guided_regex": "a"},
            "guided_regex",
            "can't be combined with guided_json",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.choice",
            "exactly one of",
        ),
        (
            {"structured_outputs": {"regex": "a", "structural_tag": "x"}},
            "structured_outputs.structural_tag",
            "is not supported",
        ),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": False}},
            "structured_outputs.disable_any_whitespace",
            "is not supported",
        ),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str, message: str):
    with pytest.raises(ApiError) as refused:
        FormatFields.read(body).structured()
    assert refused.value.status == 400 and refused.value.param == param
    assert message in refused.value.message and "\n" not in refused.value.message
