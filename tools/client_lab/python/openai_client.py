"""The openai package: chat, responses, and answers in a format."""

import json
from typing import Annotated, Literal

from lab import (
    ABOUT_CITY,
    ANSWERS,
    CITY,
    DESCRIPTION,
    FIRST,
    KEY,
    MODEL,
    PARAMETERS,
    SECOND,
    URL,
    V1,
    expect,
    get_weather,
)
from openai import OpenAI
from pydantic import BaseModel, Field

client = OpenAI(base_url=V1, api_key=KEY)
FUNCTION = {"name": "get_weather", "description": DESCRIPTION, "parameters": PARAMETERS}


class City(BaseModel):
    name: str
    population: int


def chat(messages: list, is_streamed: bool) -> str:
    """One turn, whose answers are appended as the client has them."""
    tools = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    while True:
        options = {"model": MODEL, "messages": messages, "tools": tools}
        if is_streamed:
            with client.chat.completions.stream(**options) as stream:
                num_events = len(list(stream))
                answer = stream.get_final_completion()
            assert num_events > 3
        else:
            answer = client.chat.completions.create(**options)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        expect(message.reasoning_content, "A tool knows that.")
        for call in message.tool_calls:
            said = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})


def responses(items: list, is_streamed: bool) -> str:
    tools = [{"type": "function", **FUNCTION, "strict": True}]
    while True:
        options = {"model": MODEL, "input": items, "tools": tools}
        if is_streamed:
            with client.responses.stream(**options) as stream:
                names = {event.type for event in stream}
                answer = stream.get_final_response()
            assert "response.completed" in names
        else:
            answer = client.responses.create(**options)
        items += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        for call in calls:
            said = get_weather(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": said})


for ask in (chat, responses):
    conversation: list = []
    for question, is_streamed, wanted in zip((FIRST, SECOND), (False, True), ANSWERS, strict=True):
        conversation.append({"role": "user", "content": question})
        expect(ask(conversation, is_streamed), wanted)

parsed = client.chat.completions.parse(
    model=MODEL, messages=[{"role": "user", "content": ABOUT_CITY}], response_format=City
)
expect(parsed.choices[0].message.parsed, City(**CITY))
parsed = client.responses.parse(model=MODEL, input=ABOUT_CITY, text_format=City)
expect(parsed.output_parsed, City(**CITY))


class Town(City):
    kind: Literal["town"] = "town"


class Village(BaseModel):
    kind: Literal["village"] = "village"
    name: str


class Place(BaseModel):
    place: Annotated[Town | Village, Field(discriminator="kind")]


# Not dictated: the grammar alone keeps the model to a discriminated union.
schema = {"name": "Place", "schema": Place.model_json_schema()}
answer = client.chat.completions.create(
    model=MODEL,
    messages=[{"role": "user", "content": "Say anything."}],
    max_tokens=300,
    reasoning_effort="none",
    response_format={"type": "json_schema", "json_schema": schema},
)
assert answer.choices[0].message.content.startswith('{"place"')
if answer.choices[0].finish_reason == "stop":
    Place.model_validate_json(answer.choices[0].message.content)
expect([each.id for each in client.models.list()], [MODEL, "demo"])

# What clients of other servers send: no /v1, and llama.cpp's fields.
with OpenAI(base_url=URL, api_key=KEY) as bare:
    expect([each.id for each in bare.models.list()], [MODEL, "demo"])
    for fields, wanted in (
        ({"grammar": 'root ::= "yes" | "no"'}, ("yes", "no")),
        ({"json_schema": {"enum": ["yes"]}}, ('"yes"',)),
        ({"response_format": {"type": "json_object", "schema": {"enum": [7]}}}, ("7",)),
        ({"cache_prompt": False, "guided_choice": ["yes"]}, ("yes",)),
    ):
        answer = bare.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Say anything."}],
            reasoning_effort="none",
            extra_body=fields,
        )
        assert answer.choices[0].message.content in wanted, (fields, answer)
