"""Coding agents: a tool is called, its result comes back, and no turn computes the ones before."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from helpers.agent_models import HIDDEN, make_agent_model
from helpers.fast_lane import mostly_slow
from helpers.servers import running_service

BLOCK = 16
PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}},
    "required": ["path"],
}
READ = {"name": "read", "description": "Read a file.", "parameters": PARAMETERS}
ANTHROPIC_READ = {"name": "read", "description": "Read a file.", "input_schema": PARAMETERS}
RESULT = "1: def main():\n2:     return 0"


def call(turn: int) -> str:
    """What the model writes in a turn. The space in the arguments is not the template's."""
    return (
        f"<think>\nFile {turn} may say more.\n</think>\n\nI look into it.\n<tool_call>\n"
        f'{{"name": "read", "arguments": {{"path":"src/{turn}.py","limit":{turn}}}}}\n</tool_call>'
    )


# Each agent asks for an answer and gives the result of the call that it gets; it tells how many
# tokens the prompt had, how many of them were cached, and how many were generated.
Turn = tuple[int, int, int]


def chat_agent(agent, system: str, *, sends_reasoning: bool = False) -> Iterator[Turn]:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": system},
        {"role": "user", "content": "What is in the files?"},
    ]
    while True:
        answer = agent.openai.chat.completions.create(
            model="demo", messages=messages, tools=[{"type": "function", "function": READ}]
        )
        message = answer.choices[0].message
        assert message.content == "I look into it."
        [tool_call] = message.tool_calls
        sent = {
            "role": "assistant",
            "content": message.content,
            "tool_calls": [tool_call.model_dump()],
        }
        if sends_reasoning:
            sent["reasoning_content"] = message.reasoning_content
        result = {"role": "tool", "tool_call_id": tool_call.id, "content": RESULT}
        messages += [sent, result]
        usage = answer.usage
        yield (
            usage.prompt_tokens,
            usage.prompt_tokens_details.cached_tokens,
            usage.completion_tokens,
        )


def anthropic_agent(agent, system: str) -> Iterator[Turn]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is in the files?"}]
    for turn in range(100):
        # What Claude Code's first block of the system prompt is like; it changes in each turn.
        note = f"x-anthropic-billing-header: cc_version=2; cch={turn};"
        answer = agent.anthropic.messages.create(
            model="demo",
            max_tokens=1000,
            system=[{"type": "text", "text": note}, {"type": "text", "text": system}],
            messages=messages,
            tools=[ANTHROPIC_READ],
            thinking={"type": "enabled", "budget_tokens": 1024},
        )
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
        result = {
            "type": "tool_result",
            "tool_use_id": answer.content[-1].id,
            "content": [{"type": "text", "text": RESULT}],
        }
        messages += [
            {"role": "assistant", "content": [block.model_dump() for block in answer.content]},
            {"role": "user", "content": [result]},
        ]
        usage = answer.usage
        cached = usage.cache_read_input_tokens
        yield usage.input_tokens + cached, cached, usage.output_tokens


def responses_agent(agent, system: str) -> Iterator[Turn]:
    items: list[dict[str, Any]] = [{"role": "user", "content": "What is in the files?"}]
    while True:
        answer = agent.openai.responses.create(
            model="demo",
            instructions=system,
            input=items,
            tools=[{"type": "function", "strict": False, **READ}],
            store=False,
            include=["reasoning.encrypted_content"],
        )
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        call_id = answer.output[-1].call_id
        items.append({"type": "function_call_output", "call_id": call_id, "output": RESULT})
        usage = answer.usage
        yield usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens


def unique_system() -> str:
    return f"You read files. {uuid.uuid4().hex} " + "Be brief and honest. " * 3


@mostly_slow(
    ("talk", "pieces"),
    [(chat_agent, 0), (chat_agent, 3), (anthropic_agent, 3), (responses_agent, 3)],
    quick=(2,),
)
def test_each_turn_finds_all_that_was_computed_before(agent, talk, pieces):
    turns = talk(agent, unique_system())
    num_known = 0
    for turn in range(3):
        agent.script(call(turn), pieces=pieces)
        num_prompt, num_cached, num_generated = next(turns)
        # All of the prompt and the answer before, but for a block that was not full. The end of
        # sequence was generated, and its K/V were not computed.
        assert num_known - BLOCK <= num_cached <= num_known or turn == 0
        assert num_known <= num_prompt
        num_known = num_prompt + num_generated - 1


