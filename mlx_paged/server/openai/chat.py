"""The body of ``POST /v1/chat/completions``, and its :class:`ChatJob`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mlx_paged.answers.dialect import ToolChoice
from mlx_paged.server.chat_jobs import ChatJob
from mlx_paged.server.grammars.response_format import fields_of
from mlx_paged.server.openai.messages import (
    Conversation,
    NamedFunction,
    Tool,
    checked_tool_choice,
    read_messages,
    read_tools,
)
from mlx_paged.server.openai.options import Effort, OpenAIFields, effort_options, first_given
from mlx_paged.server.schemas import Body, Children, OneOf, fixed, refused
from mlx_paged.server.service import Service

# Names that are fields of the body, or parameters of ``apply_chat_template``.
_NO_TEMPLATE_VARIABLES = {
    "add_generation_prompt": "send the field add_generation_prompt",
    "continue_final_message": "send the field continue_final_message",
    "tools": "send tools",
    "messages": "send messages",
    **dict.fromkeys(
        (
            "chat_template",
            "conversation",
            "max_length",
            "padding",
            "return_assistant_tokens_mask",
            "return_dict",
            "return_tensors",
            "tokenize",
            "tokenizer_kwargs",
            "truncation",
        ),
        "leave it out",
    ),
}


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
    tools: Children[Tool] = Field(default_factory=list)
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedFunction, OneOf("type")] = (
        "auto"
    )
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    include_reasoning: bool = True
    modalities: Annotated[Any, fixed(["text"])] = None
    verbosity: Annotated[Any, fixed("medium")] = None
    echo: Annotated[Any, fixed(False)] = None
    add_special_tokens: Annotated[Any, fixed(False)] = None

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
    wanted = request.structured()
    fields = {"logprobs": "top_logprobs", **fields_of(wanted)}
    if request.max_completion_tokens is not None:
        fields["max_tokens"] = "max_completion_tokens"
    job = ChatJob(
        messages=read_messages(request.messages),
        params=request.sampling(
            service.default_params,
            fields,
            max_tokens=max_tokens,
            logprobs=request.num_top_logprobs,
            structured_outputs=wanted and wanted.params,
        ),
        tools=tools,
        tool_choice=_read_tool_choice(request.tool_choice, tools),
        parallel_tool_calls=request.parallel_tool_calls,
        template_options=request.template_options(),
        fields=fields,
        **request.job_fields(),
    )
    if request.stream and job.params.prompt_logprobs is not None:
        raise refused("prompt_logprobs", "can't be streamed")
    return job


def _read_tool_choice(choice: str | NamedFunction, tools: tuple[dict[str, Any], ...]) -> ToolChoice:
    if isinstance(choice, NamedFunction):
        return checked_tool_choice(choice.function.name, "tool_choice.function.name", tools)
    return checked_tool_choice(choice, "", tools)
