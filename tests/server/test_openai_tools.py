"""Tools, reasoning and formats in chat, with a model that has marks for them."""

from __future__ import annotations

import json
from functools import partial

import openai
import pytest
from helpers.agent_models import make_agent_model
from helpers.fast_lane import mostly_slow
from helpers.servers import is_idle, running_service, wait_until

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
ASK = [{"role": "user", "content": "How is the weather?"}]
PARIS = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}'
ROME = '{"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}'
THOUGHT = "<think>\nHm, the weather.\n</think>\n\n"
NUMBER = {
    "type": "object",
    "properties": {"number": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["number"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "number", "schema": NUMBER}}


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agent") / "model"
    make_agent_model(folder, are_marks_special=True)
    with running_service(folder) as (service, url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield service, client
        wait_until(lambda: is_idle(service))


@pytest.fixture
def dictate(agent):
    service, _ = agent

    def dictate(*answers):
        for answer in answers:
            tokens = service.tokenizer.encode(answer, add_special_tokens=False)
            service.engine.scripts.append([*tokens, service.tokenizer.eos_token_id])

    yield dictate
    assert not service.engine.scripts


def ask(agent, messages=ASK, **fields):
    return agent[1].chat.completions.create(model="demo", messages=messages, **fields)


def told(agent, is_streamed, **fields):
    """An answer, streamed or not: its content, its reasoning, the name, the JSON of the arguments
    and the id of each call, and its end.
    """
    if is_streamed:
        message, calls, reason = streamed(ask(agent, stream=True, **fields))
        calls = [(each["name"], each["text"], each["id"]) for each in calls]
        return message["content"], message["reasoning_content"], calls, reason
    [choice] = ask(agent, **fields).choices
    reasoning = choice.message.to_dict().get("reasoning_content")
    assert choice.message.to_dict().get("reasoning") == reasoning
    calls = [
        (each.function.name, each.function.arguments, each.id) for each in choice.message.tool_calls
    ]
    return choice.message.content, reasoning, calls, choice.finish_reason


def call(body):
    return f"<tool_call>\n{body}\n</tool_call>"


def streamed(chunks):
    """The whole message that a client puts together from the chunks, and its end."""
    message, calls, reason = {"content": "", "reasoning_content": ""}, {}, None
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta.to_dict()
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for piece in delta.get("tool_calls", ()):
                index = piece["index"]
                if index not in calls:
                    assert index == len(calls) and piece["type"] == "function"
                    calls[index] = {
                        "id": piece["id"],
                        "name": piece["function"]["name"],
                        "text": "",
                    }
                else:
                    assert "id" not in piece and "name" not in piece["function"]
                calls[index]["text"] += piece["function"]["arguments"]
            reason = choice.finish_reason or reason
    return message, [calls[index] for index in sorted(calls)], reason


@mostly_slow("is_streamed", [False, True], quick=(1,))
def test_reasoning_text_and_calls_are_told_apart(agent, dictate, is_streamed):
    dictate(f"{THOUGHT}I look.\n{call(PARIS)}\n{call(ROME)}")
    content, reasoning, calls, reason = told(agent, is_streamed, tools=[WEATHER])
    assert (content, reasoning, reason) == ("I look.", "Hm, the weather.", "tool_calls")
    assert [(name, json.loads(text)) for name, text, _ in calls] == [
        ("get_weather", {"city": "Paris", "days": 2}),
        ("get_weather", {"city": "Rome", "days": 1}),
    ]
    assert len({call_id for *_, call_id in calls}) == 2


def test_a_call_without_a_text_has_no_content(agent, dictate):
    dictate(call(PARIS))
    [choice] = ask(agent, tools=[WEATHER]).choices
    assert choice.message.content is None
    assert len(choice.message.tool_calls) == 1


def test_only_one_call_is_shown_where_one_is_wanted(agent, dictate):
    answer = f"{call(PARIS)}\n{call(ROME)}"
    dictate(answer, answer)
    fields = {"tools": [WEATHER], "parallel_tool_calls": False}
    [choice] = ask(agent, **fields).choices
    assert [json.loads(each.function.arguments)["city"] for each in choice.message.tool_calls] == [
        "Paris"
    ]
    _, calls, _ = streamed(ask(agent, stream=True, **fields))
    assert len(calls) == 1


def test_tokens_of_reasoning_are_counted_and_can_be_hidden(agent, dictate):
    service, _ = agent
    dictate(f"{THOUGHT}Yes.", f"{THOUGHT}Yes.")
    count = len(service.tokenizer.encode(THOUGHT.strip(), add_special_tokens=False))
    shown = ask(agent)
    assert shown.usage.completion_tokens_details.reasoning_tokens == count
    assert shown.choices[0].message.content == "Yes."
    hidden = ask(agent, extra_body={"include_reasoning": False})
    assert "reasoning_content" not in hidden.choices[0].message.to_dict()
    assert hidden.usage.completion_tokens_details.reasoning_tokens == count


def test_what_looks_like_a_call_is_text_without_tools(agent, dictate):
    dictate(call(PARIS))
    [choice] = ask(agent).choices
    assert PARIS in choice.message.content and choice.finish_reason == "stop"


def test_stop_texts_sleep_within_reasoning_and_calls(agent, dictate):
    stopped = PARIS.replace("Paris", "Rome, STOP")
    answer = f"<think>\nNot STOP.\n</think>\n\nI look.\n{call(stopped)}\nThen STOP it."
    for is_streamed in (False, True):
        dictate(answer)
        fields = {"tools": [WEATHER], "stop": ["STOP"]}
        content, reasoning, calls, reason = told(agent, is_streamed, **fields)
        assert reasoning == "Not STOP."
        assert content == "I look.\n\nThen "
        assert [json.loads(text)["city"] for _, text, _ in calls] == ["Rome, STOP"]
        assert reason == "tool_calls"
    dictate("I STOP here.")
    [choice] = ask(agent, stop=["STOP"]).choices
    assert (choice.message.content, choice.finish_reason) == ("I ", "stop")


def test_a_mark_of_the_model_may_be_a_stop_text(agent, dictate):
    dictate(f"I look.{call(PARIS)}")
    [choice] = ask(agent, tools=[WEATHER], stop=["<tool_call>"]).choices
    assert (choice.message.content, choice.finish_reason) == ("I look.", "stop")
    assert not choice.message.tool_calls


def test_marks_that_a_model_spells_out_are_text(agent):
    service, _ = agent
    text = f"<think>a</think>{call(PARIS)}"
    letters = [service.tokenizer.encode(each, add_special_tokens=False) for each in text]
    tokens = [token for each in letters for token in each]
    service.engine.scripts.append([*tokens, service.tokenizer.eos_token_id])
    answer = ask(agent, tools=[WEATHER])
    [choice] = answer.choices
    assert (choice.message.content, choice.message.tool_calls) == (text, None)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_a_call_that_max_tokens_breaks_off_is_neither_a_call_nor_text(agent, dictate):
    service, _ = agent
    answer = f"I look.\n{call(PARIS)}\n{call(ROME)}"
    length = len(service.tokenizer.encode(answer, add_special_tokens=False))
    for is_streamed in (False, True):
        dictate(answer)
        fields = {"tools": [WEATHER], "max_tokens": length - 4}
        content, _, calls, reason = told(agent, is_streamed, **fields)
        assert (content, reason) == ("I look.", "length")
        assert [json.loads(text)["city"] for _, text, _ in calls] == ["Paris"]


def test_an_agents_second_step_has_its_history_and_hits_the_cache(agent, dictate):
    dictate(f"{THOUGHT}I look.\n{call(PARIS)}", "It rains.")
    first = ask(agent, tools=[WEATHER])
    message = first.choices[0].message
    messages = [
        *ASK,
        message.to_dict(),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"},
    ]
    second = ask(agent, messages, tools=[WEATHER])
    assert second.choices[0].message.content == "It rains."
    total = first.usage.total_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= total - 32


@mostly_slow("seed", range(3))
def test_a_tool_that_must_be_called_is_called(agent, seed):
    fields = {"temperature": 1.2, "seed": seed, "max_tokens": 300,
              "extra_body": {"enable_thinking": False}}  # fmt: skip
    [choice] = ask(agent, tools=[WEATHER, ADD], tool_choice="required", **fields).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    for each in choice.message.tool_calls:
        assert each.function.name in ("get_weather", "add")
        json.loads(each.function.arguments)
    named = {"type": "function", "function": {"name": "add"}}
    message, calls, reason = streamed(
        ask(
            agent,
            tools=[WEATHER, ADD],
            tool_choice=named,
            parallel_tool_calls=False,
            stream=True,
            **fields,
        )
    )
    assert reason == "tool_calls" and message["content"] == ""
    assert [each["name"] for each in calls] == ["add"]
    assert 0 <= json.loads(calls[0]["text"])["a"] <= 99


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORMAT},
        {"response_format": FORMAT, "tools": [WEATHER], "tool_choice": "none"},
        {"extra_body": {"guided_json": NUMBER}},
        {"extra_body": {"structured_outputs": {"json": NUMBER}}},
    ],
)
def test_an_answer_keeps_to_its_format(agent, fields):
    fields = {"temperature": 1.0, "seed": 1, "max_tokens": 200, **fields}
    fields["extra_body"] = {**fields.get("extra_body", {}), "enable_thinking": False}
    [choice] = ask(agent, **fields).choices
    assert 0 <= json.loads(choice.message.content)["number"] <= 9
    assert choice.finish_reason == "stop"


