"""Messages and tools of a chat body, as chat templates take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_paged.errors import shown
from mlx_paged.server.answers.reader import ToolChoice
from mlx_paged.server.chat_jobs import arguments_of, left_out_text
from mlx_paged.server.fields import Fields

_ROLES = ("system", "developer", "user", "assistant", "tool")
_OTHER_PARTS = {
    "image_url": "images",
    "input_image": "images",
    "video_url": "videos",
    "input_audio": "audio",
    "audio_url": "audio",
    "file": "files",
}
_REASONING = ("reasoning_content", "reasoning")


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The conversation: each message has a role and a content that is text; ``tool_calls`` of an
    assistant have arguments that are objects. ``developer`` becomes ``system``. Images and the like
    are refused in the last message alone; in the history a line of text stands for them.

    Raises:
        ApiError: something else, by its place; 400.
    """
    children = list(fields.children("messages"))
    if not children:
        raise fields.error("messages", "is empty; give at least one message")
    return [_read_message(each, is_last=each is children[-1]) for each in children]


def _read_message(fields: Fields, is_last: bool) -> dict[str, Any]:
    role = fields.choice("role", _ROLES)
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    if role == "assistant":
        message |= _read_answer(fields, is_last)
    elif role == "tool" and not fields.has("content"):
        message["content"] = ""  # Some clients have nothing to say of a call without a result.
    else:
        message["content"] = _read_content(fields, is_last)
    if role == "tool" and fields.has("tool_call_id"):
        message["tool_call_id"] = fields.text("tool_call_id")
    if fields.has("name"):
        message["name"] = fields.text("name")
    fields.leave_out_rest({"function_call": "send tool_calls", "audio": "only text can be read"})
    return message


def _read_answer(fields: Fields, is_last: bool) -> dict[str, Any]:
    """What a message of an assistant has. Without a content and calls it is an empty text, which
    clients send after an answer that was broken off.
    """
    answer: dict[str, Any] = {"content": ""}
    if fields.has("content"):
        answer["content"] = _read_content(fields, is_last)
    if fields.has("refusal"):
        answer["content"] += fields.text("refusal")
    reasoning = [fields.text(name) for name in _REASONING if fields.has(name)]
    if reasoning:
        answer["reasoning_content"] = reasoning[0]
    calls = [_read_tool_call(each) for each in fields.children("tool_calls", ())]
    if calls:
        answer["tool_calls"] = calls
    return answer


def _read_content(fields: Fields, is_last: bool) -> str:
    """The text of a message, whose parts are joined without anything between them."""
    if not isinstance(fields.raw("content"), list):
        return fields.text("content")
    return "".join(
        part
        if isinstance(part, str)
        else _read_part(Fields(part, f"{fields.path}.content[{index}]"), is_last)
        for index, part in enumerate(fields.items("content"))
    )


def _read_part(fields: Fields, is_last: bool) -> str:
    kind = fields.text("type")
    if kind in _OTHER_PARTS and not is_last:
        return left_out_text(_OTHER_PARTS[kind])
    if kind in _OTHER_PARTS:
        raise fields.error(
            "type", f"is {kind!r}, and models are text-only here: no {_OTHER_PARTS[kind]}"
        )
    if kind not in ("text", "refusal"):
        raise fields.error("type", f"must be 'text', got {shown(kind)}")
    text = fields.text(kind)
    fields.leave_out_rest()
    return text


def _read_tool_call(fields: Fields) -> dict[str, Any]:
    fields.choice("type", ("function",), "function")
    function = fields.child("function")
    call = {
        "type": "function",
        "function": {
            "name": function.text("name"),
            "arguments": arguments_of(function.text("arguments", "")),
        },
    }
    function.leave_out_rest()
    if fields.has("id"):
        call["id"] = fields.text("id")
    fields.leave_out_rest()
    return call


def read_tools(fields: Fields) -> tuple[dict[str, Any], ...]:
    """The functions that may be called, with those of their fields that templates know, in the
    order of the body.

    Raises:
        ApiError: something else, by its place; 400.
    """
    tools, names = [], set()
    for each in fields.children("tools", ()):
        tool = _read_tool(each)
        name = tool["function"]["name"]
        if name in names:
            raise each.error("function.name", f"is {name!r}, as that of another tool")
        names.add(name)
        tools.append(tool)
    return tuple(tools)


def _read_tool(fields: Fields) -> dict[str, Any]:
    kind = fields.text("type")
    if kind != "function":
        raise fields.error("type", f"must be 'function', got {shown(kind)}")
    function = fields.child("function")
    function.filled_text("name")
    function.text("description", None)
    function.child("parameters", None)
    function.boolean("strict", None)
    function.leave_out_rest()
    fields.leave_out_rest()
    return fields.known() | {"function": function.known()}


def refuse_second_names(fields: Fields, names: Sequence[str]) -> None:
    """Raise for the first of the names of ``tools`` that another one has already.

    Raises:
        ApiError: by the tool's place; 400.
    """
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            raise fields.error(f"tools[{index}].name", f"is {name!r}, as that of another tool")
        seen.add(name)


def read_tool_choice(
    fields: Fields, tools: tuple[dict[str, Any], ...], holder: str | None = "function"
) -> ToolChoice:
    """Which of the tools may or must be called.

    Args:
        holder: the object of a choice that has the tool's name; ``None``: the choice itself.

    Raises:
        ApiError: there is no such tool, or another kind of choice; 400.
    """
    names = [tool["function"]["name"] for tool in tools]
    choice: ToolChoice = "auto"
    if isinstance(fields.raw("tool_choice"), dict):
        wanted = fields.child("tool_choice")
        wanted.choice("type", ("function",))
        named = wanted if holder is None else wanted.child(holder)
        choice = named.text("name")
        if choice not in names:
            raise named.error("name", f"is {shown(choice)}, and no tool has that name")
        if choice in ("none", "auto", "required"):
            raise named.error("name", f"is {choice!r}, which is no name for a tool here")
        named.refuse_rest()
        wanted.refuse_rest()
    else:
        choice = fields.choice("tool_choice", ("none", "auto", "required"), "auto")
    if choice == "required" and not tools:
        raise fields.error("tool_choice", "is 'required', and there are no tools; send some")
    return choice
