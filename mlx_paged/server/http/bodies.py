"""Endpoints that are sent a JSON object, and work for as long as the client waits."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, TypeAlias

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mlx_paged.errors import shown
from mlx_paged.server.callers import user_of
from mlx_paged.server.errors import ApiError
from mlx_paged.server.fields import Fields
from mlx_paged.server.http.disconnects import ClientLeftError, until_disconnect
from mlx_paged.server.http.limits import check_json
from mlx_paged.server.service import Service

Handler: TypeAlias = Callable[[Request, Fields], Coroutine[Any, Any, Response]]
# Bytes that the loop's thread reads itself, in a millisecond or two. More would hold up streams.
_SMALL_BODY = 2**15
CLIENT_LEFT = 499  # nginx's word for it; nobody reads it but the log


def json_endpoint(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint of a handler, which gets the fields of the body, and is cancelled when the
    client leaves before there is a response.
    """

    async def endpoint(request: Request) -> Response:
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            what = f"a body in the content encoding {shown(encoding)} is not read; send it plain"
            raise ApiError(415, what, headers={"Accept-Encoding": "identity"})
        try:
            body = await request.body()
            return await until_disconnect(request.receive, _answer(request, body, handler))
        except (ClientDisconnect, ClientLeftError):
            return Response(status_code=CLIENT_LEFT)

    return endpoint


async def _answer(request: Request, body: bytes, handler: Handler) -> Response:
    if len(body) <= _SMALL_BODY:
        value = parse_json(body)
    else:
        service: Service = request.app.state.service
        value = await service.run_in_tokenizer_pool(user_of(request), lambda _: parse_json(body))
    return await handler(request, Fields(value))


def parse_json(body: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ApiError: it is none, or too much to parse; 400.
    """
    check_json(body)
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
        if b"\\ud" in body.lower():
            json.dumps(value, ensure_ascii=False).encode()  # Halves of characters have no UTF-8.
        return value
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except UnicodeEncodeError:
        raise ApiError(400, "the body has half a character, a lone surrogate") from None
    except ValueError as error:
        # UnicodeDecodeError is one, too. Its text would quote the body.
        what = f": {error}" if isinstance(error, json.JSONDecodeError) else ""
        raise ApiError(400, f"the body is not valid JSON{what}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ApiError(400, f"the body is not valid JSON: {name} is not allowed")
