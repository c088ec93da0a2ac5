"""``ChatJob``: a conversation to answer, in any protocol, and how it becomes a generation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from mlx_paged.chat_template import ChatTemplateError, encode_chat
from mlx_paged.sampling_params import RequestOutputKind, SamplingParams
from mlx_paged.server.answers import AnswerFormat, ToolChoice
from mlx_paged.server.errors import ApiError
from mlx_paged.server.generations import Generation
from mlx_paged.server.service import Service


@dataclass(frozen=True)
class ChatJob:
    """A conversation to answer.

    Args:
        messages: as chat templates take them: a role, a content that is text, and, of an assistant,
            ``tool_calls`` whose arguments are objects, not JSON texts.
        params: what the request says of sampling.
        tools: functions as OpenAI's ``tools`` has them, which is what chat templates take.
        tool_choice: ``"none"``, ``"auto"``, ``"required"``, or the name of the tool to call.
        parallel_tool_calls: whether an answer may call several.
        template_options: variables of the chat template.
    """

    messages: list[dict[str, Any]]
    params: SamplingParams
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    template_options: dict[str, Any] = field(default_factory=dict)
    priority: int = 0
    cache_salt: str | None = None


def prepare(service: Service, job: ChatJob) -> tuple[Generation, AnswerFormat]:
    """The prompt as tokens, and how its answers are read. It takes long for long conversations, so
    call it in a thread.

    Raises:
        ApiError: the template refuses the messages.
    """
    options = {**service.template_options, **job.template_options}
    if job.tools and job.tool_choice != "none":
        options["tools"] = list(job.tools)
    try:
        text, token_ids = encode_chat(service.tokenizer, job.messages, options)
    except ChatTemplateError as error:
        raise ApiError(400, str(error), param="messages") from error
    del text
    params = replace(job.params, output_kind=RequestOutputKind.DELTA)
    return Generation(token_ids, params, job.priority, job.cache_salt), AnswerFormat()
