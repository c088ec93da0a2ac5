"""Conversations, as far as all protocols share them: the parts of messages, the messages of a
prompt (:class:`History`), and tools.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from mlx_paged.answers.dialect import ToolChoice
from mlx_paged.answers.template_traits import REMINDER
from mlx_paged.answers.tool_grammar import Tool
from mlx_paged.errors import shown
from mlx_paged.server.schemas import Children, OneOf, Repeated, refused

# The name of each kind in words, and the way out.
_OTHERS = {
    **dict.fromkeys(("image", "image_url", "input_image"), ("images", "")),
    **dict.fromkeys(("input_audio", "audio_url"), ("audio", "")),
    **dict.fromkeys(("file", "input_file"), ("files", "")),
    "video_url": ("videos", ""),
    "document": ("documents", "; send their text"),
    "search_result": ("search results", "; send their text"),
    "container_upload": ("files", "; send their text"),
    "tool_reference": ("references to tools", "; send the tools themselves"),
}


class TextPart(Repeated):
    place = "content[]"
    type: Literal["text", "input_text", "output_text"]
    text: str

    def as_text(self, place: str, is_last: bool) -> str:
        """The text of the part in a prompt.

        Args:
            place: the place of the part in the body.
            is_last: whether the part belongs to the last message, where images and the like are
                refused; in earlier messages they are replaced by a line of text.
        """
        return self.text


class RefusalPart(Repeated):
    place = "content[]"
    type: Literal["refusal"]
    refusal: str

    def as_text(self, place: str, is_last: bool) -> str:
        return self.refusal


class OtherPart(Repeated):
    place = "content[]"
    type: Literal[tuple(_OTHERS)]  # type: ignore[valid-type]

    def as_text(self, place: str, is_last: bool) -> str:
        what, way_out = _OTHERS[self.type]
        if is_last:
            words = f"is {self.type!r}, but models are text-only here: no {what}{way_out}"
            raise refused(f"{place}.type", words)
        return f"[{what} are left out: this model reads text only]"


Part = Annotated[str | TextPart | RefusalPart | OtherPart, OneOf("type")]
Content = Annotated[str | Children[Part], OneOf()]


def texts_of(content: Content, place: str, is_last: bool) -> list[str]:
    """The texts of a content, which is a text or a list of parts; see :meth:`TextPart.as_text`."""
    if isinstance(content, str):
        return [content]
    return [
        part if isinstance(part, str) else part.as_text(f"{place}[{index}]", is_last)
        for index, part in enumerate(content)
    ]


class History:
    """A conversation that is built step by step.

    Contents are lists of texts until the end, since concatenating the texts one by one would take
    quadratic time.
    """

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._has_ended = False
        self._names: dict[str, str] = {}  # names of tools by the ids of their calls

    @property
    def last(self) -> dict[str, Any]:
        """The last message; an empty one without a role if there is none."""
        return self._messages[-1] if self._messages else {"role": None, "content": []}

    def end_message(self) -> None:
        """Begin a new message with the next text, even if its role is the same."""
        self._has_ended = True

    def message(self, role: str, *texts: str) -> dict[str, Any]:
        """Add texts of a role to the last message, or to a new one, and return the message."""
        messages = self._messages
        if self._has_ended or not messages or messages[-1]["role"] != role:
            messages.append({"role": role, "content": []})
            self._has_ended = False
        messages[-1]["content"] += texts
        return messages[-1]

    def remind(self, text: str) -> None:
        """Add a system message in the middle of the conversation, which few templates support."""
        self.message("user", REMINDER.format(text))

    def call(self, call_id: str, name: str, arguments: dict[str, Any]) -> None:
        """Add a tool call of the assistant."""
        self._names[call_id] = name
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self.message("assistant").setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, place: str, kind: str) -> dict[str, Any]:
        """Add an empty message for the result of a call, and return it.

        Args:
            place: the place of the id in the body.
            kind: the protocol's name for a call.
        """
        if call_id not in self._names:
            raise refused(place, f"is {shown(call_id)}, but no {kind} has this id")
        self.end_message()
        message = self.message("tool")
        message |= {"tool_call_id": call_id, "name": self._names[call_id]}
        return message

    def messages(self, separator: str = "") -> list[dict[str, Any]]:
        """The finished messages; ``separator`` joins the texts of each."""
        for message in self._messages:
            message["content"] = separator.join(filter(None, message["content"]))
        return self._messages


def unique_tools(tools: Iterable[Tool]) -> tuple[Tool, ...]:
    """The tools; raises if two have the same name."""
    found: dict[str, Tool] = {}
    for tool in tools:
        if found.setdefault(tool.name, tool) is not tool:
            raise refused(f"{tool.place}.name", f"is {shown(tool.name)}, the name of another tool")
    return tuple(found.values())


def checked_tool_choice(choice: ToolChoice, place: str, tools: Sequence[Tool]) -> ToolChoice:
    """Check a choice of tools.

    Args:
        choice: also ``"any"``, Anthropic's word for ``"required"``.
        place: the place of the tool's name in the body; ``""`` if the choice is not a name.
    """
    if place and all(choice != tool.name for tool in tools):
        raise refused(place, f"is {shown(choice)}, but no tool has this name")
    if place and choice in ("none", "auto", "required"):
        raise refused(place, f"is {choice!r}, which can't be the name of a tool here")
    if choice in ("required", "any") and not place:
        if not tools:
            raise refused("tool_choice", f"is {choice!r}, but there are no tools; send some")
        return "required"
    return choice
