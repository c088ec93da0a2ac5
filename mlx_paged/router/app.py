"""``RouterApp``: the application in front of several models. It answers what is asked of all, and
passes other requests on to the model that they name.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterable
from typing import Annotated, Any
from urllib.parse import quote

from pydantic import AfterValidator, BaseModel, ConfigDict
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

import mlx_paged
from mlx_paged.errors import shown
from mlx_paged.options.config import KEEP_ALIVE
from mlx_paged.router.model_process import ModelProcess
from mlx_paged.router.residency import Resident
from mlx_paged.router.router import Forwarded, Router
from mlx_paged.server.errors import (
    OLLAMA,
    ApiError,
    failed,
    not_stored,
    protocol_of,
    until_disconnect,
)
from mlx_paged.server.http.access import SAFE_METHODS, check_admin, guarded, html_page
from mlx_paged.server.http.http_server import MAX_CONNECTIONS, Gate
from mlx_paged.server.http.limits import Limits
from mlx_paged.server.http.logs import RequestLog
from mlx_paged.server.ollama import listing
from mlx_paged.server.program import ANY_NAME
from mlx_paged.server.schemas import read_part, wrong
from mlx_paged.server.settings import KeyFile, ServerSettings

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_END = "# EOF"  # of OpenMetrics
_STREAMED = ("/api/chat", "/api/generate")  # unless the client wants it otherwise


def _keep_alive(given: object) -> object:
    seconds = None if given is None else KEEP_ALIVE.read(given)
    if given is not None and seconds is None:
        raise wrong(f"must be {KEEP_ALIVE.what}, got {shown(given)}")
    return seconds


class RoutedFields(BaseModel):
    """What the router reads of a body."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    stream: bool | None = None
    keep_alive: Annotated[Any, AfterValidator(_keep_alive)] = None


class ShownFields(BaseModel):
    """The body of ``POST /api/show``."""

    model_config = RoutedFields.model_config

    model: str | None = None
    name: str | None = None


