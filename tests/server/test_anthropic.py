"""Anthropic's messages, asked for with Anthropic's client."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import anthropic
import pytest
from helpers.fast_lane import mostly_slow

from mlx_paged.server.anthropic.messages import MessagesRequest, read_messages_body
from mlx_paged.server.errors import ApiError

TOOL = {
    "name": "read",
    "description": "Read a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}
ANSWER = (
    "<think>\nIt is\nthere.\n</think>\n\nI look.\n<tool_call>\n"
    '{"name": "read", "arguments": {"path": "é</tool_call>"}}\n</tool_call>\n<tool_call>\n'
    '{"name": "read", "arguments": {}}\n</tool_call>'
)
BODY: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "What is there?"}],
}
THINK = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


def raw_events(url: str, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    request = urllib.request.Request(
        f"{url}/v1/messages",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "x-api-key": "none"},
    )
    with urllib.request.urlopen(request) as response:
        blocks = response.read().decode().split("\n\n")
    lines = [block.split("\n") for block in blocks if block]
    return [(name[len("event: ") :], json.loads(data[len("data: ") :])) for name, data in lines]


def message_of(agent, is_streamed, **body):
    """The message of an answer, put together by the client if it is streamed."""
    if not is_streamed:
        return agent.anthropic.messages.create(**body)
    with agent.anthropic.messages.stream(**body) as stream:
        return stream.get_final_message()


def test_an_answer_has_blocks_of_thinking_text_and_calls(agent):
    agent.script(ANSWER)
    message = agent.anthropic.messages.create(**BODY, tools=[TOOL], **THINK)
    assert (message.type, message.role, message.model) == ("message", "assistant", "demo")
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    thinking, text, first, second = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "It is\nthere.")
    assert thinking.signature
    assert (text.type, text.text) == ("text", "I look.")
    assert (first.type, first.name, first.input) == ("tool_use", "read", {"path": "é</tool_call>"})
    assert (second.name, second.input) == ("read", {})
    assert first.id != second.id
    num_tokens = agent.anthropic.messages.count_tokens(
        model="demo", messages=BODY["messages"], tools=[TOOL], **THINK
    )
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == num_tokens.input_tokens
    assert 0 < usage.output_tokens_details.thinking_tokens < usage.output_tokens


def test_the_events_of_a_stream_come_in_the_order_of_the_protocol(agent):
    agent.script(ANSWER)
    body = {**BODY, "tools": [TOOL], "stream": True, **THINK}
    events = raw_events(agent.url, body)
    assert all(name == data["type"] for name, data in events)
    merged = []
    for name, data in events:
        kind = data["delta"]["type"] if name == "content_block_delta" else name
        merged += [kind] if not merged or merged[-1] != kind else []
    assert merged == [
        "message_start", "ping",
        "content_block_start", "thinking_delta", "signature_delta", "content_block_stop",
        "content_block_start", "text_delta", "content_block_stop",
        "content_block_start", "input_json_delta", "content_block_stop",
        "content_block_start", "input_json_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    starts = [data for name, data in events if name == "content_block_start"]
    assert [data["index"] for data in starts] == [0, 1, 2, 3]
    assert starts[2]["content_block"]["input"] == {}
    start, end = events[0][1]["message"], events[-2][1]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] + start["usage"]["cache_read_input_tokens"] > 0
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    # A call comes once it is complete.
    parts = [
        data["delta"]["partial_json"]
        for name, data in events
        if name == "content_block_delta" and data["index"] == 2
    ]
    assert [json.loads(part) for part in parts] == [{"path": "é</tool_call>"}]


def test_a_stream_and_a_whole_answer_say_the_same(agent):
    messages = []
    for is_streamed in (False, True):
        agent.script(ANSWER)
        messages.append(message_of(agent, is_streamed, **BODY, tools=[TOOL], **THINK))
    whole, streamed = (
        [
            {name: value for name, value in block.model_dump().items() if name != "id"}
            for block in message.content
        ]
        for message in messages
    )
    for block in streamed:
        block.pop("parsed_output", None)
    assert whole == streamed
    assert messages[0].usage.output_tokens == messages[1].usage.output_tokens


@mostly_slow("is_streamed", [False, True], quick=(1,))
@pytest.mark.parametrize(
    ("answer", "fields", "reason", "sequence"),
    [
        ("Good day.", {}, "end_turn", None),
        ("Good day, STOP and go", {"stop_sequences": ["END", "STOP"]}, "stop_sequence", "STOP"),
        ("Good day.", {"max_tokens": 2}, "max_tokens", None),
        (ANSWER, {"tools": [TOOL], "tool_choice": {"type": "none"}}, "end_turn", None),
    ],
)
def test_an_answer_says_why_it_ended(agent, answer, fields, reason, sequence, is_streamed):
    agent.script(answer)
    message = message_of(agent, is_streamed, **{**BODY, **fields})
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    assert message.content[-1].type == "text"


def test_a_prompt_that_is_too_long_is_counted_and_refused(agent):
    limit = agent.service.max_model_len
    text = "a " * limit
    messages = [{"role": "user", "content": text}]
    num_tokens = agent.anthropic.messages.count_tokens(model="demo", messages=messages)
    assert num_tokens.input_tokens > limit
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        agent.anthropic.messages.create(model="demo", max_tokens=10, messages=messages)


def test_a_call_that_was_broken_off_is_no_call(agent):
    agent.script('Well.<tool_call>{"name": "read", "arguments": {"path": "aaaa', end=False)
    fields = {**BODY, "max_tokens": 30, "tools": [TOOL]}
    message = agent.anthropic.messages.create(**fields)
    assert message.stop_reason == "max_tokens"
    assert {block.type for block in message.content} == {"text"}


def test_a_call_whose_arguments_are_no_json_is_text(agent):
    text = '<tool_call>{"name": "read", "arguments": {"path": oops}}</tool_call>'
    for is_streamed in (False, True):
        agent.script(text)
        message = message_of(agent, is_streamed, **BODY, tools=[TOOL])
        assert [(block.type, block.text) for block in message.content] == [("text", text)]
        assert message.stop_reason == "end_turn"


def test_an_answer_goes_on_from_what_the_client_began(agent):
    messages = [*BODY["messages"], {"role": "assistant", "content": "There is a"}]
    agent.script(" file.")
    message = agent.anthropic.messages.create(**{**BODY, "messages": messages})
    assert message.content[0].text == " file."


def test_thinking_that_is_not_to_be_shown_is_not(agent):
    agent.script(ANSWER)
    thinking = {"type": "adaptive", "display": "omitted"}
    message = agent.anthropic.messages.create(**BODY, thinking=thinking)
    assert (message.content[0].type, message.content[0].thinking) == ("thinking", "")


# What bodies become


def read(service, *, has_betas: bool = False, **fields):
    request = MessagesRequest.read({**BODY, **fields}, leaves_out=has_betas)
    return read_messages_body(request, service)


def test_a_conversation_becomes_messages_that_templates_know(shared_agent_service):
    body = read(
        shared_agent_service,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be kind."},
        ],
        messages=[
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "c"},
                    {"type": "tool_use", "id": "1", "name": "read", "input": {"path": "d"}},
                    {"type": "tool_use", "id": "2", "name": "read", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": "e"},
                    {"type": "tool_result", "tool_use_id": "2", "is_error": True,
                     "content": [{"type": "text", "text": "f"}]},
                    {"type": "text", "text": "g"},
                ],
            },
            {"role": "system", "content": "h"},
        ],
    )  # fmt: skip
    calls = [
        {"id": "1", "type": "function", "function": {"name": "read", "arguments": {"path": "d"}}},
        {"id": "2", "type": "function", "function": {"name": "read", "arguments": {}}},
    ]
    assert body.messages == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": "c", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "name": "read", "content": "e"},
        {"role": "tool", "tool_call_id": "2", "name": "read", "content": "Error: f"},
        {"role": "user", "content": "g\n\n<system-reminder>\nh\n</system-reminder>"},
    ]


def test_fields_become_parameters(shared_agent_service):
    body = read(
        shared_agent_service,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stop_sequences=["END"],
        tools=[TOOL | {"strict": True, "cache_control": {"type": "ephemeral"}}],
        tool_choice={"type": "tool", "name": "read", "disable_parallel_tool_use": True},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {}}},
        thinking={"type": "disabled"},
        metadata={"user_id": "a"},
        service_tier="auto",
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        cache_control={"type": "ephemeral"},
    )
    params = body.generation.params
    values = (params.max_tokens, params.temperature, params.top_p, params.top_k, params.stop)
    assert values == (200, 0.5, 0.9, 7, ("END",))
    assert params.structured_outputs is not None
    assert (body.tool_choice, body.parallel_tool_calls) == ("read", False)
    assert body.template_options == {"enable_thinking": False, "reasoning_effort": "low"}
    [tool] = body.tools
    assert tool.form == {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Read a file.",
            "parameters": TOOL["input_schema"],
            "strict": True,
        },
    }


def test_a_field_of_a_beta_is_left_out_where_the_client_says_that_it_uses_betas(
    shared_agent_service,
):
    plain = read(shared_agent_service)
    assert read(shared_agent_service, has_betas=True, novelty=1) == plain
    for fields in ({"novelty": 1}, {"container": "a", "has_betas": True}):
        with pytest.raises(ApiError) as error:
            read(shared_agent_service, **fields)
        assert error.value.param == next(iter(fields))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "a"}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result",
                                                        "tool_use_id": "1"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "a"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"mcp_servers": [{"url": "a"}]}, "mcp_servers"),
        ({"model": "other"}, "model"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(shared_agent_service, fields, param):
    with pytest.raises(ApiError) as error:
        read(shared_agent_service, **fields)
    assert error.value.param == param
    assert param in error.value.message or param == "model"


def test_a_thread_is_refused_by_the_code_that_clients_fall_back_on(agent):
    with pytest.raises(anthropic.BadRequestError) as error:
        agent.anthropic.messages.create(**BODY, extra_body={"thread": {"type": "create"}})
    assert error.value.response.json()["error"]["details"]["error_code"] == (
        "thread_unsupported_request"
    )
    assert "send all messages" in error.value.message


def test_context_is_a_reminder_and_a_message_is_the_users(shared_agent_service):
    told = [{"role": "ctx", "content": "It rains."}, {"role": "msg", "content": "Hello"}]
    body = read(shared_agent_service, messages=told)
    content = "<system-reminder>\nIt rains.\n</system-reminder>\n\nHello"
    assert body.messages == [{"role": "user", "content": content}]


def test_errors_have_the_shape_of_the_protocol(agent):
    with pytest.raises(anthropic.NotFoundError) as error:
        agent.anthropic.messages.create(**{**BODY, "model": "other"})
    assert error.value.body["type"] == "error"
    assert error.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as error:
        agent.anthropic.messages.count_tokens(model="demo", messages=[])
    assert error.value.body["error"]["type"] == "invalid_request_error"
