"""``ApiError``: an error response, and its form in each protocol; and the end of requests whose
clients have disconnected.
"""

from __future__ import annotations

import asyncio
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_paged.errors import (
    AdapterError,
    AdaptersInUseError,
    ArgumentError,
    CacheFullError,
    ChatTemplateError,
    EngineStoppedError,
    PromptTooLongError,
    RequestError,
    StructuredOutputError,
    one_line,
    shown,
    type_and_place,
    without_room,
)

T = TypeVar("T")
logger = logging.getLogger("mlx_paged.server")
CLIENT_LEFT = 499  # nginx's status for this

# The type of an error by its status, for OpenAI and for Anthropic.
_TYPES = {
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    408: ("timeout_error", "timeout_error"),
    413: ("invalid_request_error", "request_too_large"),
    503: ("overloaded_error", "overloaded_error"),
}
_OTHER_CLIENT_ERROR = ("invalid_request_error", "invalid_request_error")
_OTHER_SERVER_ERROR = ("server_error", "api_error")

FAILED = "the server failed; see its log"
_LATEST = ":latest"


@dataclass(eq=False)
class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: the HTTP status.
        message: one line for the user, with the way out if there is one.
        param: the field at fault, such as ``"messages[2].content"``.
        code: a code for programs, such as ``"context_length_exceeded"``.
        headers: headers of the response, such as ``Retry-After``.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None

    def __str__(self) -> str:
        return self.message


def unknown_model(name: str, names: Iterable[str]) -> ApiError:
    """The error for a model that is none of those with these names."""
    text = f"there is no model {shown(name)}; this server has {', '.join(map(shown, names))}"
    return ApiError(404, text, param="model", code="model_not_found")


def same_names(name: str) -> set[str]:
    """A name of a model, and the same with or without ``:latest``, as clients of Ollama call it."""
    return {name, name.removesuffix(_LATEST), f"{name}{_LATEST}"}


