"""The body of OpenAI's ``/v1/responses``, and its :class:`ChatJob`."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from mlx_paged.answers.tool_grammar import Tool
from mlx_paged.errors import shown
from mlx_paged.options.sampling_params import SamplingParams
from mlx_paged.server.chat_jobs import ChatJob, arguments_of
from mlx_paged.server.conversations import (
    Content,
    History,
    checked_tool_choice,
    texts_of,
    unique_tools,
)
from mlx_paged.server.fields import (
    Effort,
    Format,
    GenerationFields,
    TextFormat,
    effort_options,
    first_given,
)
from mlx_paged.server.schemas import (
    ONE_OR_MORE,
    Body,
    Children,
    Filled,
    OneOf,
    Repeated,
    SomeChildren,
    only,
    refused,
    short,
)
from mlx_paged.server.service import Service

_INCLUDES = ("reasoning.encrypted_content", "message.output_text.logprobs")
# The prefix of ``encrypted_content``, to distinguish it from that of other servers. Clients send
# the reasoning back in it, so that the server need not store it.
_SEAL = "mlx_paged."


class Item(Repeated):
    place = "input[]"


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class CallItem(Item):
    type: Literal["function_call"]
    arguments: str
    name: str
    call_id: str


class OutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningText(Repeated):
    place = "input[].content[]"
    text: str


class ReasoningItem(Item):
    type: Literal["reasoning"]
    content: Children[ReasoningText] = Field(default_factory=list)
    summary: Any = None
    encrypted_content: str = ""


class ItemReference(Item):
    type: Literal["item_reference"]
    id: str


AnyItem = Annotated[
    MessageItem | CallItem | OutputItem | ReasoningItem | ItemReference,
    OneOf("type", default="message"),
]
Items = SomeChildren[AnyItem]


class ResponsesTool(Repeated):
    place = "tools[]"
    type: Annotated[
        str,
        only(
            "function",
            way_out="this server has function tools only; turn the tool off in the client, or "
            "describe it as a function",
        ),
    ]
    name: Filled
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Namespace(Repeated):
    """A group of tools, as sent by Codex."""

    place = "tools[]"
    type: Literal["namespace"]
    name: Filled
    description: str | None = None
    tools: Children[ResponsesTool]


AnyTool = Annotated[ResponsesTool | Namespace, OneOf("type")]


class NamedTool(Body):
    type: Literal["function"]
    name: str


class Reasoning(Body):
    effort: Effort | None = None
    # Without effect: the reasoning itself is returned, not a summary.
    summary: Any = None
    generate_summary: Any = None
    context: Any = None


class TextOptions(Body):
    verbosity: Literal["low", "medium", "high"] | None = None
    format: Format | None = None


class ResponsesRequest(GenerationFields):
    """The body of ``POST /v1/responses``."""

    input: Annotated[str | Items, OneOf()]
    instructions: str | None = None
    tools: Children[AnyTool] = Field(default_factory=list)
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedTool, OneOf("type")] = "auto"
    parallel_tool_calls: bool = True
    include: Annotated[
        list[Filled], Field(max_length=100, fail_fast=True), short(2**14), ONE_OR_MORE
    ] = Field(default_factory=list)
    top_logprobs: int = 0
    max_output_tokens: int | None = None
    reasoning: Reasoning = Field(default_factory=Reasoning)
    text: TextOptions = Field(default_factory=TextOptions)
    metadata: dict[str, Any] | None = None
    # Accepted, but nothing is stored, and the answer says so.
    store: bool | None = None
    background: Literal[False] | None = None
    # Conversations are never truncated; those that are too long are refused.
    truncation: Literal["disabled", "auto"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    n: Literal[1] | None = None
    prompt_logprobs: None = None
    prompt_cache_options: Any = None
    client_metadata: Any = None
    max_tool_calls: Any = None  # counts only tools that run on the server

    @property
    def has_sealed_reasoning(self) -> bool:
        """Whether reasoning is also returned as ``encrypted_content``."""
        return _INCLUDES[0] in self.include

    def namespaces(self) -> dict[str, str]:
        """The namespaces of tools by the tools' names."""
        spaces = [each for each in self.tools if isinstance(each, Namespace)]
        return {tool.name: space.name for space in spaces for tool in space.tools}

    def echo(self, params: SamplingParams) -> dict[str, Any]:
        """The fields of the request that the response repeats.

        Args:
            params: the sampling parameters that are used.
        """
        repeated = {"text", "tool_choice", "tools"}
        given = self.model_dump(include=repeated, exclude_unset=True, by_alias=True)
        return {
            "instructions": self.instructions,
            "max_output_tokens": params.max_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning": {"effort": self.reasoning.effort, "summary": None},
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": params.logprobs or 0,
            "top_p": params.top_p,
            **{name: value for name, value in given.items() if value},
        }


