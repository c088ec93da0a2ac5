"""``POST /v1/messages`` and ``/v1/messages/count_tokens``, which Anthropic's clients speak."""

from __future__ import annotations

import logging
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_paged.server.anthropic.answers import MessageOptions, MessageRenderer
from mlx_paged.server.anthropic.messages import MessagesBody, read_messages_body
from mlx_paged.server.callers import prepare_chat, request_id_of
from mlx_paged.server.fields import Fields
from mlx_paged.server.http.sse import EventStream
from mlx_paged.server.service import Service

LOG = logging.getLogger("mlx_paged.server")


async def messages(request: Request, fields: Fields) -> Response:
    """An answer to a conversation, whole or as events."""
    service: Service = request.app.state.service
    has_context_management = fields.has("context_management")
    read = partial(_read, request, is_count=False)
    body, generation, answer_format = await prepare_chat(request, fields, read)
    request_id = request_id_of(request)
    options = MessageOptions(
        f"msg_{request_id}",
        body.model,
        body.job.params.max_tokens,
        tuple(body.job.params.stop),
        body.shows_thinking,
        has_context_management,
    )
    renderer = MessageRenderer(answer_format, options)
    if not body.is_streamed:
        [output] = await service.whole([generation], request_id)
        return JSONResponse(renderer.whole(output))
    answer = await service.start(generation, request_id)
    return EventStream(renderer.events(answer), answer)


async def count_tokens(request: Request, fields: Fields) -> Response:
    """How many tokens the prompt of a conversation has."""
    _, generation, _ = await prepare_chat(request, fields, partial(_read, request, is_count=True))
    return JSONResponse({"input_tokens": len(generation.prompt_token_ids)})


def _read(request: Request, fields: Fields, service: Service, is_count: bool) -> MessagesBody:
    has_betas = "anthropic-beta" in request.headers
    body = read_messages_body(fields, service, has_betas=has_betas, is_count=is_count)
    if body.left_out:
        # Names that clients make up are shown as they are only if they are short words.
        names = ", ".join(name[:40] for name in body.left_out if name.isidentifier())
        LOG.warning("fields of betas are left out: %s", names)
    return body
