"""``POST /v1/chat/completions``: its body, and what an answer is written from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_paged.sampling_params import SamplingParams
from mlx_paged.server.callers import prepare_chat
from mlx_paged.server.chat_jobs import ChatJob
from mlx_paged.server.fields import Fields
from mlx_paged.server.grammars.response_format import read_structured_outputs
from mlx_paged.server.http.sse import EventStream
from mlx_paged.server.openai.chat_answers import ChatRenderer, chat_events
from mlx_paged.server.openai.messages import read_messages, read_tool_choice, read_tools
from mlx_paged.server.openai.options import (
    ADVICE,
    Head,
    Options,
    read_cache_salt,
    read_max_tokens,
    read_no_store,
    read_options,
)
from mlx_paged.server.sampling_fields import read_sampling
from mlx_paged.server.service import Service

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# What would be taken for a parameter of the function that applies a template, or has a field.
_NO_TEMPLATE_VARIABLES = {
    "add_generation_prompt": "send add_generation_prompt beside it",
    "continue_final_message": "send continue_final_message beside it",
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


@dataclass(frozen=True)
class ChatBody:
    """A body of chat, read.

    Args:
        num_top_logprobs: for each token; ``None``: no logprobs.
        has_reasoning: whether the answer shows it.
    """

    job: ChatJob
    options: Options
    num_top_logprobs: int | None
    has_reasoning: bool


async def chat_completions(request: Request, fields: Fields) -> Response:
    """An answer to a conversation, whole or in parts."""
    service: Service = request.app.state.service
    body, generation, answer_format = await prepare_chat(request, fields, read_chat)
    kind = "chat.completion.chunk" if body.options.is_streamed else "chat.completion"
    head = Head.of(request, body.options, "chatcmpl", kind)
    renderer = ChatRenderer(
        service,
        head.values,
        body.options,
        answer_format,
        num_top_logprobs=body.num_top_logprobs,
        has_reasoning=body.has_reasoning,
    )
    if not body.options.is_streamed:
        [output] = await service.whole([generation], head.request_id)
        return JSONResponse(renderer.whole(output))
    answer = await service.start(generation, head.request_id)
    return EventStream(chat_events(renderer, answer), answer)


def read_chat(fields: Fields, service: Service) -> ChatBody:
    """Everything that the body says.

    Raises:
        ApiError: the first thing that is wrong, and every field that can't be honoured, by name.
    """
    options = read_options(fields, service)
    tools = read_tools(fields)
    num_top_logprobs = _read_num_top_logprobs(fields)
    job = ChatJob(
        messages=read_messages(fields),
        params=_read_params(fields, service, num_top_logprobs),
        tools=tools,
        tool_choice=read_tool_choice(fields, tools),
        parallel_tool_calls=fields.boolean("parallel_tool_calls", True),
        template_options=read_template_options(fields),
        priority=fields.integer("priority", 0),
        cache_salt=read_cache_salt(fields),
        no_store=read_no_store(fields),
    )
    if options.is_streamed and job.params.prompt_logprobs is not None:
        raise fields.error("prompt_logprobs", "can't be streamed")
    has_reasoning = fields.boolean("include_reasoning", True)
    fields.only("modalities", ["text"])
    fields.only("verbosity", "medium")
    fields.only("echo", False)
    fields.only("add_special_tokens", False)
    fields.refuse_rest(ADVICE)
    return ChatBody(job, options, num_top_logprobs, has_reasoning)


def _read_num_top_logprobs(fields: Fields) -> int | None:
    has_logprobs = fields.boolean("logprobs", False)
    if fields.has("top_logprobs") and not has_logprobs:
        raise fields.error("top_logprobs", "is given, and logprobs is not true")
    return fields.integer("top_logprobs", 0) if has_logprobs else None


def _read_params(fields: Fields, service: Service, num_top_logprobs: int | None) -> SamplingParams:
    names = ("max_completion_tokens", "max_tokens")
    return read_sampling(
        fields,
        service.default_params,
        max_tokens=read_max_tokens(fields, *names, default=service.max_tokens),
        logprobs=num_top_logprobs,
        structured_outputs=read_structured_outputs(fields),
    )


def read_template_options(fields: Fields) -> dict[str, Any]:
    """Variables of the chat template: ``chat_template_kwargs``, and those that have a field.

    ``reasoning_effort`` is one that some templates know; ``"none"`` turns thinking off, and all
    others turn it on, unless ``enable_thinking`` says something else.
    """
    options: dict[str, Any] = {}
    effort = fields.choice("reasoning_effort", _EFFORTS, None)
    if effort is not None:
        options = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    given = fields.raw("chat_template_kwargs")
    if given is not None:
        child = Fields(given, fields.name_of("chat_template_kwargs"))
        for name in sorted(_NO_TEMPLATE_VARIABLES.keys() & given.keys()):
            raise child.error(name, f"can't be set; {_NO_TEMPLATE_VARIABLES[name]}")
        options |= given
    if fields.has("enable_thinking"):
        options["enable_thinking"] = fields.boolean("enable_thinking")
    if fields.boolean("continue_final_message", False):
        if fields.boolean("add_generation_prompt", False):
            raise fields.error("continue_final_message", "excludes add_generation_prompt")
        options |= {"continue_final_message": True, "add_generation_prompt": False}
    elif not fields.boolean("add_generation_prompt", True):
        options["add_generation_prompt"] = False
    return options
