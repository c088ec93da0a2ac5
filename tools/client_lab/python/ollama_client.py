"""The ollama package: chat with tools, generate, answers in a format, and the lists of models."""

from lab import ABOUT_CITY, ANSWERS, CITY, FIRST, KEY, MODEL, SECOND, URL, expect, get_weather
from ollama import ChatResponse, Client, Message, ResponseError
from pydantic import BaseModel

client = Client(host=URL, headers={"Authorization": f"Bearer {KEY}"})


class City(BaseModel):
    name: str
    population: int


def answer_of(messages: list, is_streamed: bool) -> ChatResponse:
    options = {"model": MODEL, "messages": messages, "tools": [get_weather], "think": True}
    if not is_streamed:
        return client.chat(**options)
    answer = ChatResponse(message=Message(role="assistant", content="", thinking="", tool_calls=[]))
    for part in client.chat(**options, stream=True):
        said = answer.message
        said.content += part.message.content
        said.thinking += part.message.thinking or ""
        said.tool_calls += part.message.tool_calls or []
        answer.done_reason, answer.eval_duration = part.done_reason, part.eval_duration
    return answer


def chat(messages: list, is_streamed: bool) -> str:
    """One turn, whose answers are appended as the client has them."""
    while True:
        answer = answer_of(messages, is_streamed)
        message = answer.message
        messages.append(message)
        expect((answer.done_reason, answer.eval_duration > 0), ("stop", True))
        if not message.tool_calls:
            return message.content
        expect(message.thinking, "A tool knows that.")
        for call in message.tool_calls:
            said = get_weather(**call.function.arguments)
            name = call.function.name
            messages.append({"role": "tool", "tool_name": name, "content": said})


conversation: list = []
for question, is_streamed, wanted in zip((FIRST, SECOND), (False, True), ANSWERS, strict=True):
    conversation.append({"role": "user", "content": question})
    expect(chat(conversation, is_streamed), wanted)

options = {"num_predict": 100, "temperature": 0, "num_ctx": 8192}
for form in (City.model_json_schema(), "json"):
    generated = client.generate(MODEL, ABOUT_CITY, format=form, think=False, options=options)
    expect(City.model_validate_json(generated.response), City(**CITY))
raw = client.generate(MODEL, "Say anything", raw=True, options={"num_predict": 3}, logprobs=True)
expect((raw.eval_count, raw.done_reason, len(raw.logprobs)), (3, "length", 3))

[listed, _] = client.list().models
expect(listed.model, f"{MODEL}:latest")
expect(client.ps().models[0].model, listed.model)
shown = client.show(listed.model)
expect(shown.capabilities, ["completion", "tools", "thinking"])
expect(shown.modelinfo["general.basename"], listed.model)
expect(client.generate(MODEL).done_reason, "load")
for refused, status in (
    (lambda: client.chat("unknown"), 404),
    (lambda: client.pull("other"), 501),
    (lambda: client.embed(MODEL, "not made for embeddings"), 400),
):
    try:
        refused()
    except ResponseError as error:
        expect(error.status_code, status)
    else:
        raise SystemExit("an error was expected")
