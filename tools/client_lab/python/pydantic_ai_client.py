"""pydantic-ai: an agent on chat, responses and messages, and its three ways to an output."""

import asyncio

from lab import ABOUT_CITY, ANSWERS, CITY, FIRST, KEY, MODEL, SECOND, URL, V1, expect, get_weather
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    name: str
    population: int


async def main() -> None:
    openai = OpenAIProvider(base_url=V1, api_key=KEY)
    chat = OpenAIChatModel(MODEL, provider=openai)
    for model in (
        chat,
        OpenAIResponsesModel(MODEL, provider=openai),
        AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY)),
    ):
        agent = Agent(model, tools=[get_weather])
        first = await agent.run(FIRST)
        expect(first.output, ANSWERS[0])
        async with agent.run_stream(SECOND, message_history=first.all_messages()) as second:
            expect("".join([each async for each in second.stream_text(delta=True)]), ANSWERS[1])
    for output in (ToolOutput, NativeOutput, PromptedOutput):
        agent = Agent(chat, output_type=output(City))
        expect((await agent.run(ABOUT_CITY)).output, City(**CITY))


asyncio.run(main())
