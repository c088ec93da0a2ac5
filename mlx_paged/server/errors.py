"""``ApiError``: an error response, and its form in each protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

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


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: the HTTP status.
        message: one line for the user, with the way out if there is one.
        param: the field at fault, such as ``"messages[2].content"``.
        code: a code for programs, such as ``"context_length_exceeded"``.
        headers: headers of the response, such as ``Retry-After``.
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
    """The API that an endpoint belongs to, which determines the form of its errors."""

    OPENAI = "openai"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"


def error_body(
    error: ApiError, protocol: WireProtocol = WireProtocol.OPENAI, request_id: str | None = None
) -> dict[str, Any]:
    """The error in the form of a protocol."""
    other = _OTHER_CLIENT_ERROR if error.status < 500 else _OTHER_SERVER_ERROR
    openai_type, anthropic_type = _TYPES.get(error.status, other)
    if protocol is WireProtocol.ANTHROPIC:
        details = {} if error.code is None else {"details": {"error_code": error.code}}
        return {
            "type": "error",
            "error": {"type": anthropic_type, "message": error.message, **details},
            "request_id": request_id,
        }
    return {
        "error": {
            "message": error.message,
            "type": openai_type,
            "param": error.param,
            "code": error.code,
        }
    }


def protocol_of(scope: Scope) -> WireProtocol:
    """The protocol of a request, as set by :mod:`mlx_paged.server.app`."""
    protocol: WireProtocol = scope.get("state", {}).get("protocol", WireProtocol.OPENAI)
    return protocol


def error_response(error: ApiError, scope: Scope) -> Response:
    """The error as a response."""
    request_id = scope.get("state", {}).get("request_id")
    body = error_body(error, protocol_of(scope), request_id)
    return JSONResponse(body, status_code=error.status, headers=error.headers)


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
