"""``Router``: the models and their processes; ``Forwarded``: the response of one of them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mlx_paged.router.model_process import Headers, ModelProcess
from mlx_paged.router.residency import Residency, Resident
from mlx_paged.server.errors import (
    FAILED,
    OLLAMA,
    ApiError,
    error_response,
    protocol_of,
    same_names,
    unknown_model,
    until_disconnect,
)
from mlx_paged.server.http.access import ROUTER_PREFIX, SAFE_METHODS, Principal
from mlx_paged.server.http.sse import HEADERS, EventStream, LineStream
from mlx_paged.server.program import ANY_NAME

logger = logging.getLogger("mlx_paged.server")

# A stream whose model is being loaded begins after the first, so that an early failure can still
# have an HTTP status, and then has a comment at this interval.
FIRST_PROGRESS_SECONDS, PROGRESS_SECONDS = 10.0, 5.0
STOP_SECONDS = 20.0  # for processes to end, once no request is left
# Headers of one connection, those that the router writes itself, and those that only it may read.
_NOT_PASSED_ON = {
    *(b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"),
    *(b"host", b"content-length", b"x-request-id", b"request-id", b"date"),
    *(b"authorization", b"x-api-key", b"cookie", b"origin"),
}
_EVENT_HEADERS = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]


class Router:
    """The models and their processes.

    Args:
        residency: of at least one model; the first one answers requests that name none.

    Attributes:
        created: when the router started, in seconds since the epoch.
    """

    def __init__(self, residency: Residency):
        self.residency = residency
        self.created = int(time.time())
        self._answers: set[asyncio.Task[Any]] = set()
        self._is_aborting = False

    def begin(self) -> None:
        """Load the pinned models, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loads = [
            asyncio.create_task(self._load_pinned(name))
            for name, model in self.residency.models.items()
            if model.is_pinned
        ]

    async def _load_pinned(self, name: str) -> None:
        with suppress(ApiError):  # It is logged, and requests try again.
            await self.residency.load(name)

    def allowed(self, principal: Principal) -> list[Resident]:
        """The models that a user may use."""
        models, names = self.residency.models.values(), principal.models
        return [
            model for model in models if names is None or not names.isdisjoint(model.process.names)
        ]

    def find(self, name: str | None, principal: Principal) -> Resident:
        """The model of a name or an alias that the user may use; without a name, the first one.

        Raises:
            ApiError: there is none.
        """
        allowed = self.allowed(principal)
        if name is None and allowed:
            return allowed[0]
        name = name or ""
        for names in ({name}, same_names(name), {ANY_NAME}):
            for model in allowed:
                if not names.isdisjoint(model.process.names):
                    return model
        raise unknown_model(name, (model.name for model in allowed))

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """A request that is being answered, in its task.

        Raises:
            ApiError: it was aborted, since the server is shutting down.
        """
        task = asyncio.current_task()
        assert task is not None
        self._answers.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._is_aborting:
                raise
            raise ApiError(503, "the server aborted this answer", code="aborted") from None
        finally:
            self._answers.discard(task)

    def stopped(self) -> None:
        """A router has no failure of its own."""

    def step_seconds(self) -> float:
        return 0.0

    def abort_all(self) -> None:
        """End all requests with an error."""
        self._is_aborting = True
        while self._answers:
            self._answers.pop().cancel()

    def shutdown(self, timeout: float) -> bool:
        """End all processes, from another thread than the event loop's; returns whether none had to
        be killed.
        """
        closing = self.residency.close(timeout + STOP_SECONDS)
        return asyncio.run_coroutine_threadsafe(closing, self._loop).result()


