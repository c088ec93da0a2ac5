"""The body of OpenAI's ``/v1/responses`` as a :class:`ChatJob`."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from mlx_paged.errors import shown
from mlx_paged.server.chat_jobs import ChatJob, arguments_of
from mlx_paged.server.grammars.response_format import Format
from mlx_paged.server.openai.messages import (
    checked_tool_choice,
    function_tool,
    refuse_second_names,
)
from mlx_paged.server.openai.options import CacheFields, ModelFields, StreamOptions, first_given
from mlx_paged.server.parts import Content, texts_of
from mlx_paged.server.sampling_fields import SamplingFields
from mlx_paged.server.schemas import (
    MAX_CHILDREN,
    ONE_OR_MORE,
    AtMost,
    Body,
    Children,
    Filled,
    Fixed,
    OneOf,
    Repeated,
    refused,
    short,
)
from mlx_paged.server.service import Service

_INCLUDES = ("reasoning.encrypted_content", "message.output_text.logprobs")
# Before the reasoning in ``encrypted_content``, so that what other servers made is told apart. The
# server keeps nothing, and clients bring it back.
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
_NO_ITEMS = "is empty; give a text, or at least one item"
Items = Annotated[list[AnyItem], AtMost(MAX_CHILDREN, if_empty=_NO_ITEMS)]


class Tool(Repeated):
    place = "tools[]"
    type: Annotated[
        str,
        Fixed(
            "function",
            way_out="this server has function tools only; turn the tool off in the client, or "
            "describe it as a function",
        ),
    ]
    name: Filled
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_function(self) -> dict[str, Any]:
        """The tool as templates take it, which is that of chat completions."""
        empty = {"type": "object", "properties": {}}
        return function_tool(self.name, self.description, self.parameters or empty, self.strict)


class Namespace(Repeated):
    """Codex's, with the tools of a feature."""

    place = "tools[]"
    type: Literal["namespace"]
    name: Filled
    description: str | None = None
    tools: Children[Tool]


class NamedTool(Body):
    type: Literal["function"]
    name: str


class Reasoning(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # Reasoning is shown as it is, and not summed up.
    summary: Any = None
    generate_summary: Any = None
    context: Any = None


class Text(Body):
    verbosity: Literal["low", "medium", "high"] | None = None
    format: Format | None = None


class ResponsesRequest(ModelFields, CacheFields, SamplingFields):
    """The body of ``POST /v1/responses``."""

    input: Annotated[str | Items, OneOf()]
    instructions: str | None = None
    tools: Children[Annotated[Tool | Namespace, OneOf("type")]] = Field(default_factory=list)
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedTool, OneOf("type")] = "auto"
    parallel_tool_calls: bool = True
    include: Annotated[list[Filled], AtMost(100), short(2**14), ONE_OR_MORE] = Field(
        default_factory=list
    )
    top_logprobs: int = 0
    max_output_tokens: int | None = None
    reasoning: Reasoning = Field(default_factory=Reasoning)
    text: Text = Field(default_factory=Text)
    stream: bool = False
    stream_options: StreamOptions | None = None
    metadata: dict[str, Any] | None = None
    # Nothing is stored, and the answer says so.
    store: bool | None = None
    background: Annotated[Any, Fixed(False)] = None
    # A conversation that is too long is refused, and nothing of it goes missing.
    truncation: Annotated[Any, Fixed("disabled", "auto")] = None
    service_tier: Annotated[Any, Fixed("auto", "default")] = None
    n: Annotated[Any, Fixed(1)] = None
    prompt_logprobs: Annotated[Any, Fixed()] = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    client_metadata: Any = None
    max_tool_calls: Any = None  # of tools that run on the server


@dataclass(frozen=True)
class ResponsesBody:
    """A body, read.

    Args:
        namespaces: of the tools that came in one, by their names.
        echo: what the response repeats of the request.
        has_sealed_reasoning: whether reasoning comes as ``encrypted_content``, too.
    """

    job: ChatJob
    model: str
    is_streamed: bool = False
    num_top_logprobs: int | None = None
    has_sealed_reasoning: bool = False
    namespaces: dict[str, str] = field(default_factory=dict)
    echo: dict[str, Any] = field(default_factory=dict)


