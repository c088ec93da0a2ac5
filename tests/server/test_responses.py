"""OpenAI's responses, asked for with OpenAI's client."""

from __future__ import annotations

import json

import openai
import pytest

from mlx_paged.server.errors import ApiError
from mlx_paged.server.kept_answers import KeptItems
from mlx_paged.server.responses.body import ResponsesRequest, read_responses_body, seal

TOOL = {
    "type": "function",
    "name": "read",
    "description": "Read a file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    "strict": False,
}
ANSWER = (
    "<think>\nIt is there.\n</think>\n\nI look.\n<tool_call>\n"
    '{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
)
ASK = {"model": "demo", "input": "What is there?", "max_output_tokens": 200}


def test_an_answer_has_items_of_reasoning_text_and_calls(agent):
    agent.script(ANSWER)
    response = agent.openai.responses.create(**ASK, tools=[TOOL], metadata={"a": "b"})
    assert (response.object, response.status, response.model) == ("response", "completed", "demo")
    assert response.metadata == {"a": "b"} and response.error is None
    reasoning, message, call = response.output
    assert [part.text for part in reasoning.content] == ["It is there."]
    assert reasoning.encrypted_content is None
    assert (message.role, message.status) == ("assistant", "completed")
    assert response.output_text == "I look."
    assert (call.name, json.loads(call.arguments), call.status) == (
        "read", {"path": "a"}, "completed",
    )  # fmt: skip
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens


def test_the_events_of_a_stream_come_in_the_order_of_the_protocol(agent):
    agent.script(ANSWER)
    events = list(agent.openai.responses.create(**ASK, tools=[TOOL], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    merged = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    assert merged == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]  # fmt: skip
    response = events[-1].response
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in added] == [item.id for item in done]
    assert done == response.output
    for event in events:
        if event.type.endswith((".delta", ".done")) and event.type != "response.output_item.done":
            assert event.item_id == response.output[event.output_index].id
    for name, text in (
        ("reasoning_text", "It is there."),
        ("output_text", "I look."),
        ("function_call_arguments", '{"path": "a"}'),
    ):
        deltas = [event.delta for event in events if event.type == f"response.{name}.delta"]
        assert "".join(deltas) == text  # in as many as the reader was quick to take


def test_a_stream_and_a_whole_answer_say_the_same(agent):
    outputs = []
    for is_streamed in (False, True):
        agent.script(ANSWER)
        if is_streamed:
            with agent.openai.responses.stream(**ASK, tools=[TOOL]) as stream:
                response = stream.get_final_response()
        else:
            response = agent.openai.responses.create(**ASK, tools=[TOOL])
        outputs.append(
            [
                (item.type, getattr(item, "content", None) and item.content[0].text,
                 getattr(item, "arguments", None))
                for item in response.output
            ]
        )  # fmt: skip
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_that_was_cut_is_incomplete(agent, is_streamed):
    agent.script("One two three four five six seven eight nine ten.")
    fields = {**ASK, "max_output_tokens": 4}
    if is_streamed:
        *_, last = agent.openai.responses.create(**fields, stream=True)
        assert last.type == "response.incomplete"
        response = last.response
    else:
        response = agent.openai.responses.create(**fields)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    assert response.usage.output_tokens == 4


def test_logprobs_are_those_of_the_text(agent):
    agent.script(ANSWER)
    include = ["message.output_text.logprobs"]
    response = agent.openai.responses.create(**ASK, tools=[TOOL], include=include, top_logprobs=2)
    [text] = response.output[1].content
    assert "".join(each.token for each in text.logprobs) == "I look."
    assert {len(each.top_logprobs) for each in text.logprobs} == {2}


def test_an_answer_keeps_to_a_schema(agent):
    schema = {"type": "object", "properties": {"sum": {"enum": [41, 42]}}, "required": ["sum"],
              "additionalProperties": False}  # fmt: skip
    text = {"format": {"type": "json_schema", "name": "sum", "schema": schema, "strict": True}}
    reasoning = {"effort": "none"}
    response = agent.openai.responses.create(**ASK, text=text, reasoning=reasoning)
    assert json.loads(response.output_text)["sum"] in (41, 42)


def test_nothing_is_stored_and_looking_it_up_says_so(agent):
    agent.script("Hello!")
    response = agent.openai.responses.create(**ASK, store=True)
    assert response.store is False
    with pytest.raises(openai.NotFoundError, match="responses are not stored"):
        agent.openai.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError, match="responses are not stored"):
        agent.openai.responses.delete(response.id)


# What bodies become


def read(service, **fields):
    return read_responses_body(ResponsesRequest.read({**ASK, **fields}), service)