def test_texts_keep_to_choices_and_expressions(agent):
    for extra, allowed in (
        ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
        ({"guided_regex": "a{3}|b"}, ("aaa", "b")),
        ({"guided_grammar": 'start: "x" "y"'}, ("xy",)),
    ):
        extra = {**extra, "enable_thinking": False}
        [choice] = ask(agent, temperature=1.0, seed=2, extra_body=extra).choices
        assert choice.message.content in allowed
    answer = agent[1].completions.create(
        model="demo", prompt="Yes or no?", extra_body={"guided_choice": ["yes", "no"]}
    )
    assert answer.choices[0].text in ("yes", "no")


def test_a_format_begins_behind_the_reasoning(agent, dictate):
    dictate(f'{THOUGHT.rstrip()}{{"number": 4}}')
    [choice] = ask(agent, response_format=FORMAT).choices
    assert json.loads(choice.message.content) == {"number": 4}
    assert choice.message.to_dict()["reasoning_content"] == "Hm, the weather."


def test_an_answer_may_be_a_call_or_have_the_format(agent, dictate):
    fields = {"response_format": FORMAT, "tools": [WEATHER, ADD], "max_tokens": 300}
    dictate(call(PARIS), '{"number": 7}')
    [choice] = ask(agent, **fields).choices
    assert choice.message.tool_calls[0].function.name == "get_weather"
    [choice] = ask(agent, **fields).choices
    assert json.loads(choice.message.content) == {"number": 7}
    seen = set()
    for seed in range(6):
        [choice] = ask(
            agent, temperature=1.5, seed=seed, extra_body={"enable_thinking": False}, **fields
        ).choices
        if choice.message.tool_calls:
            for each in choice.message.tool_calls:
                json.loads(each.function.arguments)
        else:
            assert 0 <= json.loads(choice.message.content)["number"] <= 9
        seen.add(choice.finish_reason)
    assert seen <= {"stop", "tool_calls"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
            None,
        ),
        ({"extra_body": {"guided_regex": "("}}, None),
        ({"extra_body": {"guided_json": NUMBER, "guided_regex": "a"}}, "guided_regex"),
        ({"extra_body": {"guided_regex": "a"}, "tools": [ADD]}, "tools"),
        ({"response_format": FORMAT, "extra_body": {"ignore_eos": True}}, None),
        (
            {
                "tools": [{"type": "function",
                           "function": {"name": "a", "parameters": {"type": "string"}}}],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
        ),
    ],
)  # fmt: skip
def test_formats_that_cannot_be_kept_are_refused_by_name(agent, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(agent, **fields)
    assert param is None or caught.value.param == param


SHOWS_TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)


