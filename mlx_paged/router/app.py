"""``RouterApp``: the application in front of several models. It answers what is asked of all, and
passes other requests on to the model that they name.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

import mlx_paged
from mlx_paged.errors import shown
from mlx_paged.router.model_process import ModelProcess
from mlx_paged.router.router import Forwarded, Router, may_use
from mlx_paged.server.errors import ApiError, failed, not_stored
from mlx_paged.server.http.access import ANONYMOUS, SAFE_METHODS, guarded, html_page
from mlx_paged.server.http.http_server import MAX_CONNECTIONS, Gate
from mlx_paged.server.http.limits import Limits
from mlx_paged.server.http.logs import RequestLog
from mlx_paged.server.schemas import read_part
from mlx_paged.server.settings import KeyFile, ServerSettings

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_END = "# EOF"  # of OpenMetrics


class RoutedFields(BaseModel):
    """What the router reads of a body."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    stream: bool | None = None


class NamedModel(BaseModel):
    """The body of ``/models/load`` and ``/models/unload``."""

    model_config = RoutedFields.model_config

    model: str


class RouterApp(RequestLog):
    """The application in front of several models.

    Args:
        is_loopback: whether only this machine can reach the server.
        key_file: provides the keys instead of the settings, and may be reread.
        max_connections: further connections are refused with 503.

    Attributes:
        gate: closes the application.
    """

    def __init__(
        self,
        router: Router,
        settings: ServerSettings,
        is_loopback: bool = True,
        key_file: KeyFile | None = None,
        max_connections: int = MAX_CONNECTIONS,
    ):
        self._router = router
        self._is_loopback = is_loopback
        inner = Starlette(
            routes=[
                Route("/", self.page),
                *(Route(path, self.health) for path in ("/health", "/ping")),
                Route("/version", self.version),
                Route("/v1/pool", self.models),  # what the page shows
                Route("/metrics", self.metrics),
                Route("/openapi.json", self.openapi),
                *(
                    Route(f"{prefix}/models{path}", endpoint, methods=[method])
                    for prefix in ("/v1", "")
                    for path, endpoint, method in (
                        ("", self.models, "GET"),
                        ("/load", self.load, "POST"),  # llama.cpp's, with the name in the body
                        ("/unload", self.unload, "POST"),
                        ("/{name:path}/load", self.load, "POST"),
                        ("/{name:path}/unload", self.unload, "POST"),
                        ("/{name:path}", self.model, "GET"),
                    )
                ),
                Route("/model/{path:path}", self.of_model, methods=_METHODS),
                Route("/v1/responses/{path:path}", self.stored_response, methods=_METHODS),
                Route("/{path:path}", self.forward, methods=_METHODS),
            ],
            exception_handlers=dict.fromkeys(
                (ApiError, ClientDisconnect, HTTPException, Exception), failed
            ),
        )
        limited = Limits(inner, settings.max_body_bytes)
        self.gate = Gate(guarded(limited, settings, is_loopback, key_file), router, max_connections)
        super().__init__(self.gate)

    async def page(self, request: Request) -> Response:
        """A page with a card for each model."""
        return html_page("mlx_paged.router")

    async def health(self, request: Request) -> Response:
        """The health of the router."""
        return JSONResponse({"status": "ok"})

    async def version(self, request: Request) -> Response:
        """The version of the package."""
        return JSONResponse({"version": mlx_paged.__version__})

    async def stored_response(self, request: Request) -> Response:
        """Always 404, since responses are not stored."""
        raise not_stored()

    async def models(self, request: Request) -> Response:
        """The models that the user may use, and their states."""
        data = [self._card(each) for each in self._allowed(request)]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """One of the models that the user may use, and its state."""
        name = request.path_params["name"]
        return JSONResponse(self._card(self._router.find(name, request.state.principal)))

    async def load(self, request: Request) -> Response:
        """Load a model, and answer when it is loaded."""
        process = await self._named(request)
        async with self._router.use(process):
            return JSONResponse({"success": True, **self._card(process)})

    async def unload(self, request: Request) -> Response:
        """Unload a model, whose running answers have ``--drain-seconds`` to end."""
        process = await self._named(request)
        await process.stop()
        return JSONResponse({"success": True, **self._card(process)})

    async def metrics(self, request: Request) -> Response:
        """The metrics of all models that are loaded, for Prometheus."""
        accept = (b"accept", request.headers.get("accept", "").encode("latin-1"))
        texts = await self._ask_loaded(request, "/metrics", accept)
        is_open = any(text.endswith(f"{_END}\n") for text in texts)
        body = merge_metrics(texts) + f"{_END}\n" * is_open
        kind = _OPENMETRICS if is_open else _PROMETHEUS
        return Response(body, headers={"Content-Type": kind, "Cache-Control": "no-store"})

    async def openapi(self, request: Request) -> Response:
        """The routes of a model that is loaded and of the router, as an OpenAPI 3.1 document."""
        for text in await self._ask_loaded(request, "/openapi.json"):
            document = json.loads(text)
            responses = {"200": {"description": "The answer."}}
            name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            for verb, endpoint in (("load", self.load), ("unload", self.unload)):
                summary = str(endpoint.__doc__).partition("\n")[0]
                operation = {"summary": summary, "parameters": [name], "responses": responses}
                document["paths"][f"/v1/models/{{name}}/{verb}"] = {"post": operation}
            return JSONResponse(document)
        text = "no model is loaded, and the routes are theirs; load one first"
        raise ApiError(503, text, code="model_not_loaded")

    async def of_model(self, request: Request) -> Response:
        """A path of one model, ``/model/NAME/PATH``; without ``PATH``, its page."""
        path = request.path_params["path"]
        if path.endswith("/") and request.method in SAFE_METHODS:
            return html_page("mlx_paged.server")  # open to all, as it holds no data
        names = [name for each in self._allowed(request) for name in each.names]
        found = [name for name in names if f"{path}/".startswith(f"{name}/")]
        name = max(found, key=len, default=path)
        process = self._router.find(name, request.state.principal)
        if path == name and request.method in SAFE_METHODS:
            return RedirectResponse(f"/model/{path}/")
        return await self._forwarded(request, process, path.removeprefix(name))

    async def forward(self, request: Request) -> Response:
        """Any other path, for the model that the body or the query names."""
        return await self._forwarded(request)

    async def _forwarded(
        self, request: Request, process: ModelProcess | None = None, path: str = ""
    ) -> Response:
        body, streams = await request.body(), False
        name = request.query_params.get("model")
        if request.method == "POST":
            fields = read_part(RoutedFields, body)
            name, streams = fields.model or name, bool(fields.stream)
        if process is None:
            process = self._router.find(name, request.state.principal)
            raw: bytes = request.scope["raw_path"]
        else:
            raw = quote(path).encode()
        if request.method in SAFE_METHODS and process.state != "loaded":
            raise ApiError(
                503, f"the model {shown(process.name)} is not loaded", code="model_not_loaded"
            )
        query: bytes = request.scope["query_string"]
        return Forwarded(self._router, process, body, raw + b"?" * bool(query) + query, streams)

    def _allowed(self, request: Request) -> list[ModelProcess]:
        principal = request.state.principal
        return [each for each in self._router.processes if may_use(principal, each)]

    async def _named(self, request: Request) -> ModelProcess:
        """The model that an administrator names, in the path or in the body.

        Raises:
            ApiError: the user is none, or there is no such model.
        """
        principal = request.state.principal
        if not (principal.is_admin or (principal is ANONYMOUS and self._is_loopback)):
            raise ApiError(
                403,
                "models are loaded and unloaded with a key that is marked admin in the key file, "
                "or without keys from this machine",
                code="admin_needed",
            )
        name = request.path_params.get("name")
        if name is None:
            name = read_part(NamedModel, await request.body()).model
        return self._router.find(name, principal)

    def _card(self, process: ModelProcess) -> dict[str, Any]:
        """A model in OpenAI's form, with the states of LM Studio's and llama.cpp's."""
        has_failed = process.state == "failed"
        state = "unloaded" if has_failed else process.state
        return {
            "id": process.name,
            "object": "model",
            "created": self._router.created,
            "owned_by": "mlx_paged",
            "root": process.name,
            "parent": None,
            "max_model_len": process.max_model_len,
            "aliases": list(process.names[1:]),
            "state": state,
            "status": {"value": state, "failed": has_failed},
            "num_requests": process.num_requests,
        }

    async def _ask_loaded(
        self, request: Request, target: str, *headers: tuple[bytes, bytes]
    ) -> list[str]:
        """What the loaded models answer, without those that fail meanwhile."""
        loaded = [each for each in self._allowed(request) if each.state == "loaded"]
        found = await asyncio.gather(
            *(each.ask(target, *headers) for each in loaded), return_exceptions=True
        )
        return [body.decode() for body in found if isinstance(body, bytes)]


def merge_metrics(texts: Iterable[str]) -> str:
    """One exposition of those of several models: each metric once, with the samples of all."""
    metrics: dict[str, tuple[list[str], list[str]]] = {}
    for text in texts:
        samples: list[str] = []
        for line in text.splitlines():
            if not line.startswith("# "):
                samples.append(line)
            elif line != _END:
                head, samples = metrics.setdefault(line.split(" ", 3)[2], ([], []))
                if line not in head:
                    head.append(line)
    lines = [line for parts in metrics.values() for part in parts for line in part]
    return "\n".join([*lines, ""])