def test_without_the_kept_answers_each_answer_is_computed_again(agent, monkeypatch):
    monkeypatch.setattr(agent.service.kept_answers, "max_tokens", 0)
    turns = chat_agent(agent, unique_system())
    agent.script(call(0))
    num_prompt, _, num_generated = next(turns)
    agent.script(call(1))
    _, num_cached, _ = next(turns)
    assert num_prompt - BLOCK <= num_cached <= num_prompt < num_prompt + num_generated - BLOCK


def test_reasoning_that_clients_send_back_is_what_was_kept(agent):
    system = unique_system()
    for sends_reasoning in (True, False):
        turns = chat_agent(agent, system, sends_reasoning=sends_reasoning)
        for turn in range(2):
            agent.script(call(turn))
            num_prompt, num_cached, _ = next(turns)
        if not sends_reasoning:
            # The second time, everything was there.
            assert num_cached > num_prompt - BLOCK - 1


def test_users_never_share_what_was_kept(agent):
    messages = [{"role": "user", "content": f"Hello {uuid.uuid4().hex}!"}]
    agent.script("<think>\nA secret.\n</think>\n\nGood day.")
    agent.openai.chat.completions.create(
        model="demo", messages=messages, extra_body={"cache_salt": "a"}
    )
    messages += [{"role": "assistant", "content": "Good day."}]
    messages += [{"role": "user", "content": "Why?"}]
    prompts = []
    for salt in ("a", "b"):
        keys = agent.service.kept_answers.encode(
            agent.service.tokenizer, messages, {}, cache_salt=salt
        )
        prompts.append(keys.before)
    assert prompts[1] is None
    assert prompts[0] is None or prompts[0].said.reading.text == "Good day."


def test_reasoning_ends_at_the_budget_of_the_request(agent):
    agent.script("<think>\n" + "more and more " * 40 + "</think>Good day.")
    answer = agent.anthropic.messages.create(
        model="demo",
        max_tokens=30,
        messages=[{"role": "user", "content": "Hello!"}],
        thinking={"type": "enabled", "budget_tokens": 12},
    )
    assert [block.type for block in answer.content] == ["thinking", "text"]
    # With the two marks.
    assert answer.usage.output_tokens_details.thinking_tokens == 14


def test_an_answer_has_one_call_where_there_may_be_one(agent):
    agent.script(call(0) + "\n" + call(1).partition("</think>\n\n")[2])
    answer = agent.openai.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "a"}],
        tools=[{"type": "function", "function": READ}],
        parallel_tool_calls=False,
    )
    [tool_call] = answer.choices[0].message.tool_calls
    assert json.loads(tool_call.function.arguments) == {"path": "src/0.py", "limit": 0}
    # It was over with the call.
    tokenizer = agent.service.tokenizer
    assert answer.usage.completion_tokens == len(
        tokenizer.encode(call(0), add_special_tokens=False)
    )


# What must be called is called, whatever the model would say. It would never end a text by itself.

FEW = {
    "type": "object",
    "properties": {"path": {"enum": ["a.py", "b.py"]}, "limit": {"enum": [1, 2]}},
    "required": ["path"],
    "additionalProperties": False,
}
READ_FEW = {"name": "read", "parameters": FEW}
WRITE_FEW = {"name": "write", "parameters": {**FEW, "required": ["path", "limit"]}}


def required_calls(client, **fields) -> list[tuple[str, Any]]:
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "What is 27 + 15?"}],
        tools=[{"type": "function", "function": each} for each in (READ_FEW, WRITE_FEW)],
        max_tokens=1000,
        temperature=1.0,
        extra_body={"enable_thinking": False},
        **fields,
    )
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    calls = choice.message.tool_calls
    return [(each.function.name, json.loads(each.function.arguments)) for each in calls]


