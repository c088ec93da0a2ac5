"""What an answer consists of, as it comes: reasoning, what is said, and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["reasoning", "text", "call"]


@dataclass(frozen=True)
class ToolCall:
    """The model calls a tool. ``index`` counts the calls of an answer."""

    index: int
    call_id: str
    name: str


class Event(NamedTuple):
    """A piece of an answer.

    Args:
        text: reasoning without its marks, what is said, or the JSON text of a call's arguments,
            which are one object together, unless the answer was broken off within them.
        call: that begins here, and whose arguments follow.
        is_json: false where the model wrote something else than JSON, from this piece on: it is
            given as it is, since the call has begun.
    """

    kind: Kind
    text: str = ""
    call: ToolCall | None = None
    is_json: bool = True
