"""What clients repeat of a conversation, in every protocol: fields of other servers, and parts that
are not text.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest

from mlx_paged.server import schemas
from mlx_paged.server.anthropic.messages import MessagesRequest, read_messages_body
from mlx_paged.server.errors import ApiError
from mlx_paged.server.openai.chat import ChatRequest, read_chat
from mlx_paged.server.responses.body import ResponsesRequest, read_responses_body

IMAGES = "[images are left out: this model reads text only]"
PROVIDER = {"provider_specific_fields": {"a": 1}}  # of litellm
SCHEMA = {"type": "object", "properties": {}}


def chat(service, *messages: dict[str, Any], **more: Any):
    return read_chat(ChatRequest.read({"messages": list(messages), **more}), service)


def messages(service, *told: dict[str, Any], has_betas: bool = False, **more: Any):
    body = {"model": "demo", "max_tokens": 9, "messages": list(told), **more}
    request = MessagesRequest.read(body, leaves_out=has_betas)
    return read_messages_body(request, service)


def responses(service, *items: dict[str, Any], **more: Any):
    return read_responses_body(ResponsesRequest.read({"input": list(items), **more}), service)


def test_fields_of_other_servers_in_a_chat_are_left_out(shared_service):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    parsed = {**call["function"], "parsed_arguments": {}}  # of OpenAI's own parse()
    plain = [
        {"role": "user", "content": [{"type": "text", "text": "Add."}]},
        {"role": "assistant", "content": "I add.", "tool_calls": [call]},
        {"role": "tool", "content": "", "tool_call_id": "1"},
    ]
    told = [
        {"role": "user", "content": [{"type": "text", "text": "Add.", "cache_control": {}}]},
        {
            "role": "assistant",
            "content": "I add.",
            "tool_calls": [{**call, "function": parsed, "extra_content": {}, **PROVIDER}],
            "parsed": None,
            "reasoning_details": [{"type": "reasoning.text"}],
            "thinking_blocks": [{"type": "thinking", "thinking": "Hm."}],
            **PROVIDER,
        },
        {"role": "tool", "content": None, "tool_call_id": "1", "citations": [], **PROVIDER},
    ]
    tool = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
    hinted = {
        "type": "function",
        "function": {"name": "add", "colour": 1, "parameters": SCHEMA},
        "cache_control": {"type": "ephemeral"},
    }
    job, expected = chat(shared_service, *told, tools=[hinted]), chat(shared_service, *plain)
    assert job.messages == expected.messages
    assert job.tools == chat(shared_service, *plain, tools=[tool]).tools
    assert [each.form for each in job.tools] == [tool]
    for name in ("function_call", "audio"):  # It would have something to say.
        with pytest.raises(ApiError) as refused:
            chat(shared_service, {"role": "assistant", "content": "", name: {"id": "a"}})
        assert refused.value.param == f"messages[0].{name}"
    with pytest.raises(ApiError, match="colour is not supported"):
        chat(shared_service, *plain, colour=1)


def test_fields_of_other_servers_in_anthropics_messages_are_left_out(shared_service):
    call = {"type": "tool_use", "id": "1", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "a"}]}
    plain = [
        {"role": "user", "content": [{"type": "text", "text": "Read."}]},
        {"role": "assistant", "content": [{"type": "text", "text": "I read."}, call]},
        {"role": "user", "content": [result]},
    ]
    hint = {"cache_control": {"type": "ephemeral"}, "citations": [], "novelty": 1}
    told = [
        {**message, "novelty": 1, "content": [{**block, **hint} for block in message["content"]]}
        for message in plain
    ]
    tool = {"name": "read", "input_schema": SCHEMA}
    job = messages(shared_service, *told, tools=[{**tool, **hint, "defer_loading": False}])
    expected = messages(shared_service, *plain, tools=[tool])
    assert (job.messages, job.tools) == (expected.messages, expected.tools)
    thinking = {"type": "enabled", "budget_tokens": 9, "novelty": 1}
    assert messages(shared_service, *plain, thinking=thinking, has_betas=True)
    with pytest.raises(ApiError, match=r"thinking\.novelty is not supported"):
        messages(shared_service, *plain, thinking=thinking)


def test_fields_of_other_servers_in_items_are_left_out(shared_service):
    call = {"type": "function_call", "call_id": "1", "name": "read", "arguments": "{}"}
    plain = [
        {"role": "user", "content": [{"type": "input_text", "text": "Read."}]},
        call,
        {"type": "function_call_output", "call_id": "1", "output": "a"},
    ]
    told = [{**item, "novelty": 1, "id": "x", "status": "completed"} for item in plain]
    told[0]["content"] = [{**plain[0]["content"][0], "prompt_cache_breakpoint": {}, "novelty": 1}]
    assert responses(shared_service, *told).messages == responses(shared_service, *plain).messages


def test_what_is_left_out_is_logged_once_and_only_by_words(
    shared_service, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(schemas, "_logged", set())
    user = {"role": "user", "content": "a"}
    with caplog.at_level(logging.INFO, logger="mlx_paged.server"):
        for _ in range(2):
            chat(shared_service, user, {**user, "novelty": 1, "a\nb": 2, "x" * 100: 3})
    assert [record.message for record in caplog.records] == [
        "an unknown field was ignored: messages[].novelty"
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="mlx_paged.server"):
        chat(shared_service, {**user, **{f"name_{number}": 1 for number in range(1000)}})
    assert len(caplog.records) == 255


def test_an_image_in_a_history_becomes_a_line_of_text(shared_service):
    after = {"role": "user", "content": "And now?"}
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    user = {"role": "user", "content": [image, {"type": "text", "text": " What is it?"}]}
    assert chat(shared_service, user, after).messages == [
        {"role": "user", "content": f"{IMAGES} What is it?"}, after,
    ]  # fmt: skip
    block = {"type": "image", "source": {}}
    call = {"type": "tool_use", "id": "1", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [block]}
    told = [
        {"role": "user", "content": [block, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": "A cat."},
        after,
    ]
    job = messages(shared_service, *told, tools=[{"name": "read", "input_schema": SCHEMA}])
    assert [message["content"] for message in job.messages] == [
        f"{IMAGES}\n\nWhat is it?", "", IMAGES, "A cat.", "And now?",
    ]  # fmt: skip
    part = {"type": "input_image", "image_url": "data:"}
    items = [
        {"role": "user", "content": [part, {"type": "input_text", "text": " What is it?"}]},
        after,
    ]
    job = responses(shared_service, *items)
    assert [message["content"] for message in job.messages] == [f"{IMAGES} What is it?", "And now?"]


@pytest.mark.parametrize(
    ("read", "content"),
    [
        (chat, [{"type": "image_url", "image_url": {"url": "data:"}}]),
        (messages, [{"type": "image", "source": {}}]),
        (responses, [{"type": "input_image", "image_url": "data:"}]),
    ],
)
def test_an_image_in_the_newest_message_is_refused_by_its_place(shared_service, read, content):
    with pytest.raises(ApiError, match=r"\[1\].content\[0\].type is .*text-only here: no images"):
        read(shared_service, {"role": "user", "content": "a"}, {"role": "user", "content": content})
