"""``/v1/responses``, which OpenAI's newer clients speak. Responses are not stored."""

from __future__ import annotations

from functools import partial
from typing import NoReturn

from starlette.responses import JSONResponse, Response

from mlx_paged.server.context import RequestContext
from mlx_paged.server.errors import ApiError
from mlx_paged.server.http.sse import EventStream
from mlx_paged.server.responses.answers import ResponseRenderer
from mlx_paged.server.responses.body import ResponsesRequest, read_responses_body
from mlx_paged.server.schemas import Body


async def responses(context: RequestContext[ResponsesRequest]) -> Response:
    """An answer to a conversation, whole or as events."""
    service, request_id = context.service, context.request_id
    owner = context.cache_salt()
    read = partial(read_responses_body, owner=owner)
    body, generation, answer_format = await context.prepare_chat(read)
    renderer = ResponseRenderer(service, body, answer_format, request_id, owner)
    if not body.is_streamed:
        [output] = await service.whole([generation], request_id)
        return JSONResponse(renderer.whole(output))
    answer = await service.start(generation, request_id)
    return EventStream(renderer.events(answer), answer)


async def stored_response(context: RequestContext[Body]) -> NoReturn:
    """There is none."""
    raise ApiError(
        404,
        "nothing is stored here, so no response can be looked up; send the whole conversation",
        param="response_id",
        code="response_not_found",
    )