class Forwarded(Response):
    """The response of a model's process, passed on as it arrives.

    Args:
        model: answers.
        target: the path and the query.
        keep_alive: how many seconds the model stays in memory afterwards, if the client says so.
        streams: whether the client expects events. It then gets comments, which clients ignore,
            while the model is being loaded.
    """

    def __init__(
        self,
        router: Router,
        model: Resident,
        body: bytes,
        target: bytes,
        keep_alive: float | None = None,
        streams: bool = False,
    ):
        self._router, self._model, self._keep_alive = router, model, keep_alive
        self._body, self._target, self._streams = body, target, streams
        self._path = target.partition(b"?")[0].decode("latin-1")
        is_ollama = protocol_of({"path": self._path}) is OLLAMA
        self._stream: type[EventStream] = LineStream if is_ollama else EventStream
        self._has_begun = self._has_events = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await until_disconnect(receive, self._send_all(scope, send))

    async def _send_all(self, scope: Scope, send: Send) -> None:
        below = {**scope, "path": self._path}
        try:
            async with self._router.answering():
                await self._answer(below, send)
        except ApiError as error:
            if self._has_events:
                await _send_body(send, self._stream.encode(protocol_of(below).event(error)))
                await _send_body(send, b"", more=False)
            elif not self._has_begun:
                await error_response(error, below)(below, _receive_nothing, send)
            else:
                # Half a body has no form for an error.
                logger.warning("%s", error.message)
                scope["state"]["connection"].transport.abort()

    async def _answer(self, scope: Scope, send: Send) -> None:
        if scope["method"] in SAFE_METHODS:
            # What only looks at a model, such as its page, does not keep it in memory.
            await self._pass_on(self._model.process, scope, send)
            return
        progress = asyncio.create_task(self._show_progress(send))
        try:
            async with self._router.residency.use(self._model.name, self._keep_alive) as process:
                progress.cancel()
                await self._pass_on(process, scope, send)
        finally:
            progress.cancel()

    async def _pass_on(self, process: ModelProcess, scope: Scope, send: Send) -> None:
        state = scope["state"]
        headers = [
            *((name, value) for name, value in scope["headers"] if _is_passed_on(name)),
            state["principal"].header(),
            (b"x-request-id", state["request_id"].encode()),
            (b"content-length", str(len(self._body)).encode()),
        ]
        sending = process.send(scope["method"], self._target, headers, self._body)
        async with sending as response:
            state["is_logged"] = True
            found = [(name.lower(), value) for name, value in response.headers]
            kind = self._stream.media_type.encode()
            has_events = dict(found).get(b"content-type", b"").startswith(kind)
            if self._has_begun and not has_events:
                raise _read_error(response.status, await response.aread())
            if not self._has_begun:
                self._has_events = has_events
                kept = [(name, value) for name, value in found if _is_passed_on(name)]
                await self._begin(send, response.status, kept)
            async for chunk in response.aiter_stream():
                await _send_body(send, chunk)
        await _send_body(send, b"", more=False)

    async def _show_progress(self, send: Send) -> None:
        """While the model is being loaded, say so to a client that expects events."""
        if not self._streams:
            return
        begin = time.monotonic()
        await asyncio.sleep(FIRST_PROGRESS_SECONDS)
        self._has_events = True
        kind = f"{self._stream.media_type}; charset=utf-8".encode()
        await self._begin(send, 200, [*_EVENT_HEADERS, (b"content-type", kind)])
        while True:
            text = f"waiting for {self._model.name}, {time.monotonic() - begin:.0f} s"
            await _send_body(send, self._stream.comment(text))
            await asyncio.sleep(PROGRESS_SECONDS)

    async def _begin(self, send: Send, status: int, headers: Headers) -> None:
        self._has_begun = True
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})


async def _send_body(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _receive_nothing() -> Message:
    raise AssertionError("an error needs no request")


def _is_passed_on(name: bytes) -> bool:
    return name not in _NOT_PASSED_ON and not name.startswith(ROUTER_PREFIX)


def _read_error(status: int, body: bytes) -> ApiError:
    """The error in a response, in the form of any protocol."""
    try:
        found = json.loads(body)["error"]
        if isinstance(found, str):
            return ApiError(status, found)
        code = found.get("code") or found.get("details", {}).get("error_code")
        return ApiError(status, found["message"], param=found.get("param"), code=code)
    except (ValueError, KeyError, TypeError, AttributeError):
        return ApiError(500, FAILED)
