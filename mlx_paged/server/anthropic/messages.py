"""The body of Anthropic's ``/v1/messages``, and its :class:`ChatJob`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from mlx_paged.answers.tool_grammar import Tool
from mlx_paged.server.chat_jobs import ChatJob
from mlx_paged.server.conversations import (
    Content,
    History,
    OtherPart,
    TextPart,
    checked_tool_choice,
    texts_of,
    unique_tools,
)
from mlx_paged.server.fields import (
    RequestedFormat,
    RequestFields,
    StopTexts,
    make_params,
    read_format,
)
from mlx_paged.server.generations import Generation
from mlx_paged.server.schemas import (
    Body,
    Children,
    Filled,
    OneOf,
    Repeated,
    SomeChildren,
    only,
    refused,
    without_effect,
)
from mlx_paged.server.service import Service

# A note of Claude Code for Anthropic's accounting. It is not meant for the model, and it changes
# with each request, so prompts with it would share no prefix.
_BILLING = "x-anthropic-billing-header:"


class ContentBlock(Repeated):
    place = "messages[].content[]"


class ThinkingBlock(ContentBlock):
    type: Literal["thinking"]
    thinking: str
    signature: Any = None


class RedactedBlock(ContentBlock):
    """Reasoning encrypted by Anthropic, which is ignored."""

    type: Literal["redacted_thinking"]
    data: Any = None


class CallBlock(ContentBlock):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ResultBlock(ContentBlock):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Content = ""
    is_error: bool = False


AnswerPart = Annotated[
    TextPart | ThinkingBlock | RedactedBlock | CallBlock | OtherPart, OneOf("type")
]
QuestionPart = Annotated[TextPart | ResultBlock | OtherPart, OneOf("type")]


class AssistantTurn(Repeated):
    """A message of the model."""

    place = "messages[]"
    role: Literal["assistant"]
    content: Annotated[str | Children[AnswerPart], OneOf()]


class UserTurn(Repeated):
    """A message of the user, with texts and results of tools in any order."""

    place = "messages[]"
    role: Literal["user", "msg"]
    content: Annotated[str | Children[QuestionPart], OneOf()]


class SystemTurn(Repeated):
    place = "messages[]"
    role: Literal["system", "ctx"]
    content: Content


AnyMessage = Annotated[AssistantTurn | UserTurn | SystemTurn, OneOf("role")]
Conversation = SomeChildren[AnyMessage]


class AnthropicTool(Repeated):
    place = "tools[]"
    type: Annotated[
        str,
        only(
            "custom",
            way_out="it is Anthropic's own tool; describe it as a custom tool with an input_schema",
        ),
    ] = "custom"
    name: Filled
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: Any = None


class Thinking(Body):
    place = "thinking"
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted", "full"] = "full"


# They identify the user, choose a service tier, or control the cache, in which everything is kept;
# or they let Anthropic's servers shorten a conversation, which the answer says is not done.
_WithoutEffect: Any = without_effect(
    "metadata", "cache_control", "service_tier", "inference_geo", "speed", "diagnostics",
    "context_management", "compaction", "billing_policy", "fallbacks", "fallback_credit_token",
    "user_profile_id", "workspace_id", "betas", "anthropic_beta", "anthropic_version",
)  # fmt: skip


class ConversationFields(RequestFields, _WithoutEffect):  # type: ignore[misc]
    """The fields of ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

    # On this code Anthropic's clients send the whole conversation instead.
    thread: Annotated[Any, only(way_out="send all messages", code="thread_unsupported_request")] = (
        None
    )
    messages: Conversation
    system: Content = ""
    tools: Children[AnthropicTool] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    output_format: OutputFormat | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: StopTexts | None = None
    mcp_servers: Annotated[
        Any, only([], way_out="give the servers' tools as tools, and call them yourself")
    ] = None


class MessagesRequest(ConversationFields):
    """The body of ``POST /v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1)]


class CountRequest(ConversationFields):
    """The body of ``POST /v1/messages/count_tokens``."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None


AnyRequest = MessagesRequest | CountRequest


