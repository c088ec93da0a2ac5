"""The messages and tools of a chat body, and their conversion for chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from mlx_paged.answers.dialect import ToolChoice
from mlx_paged.errors import shown
from mlx_paged.server.chat_jobs import arguments_of
from mlx_paged.server.parts import Content, texts_of
from mlx_paged.server.schemas import (
    MAX_CHILDREN,
    Body,
    Children,
    Filled,
    OneOf,
    Repeated,
    at_most,
    fixed,
    refused,
)


class Message(Repeated):
    place = "messages[]"
    name: str | None = None
    function_call: Annotated[Any, fixed(way_out="send tool_calls")] = None
    audio: Annotated[Any, fixed(way_out="only text can be read")] = None


class Question(Message):
    """A message of any other role than the model and tools."""

    role: Literal["system", "developer", "user"]
    content: Content


class ToolResult(Message):
    role: Literal["tool"]
    content: Content = ""  # Some clients omit it for a call without a result.
    tool_call_id: str | None = None


class CalledFunction(Repeated):
    place = "messages[].tool_calls[].function"
    name: str
    arguments: str = ""


class ToolCall(Repeated):
    place = "messages[].tool_calls[]"
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Answer(Message):
    """A message of the model. Without content and calls it is an empty text, which clients send
    after an answer that was interrupted.
    """

    role: Literal["assistant"]
    content: Content = ""
    refusal: str = ""
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Children[ToolCall] = Field(default_factory=list)


AnyMessage = Annotated[Question | ToolResult | Answer, OneOf("role")]
NO_MESSAGES = "is empty; give at least one message"
Conversation = Annotated[list[AnyMessage], at_most(MAX_CHILDREN, if_empty=NO_MESSAGES)]


class Function(Repeated):
    place = "tools[].function"
    name: Filled
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Repeated):
    place = "tools[]"
    type: Annotated[str, fixed("function", way_out="describe it as a function")]
    function: Function


class FunctionName(Body):
    name: str


class NamedFunction(Body):
    type: Literal["function"]
    function: FunctionName


def read_messages(messages: Sequence[AnyMessage]) -> list[dict[str, Any]]:
    """The messages for a chat template: contents are texts, and arguments of tool calls are
    objects. ``developer`` becomes ``system``. Images and the like are refused in the last message,
    and replaced by a line of text in earlier ones.
    """
    last = len(messages) - 1
    return [
        _read_message(each, f"messages[{index}]", is_last=index == last)
        for index, each in enumerate(messages)
    ]


def _read_message(message: AnyMessage, place: str, is_last: bool) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    content = "".join(texts_of(message.content, f"{place}.content", is_last))
    converted: dict[str, Any] = {"role": role, "content": content}
    if isinstance(message, Answer):
        converted["content"] += message.refusal
        reasoning = message.reasoning_content
        reasoning = message.reasoning if reasoning is None else reasoning
        if reasoning is not None:
            converted["reasoning_content"] = reasoning
        if message.tool_calls:
            converted["tool_calls"] = list(map(_read_call, message.tool_calls))
    elif isinstance(message, ToolResult) and message.tool_call_id is not None:
        converted["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        converted["name"] = message.name
    return converted


def _read_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": arguments_of(call.function.arguments)}
    converted = {"type": "function", "function": function}
    return converted if call.id is None else {**converted, "id": call.id}


def read_tools(tools: Sequence[Tool]) -> tuple[dict[str, Any], ...]:
    """The tools for a chat template, without unknown fields."""
    refuse_second_names([tool.function.name for tool in tools], "function.name")
    return tuple(tool.model_dump(exclude_unset=True) for tool in tools)


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any], strict: bool | None
) -> dict[str, Any]:
    """A tool in the form that chat templates take."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def tool_fields(places: Sequence[str], schema: str) -> dict[str, str]:
    """The fields of tools by their places in OpenAI's form, as errors name them.

    Args:
        places: of the tools in the body.
        schema: the field of a tool that has its schema.
    """
    fields: dict[str, str] = {}
    for index, place in enumerate(places):
        fields[f"tools[{index}].function.parameters"] = f"{place}.{schema}"
        fields[f"tools[{index}].function.strict"] = f"{place}.strict"
    return fields


def refuse_second_names(names: Sequence[str], field: str = "name") -> None:
    """Raise if two tools have the same name; ``field`` is the place of the name in a tool."""
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            raise refused(f"tools[{index}].{field}", f"is {shown(name)}, the name of another tool")
        seen.add(name)


def checked_tool_choice(
    choice: ToolChoice, place: str, tools: tuple[dict[str, Any], ...]
) -> ToolChoice:
    """Check a choice of tools.

    Args:
        place: the place of the tool's name in the body; ``""`` if the choice is not a name.
    """
    names = [tool["function"]["name"] for tool in tools]
    if place and choice not in names:
        raise refused(place, f"is {shown(choice)}, but no tool has this name")
    if place and choice in ("none", "auto", "required"):
        raise refused(place, f"is {choice!r}, which can't be the name of a tool here")
    if choice == "required" and not tools:
        raise refused("tool_choice", "is 'required', but there are no tools; send some")
    return choice
