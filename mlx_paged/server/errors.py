"""``ApiError``: what is wrong with a request, and how each protocol says so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

# What a status is called: by OpenAI, and by Anthropic.
_NAMES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("timeout_error", "timeout_error"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_error"),
    503: ("overloaded_error", "overloaded_error"),
}
_OTHER_MISTAKE = ("invalid_request_error", "invalid_request_error")
_SERVER_ERROR = ("server_error", "api_error")

FAILED = "the server failed; its log says how"


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: of HTTP.
        message: one line for the user, with the way out where there is one.
        param: the field that it is about, such as ``"messages[2].content"``.
        code: a word for programs, such as ``"context_length_exceeded"``.
        headers: of the response, such as ``Retry-After``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


class WireProtocol(Enum):
    """Whose interface an endpoint has, which says what errors look like."""

    OPENAI = "openai"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"


def error_body(
    error: ApiError, protocol: WireProtocol = WireProtocol.OPENAI, request_id: str | None = None
) -> dict[str, Any]:
    """The error in the shape of a protocol."""
    other = _OTHER_MISTAKE if error.status < 500 else _SERVER_ERROR
    openai_name, anthropic_name = _NAMES.get(error.status, other)
    if protocol is WireProtocol.ANTHROPIC:
        details = {} if error.code is None else {"details": {"error_code": error.code}}
        return {
            "type": "error",
            "error": {"type": anthropic_name, "message": error.message, **details},
            "request_id": request_id,
        }
    return {
        "error": {
            "message": error.message,
            "type": openai_name,
            "param": error.param,
            "code": error.code,
        }
    }


def protocol_of(scope: Scope) -> WireProtocol:
    """The protocol of a request, which :mod:`mlx_paged.server.app` left there."""
    protocol: WireProtocol = scope.get("state", {}).get("protocol", WireProtocol.OPENAI)
    return protocol


def error_response(error: ApiError, scope: Scope) -> Response:
    """The whole answer to a request."""
    request_id = scope.get("state", {}).get("request_id")
    body = error_body(error, protocol_of(scope), request_id)
    return JSONResponse(body, status_code=error.status, headers=error.headers)


class Guard(ABC):
    """Middleware that answers a request with an error unless it lets it in."""

    def __init__(self, app: ASGIApp):
        self._app = app

    @abstractmethod
    def refusal(self, scope: Scope) -> ApiError | None:
        """Why a request is not let in; ``None``: it is."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self.refusal(scope)
        app = self._app if error is None else error_response(error, scope)
        await app(scope, receive, send)
