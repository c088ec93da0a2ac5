"""The events that a parsed answer consists of: reasoning, text and tool calls."""

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
        text: reasoning without its marks, text, or a piece of the JSON text of a call's arguments.
            Together the pieces are one object, unless the answer was truncated.
        call: a call that begins here; its arguments follow.
        is_json: false from the piece on where the model's arguments are not valid JSON; they are
            passed on unchanged, since the call has begun.
    """

    kind: Kind
    text: str = ""
    call: ToolCall | None = None
    is_json: bool = True
