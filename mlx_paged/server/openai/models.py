"""``GET /v1/models``, ``/health`` and ``/version``."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

import mlx_paged
from mlx_paged.server.context import RequestContext
from mlx_paged.server.errors import ApiError
from mlx_paged.server.generations import api_error
from mlx_paged.server.openai.options import check_model_name
from mlx_paged.server.schemas import Body
from mlx_paged.server.service import Service


async def models(context: RequestContext[Body]) -> Response:
    """The names that clients may use."""
    service = context.service
    data = [_model(name, service) for name in service.model_names]
    return JSONResponse({"object": "list", "data": data})


async def model(context: RequestContext[Body]) -> Response:
    """One of the names that clients may use."""
    service = context.service
    name = context.request.path_params["name"]
    check_model_name(name, service)
    return JSONResponse(_model(name, service))


def _model(name: str, service: Service) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "mlx_paged",
        "root": service.model_names[0],
        "parent": None,
        "max_model_len": service.max_model_len,
    }


async def health(context: RequestContext[Body]) -> Response:
    """The health of the server: 503 after the engine has stopped, and while a step hangs."""
    service = context.service
    reason = service.engine.stopped()
    if reason is not None:
        raise api_error(reason)
    seconds = service.engine.step_seconds()
    if seconds > service.settings.step_timeout:
        raise ApiError(
            503,
            f"a step of the engine has been running for {seconds:.0f} seconds, and --step-timeout "
            f"is {service.settings.step_timeout:g}; if it does not end, restart the server",
            code="step_hangs",
        )
    return JSONResponse({"status": "ok"})


async def version(context: RequestContext[Body]) -> Response:
    """The version of the package."""
    return JSONResponse({"version": mlx_paged.__version__})
