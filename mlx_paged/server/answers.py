"""The text of an answer as it comes, told apart: reasoning, what is said, and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias


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
    """A piece of the JSON text of a call's arguments. Together they are one JSON object."""

    index: int
    text: str


Event: TypeAlias = Reasoning | Text | ToolCallStart | ToolCallArguments
ToolChoice: TypeAlias = "Literal['none', 'auto', 'required'] | str"


@dataclass(frozen=True)
class AnswerFormat:
    """How answers to a prompt are read.

    Args:
        think_marks: what opens and what closes reasoning; ``None`` for a model that has no marks.
        is_thinking: the prompt has opened it already.
        tools: the functions that may be called, as OpenAI's ``tools`` has them; none: what looks
            like a call is text.
    """

    think_marks: tuple[str, str] | None = None
    is_thinking: bool = False
    tools: tuple[dict[str, Any], ...] = field(default_factory=tuple)

    def reader(self) -> AnswerReader:
        """A reader for one completion."""
        return AnswerReader(self)


class AnswerReader:
    """Reads the text of one completion, piece by piece.

    Attributes:
        num_tool_calls: calls that were begun.
    """

    def __init__(self, answer_format: AnswerFormat):
        self.num_tool_calls = 0
        self._format = answer_format

    def add(self, text: str) -> list[Event]:
        """What can be told apart by now."""
        return [Text(text)] if text else []

    def finish(self) -> list[Event]:
        """The answer is over: what was held back."""
        return []
