"""``/v1/responses``, which OpenAI's newer clients speak. Nothing is stored."""

from __future__ import annotations

from typing import NoReturn

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_paged.server.answers.reader import AnswerFormat
from mlx_paged.server.callers import job_of, request_id_of, user_of
from mlx_paged.server.chat_jobs import prepare
from mlx_paged.server.errors import ApiError
from mlx_paged.server.fair_threads import Work
from mlx_paged.server.fields import Fields
from mlx_paged.server.generations import Generation
from mlx_paged.server.http.sse import EventStream
from mlx_paged.server.responses.answers import ResponseAnswer, response_events, whole_response
from mlx_paged.server.responses.body import ResponsesBody, read_responses_body
from mlx_paged.server.service import Service


async def responses(request: Request, fields: Fields) -> Response:
    """An answer to a conversation, whole or as events."""
    service: Service = request.app.state.service
    user = user_of(request)
    body, generation, answer_format = await service.run_in_tokenizer_pool(
        user, _prepared, request, fields
    )
    request_id = request_id_of(request)
    answer = ResponseAnswer(service, body, answer_format, request_id)
    if not body.is_streamed:
        [output] = await service.whole([generation], request_id)
        return JSONResponse(whole_response(answer, output))
    parts = await service.start(generation, request_id)
    return EventStream(response_events(answer, parts), parts)


def _prepared(
    work: Work, request: Request, fields: Fields
) -> tuple[ResponsesBody, Generation, AnswerFormat]:
    """The body, and the prompt and the answer that it asks for."""
    service: Service = request.app.state.service
    body = read_responses_body(fields, service)
    return body, *prepare(work, service, job_of(request, body.job))


async def stored_response(request: Request) -> NoReturn:
    """There is none."""
    raise ApiError(
        404,
        "nothing is stored here, so no response can be looked up; send the whole conversation",
        param="response_id",
        code="response_not_found",
    )
