"""The anthropic package: messages, its tool runner, and counting tokens."""

from anthropic import Anthropic, beta_tool
from lab import (
    ANSWERS,
    DESCRIPTION,
    FIRST,
    KEY,
    MODEL,
    PARAMETERS,
    SECOND,
    URL,
    expect,
    get_weather,
)

client = Anthropic(base_url=URL, api_key=KEY)
TOOL = {"name": "get_weather", "description": DESCRIPTION, "input_schema": PARAMETERS}


def ask(messages: list, is_streamed: bool) -> str:
    """One turn, whose answers are appended as the client has them."""
    while True:
        options = {
            "model": MODEL,
            "max_tokens": 1000,
            "messages": messages,
            "tools": [TOOL],
            "thinking": {"type": "adaptive"},
        }
        if is_streamed:
            with client.messages.stream(**options) as stream:
                assert len(list(stream)) > 3
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**options)
        messages.append({"role": "assistant", "content": answer.content})
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return answer.content[-1].text
        expect(answer.content[0].thinking, "A tool knows that.")
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": get_weather(**call.input)}
            for call in calls
        ]
        messages.append({"role": "user", "content": results})


conversation: list = []
for question, is_streamed, wanted in zip((FIRST, SECOND), (False, True), ANSWERS, strict=True):
    conversation.append({"role": "user", "content": question})
    expect(ask(conversation, is_streamed), wanted)

runner = client.beta.messages.tool_runner(
    model=MODEL,
    max_tokens=1000,
    tools=[beta_tool(get_weather)],
    messages=[{"role": "user", "content": FIRST}],
)
expect(runner.until_done().content[-1].text, ANSWERS[0])

count = client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": FIRST}])
assert count.input_tokens > 10