def _openai_body(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    kind = _types_of(error)[0]
    fields = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return {"error": fields}


def _responses_event(error: ApiError) -> dict[str, Any]:
    """The event of the protocol, and additionally the object ``error`` that OpenAI's clients look
    for in any event.
    """
    body = _openai_body(error)["error"]
    fields = {name: body[name] for name in ("code", "message", "param")}
    return {"type": "error", **fields, "error": body}


def _anthropic_body(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    details = {} if error.code is None else {"details": {"error_code": error.code}}
    fields = {"type": _types_of(error)[1], "message": error.message, **details}
    return {"type": "error", "error": fields, "request_id": request_id}


def _ollama_body(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    return {"error": error.message}


def _types_of(error: ApiError) -> tuple[str, str]:
    other = _OTHER_CLIENT_ERROR if error.status < 500 else _OTHER_SERVER_ERROR
    return _TYPES.get(error.status, other)


def not_stored() -> ApiError:
    """The error for a response that is asked for by its id."""
    return ApiError(
        404,
        "responses are not stored here and can't be retrieved; send the whole conversation",
        param="response_id",
        code="response_not_found",
    )


@dataclass(frozen=True)
class WireProtocol:
    """The form of errors in an API.

    Args:
        prefix: the beginning of its paths.
        body: the body of a response, for an error and the request's id.
        event: the last event of a stream that failed.
    """

    prefix: str
    body: Callable[[ApiError, str | None], dict[str, Any]]
    event: Callable[[ApiError], dict[str, Any]]


OPENAI = WireProtocol("/", _openai_body, _openai_body)
RESPONSES = WireProtocol("/v1/responses", _openai_body, _responses_event)
ANTHROPIC = WireProtocol("/v1/messages", _anthropic_body, _anthropic_body)
OLLAMA = WireProtocol("/api/", _ollama_body, _ollama_body)


def protocol_of(scope: Scope) -> WireProtocol:
    """The protocol of a request, by its path: requests that are refused before they are routed need
    one, too.
    """
    found = (
        each for each in (RESPONSES, ANTHROPIC, OLLAMA) if scope["path"].startswith(each.prefix)
    )
    return next(found, OPENAI)


def error_response(error: ApiError, scope: Scope) -> Response:
    """The error as a response."""
    body = protocol_of(scope).body(error, scope.get("state", {}).get("request_id"))
    return JSONResponse(body, status_code=error.status, headers=error.headers)


async def failed(request: Request, error: Exception) -> Response:
    """The response to a request whose handling raised an error."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_LEFT)
    if isinstance(error, HTTPException):
        text = f"{request.method} {request.url.path}: {error.detail}"
        error = ApiError(error.status_code, text, headers=error.headers)
    elif not isinstance(error, ApiError):
        error = ApiError(500, FAILED)
    return error_response(error, request.scope)


class Guard(ABC):
    """Middleware that passes a request on, or answers it with an error."""

    def __init__(self, app: ASGIApp):
        self._app = app

    @abstractmethod
    def refusal(self, scope: Scope) -> ApiError | None:
        """The error for a request, or ``None`` to pass it on."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self.refusal(scope)
        app = self._app if error is None else error_response(error, scope)
        await app(scope, receive, send)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``; it is cancelled as soon as the client disconnects.

    Args:
        receive: that of a request whose body was read. No other task may call it meanwhile.

    Raises:
        ClientDisconnect: the client disconnected before the work was done.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        # Wait until cancelled work has released its resources.
        await asyncio.wait({working, leaving})
        if not working.cancelled():
            working.exception()  # Retrieved, so that asyncio does not log it.


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def api_error(error: BaseException, fields: Mapping[str, str] | None = None) -> ApiError:
    """The response to an error that ended a generation. Messages of this package's errors are
    shown; for others, which may quote anything, only the type and the place. Frames are logged.

    Args:
        fields: the client's fields by the names of the parameters that they set. An error about a
            parameter names the field instead.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLongError):
        text = f"prompt is too long: {_words_of(error)}"
        return ApiError(400, text, code="context_length_exceeded")
    if isinstance(error, AdaptersInUseError | EngineStoppedError):
        return ApiError(503, _words_of(error), headers={"Retry-After": "5"})
    if isinstance(error, AdapterError) and error.__cause__ is not None:
        logger.error("%s: %s", one_line(error), one_line(error.__cause__))
        return ApiError(500, _words_of(error))
    if isinstance(error, AdapterError):
        # It was unloaded since the model's name was checked.
        return ApiError(404, _words_of(error), param="model", code="model_not_found")
    if isinstance(error, ArgumentError):
        argument, fields = error.argument, {} if fields is None else fields
        words = _in_clients_words(_words_of(error), argument, fields)
        return ApiError(400, words, param=argument and fields.get(argument, argument))
    if isinstance(error, ChatTemplateError):
        return ApiError(400, _words_of(error))
    logger.error("a request failed: %s", type_and_place(error), exc_info=error)
    is_foreseen = isinstance(error, CacheFullError | RequestError | StructuredOutputError)
    words = _words_of(error) if is_foreseen else type_and_place(error)
    return ApiError(500, f"the request failed: {words}")


def _words_of(error: BaseException) -> str:
    """The message of an error on one line, without the ``[module]`` in front."""
    return without_room(one_line(error, 500))


def _in_clients_words(text: str, argument: str | None, fields: Mapping[str, str]) -> str:
    """The text of an error with the client's fields in place of parameters."""
    names = [name for name in fields if name == argument or "_" in name or "." in name]
    if not names:
        return text
    seen: set[str] = set()

    def field_of(match: re.Match[str]) -> str:
        name = match[1]
        # Without "_" it may be an ordinary word, so it is replaced only where it comes first.
        is_name = "_" in name or "." in name or name not in seen
        seen.add(name)
        return fields[name] if is_name else name

    either = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.sub(rf"(?<![\w.])({either})(?!\w)", field_of, text)
