"""What the clients have in common: the server, two questions, a tool, and what has to come back."""

from __future__ import annotations

import os

URL = os.environ["LAB_URL"]
V1 = f"{URL}/v1"
KEY = "none"
MODEL = "local"

FIRST = "What is the weather in Paris? Use the tool."
SECOND = "And in Rome?"
WEATHER = {"Paris": "21 degrees and sunny", "Rome": "17 degrees and rain"}
ANSWERS = [f"The tool said: {said}" for said in WEATHER.values()]
DESCRIPTION = "The weather in a city."
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
ABOUT_CITY = "Describe the City of Paris as JSON."
CITY = {"name": "Paris", "population": 2100000}


def get_weather(city: str) -> str:
    """The weather in a city."""
    return WEATHER[city]


def expect(found: object, wanted: object) -> None:
    """End the script where something else came back than it has to be."""
    if found != wanted:
        raise SystemExit(f"expected {wanted!r}, got {found!r}")