def read_messages_body(request: AnyRequest, service: Service) -> ChatJob:
    """Turn the body into a job."""
    request.model_name(service)
    tools = unique_tools(
        Tool.of(f"tools[{i}]", t.name, t.description, t.input_schema, t.strict, "input_schema")
        for i, t in enumerate(request.tools)
    )
    requested_choice = request.tool_choice or ToolChoice(type="auto")
    choice = _tool_choice(requested_choice, tools)
    thinking, effort = request.thinking, request.output_config.effort
    if thinking is None:
        # Off by default, as in Anthropic's API, unless the server was started with another default.
        is_thinking = service.template_options.get("enable_thinking", False)
    else:
        is_thinking = thinking.type != "disabled"
    options: dict[str, Any] = {"enable_thinking": is_thinking}
    if effort is not None:
        options["reasoning_effort"] = effort
    messages = _read_messages(request.system, request.messages)
    if messages[-1]["role"] == "assistant":
        # The answer continues it.
        options |= {"continue_final_message": True, "add_generation_prompt": False}
    requested = _requested_format(request)
    fields = {
        "stop": "stop_sequences",
        "thinking_token_budget": "thinking.budget_tokens",
        **requested.fields,
    }
    names = ("temperature", "top_p", "top_k", "max_tokens")
    values = {
        **{name: getattr(request, name) for name in names},
        "stop": request.stop_sequences,
        "thinking_token_budget": thinking and thinking.budget_tokens,
        "structured_outputs": requested.params,
    }
    given = {name: value for name, value in values.items() if value is not None}
    params = make_params(service.default_params, given, fields)
    return ChatJob(
        messages,
        Generation([], params, request.options(service), fields=fields),
        tools,
        choice,
        not requested_choice.disable_parallel_tool_use,
        options,
    )


def _requested_format(request: AnyRequest) -> RequestedFormat:
    """The JSON that is requested, if any."""
    places = {
        "output_config.format.schema": request.output_config.format,
        "output_format.schema": request.output_format,
    }
    given = [(place, form.schema_) for place, form in places.items() if form is not None]
    return read_format(given[0][0], json=given[0][1]) if given else RequestedFormat()


def _tool_choice(choice: ToolChoice, tools: Sequence[Tool]) -> str:
    """The choice in OpenAI's terms."""
    if choice.type != "tool":
        return checked_tool_choice(choice.type, "", tools)
    if choice.name is None:
        raise refused("tool_choice.name", "is missing")
    return checked_tool_choice(choice.name, "tool_choice.name", tools)


# Messages


def _read_messages(system: Content, messages: Sequence[AnyMessage]) -> list[dict[str, Any]]:
    """The messages for a chat template; consecutive messages of one role are merged."""
    history = History()
    texts = texts_of(system, "system", is_last=True)
    instructions = "\n\n".join(text for text in texts if not text.startswith(_BILLING))
    if instructions:
        history.message("system", instructions)
    for index, each in enumerate(messages):
        place, is_last = f"messages[{index}].content", index == len(messages) - 1
        if isinstance(each, AssistantTurn):
            _read_answer(history, each, place, is_last)
        elif isinstance(each, UserTurn):
            _read_question(history, each, place, is_last)
        else:
            history.remind("\n\n".join(texts_of(each.content, place, is_last)))
    return history.messages("\n\n")


def _read_question(history: History, question: UserTurn, place: str, is_last: bool) -> None:
    if isinstance(question.content, str):
        history.message("user", question.content)
        return
    if not question.content:
        history.message("user")
    for index, block in enumerate(question.content):
        here = f"{place}[{index}]"
        if not isinstance(block, ResultBlock):
            history.message("user", block.as_text(here, is_last))
            continue
        message = history.result(block.tool_use_id, f"{here}.tool_use_id", "tool_use")
        text = "\n".join(texts_of(block.content, f"{here}.content", is_last))
        if block.is_error and "error" not in text[:40].lower():
            # Templates have no field for it.
            text = f"Error: {text}"
        message["content"].append(text)


def _read_answer(history: History, answer: AssistantTurn, place: str, is_last: bool) -> None:
    if isinstance(answer.content, str):
        history.message("assistant", answer.content)
        return
    message = history.message("assistant")
    texts, reasoning = [], []
    for index, block in enumerate(answer.content):
        if isinstance(block, ThinkingBlock):
            reasoning.append(block.thinking)
        elif isinstance(block, CallBlock):
            history.call(block.id, block.name, block.input)
        elif not isinstance(block, RedactedBlock):
            texts.append(block.as_text(f"{place}[{index}]", is_last))
    message["content"].append("".join(texts))
    if any(reasoning):
        message["reasoning_content"] = "\n".join(reasoning)
