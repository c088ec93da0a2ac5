"""The ASGI application: its routes, each with its protocol and the class of its body, behind the
middleware that logs, authenticates and limits requests.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_paged.server.anthropic.answers import count_tokens, messages
from mlx_paged.server.anthropic.messages import CountRequest, MessagesRequest
from mlx_paged.server.errors import FAILED, ApiError, WireProtocol, error_response
from mlx_paged.server.http.access import Access, OriginGuard
from mlx_paged.server.http.http_server import MAX_CONNECTIONS, Gate
from mlx_paged.server.http.limits import Limits
from mlx_paged.server.http.logs import RequestLog
from mlx_paged.server.metrics import count_request, metrics_endpoint
from mlx_paged.server.openai.answers import chat_completions
from mlx_paged.server.openai.chat import ChatRequest
from mlx_paged.server.openai.completions import CompletionRequest, completions
from mlx_paged.server.openai.model import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize,
    health,
    model,
    models,
    tokenize,
    version,
)
from mlx_paged.server.page import cache, page_endpoint, pool
from mlx_paged.server.responses.answers import responses, stored_response
from mlx_paged.server.responses.body import ResponsesRequest
from mlx_paged.server.routes import ApiRoute, openapi_endpoint
from mlx_paged.server.service import Service
from mlx_paged.server.settings import KeyFile, ServerSettings


class App:
    """The whole application, as the program and the tests run it.

    Args:
        is_loopback: whether only this machine can reach the server.
        key_file: provides the keys instead of the settings, and may be reread.
        max_connections: further connections are refused with 503.

    Attributes:
        gate: closes the application.
    """

    def __init__(
        self,
        service: Service,
        is_loopback: bool = True,
        key_file: KeyFile | None = None,
        max_connections: int = MAX_CONNECTIONS,
    ):
        counts: Counter[tuple[str, str, int]] = Counter()
        routes = routes_of(service, counts)
        self._protocols = [
            (route.path, route.protocol)
            for route in routes
            if route.protocol is not WireProtocol.OPENAI
        ]
        inner = Starlette(
            routes=routes,
            exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _failed),
        )
        self.gate = Gate(
            guarded(inner, service.settings, is_loopback, key_file),
            service.engine,
            max_connections,
        )
        self._app = RequestLog(self.gate, partial(count_request, counts, routes))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # By the beginning of the path: requests refused before routing need a protocol, too.
        found = (each for begin, each in self._protocols if scope["path"].startswith(begin))
        scope.setdefault("state", {})["protocol"] = next(found, WireProtocol.OPENAI)
        await self._app(scope, receive, send)


def routes_of(service: Service, counts: Counter[tuple[str, str, int]]) -> list[ApiRoute]:
    """The routes of the server.

    Args:
        counts: HTTP requests by method, path and status, for the metrics.
    """
    anthropic, of_responses = WireProtocol.ANTHROPIC, WireProtocol.RESPONSES
    routes = [
        ApiRoute("/health", health),
        ApiRoute("/ping", health),  # the name used by SageMaker and vLLM
        ApiRoute("/version", version),
        # Also without /v1, for clients whose base URL lacks it.
        *(ApiRoute(path, models) for path in ("/v1/models", "/models")),
        *(ApiRoute(path, model) for path in ("/v1/models/{name:path}", "/models/{name:path}")),
        ApiRoute("/v1/cache", cache),
        ApiRoute("/", page_endpoint()),
        ApiRoute("/v1/pool", pool),
        ApiRoute("/metrics", metrics_endpoint(service, counts)),
        ApiRoute("/v1/chat/completions", chat_completions, ChatRequest),
        ApiRoute("/chat/completions", chat_completions, ChatRequest),
        ApiRoute("/v1/completions", completions, CompletionRequest),
        ApiRoute("/v1/messages", messages, MessagesRequest, anthropic),
        ApiRoute("/v1/messages/count_tokens", count_tokens, CountRequest, anthropic),
        ApiRoute("/v1/responses", responses, ResponsesRequest, of_responses),
        ApiRoute(
            "/v1/responses/{path:path}",
            stored_response,
            None,
            of_responses,
            ("GET", "POST", "DELETE"),
        ),
        ApiRoute("/tokenize", tokenize, TokenizeRequest),
        ApiRoute("/detokenize", detokenize, DetokenizeRequest),
    ]
    routes.append(ApiRoute("/openapi.json", openapi_endpoint(routes)))
    for route in routes:
        route.service = service
    return routes


def guarded(
    app: ASGIApp,
    settings: ServerSettings,
    is_loopback: bool,
    key_file: KeyFile | None = None,
) -> ASGIApp:
    """Wrap an application in the middleware that decides whose requests are answered."""
    app = Access(Limits(app, settings.max_body_bytes), settings, key_file)
    if settings.cors_origins:
        # Outside Access: preflight requests have no key, and pages may read that a key is missing.
        app = CORSMiddleware(
            app,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after"],
            max_age=600,
        )
    return OriginGuard(app, settings, is_loopback)


async def _failed(request: Request, error: Exception) -> Response:
    """The response to a request whose handling raised an error."""
    if isinstance(error, HTTPException):
        text = f"{request.method} {request.url.path}: {error.detail}"
        error = ApiError(error.status_code, text, headers=error.headers)
    elif not isinstance(error, ApiError):
        error = ApiError(500, FAILED)
    return error_response(error, request.scope)
