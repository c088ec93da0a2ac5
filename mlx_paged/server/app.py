"""The routes of the server, and what is around them."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlx_paged.server.errors import ApiError, error_response
from mlx_paged.server.service import Service


def make_app(service: Service) -> Starlette:
    """The application for a service, which endpoints find as ``request.app.state.service``."""
    app = Starlette(
        routes=[Route("/health", health)],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _failure},
    )
    app.state.service = service
    return app


async def health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.url.path, _request_id(request))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    return await _api_error(request, ApiError(error.status_code, text, headers=error.headers))


async def _failure(request: Request, error: Exception) -> Response:
    return await _api_error(request, ApiError(500, "the server failed; its log says how"))


def _request_id(request: Request) -> str | None:
    name: str | None = getattr(request.state, "request_id", None)
    return name