def read_responses_body(
    request: ResponsesRequest, service: Service, owner: str | None = None
) -> ResponsesBody:
    """Everything that the body says.

    Args:
        owner: of the items that it may refer to.

    Raises:
        ApiError: the first thing that is wrong; 404 for an unknown model, and else 400.
    """
    model = request.model_name(service)
    tools, namespaces = _read_tools(request.tools)
    wanted = request.tool_choice
    if isinstance(wanted, NamedTool):
        choice = checked_tool_choice(wanted.name, "tool_choice.name", tools)
    else:
        choice = checked_tool_choice(wanted, "", tools)
    num_top_logprobs = _num_top_logprobs(request)
    options = _template_options(request)
    answer_format = request.text.format
    params = request.sampling(
        service.default_params,
        max_tokens=first_given(request.max_output_tokens, service.max_tokens),
        logprobs=num_top_logprobs,
        structured_outputs=answer_format and answer_format.wanted("text.format"),
    )
    if request.stream_options is not None and not request.stream:
        raise refused("stream_options", "is given, and stream is not true")
    job = ChatJob(
        _read_conversation(request, partial(service.kept_items.find, owner)),
        params,
        tools,
        choice,
        request.parallel_tool_calls,
        options,
        **request.job_fields(),
    )
    repeated = {"text", "tool_choice", "tools"}
    given = request.model_dump(include=repeated, exclude_unset=True, by_alias=True)
    echo = {
        "instructions": request.instructions,
        "max_output_tokens": params.max_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning": {"effort": request.reasoning.effort, "summary": None},
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": num_top_logprobs or 0,
        "top_p": params.top_p,
        **{name: value for name, value in given.items() if value},
    }
    return ResponsesBody(
        job, model, request.stream, num_top_logprobs, _INCLUDES[0] in request.include, namespaces,
        echo,
    )  # fmt: skip


def _num_top_logprobs(request: ResponsesRequest) -> int | None:
    for index, name in enumerate(request.include):
        if name not in _INCLUDES:
            raise refused(f"include[{index}]", f"is {shown(name)}, which there is not here")
    has_logprobs = _INCLUDES[1] in request.include
    if request.top_logprobs and not has_logprobs:
        raise refused("top_logprobs", f"is given, and include has no {_INCLUDES[1]!r}")
    return request.top_logprobs if has_logprobs else None


def _template_options(request: ResponsesRequest) -> dict[str, Any]:
    """Variables of the template."""
    options: dict[str, Any] = {}
    effort = request.reasoning.effort
    if effort is not None:
        options = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    if request.text.verbosity is not None:
        options["verbosity"] = request.text.verbosity  # There may be templates that know it.
    return options


def _read_tools(
    tools: Sequence[Tool | Namespace],
) -> tuple[tuple[dict[str, Any], ...], dict[str, str]]:
    """The tools, those of Codex's namespaces among them, and the namespaces by the tools' names."""
    functions: list[dict[str, Any]] = []
    namespaces: dict[str, str] = {}
    for each in tools:
        inner = each.tools if isinstance(each, Namespace) else [each]
        functions += [tool.as_function() for tool in inner]
        if isinstance(each, Namespace):
            namespaces |= {tool.name: each.name for tool in inner}
    refuse_second_names([function["function"]["name"] for function in functions])
    return tuple(functions), namespaces


# Input


def _read_conversation(
    request: ResponsesRequest, find: Callable[[str], dict[str, Any] | None]
) -> list[dict[str, Any]]:
    """Instructions and input as messages; what one side says in several items becomes one.

    A content is the list of its texts until all of them are there: to join them one by one would
    take the square of their number.
    """
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": [request.instructions]})
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": [request.input]})
    else:
        reader = _ItemReader(messages, find)
        last = len(request.input) - 1
        for index, each in enumerate(request.input):
            reader.add(each, f"input[{index}]", is_last=index == last)
        reader.end_turn()
    for message in messages:
        message["content"] = "".join(message["content"])
    return messages


