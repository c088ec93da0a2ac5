"""The ASGI application: the routes of all protocols, behind the middleware that logs, authenticates
and limits requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from mlx_paged.server import anthropic, openai, pooling, responses
from mlx_paged.server.errors import ApiError, failed
from mlx_paged.server.http.access import BehindRouter, guarded
from mlx_paged.server.http.http_server import MAX_CONNECTIONS, Gate
from mlx_paged.server.http.limits import Limits
from mlx_paged.server.http.logs import RequestLog
from mlx_paged.server.metrics import EngineCollector, count_request, metrics
from mlx_paged.server.ollama.answers import ROUTES as OLLAMA_ROUTES
from mlx_paged.server.page import cache_report, health, page, pool, version
from mlx_paged.server.routes import ApiRoute, openapi
from mlx_paged.server.service import Service
from mlx_paged.server.settings import KeyFile

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
    *OLLAMA_ROUTES,
    *pooling.ROUTES,
    ApiRoute("/openapi.json", openapi),
]


class App(RequestLog):
    """The whole application, as the program and the tests run it.

    Args:
        is_loopback: whether only this machine can reach the server.
        key_file: provides the keys instead of the settings, and may be reread.
        max_connections: further connections are refused with 503.
        for_router: routes in addition, if all requests come from a router, which has checked them.

    Attributes:
        service: what the endpoints share.
        gate: closes the application.
    """

    def __init__(
        self,
        service: Service,
        is_loopback: bool = True,
        key_file: KeyFile | None = None,
        max_connections: int = MAX_CONNECTIONS,
        for_router: Sequence[ApiRoute] = (),
    ):
        self.service = service
        inner = Starlette(
            routes=[*ROUTES, *for_router],
            exception_handlers=dict.fromkeys(
                (ApiError, ClientDisconnect, HTTPException, Exception), failed
            ),
        )
        counts: Counter[tuple[str, str, int]] = Counter()
        inner.state.service = service
        engine, model_name = service.engine.engine, service.model_names[0]
        inner.state.metrics = EngineCollector(engine, model_name, counts, bool(for_router))
        limited = Limits(inner, service.settings.max_body_bytes)
        if for_router:
            checked: ASGIApp = BehindRouter(limited)
        else:
            checked = guarded(limited, service.settings, is_loopback, key_file)
        self.gate = Gate(checked, service.engine, max_connections)
        super().__init__(self.gate, partial(count_request, counts, ROUTES))
