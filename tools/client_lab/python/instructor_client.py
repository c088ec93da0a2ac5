"""instructor: models by a tool that must be called, by a JSON schema, by text, and in parts."""

import instructor
from lab import ABOUT_CITY, CITY, KEY, MODEL, V1, expect
from openai import OpenAI
from pydantic import BaseModel


class City(BaseModel):
    name: str
    population: int


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    client = instructor.from_openai(OpenAI(base_url=V1, api_key=KEY), mode=mode)
    messages = [{"role": "user", "content": ABOUT_CITY}]
    asked = {"model": MODEL, "response_model": City}
    first, answer = client.chat.completions.create_with_completion(messages=messages, **asked)
    expect(first.model_dump(), CITY)
    messages += [
        {"role": "assistant", "content": first.model_dump_json()},
        {"role": "user", "content": ABOUT_CITY},
    ]
    *_, last = client.chat.completions.create_partial(messages=messages, **asked)
    expect(last.model_dump(), CITY)
