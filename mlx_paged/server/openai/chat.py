"""The body of ``POST /v1/chat/completions``, its messages and tools, and its :class:`ChatJob`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from mlx_paged.answers.dialect import ToolChoice
from mlx_paged.answers.tool_grammar import Tool
from mlx_paged.server.chat_jobs import ChatJob, arguments_of
from mlx_paged.server.conversations import (
    Content,
    checked_tool_choice,
    texts_of,
    unique_tools,
)
from mlx_paged.server.fields import (
    Effort,
    FormatFields,
    GenerationFields,
    StreamOptions,
    effort_options,
    first_given,
)
from mlx_paged.server.schemas import (
    Body,
    Children,
    Filled,
    OneOf,
    Repeated,
    SomeChildren,
    only,
    refused,
)
from mlx_paged.server.service import Service

# Names that are fields of the body, or parameters of ``apply_chat_template``.
_NO_TEMPLATE_VARIABLES = {
    "add_generation_prompt": "send the field add_generation_prompt",
    "continue_final_message": "send the field continue_final_message",
    "tools": "send tools",
    "messages": "send messages",
    **dict.fromkeys(
        (
            "chat_template", "conversation", "max_length", "padding",
            "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize",
            "tokenizer_kwargs", "truncation",
        ),
        "leave it out",
    ),
}  # fmt: skip


class ChatMessage(Repeated):
    place = "messages[]"
    name: str | None = None
    function_call: Annotated[Any, only(way_out="send tool_calls")] = None
    audio: Annotated[Any, only(way_out="only text can be read")] = None


class InputMessage(ChatMessage):
    """A message of any other role than the model and tools."""

    role: Literal["system", "developer", "user"]
    content: Content


class ToolMessage(ChatMessage):
    role: Literal["tool"]
    content: Content = ""  # Some clients omit it for a call without a result.
    tool_call_id: str | None = None


class CalledFunction(Repeated):
    place = "messages[].tool_calls[].function"
    name: str
    arguments: str = ""


class ChatToolCall(Repeated):
    place = "messages[].tool_calls[]"
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(ChatMessage):
    """A message of the model. Without content and calls it is an empty text, which clients send
    after an answer that was interrupted.
    """

    role: Literal["assistant"]
    content: Content = ""
    refusal: str = ""
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Children[ChatToolCall] = Field(default_factory=list)


AnyMessage = Annotated[InputMessage | ToolMessage | AssistantMessage, OneOf("role")]

Conversation = SomeChildren[AnyMessage]


class ChatFunction(Repeated):
    place = "tools[].function"
    name: Filled
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Repeated):
    place = "tools[]"
    type: Annotated[str, only("function", way_out="describe it as a function")]
    function: ChatFunction


class FunctionName(Body):
    name: str


class NamedFunction(Body):
    type: Literal["function"]
    function: FunctionName


class UsageOptions(StreamOptions):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class OpenAIFields(GenerationFields, FormatFields):
    """The fields that chat and completions share."""

    stream_options: UsageOptions | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    request_id: Annotated[str, Field(pattern="^[A-Za-z0-9._:-]{1,128}$")] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    metadata: Any = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


class TemplateFields(Body):
    """Fields that set variables of the chat template."""

    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    enable_thinking: bool | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None

    def template_options(self) -> dict[str, Any]:
        """``chat_template_kwargs``, and the variables that have their own fields.
        ``enable_thinking`` overrides ``reasoning_effort``.
        """
        options = effort_options(self.reasoning_effort)
        for name in sorted(_NO_TEMPLATE_VARIABLES.keys() & self.chat_template_kwargs.keys()):
            way_out = _NO_TEMPLATE_VARIABLES[name]
            raise refused(f"chat_template_kwargs.{name}", f"can't be set; {way_out}")
        options |= self.chat_template_kwargs
        if self.enable_thinking is not None:
            options["enable_thinking"] = self.enable_thinking
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise refused(
                    "continue_final_message", "can't be combined with add_generation_prompt"
                )
            options |= {"continue_final_message": True, "add_generation_prompt": False}
        elif self.add_generation_prompt is False:
            options["add_generation_prompt"] = False
        return options


class ChatRequest(OpenAIFields, TemplateFields):
    """The body of ``POST /v1/chat/completions``."""

    messages: Conversation
    tools: Children[ChatTool] = Field(default_factory=list)
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedFunction, OneOf("type")] = (
        "auto"
    )
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    include_reasoning: bool = True
    modalities: Annotated[Any, only(["text"], way_out="leave it out")] = None
    verbosity: Literal["medium"] | None = None
    echo: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        """The number of alternatives per token; ``None``: no logprobs."""
        return self.top_logprobs or 0 if self.logprobs else None


def read_chat(request: ChatRequest, service: Service) -> ChatJob:
    """Turn the body into a job."""
    request.check(service)
    tools = read_tools(request.tools)
    if request.top_logprobs is not None and not request.logprobs:
        raise refused("top_logprobs", "is given, but logprobs is not true")
    max_tokens = first_given(request.max_completion_tokens, request.max_tokens, service.max_tokens)
    fields = {"logprobs": "top_logprobs"}
    if request.max_completion_tokens is not None:
        fields["max_tokens"] = "max_completion_tokens"
    messages = read_messages(request.messages)
    values = {"max_tokens": max_tokens, "logprobs": request.num_top_logprobs}
    job = ChatJob(
        messages,
        request.generation(service, request.structured(), fields, **values),
        tools,
        _read_tool_choice(request.tool_choice, tools),
        request.parallel_tool_calls,
        request.template_options(),
    )
    if request.stream and job.generation.params.prompt_logprobs is not None:
        raise refused("prompt_logprobs", "can't be streamed")
    return job


def _read_tool_choice(choice: str | NamedFunction, tools: Sequence[Tool]) -> ToolChoice:
    if isinstance(choice, NamedFunction):
        return checked_tool_choice(choice.function.name, "tool_choice.function.name", tools)
    return checked_tool_choice(choice, "", tools)


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
    if isinstance(message, AssistantMessage):
        converted["content"] += message.refusal
        reasoning = message.reasoning_content
        reasoning = message.reasoning if reasoning is None else reasoning
        if reasoning is not None:
            converted["reasoning_content"] = reasoning
        if message.tool_calls:
            converted["tool_calls"] = list(map(_read_call, message.tool_calls))
    elif isinstance(message, ToolMessage) and message.tool_call_id is not None:
        converted["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        converted["name"] = message.name
    return converted


def _read_call(call: ChatToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": arguments_of(call.function.arguments)}
    converted = {"type": "function", "function": function}
    return converted if call.id is None else {**converted, "id": call.id}


def read_tools(tools: Sequence[ChatTool]) -> tuple[Tool, ...]:
    """The tools, without unknown fields."""
    forms = [tool.model_dump(exclude_unset=True) for tool in tools]
    return unique_tools(Tool(form, f"tools[{i}].function") for i, form in enumerate(forms))