@mostly_slow("has_format", [True, False])
def test_a_tool_that_must_be_called_is_called_with_what_it_needs(
    agent, client, service, monkeypatch, has_format
):
    # A model without a format of calls writes JSON. The demo model's template shows no tools.
    asked = agent.openai if has_format else client
    tokenizer = service.tokenizer._tokenizer
    shown = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", shown + tokenizer.chat_template)
    for seed in range(2):
        one = {"seed": seed, "parallel_tool_calls": False}
        [(name, arguments)] = required_calls(asked, tool_choice="required", **one)
        assert {"read": {"path"}, "write": {"path", "limit"}}[name] <= set(arguments)
        named = {"type": "function", "function": {"name": "write"}}
        [(name, arguments)] = required_calls(asked, tool_choice=named, **one)
        assert (name, set(arguments)) == ("write", {"path", "limit"})


def test_reasoning_comes_before_a_call_that_must_be(agent):
    agent.script("<think>\nWhich one?\n</think>", end=False)
    answer = agent.anthropic.messages.create(
        model="demo",
        max_tokens=1000,
        messages=[{"role": "user", "content": "What is 27 + 15?"}],
        tools=[{"name": "read", "input_schema": FEW}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "adaptive"},
    )
    assert [block.type for block in answer.content] == ["thinking", "tool_use"]
    assert answer.content[1].input["path"] in ("a.py", "b.py")


def test_an_answer_has_the_format_that_was_asked_for_or_calls_tools(agent):
    schema = {"type": "object", "properties": {"sum": {"enum": [41, 42]}}, "required": ["sum"],
              "additionalProperties": False}  # fmt: skip
    fields = {
        "model": "demo",
        "input": "What is 27 + 15?",
        "tools": [{"type": "function", "strict": False, **READ_FEW}],
        "text": {"format": {"type": "json_schema", "name": "sum", "schema": schema}},
        "reasoning": {"effort": "none"},
        "max_output_tokens": 1000,
        "parallel_tool_calls": False,
    }
    agent.script('{"', end=False)
    answer = agent.openai.responses.create(**fields)
    assert json.loads(answer.output_text)["sum"] in (41, 42)
    agent.script("<tool_call>\n", end=False)
    answer = agent.openai.responses.create(**fields)
    assert {item.type for item in answer.output} == {"function_call"}
    assert json.loads(answer.output[0].arguments)["path"] in ("a.py", "b.py")


def test_what_can_not_be_kept_to_is_refused_by_name(agent, client):
    fields = {"model": "demo", "input": "a", "tools": [{"type": "function", **READ_FEW}]}
    text = {"format": {"type": "json_object"}}
    for asked, more, param in (
        (agent.openai, {"text": text, "tool_choice": "required"}, "tool_choice"),
        (client, {"text": text}, "tools"),
        (client, {}, "tools"),
        (client, {"tools": [{"type": "function", "strict": True, **READ_FEW}]}, "tools"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            asked.responses.create(**{**fields, **more})
        assert error.value.param.startswith(param)


def test_marks_that_are_special_tokens_are_read_and_others_never_show(tmp_path):
    folder = make_agent_model(tmp_path / "agent", are_marks_special=True)
    clients = {"api_key": "none", "max_retries": 0}
    with (
        running_service(folder) as (service, url),
        openai.OpenAI(base_url=f"{url}/v1", **clients) as client,
    ):
        text = call(0).replace("I look", f"I{HIDDEN} look") + HIDDEN
        ask = {"model": "demo", "messages": [{"role": "user", "content": "a"}]}
        tools = [{"type": "function", "function": READ}]
        tokens = service.tokenizer.encode(text, add_special_tokens=False)
        service.engine.scripts.append([*tokens, service.tokenizer.eos_token_id])
        message = client.chat.completions.create(**ask, tools=tools).choices[0].message
        assert message.content == "I look into it."
        assert message.reasoning_content == "File 0 may say more."
        assert len(message.tool_calls) == 1
        # Without tools, a call is text; its marks are special tokens, which no text shows.
        service.engine.scripts.append([*tokens, service.tokenizer.eos_token_id])
        message = client.chat.completions.create(**ask).choices[0].message
        assert message.tool_calls is None
        assert "read" in message.content and "<" not in message.content
        # A client that wants to see special tokens sees them.
        service.engine.scripts.append([*tokens, service.tokenizer.eos_token_id])
        message = (
            client.chat.completions.create(
                **ask, tools=tools, extra_body={"skip_special_tokens": False}
            )
            .choices[0]
            .message
        )
        assert HIDDEN in message.content
