"""The events that an answer is read as: reasoning, text and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["reasoning", "text", "call"]


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. ``index`` counts the calls of an answer."""

    index: int
    call_id: str
    name: str


class Event(NamedTuple):
    """A piece of an answer.

    Args:
        text: reasoning without its marks, text, or the arguments of a call, which are one JSON
            object.
        call: the call.
    """

    kind: Kind
    text: str = ""
    call: ToolCall | None = None
