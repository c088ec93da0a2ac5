"""openai-agents: an agent on responses and on chat."""

import asyncio

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from lab import ABOUT_CITY, ANSWERS, CITY, FIRST, KEY, MODEL, SECOND, V1, expect, get_weather
from openai import AsyncOpenAI
from pydantic import BaseModel


class City(BaseModel):
    name: str
    population: int


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=V1, api_key=KEY)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(model=MODEL, openai_client=client)
        agent = Agent(name="Weather", model=model, tools=[function_tool(get_weather)])
        first = await Runner.run(agent, FIRST)
        expect(first.final_output, ANSWERS[0])
        asked = [*first.to_input_list(), {"role": "user", "content": SECOND}]
        second = Runner.run_streamed(agent, asked)
        assert len([event async for event in second.stream_events()]) > 3
        expect(second.final_output, ANSWERS[1])
        described = await Runner.run(Agent(name="City", model=model, output_type=City), ABOUT_CITY)
        expect(described.final_output, City(**CITY))


asyncio.run(main())