def read_responses_body(
    request: ResponsesRequest, service: Service, owner: str | None = None
) -> ChatJob:
    """Turn the body into a job.

    Args:
        owner: the user whose kept items the body may refer to.
    """
    request.check(service)
    tools = _read_tools(request.tools)
    requested = request.tool_choice
    if isinstance(requested, NamedTool):
        choice = checked_tool_choice(requested.name, "tool_choice.name", tools)
    else:
        choice = checked_tool_choice(requested, "", tools)
    num_top_logprobs = _num_top_logprobs(request)
    options = effort_options(request.reasoning.effort)
    if request.text.verbosity is not None:
        options["verbosity"] = request.text.verbosity  # Some templates may use it.
    generation = request.generation(
        service,
        (request.text.format or TextFormat(type="text")).requested("text.format"),
        {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"},
        max_tokens=first_given(request.max_output_tokens, service.max_tokens),
        logprobs=num_top_logprobs,
    )
    return ChatJob(
        _read_conversation(request, partial(service.kept_items.find, owner)),
        generation,
        tools,
        choice,
        request.parallel_tool_calls,
        options,
    )


def _num_top_logprobs(request: ResponsesRequest) -> int | None:
    for index, name in enumerate(request.include):
        if name not in _INCLUDES:
            raise refused(f"include[{index}]", f"is {shown(name)}, which is not supported")
    has_logprobs = _INCLUDES[1] in request.include
    if request.top_logprobs and not has_logprobs:
        raise refused("top_logprobs", f"is given, but include does not contain {_INCLUDES[1]!r}")
    return request.top_logprobs if has_logprobs else None


def _read_tools(tools: Sequence[AnyTool]) -> tuple[Tool, ...]:
    """All tools, including those in namespaces."""
    found: list[tuple[str, ResponsesTool]] = []
    for index, each in enumerate(tools):
        place = f"tools[{index}]"
        if isinstance(each, Namespace):
            found += [(f"{place}.tools[{inner}]", tool) for inner, tool in enumerate(each.tools)]
        else:
            found.append((place, each))
    empty = {"type": "object", "properties": {}}
    return unique_tools(
        Tool.of(place, tool.name, tool.description, tool.parameters or empty, tool.strict)
        for place, tool in found
    )


# Input


def _read_conversation(
    request: ResponsesRequest, find: Callable[[str], dict[str, Any] | None]
) -> list[dict[str, Any]]:
    """The messages for a chat template; consecutive items of the model are merged.

    Args:
        find: returns a kept item by its id, or ``None``.
    """
    history = History()
    if request.instructions:
        history.message("system", request.instructions)
    if isinstance(request.input, str):
        history.message("user", request.input)
        return history.messages()
    last = len(request.input) - 1
    for index, item in enumerate(request.input):
        place = f"input[{index}]"
        if isinstance(item, ItemReference):
            found = find(item.id)
            if found is None:
                words = "is not kept here, or no longer; send the item itself"
                raise refused(f"{place}.id", f"{shown(item.id)} {words}")
            item = _KeptItem.read({"item": found}).item
        _read_item(history, item, place, is_last=index == last)
    return history.messages()


def _read_item(history: History, item: AnyItem, place: str, is_last: bool) -> None:
    if isinstance(item, MessageItem):
        text = "".join(texts_of(item.content, f"{place}.content", is_last))
        _read_message(history, item.role, text)
    elif isinstance(item, CallItem):
        history.call(item.call_id, item.name, arguments_of(item.arguments))
    elif isinstance(item, OutputItem):
        message = history.result(item.call_id, f"{place}.call_id", "function_call")
        message["content"] += texts_of(item.output, f"{place}.output", is_last)
    else:
        assert isinstance(item, ReasoningItem)
        last = history.last
        if last["role"] == "assistant" and (any(last["content"]) or "tool_calls" in last):
            history.end_message()  # Reasoning comes first.
        texts = [each.text for each in item.content] or [_unseal(item.encrypted_content)]
        text = "\n".join(filter(None, texts))
        if text:
            history.message("assistant")["reasoning_content"] = text


def _read_message(history: History, role: str, text: str) -> None:
    if role == "assistant":
        history.message("assistant", text)
    elif role == "user":
        history.end_message()
        history.message("user", text)
    elif history.last["role"] is None:
        history.message("system", text)
    elif history.last["role"] == "system":
        history.message("system", "\n\n", text)
    else:
        history.end_message()
        history.remind(text)


class _KeptItem(Body):
    item: AnyItem


def seal(reasoning: str) -> str:
    """Reasoning as ``encrypted_content``. It is not encrypted, since the client may see it."""
    return _SEAL + base64.b64encode(reasoning.encode(errors="replace")).decode()


def _unseal(text: str) -> str:
    """The reasoning in an ``encrypted_content``; ``""`` if another server made it."""
    if not text.startswith(_SEAL):
        return ""
    try:
        return base64.b64decode(text[len(_SEAL) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
