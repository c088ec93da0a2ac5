"""Endpoints that are sent a JSON object, and work for as long as the client waits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, TypeAlias

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mlx_paged.server.errors import ApiError
from mlx_paged.server.fields import Fields
from mlx_paged.server.http.disconnects import ClientLeftError, until_disconnect

Handler: TypeAlias = Callable[[Request, Fields], Coroutine[Any, Any, Response]]
_LARGE_BODY = 2**18  # bytes; to parse it in the loop's thread would hold up all streams
CLIENT_LEFT = 499  # nginx's word for it; nobody reads it but the log


def json_endpoint(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint of a handler, which gets the fields of the body, and is cancelled when the
    client leaves before there is a response.
    """

    async def endpoint(request: Request) -> Response:
        try:
            body = await request.body()
            is_large = len(body) > _LARGE_BODY
            value = await asyncio.to_thread(parse_json, body) if is_large else parse_json(body)
            fields = Fields(value)
            return await until_disconnect(request.receive, handler(request, fields))
        except (ClientDisconnect, ClientLeftError):
            return Response(status_code=CLIENT_LEFT)

    return endpoint


def parse_json(body: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ApiError: it is none; 400.
    """
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
        raise ApiError(400, f"the body is no JSON{what}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ApiError(400, f"the body is no JSON: {name} is no number of it")