def test_a_model_without_a_format_for_calls_says_so_unless_one_must_be_made():
    fields = {"model": "demo", "messages": ASK, "tools": [ADD], "max_tokens": 200}
    client_of = partial(openai.OpenAI, api_key="none", max_retries=0)
    with running_service() as (service, url), client_of(base_url=f"{url}/v1") as client:
        service.tokenizer.chat_template = SHOWS_TOOLS
        with pytest.raises(openai.BadRequestError, match="format of calls is unknown") as caught:
            client.chat.completions.create(**fields)
        assert caught.value.param == "tools"
        fields |= {"tool_choice": "required", "parallel_tool_calls": False}
        [choice] = client.chat.completions.create(**fields).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert {each.function.name for each in choice.message.tool_calls} == {"add"}


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "function": {"name": "add"}}]
)
def test_tools_that_the_template_does_not_show_are_refused_and_left_out_if_none_is_chosen(
    client, choice
):
    """A call would be forced of which the model knows nothing."""
    fields = {"model": "demo", "messages": ASK, "tools": [ADD], "max_tokens": 5}
    with pytest.raises(openai.BadRequestError, match="does not show tools to the model") as caught:
        client.chat.completions.create(**fields, tool_choice=choice)
    assert caught.value.param == "tools"
    assert client.chat.completions.create(**fields, tool_choice="none").choices[0].message.content