class _ItemReader:
    """Items of the input, one after another, to messages.

    Args:
        find: returns an item by its id, if it is kept.
    """

    def __init__(
        self, messages: list[dict[str, Any]], find: Callable[[str], dict[str, Any] | None]
    ):
        self._messages = messages
        self._find = find
        self._turn: dict[str, Any] | None = None  # what the model says, which may be many items
        self._names: dict[str, str] = {}  # of the tools, by the ids of their calls

    def add(self, item: AnyItem, place: str, is_last: bool) -> None:
        """Take the next item, which stands at a place."""
        if isinstance(item, ItemReference):
            item = self._referred(item, place)
        if isinstance(item, MessageItem):
            text = "".join(texts_of(item.content, f"{place}.content", is_last))
            self._add_message(item, text)
        elif isinstance(item, CallItem):
            self._add_call(item)
        elif isinstance(item, OutputItem):
            self._add_output(item, place, is_last)
        else:
            assert isinstance(item, ReasoningItem)
            self._add_reasoning(item)

    def _referred(self, reference: ItemReference, place: str) -> AnyItem:
        found = self._find(reference.id)
        if found is None:
            words = "is not kept here, or not any more; send the item itself"
            raise refused(f"{place}.id", f"{shown(reference.id)} {words}")
        return _KeptItem.read({"item": found}).item

    def end_turn(self) -> None:
        """What the model said is over."""
        if self._turn is not None:
            self._messages.append(self._turn)
            self._turn = None

    def _open_turn(self) -> dict[str, Any]:
        if self._turn is None:
            self._turn = {"role": "assistant", "content": []}
        return self._turn

    def _add_message(self, item: MessageItem, text: str) -> None:
        if item.role == "assistant":
            self._open_turn()["content"].append(text)
            return
        self.end_turn()
        last = self._messages[-1] if self._messages else None
        if item.role == "user":
            self._messages.append({"role": "user", "content": [text]})
        elif last is None:
            self._messages.append({"role": "system", "content": [text]})
        elif last["role"] == "system":
            last["content"] += ["\n\n", text]
        else:
            # Few templates know a system's message in the middle.
            content = f"<system-reminder>\n{text}\n</system-reminder>"
            self._messages.append({"role": "user", "content": [content]})

    def _add_call(self, item: CallItem) -> None:
        self._names[item.call_id] = item.name
        function = {"name": item.name, "arguments": arguments_of(item.arguments)}
        call = {"id": item.call_id, "type": "function", "function": function}
        self._open_turn().setdefault("tool_calls", []).append(call)

    def _add_output(self, item: OutputItem, place: str, is_last: bool) -> None:
        call_id = item.call_id
        if call_id not in self._names:
            words = f"is {shown(call_id)}, and no function_call has that id"
            raise refused(f"{place}.call_id", words)
        self.end_turn()
        self._messages.append(
            {
                "role": "tool",
                "tool_call_id": call_id,
                "name": self._names[call_id],
                "content": texts_of(item.output, f"{place}.output", is_last),
            }
        )

    def _add_reasoning(self, item: ReasoningItem) -> None:
        turn = self._turn
        if turn is not None and (any(turn["content"]) or "tool_calls" in turn):
            self.end_turn()  # Reasoning comes first.
        texts = [each.text for each in item.content] or [_opened(item.encrypted_content)]
        text = "\n".join(filter(None, texts))
        if text:
            self._open_turn()["reasoning_content"] = text


class _KeptItem(Body):
    item: AnyItem


def sealed(reasoning: str) -> str:
    """Reasoning as ``encrypted_content``. It is not secret: the client sees it in any case."""
    return _SEAL + base64.b64encode(reasoning.encode(errors="replace")).decode()


def _opened(text: str) -> str:
    """The reasoning in an ``encrypted_content``; nothing if it is another server's."""
    if not text.startswith(_SEAL):
        return ""
    try:
        return base64.b64decode(text[len(_SEAL) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
