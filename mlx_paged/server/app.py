"""The routes of the server, and what is around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlx_paged.server.anthropic.endpoints import count_tokens, messages
from mlx_paged.server.errors import FAILED, ApiError, error_response
from mlx_paged.server.http.bodies import Handler, json_endpoint
from mlx_paged.server.openai.chat import chat_completions
from mlx_paged.server.openai.completions import completions
from mlx_paged.server.openai.models import health, model, models, version
from mlx_paged.server.openai.tokenize import detokenize, tokenize
from mlx_paged.server.responses.endpoint import responses, stored_response
from mlx_paged.server.service import Service
from mlx_paged.server.watching.cache_report import cache
from mlx_paged.server.watching.metrics import add_metrics
from mlx_paged.server.watching.pool_page import page_routes


def make_app(service: Service) -> Starlette:
    """The application for a service, which endpoints find as ``request.app.state.service``."""
    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/ping", health),  # as SageMaker and vLLM call it
            Route("/version", version),
            *_with_and_without_version("/v1/models", models),
            *_with_and_without_version("/v1/models/{name:path}", model),
            Route("/v1/cache", cache),
            Route("/v1/responses/{path:path}", stored_response, methods=["GET", "POST", "DELETE"]),
            *page_routes(),
            *_posts(
                {
                    "/v1/chat/completions": chat_completions,
                    "/chat/completions": chat_completions,
                    "/v1/completions": completions,
                    "/v1/messages": messages,
                    "/v1/messages/count_tokens": count_tokens,
                    "/v1/responses": responses,
                    "/tokenize": tokenize,
                    "/detokenize": detokenize,
                }
            ),
        ],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _failure},
    )
    app.state.service = service
    add_metrics(app, service)
    return app


def _with_and_without_version(path: str, endpoint: Callable[[Request], Any]) -> list[Route]:
    """Clients that were given a base URL without ``/v1`` leave it out of their paths, too."""
    return [Route(path, endpoint), Route(path.removeprefix("/v1"), endpoint)]


def _posts(handlers: Mapping[str, Handler]) -> list[Route]:
    """Routes that are sent a JSON object."""
    return [
        Route(path, json_endpoint(handler), methods=["POST"]) for path, handler in handlers.items()
    ]


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.url.path, _request_id(request))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    return await _api_error(request, ApiError(error.status_code, text, headers=error.headers))


async def _failure(request: Request, error: Exception) -> Response:
    return await _api_error(request, ApiError(500, FAILED))


def _request_id(request: Request) -> str | None:
    name: str | None = getattr(request.state, "request_id", None)
    return name
