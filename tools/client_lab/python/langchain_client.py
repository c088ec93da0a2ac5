"""langchain: its agent on ChatOpenAI (chat and responses) and on ChatAnthropic."""

from lab import ABOUT_CITY, ANSWERS, CITY, FIRST, KEY, MODEL, SECOND, URL, V1, expect, get_weather
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    name: str
    population: int


chat = ChatOpenAI(model=MODEL, base_url=V1, api_key=KEY)
models = [
    chat,
    ChatOpenAI(model=MODEL, base_url=V1, api_key=KEY, use_responses_api=True),
    ChatAnthropic(model=MODEL, base_url=URL, api_key=KEY, max_tokens=1000),
]
for model in models:
    agent = create_agent(model, [get_weather])
    state = agent.invoke({"messages": [{"role": "user", "content": FIRST}]})
    expect(state["messages"][-1].text, ANSWERS[0])
    asked = {"messages": [*state["messages"], {"role": "user", "content": SECOND}]}
    pieces = []
    for piece, _ in agent.stream(asked, stream_mode="messages"):
        if piece.type == "AIMessageChunk":
            pieces.append(piece.text)
    expect("".join(pieces), ANSWERS[1])

expect(chat.with_structured_output(City).invoke(ABOUT_CITY), City(**CITY))
expect(
    chat.with_structured_output(City, method="function_calling").invoke(ABOUT_CITY), City(**CITY)
)
