"""Parameters that are invalid, alone or together, are refused with 400 and the name of the client's
own field, in every protocol and whether found in the body, by the grammar or by an answer.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from mlx_paged.server.service import Service

MESSAGES = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ANTHROPIC, RESPONSES = "/v1/messages", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 8},
    COMPLETIONS: {"prompt": "Hello", "max_tokens": 8},
    ANTHROPIC: {"messages": MESSAGES, "max_tokens": 8},
    RESPONSES: {"input": "Hello", "max_output_tokens": 8},
}
GOOD = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
BAD = {"type": "object", "properties": {"a": {"type": "strin"}}, "required": ["a"]}
BIG = 1234567890123456789  # in float64, ...768
EXACT = {
    "type": "object",
    "properties": {"id": {"const": BIG}},
    "required": ["id"],
    "additionalProperties": False,
}
INEXACT = {"properties": {"id": {"type": "integer", "minimum": BIG, "multipleOf": 3}}}
LONG = "n" * 300_000


@pytest.fixture(autouse=True)
def template(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo model's own shows no tools, so they would be refused in any case."""
    shown = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    own = service.tokenizer.chat_template
    monkeypatch.setattr(service.tokenizer._tokenizer, "chat_template", shown + own)


def function(name: str, parameters: dict[str, Any] = GOOD) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def refusal(url: str, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The error of a response with 400, and all of its text."""
    response = httpx.post(url + path, json={**BODIES[path], **body}, timeout=60)
    assert response.status_code == 400, response.text
    return response.json()["error"], response.text


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (
            CHAT,
            {"tools": [function("f")], "tool_choice": "required", "ignore_eos": True},
            "ignore_eos",
            "can't be combined with tool_choice",
        ),
        (
            CHAT,
            {"guided_choice": ["a"], "ignore_eos": True},
            "ignore_eos",
            "can't be combined with guided_choice",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_object"}, "ignore_eos": True},
            "ignore_eos",
            "can't be combined with response_format",
        ),
        (
            CHAT,
            {"guided_choice": ["a", "b"], "allowed_token_ids": [5, 6]},
            "allowed_token_ids",
            "allowed_token_ids and guided_choice together allow no token as token 1 of the answer",
        ),
        (
            CHAT,
            {"tools": [function("f")], "tool_choice": "required", "allowed_token_ids": [5]},
            "allowed_token_ids",
            "allowed_token_ids and tool_choice together allow no token",
        ),
        (
            COMPLETIONS,
            {"guided_choice": ["a"], "min_tokens": 5},
            "min_tokens",
            "min_tokens and guided_choice together allow no token as token 2 of the answer",
        ),
        (
            COMPLETIONS,
            {"guided_choice": ["ab"], "bad_words": ["a", "ab", "b"]},
            "bad_words",
            "bad_words and guided_choice together allow no token",
        ),
        (COMPLETIONS, {"guided_regex": "("}, "guided_regex", "guided_regex can't be compiled"),
        (
            COMPLETIONS,
            {"structured_outputs": {"regex": "("}},
            "structured_outputs.regex",
            "structured_outputs.regex can't be compiled",
        ),
        (COMPLETIONS, {"guided_json": BAD}, "guided_json", "Invalid type: strin"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": BAD}}},
            "response_format.json_schema.schema",
            "response_format.json_schema.schema can't be compiled: Invalid type: strin",
        ),
        (
            CHAT,
            {"max_tokens": None, "max_completion_tokens": 4, "min_tokens": 5},
            "min_tokens",
            "at most max_completion_tokens=4, got 5",
        ),
        (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be"),
        (RESPONSES, {"min_tokens": 9}, "min_tokens", "at most max_output_tokens=8"),
        (
            RESPONSES,
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": BAD}}},
            "text.format.schema",
            "text.format.schema can't be compiled",
        ),
        (
            CHAT,
            {"tools": [function("f"), function("g", BAD)], "tool_choice": "required"},
            "tools[1].function.parameters",
            "tools[1].function.parameters can't be compiled: Invalid type: strin",
        ),
        (
            RESPONSES,
            {
                "tools": [
                    {"type": "namespace", "name": "n", "tools": [function("f")["function"]]},
                    {"type": "function", "name": "g", "parameters": BAD},
                ],
                "tool_choice": "required",
            },
            "tools[1].parameters",
            "tools[1].parameters can't be compiled: Invalid type: strin",
        ),
        (
            CHAT,
            {"tools": [function("f", INEXACT)], "tool_choice": "required"},
            "tools[0].function.parameters",
            "tools[0].function.parameters has an integer beyond 2^53 that can't be kept exactly "
            "beside multipleOf",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": INEXACT}}},
            "response_format.json_schema.schema",
            "response_format.json_schema.schema has an integer beyond 2^53 that can't be kept",
        ),
        (
            CHAT,
            {"tools": [function(LONG)], "tool_choice": "required"},
            "tools",
            "tools has 300,",
        ),
    ],
)
def test_an_error_names_the_clients_own_field(
    server_url: str, path: str, body: dict[str, Any], param: str, words: str
):
    if body.get("tools", [{}])[0].get("type") == "namespace":
        body["tools"][0]["tools"][0]["type"] = "function"
    error, _ = refusal(server_url, path, body)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"] and "object_0" not in error["message"]
    assert not error["message"].startswith("[")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            {"tools": [{"name": "f", "input_schema": BAD}], "tool_choice": {"type": "any"}},
            "tools[0].input_schema can't be compiled: Invalid type: strin",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": BAD}}},
            "output_config.format.schema can't be compiled: Invalid type: strin",
        ),
        (
            {"output_format": {"type": "json_schema", "schema": {"const": "a" * 300_000}}},
            "output_format.schema can't be used: json has 300,0",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens must be"),
        ({"top_p": 7.0}, "top_p must be"),
    ],
)
def test_an_error_names_the_field_of_anthropics_body(
    server_url: str, body: dict[str, Any], words: str
):
    error, text = refusal(server_url, ANTHROPIC, body)
    assert error["message"].startswith(words) and len(text) < 1000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {LONG: 1}),
        (RESPONSES, {LONG: 1}),
        (CHAT, {"response_format": {"type": "text", LONG: 1}}),
        (CHAT, {"tools": [function(LONG), function(LONG)]}),
        (CHAT, {"chat_template_kwargs": {"tools": 1}, LONG: 1}),
        (COMPLETIONS, {"guided_regex": f"[{LONG[:200_000]}"}),
        (COMPLETIONS, {"guided_grammar": f"start: {LONG[:200_000]}"}),
    ],
)
def test_an_error_shortens_long_names(server_url: str, path: str, body: dict[str, Any]):
    _, text = refusal(server_url, path, body)
    assert "nnn" in text and len(text) < 1000


def test_a_stream_that_can_not_go_on_ends_with_the_clients_field(server_url: str, service: Service):
    allowed = service.tokenizer.encode("a", add_special_tokens=False)
    body = {"guided_choice": ["ab"], "allowed_token_ids": allowed, "stream": True}
    error, _ = refusal(server_url, CHAT, body)
    assert error["param"] == "allowed_token_ids"


def test_integers_beyond_2_53_are_exact_in_answers_and_calls(server_url: str):
    def message(**body: Any) -> dict[str, Any]:
        body = {"messages": MESSAGES, "max_tokens": 60, **body}
        response = httpx.post(server_url + CHAT, json=body, timeout=60)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()["choices"][0]["message"]
        return found

    for schema in (EXACT, {"type": "integer", "minimum": BIG, "maximum": BIG}):
        answer = message(guided_json=schema)["content"]
        assert str(BIG) in answer
    tools = [function("f", EXACT), function("g", {"type": "object", "additionalProperties": False})]
    choice = {"type": "function", "function": {"name": "f"}}
    (call,) = message(tools=tools, tool_choice=choice, parallel_tool_calls=False)["tool_calls"]
    assert json.loads(call["function"]["arguments"])["id"] == BIG
