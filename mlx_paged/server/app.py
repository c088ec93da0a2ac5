"""The ASGI application: the routes of all protocols, behind the middleware that logs, authenticates
and limits requests.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from mlx_paged.server import anthropic, openai, pooling, responses
from mlx_paged.server.errors import CLIENT_LEFT, FAILED, ApiError, error_response
from mlx_paged.server.http.access import Access, OriginGuard
from mlx_paged.server.http.http_server import MAX_CONNECTIONS, Gate
from mlx_paged.server.http.limits import Limits
from mlx_paged.server.http.logs import RequestLog
from mlx_paged.server.metrics import EngineCollector, count_request, metrics
from mlx_paged.server.page import cache_report, health, page, pool, version
from mlx_paged.server.routes import ApiRoute, openapi
from mlx_paged.server.service import Service
from mlx_paged.server.settings import KeyFile, ServerSettings

ROUTES = [
    ApiRoute("/health", health),
    ApiRoute("/ping", health),  # the name used by SageMaker and vLLM
    ApiRoute("/version", version),
    ApiRoute("/v1/cache", cache_report),
    ApiRoute("/", page),
    ApiRoute("/v1/pool", pool),
    ApiRoute("/metrics", metrics),
    *openai.ROUTES,
    *anthropic.ROUTES,
    *responses.ROUTES,
    *pooling.ROUTES,
    ApiRoute("/openapi.json", openapi),
]


class App(RequestLog):
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
        inner = Starlette(
            routes=ROUTES,
            exception_handlers=dict.fromkeys(
                (ApiError, ClientDisconnect, HTTPException, Exception), _failed
            ),
        )
        counts: Counter[tuple[str, str, int]] = Counter()
        inner.state.service = service
        engine, model_name = service.engine.engine, service.model_names[0]
        inner.state.metrics = EngineCollector(engine, model_name, counts)
        shielded = guarded(inner, service.settings, is_loopback, key_file)
        self.gate = Gate(shielded, service.engine, max_connections)
        super().__init__(self.gate, partial(count_request, counts, ROUTES))


def guarded(
    app: ASGIApp, settings: ServerSettings, is_loopback: bool, key_file: KeyFile | None = None
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
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_LEFT)
    if isinstance(error, HTTPException):
        text = f"{request.method} {request.url.path}: {error.detail}"
        error = ApiError(error.status_code, text, headers=error.headers)
    elif not isinstance(error, ApiError):
        error = ApiError(500, FAILED)
    return error_response(error, request.scope)
