"""llama-index: an agent on OpenAILike."""

import asyncio

from lab import ANSWERS, FIRST, KEY, MODEL, SECOND, V1, expect, get_weather
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.workflow import Context
from llama_index.llms.openai_like import OpenAILike


async def main() -> None:
    model = OpenAILike(
        model=MODEL,
        api_base=V1,
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=32768,
    )
    agent = FunctionAgent(tools=[get_weather], llm=model, system_prompt="Be brief.")
    context = Context(agent)
    for question, wanted in zip((FIRST, SECOND), ANSWERS, strict=True):
        handler = agent.run(question, ctx=context)  # It streams.
        pieces = [
            event.delta async for event in handler.stream_events() if isinstance(event, AgentStream)
        ]
        expect(str(await handler), wanted)
        assert "".join(pieces).endswith(wanted) and len(pieces) > 3
    expect((await model.acomplete("x", max_tokens=3)).text != "", True)


asyncio.run(main())