class LoadFields(RoutedFields):
    """The body of a request to load or unload a model."""

    pin: bool | None = None


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
        self._describing = asyncio.Lock()
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
                Route("/api/version", self.ollama_version),
                Route("/api/tags", self.tags),
                Route("/api/ps", self.loaded),
                Route("/api/show", self.show, methods=["POST"]),
                *(
                    Route(path, self.refuse, methods=[method])
                    for path, method in listing.REFUSED.items()
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
        data = [self._card(each) for each in self._router.allowed(request.state.principal)]
        budget = self._router.residency.budget
        return JSONResponse({"object": "list", "data": data, "bytes_budget": budget})

    async def model(self, request: Request) -> Response:
        """One of the models that the user may use, and its state."""
        name = request.path_params["name"]
        return JSONResponse(self._card(self._router.find(name, request.state.principal)))

    async def load(self, request: Request) -> Response:
        """Load a model, and answer when it is loaded; with ``pin``, it stays loaded."""
        model, fields = await self._read_load(request)
        if fields.pin is not None:
            model.is_pinned = fields.pin
        await until_disconnect(
            request.receive, self._router.residency.load(model.name, fields.keep_alive)
        )
        return JSONResponse({"success": True, **self._card(model)})

    async def unload(self, request: Request) -> Response:
        """Unload a model when the answers that it gives now have ended."""
        model, _ = await self._read_load(request)
        model.is_pinned = False
        await until_disconnect(request.receive, self._router.residency.unload(model.name))
        return JSONResponse({"success": True, **self._card(model)})

    async def ollama_version(self, request: Request) -> Response:
        """The version of Ollama whose API this is."""
        return JSONResponse({"version": listing.VERSION})

    async def tags(self, request: Request) -> Response:
        """The models that the user may use, in Ollama's form. Of one that was never loaded, only
        its names are known.
        """
        models = self._router.allowed(request.state.principal)
        found = [each for model in models for each in _listed(model.process)]
        return JSONResponse({"models": found})

    async def loaded(self, request: Request) -> Response:
        """The models that are loaded, in Ollama's form, with their memory."""
        found = []
        for model in self._router.allowed(request.state.principal):
            process, expires = model.process, listing.FOREVER
            if process.state != "loaded":
                continue
            seconds = max(0.0, model.expires - asyncio.get_running_loop().time())
            if not (model.is_pinned or math.isinf(seconds)):
                expires = listing.timestamp(time.time() + seconds)
            nbytes = await process.nbytes()
            memory = {"size": nbytes, "size_vram": nbytes, "expires_at": expires}
            memory["context_length"] = process.max_model_len
            found += [{**each, **memory} for each in _listed(process)]
        return JSONResponse({"models": found})

    async def show(self, request: Request) -> Response:
        """What a model is and can do, in Ollama's form. It is loaded only if it must be."""
        fields = read_part(ShownFields, await request.body())
        name = fields.model or fields.name
        model = self._router.find(name, request.state.principal)
        async with self._describing:  # Clients ask for all models at once.
            await until_disconnect(request.receive, model.process.describe())
        if model.process.description is None:
            await until_disconnect(request.receive, self._router.residency.load(model.name))
        return JSONResponse(listing.shown(name or model.name, model.process.description or {}))

    async def refuse(self, request: Request) -> Response:
        """Refused: the error says what to use instead."""
        listing.refuse(request.url.path)

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
        allowed = self._router.allowed(request.state.principal)
        names = [name for model in allowed for name in model.process.names]
        found = [name for name in names if f"{path}/".startswith(f"{name}/")]
        name = max(found, key=len, default=path)
        if path == name and found and request.method in SAFE_METHODS:
            return RedirectResponse(f"/model/{quote(path)}/")
        return await self._forwarded(request, name, quote(path.removeprefix(name)).encode())

    async def forward(self, request: Request) -> Response:
        """Any other path, for the model that the body or the query names."""
        return await self._forwarded(request)

    async def _forwarded(
        self, request: Request, name: str | None = None, path: bytes | None = None
    ) -> Response:
        """The response of the model of a name, by default the one that is asked for."""
        principal, body, fields = request.state.principal, await request.body(), RoutedFields()
        if request.method == "POST":
            fields = read_part(RoutedFields, body)
        name = name or fields.model or request.query_params.get("model")
        model = self._router.find(name, principal)
        if request.method in SAFE_METHODS and model.process.state != "loaded":
            text = f"the model {shown(model.name)} is not loaded"
            raise ApiError(503, text, code="model_not_loaded")
        raw, query = request.scope["raw_path"], request.scope["query_string"]
        target, keep_alive = raw if path is None else path, fields.keep_alive
        if keep_alive is not None and keep_alive > model.keep_alive:
            is_ollama = protocol_of({"path": target.decode("latin-1")}) is OLLAMA
            if is_ollama and not principal.is_admin:
                keep_alive = None  # Ollama's clients send a time that their user has not chosen.
            else:
                check_admin(principal, "a model", f"to keep it for over {model.keep_alive:g} s")
        target += b"?" * bool(query) + query
        streams = request.url.path in _STREAMED if fields.stream is None else fields.stream
        return Forwarded(self._router, model, body, target, keep_alive, streams)

    async def _read_load(self, request: Request) -> tuple[Resident, LoadFields]:
        """The model that an administrator names, in the path or in the body.

        Raises:
            ApiError: the user is none, or there is no such model.
        """
        principal, body = request.state.principal, await request.body()
        check_admin(principal, "a model", "to load or unload it")
        fields = read_part(LoadFields, body) if body else LoadFields()
        name = request.path_params.get("name", fields.model)
        if name is None:
            raise ApiError(400, "model is missing", param="model")
        return self._router.find(name, principal), fields

    def _card(self, model: Resident) -> dict[str, Any]:
        """A model in OpenAI's form, with the states of LM Studio's and llama.cpp's."""
        process = model.process
        has_failed = process.state == "failed"
        state = "unloaded" if has_failed else process.state
        return {
            "id": model.name,
            "object": "model",
            "created": self._router.created,
            "owned_by": "mlx_paged",
            "root": model.name,
            "parent": None,
            "max_model_len": process.max_model_len,
            "aliases": list(process.names[1:]),
            "state": state,
            "status": {"value": state, "failed": has_failed},
            "error": process.failure if has_failed else None,
            "is_pinned": model.is_pinned,
            "num_requests": process.num_requests,
            **self._router.residency.view(model),
        }

    async def _ask_loaded(
        self, request: Request, target: str, *headers: tuple[bytes, bytes]
    ) -> list[str]:
        """What the loaded models answer, without those that fail meanwhile."""
        allowed = self._router.allowed(request.state.principal)
        loaded = [model.process for model in allowed if model.process.state == "loaded"]
        found = await asyncio.gather(
            *(each.ask(target, *headers) for each in loaded), return_exceptions=True
        )
        return [body.decode() for body in found if isinstance(body, bytes)]


def _listed(process: ModelProcess) -> list[dict[str, Any]]:
    """The entries of a model in Ollama's form."""
    return listing.entries(
        (name for name in process.names if name != ANY_NAME), process.description
    )


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