def test_tools_of_a_namespace_are_tools_and_their_calls_say_it(agent):
    agent.script(ANSWER)
    namespace = {"type": "namespace", "name": "files", "description": "Of files.", "tools": [TOOL]}
    other = {**TOOL, "name": "write"}
    response = agent.openai.responses.create(**ASK, tools=[other, namespace])
    call = response.output[-1]
    assert (call.name, call.namespace) == ("read", "files")
    agent.script(ANSWER)
    plain = agent.openai.responses.create(**ASK, tools=[other, TOOL])
    assert plain.usage.input_tokens == response.usage.input_tokens
    assert getattr(plain.output[-1], "namespace", None) is None


def test_items_that_a_client_refers_to_are_those_that_it_was_told(agent):
    agent.script(ANSWER)
    first = agent.openai.responses.create(**ASK, tools=[TOOL])
    *_, call = first.output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
    question = {"role": "user", "content": ASK["input"]}
    tokens = []
    for items in (
        [{"type": "item_reference", "id": item.id} for item in first.output],
        [item.model_dump(exclude_none=True) for item in first.output],
    ):
        agent.script("It says 1.")
        ask = {**ASK, "input": [question, *items, output]}
        tokens.append(agent.openai.responses.create(**ask, tools=[TOOL]).usage.input_tokens)
    assert tokens[0] == tokens[1]


def test_items_are_kept_for_their_owner_up_to_a_bound():
    kept = KeptItems(max_characters=100)
    items = [{"id": str(number), "text": "x" * 20} for number in range(4)]
    kept.keep(None, items[:2])
    assert kept.find(None, "0") == items[0]  # so that 1 is older
    assert kept.find("somebody", "0") is None
    kept.keep(None, items[2:3])
    assert [kept.find(None, str(number)) for number in range(3)] == [items[0], None, items[2]]
    kept.keep(None, [{"id": "0", "text": "new"}])
    assert kept.find(None, "0") == {"id": "0", "text": "new"}


def test_items_become_messages_that_templates_know(shared_agent_service):
    call = {"type": "function_call", "name": "read", "call_id": "1", "arguments": '{"path": "a"}'}
    other = {"type": "function_call", "name": "read", "call_id": "2", "arguments": "{oops"}
    body = read(
        shared_agent_service,
        instructions="Be brief.",
        input=[
            {"type": "message", "role": "developer",
             "content": [{"type": "input_text", "text": "Be kind."}]},
            {"role": "user", "content": "a"},
            {"type": "reasoning", "id": "rs_1", "summary": [],
             "encrypted_content": seal("hm")},
            {"type": "message", "role": "assistant", "status": "completed", "id": "msg_1",
             "content": [{"type": "output_text", "text": "b", "annotations": []}]},
            call,
            other,
            {"type": "function_call_output", "call_id": "1", "output": "c"},
            {"type": "function_call_output", "call_id": "2",
             "output": [{"type": "input_text", "text": "d"}]},
            {"type": "reasoning", "summary": [],
             "content": [{"type": "reasoning_text", "text": "hmm"}]},
            {"role": "assistant", "content": "e"},
            {"role": "developer", "content": "f"},
            {"type": "reasoning", "summary": [], "encrypted_content": "another server's"},
        ],
    )  # fmt: skip
    calls = [
        {"id": "1", "type": "function", "function": {"name": "read", "arguments": {"path": "a"}}},
        {"id": "2", "type": "function",
         "function": {"name": "read", "arguments": {"arguments": "{oops"}}},
    ]  # fmt: skip
    assert body.messages == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "name": "read", "content": "c"},
        {"role": "tool", "tool_call_id": "2", "name": "read", "content": "d"},
        {"role": "assistant", "content": "e", "reasoning_content": "hmm"},
        {"role": "user", "content": "<system-reminder>\nf\n</system-reminder>"},
    ]


def test_fields_become_parameters(shared_agent_service):
    body = read(
        shared_agent_service,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        include=["reasoning.encrypted_content", "message.output_text.logprobs"],
        top_logprobs=3,
        tools=[TOOL],
        tool_choice={"type": "function", "name": "read"},
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"},
        prompt_cache_key="a",
        truncation="auto",
        store=False,
    )
    params = body.generation.params
    values = (params.max_tokens, params.temperature, params.top_p, params.top_k, params.logprobs)
    assert values == (200, 0.5, 0.9, 7, 3)
    assert (body.tool_choice, body.parallel_tool_calls) == ("read", False)
    assert body.template_options == {
        "reasoning_effort": "low", "enable_thinking": True, "verbosity": "low",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "custom"}]}]},
         "tools[0].tools[0].type"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "a"}]},
         "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ({"previous_response_id": "a"}, "previous_response_id"),
        ({"conversation": "a"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "some"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "name": "apply_patch"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL, {"type": "namespace", "name": "a", "tools": [TOOL]}]},
         "tools[1].tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"reasoning": {"effort": "a lot"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"max_output_tokens": "a"}, "max_output_tokens"),
        ({"metadata": 5}, "metadata"),
        ({"n": 2}, "n"),
        ({"novelty": 1}, "novelty"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(shared_agent_service, fields, param):
    with pytest.raises(ApiError) as error:
        read(shared_agent_service, **fields)
    assert error.value.param == param and param in error.value.message
