"""``POST /v1/messages`` and ``/v1/messages/count_tokens``, which Anthropic's clients speak."""

from __future__ import annotations

from typing import TypeVar

from starlette.responses import JSONResponse, Response

from mlx_paged.server.answers.reader import AnswerFormat
from mlx_paged.server.anthropic.answers import MessageOptions, MessageRenderer
from mlx_paged.server.anthropic.messages import (
    AnyRequest,
    CountRequest,
    MessagesBody,
    MessagesRequest,
    read_messages_body,
)
from mlx_paged.server.context import RequestContext
from mlx_paged.server.generations import Generation
from mlx_paged.server.http.sse import EventStream

C = TypeVar("C", bound=AnyRequest)


async def messages(context: RequestContext[MessagesRequest]) -> Response:
    """An answer to a conversation, whole or as events."""
    service, request_id = context.service, context.request_id
    body, generation, answer_format = await _prepare(context)
    options = MessageOptions(
        f"msg_{request_id}",
        body.model,
        body.job.params.max_tokens,
        tuple(body.job.params.stop),
        body.shows_thinking,
        context.value.get("context_management") is not None,
    )
    renderer = MessageRenderer(answer_format, options)
    if not body.is_streamed:
        [output] = await service.whole([generation], request_id)
        return JSONResponse(renderer.whole(output))
    answer = await service.start(generation, request_id)
    return EventStream(renderer.events(answer), answer)


async def count_tokens(context: RequestContext[CountRequest]) -> Response:
    """How many tokens the prompt of a conversation has."""
    _, generation, _ = await _prepare(context)
    return JSONResponse({"input_tokens": len(generation.prompt_token_ids)})


async def _prepare(
    context: RequestContext[C],
) -> tuple[MessagesBody, Generation, AnswerFormat]:
    # Betas have fields that are newer than this server.
    has_betas = "anthropic-beta" in context.request.headers
    return await context.prepare_chat(read_messages_body, leaves_out=has_betas)
