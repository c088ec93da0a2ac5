"""``/v1/responses``, which OpenAI's newer clients speak. Responses are not stored."""

from __future__ import annotations

from functools import partial
from typing import NoReturn

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_paged.server.callers import cache_salt_of, prepare_chat, request_id_of
from mlx_paged.server.errors import ApiError
from mlx_paged.server.fields import Fields
from mlx_paged.server.http.sse import EventStream
from mlx_paged.server.responses.answers import ResponseRenderer
from mlx_paged.server.responses.body import read_responses_body
from mlx_paged.server.service import Service


async def responses(request: Request, fields: Fields) -> Response:
    """An answer to a conversation, whole or as events."""
    service: Service = request.app.state.service
    owner = cache_salt_of(request, None)
    read = partial(read_responses_body, owner=owner)
    body, generation, answer_format = await prepare_chat(request, fields, read)
    request_id = request_id_of(request)
    renderer = ResponseRenderer(service, body, answer_format, request_id, owner)
    if not body.is_streamed:
        [output] = await service.whole([generation], request_id)
        return JSONResponse(renderer.whole(output))
    answer = await service.start(generation, request_id)
    return EventStream(renderer.events(answer), answer)


async def stored_response(request: Request) -> NoReturn:
    """There is none."""
    raise ApiError(
        404,
        "nothing is stored here, so no response can be looked up; send the whole conversation",
        param="response_id",
        code="response_not_found",
    )
