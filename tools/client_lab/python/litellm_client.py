"""litellm: chat by its openai provider, messages by its anthropic one."""

import json

import litellm
from lab import (
    ANSWERS,
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

FUNCTION = {"name": "get_weather", "description": DESCRIPTION, "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]


def ask(messages: list, is_streamed: bool, **options: object) -> str:
    """One turn, whose answers are appended as the client has them."""
    while True:
        answer = litellm.completion(
            messages=messages, tools=TOOLS, stream=is_streamed, api_key=KEY, **options
        )
        if is_streamed:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            said = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})


for options in (
    {"model": f"openai/{MODEL}", "api_base": V1},
    {"model": f"anthropic/{MODEL}", "api_base": URL, "max_tokens": 1000},
):
    conversation: list = []
    for question, is_streamed, wanted in zip((FIRST, SECOND), (False, True), ANSWERS, strict=True):
        conversation.append({"role": "user", "content": question})
        expect(ask(conversation, is_streamed, **options), wanted)
