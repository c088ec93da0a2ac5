"""What an answer consists of, as it comes: reasoning, what is said, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Reasoning:
    """A piece of the model's reasoning, without its marks."""

    text: str


@dataclass(frozen=True)
class Text:
    """A piece of what is said."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """The model calls a tool; the arguments follow. ``index`` counts the calls of an answer."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """A piece of the JSON text of a call's arguments. Together they are one JSON object, unless
    the answer was broken off within them.

    Args:
        is_json: false where the model wrote something else, from this piece on: it is given as it
            is, since the call has begun.
    """

    index: int
    text: str
    is_json: bool = True


Event: TypeAlias = Reasoning | Text | ToolCallStart | ToolCallArguments


def merged(events: Iterable[Event]) -> list[Event]:
    """The same events, with neighbours of one kind in one piece."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Reasoning | Text) and type(last) is type(event):
            assert isinstance(last, Reasoning | Text)
            result[-1] = type(event)(last.text + event.text)
        elif isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments):
            # The start of a call stands between the arguments of two.
            result[-1] = ToolCallArguments(last.index, last.text + event.text, event.is_json)
        else:
            result.append(event)
    return result
