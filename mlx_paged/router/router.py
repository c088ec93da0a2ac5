"""``Router``: the models and their processes; ``Forwarded``: the response of one of them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mlx_paged.errors import shown
from mlx_paged.router.model_process import Headers, ModelProcess
from mlx_paged.server.errors import (
    FAILED,
    ApiError,
    error_response,
    protocol_of,
    until_disconnect,
)
from mlx_paged.server.http.access import ROUTER_PREFIX, Principal
from mlx_paged.server.http.sse import HEADERS, event

logger = logging.getLogger("mlx_paged.server")

# A stream whose model is being loaded begins after the first, so that an early failure can still
# have an HTTP status, and then has a comment every so many seconds.
FIRST_PROGRESS_SECONDS, PROGRESS_SECONDS = 10.0, 5.0
STOP_SECONDS = 20.0  # for processes to end, once no request is left
# Headers of one connection, those that the router writes itself, and those that only it may read.
_NOT_PASSED_ON = {
    *(b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"),
    *(b"host", b"content-length", b"x-request-id", b"request-id", b"date"),
    *(b"authorization", b"x-api-key", b"cookie", b"origin"),
}
_EVENT_HEADERS = [
    *((name.lower().encode(), value.encode()) for name, value in HEADERS.items()),
    (b"content-type", b"text/event-stream; charset=utf-8"),
]


class Router:
    """The models and their processes.

    Args:
        processes: at least one; the first answers requests without a model.

    Attributes:
        created: when the router started, in seconds since the epoch.
    """

    def __init__(self, processes: Sequence[ModelProcess]):
        self.processes = processes
        self.created = int(time.time())
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._answers: set[asyncio.Task[Any]] = set()
        self._is_aborting = False

    def begin(self) -> None:
        """Load the pinned models, from the running event loop on."""
        self._loop = asyncio.get_running_loop()
        for process in self.processes:
            if process.flags["pin"]:
                self._load(process)

    def find(self, name: str | None, principal: Principal) -> ModelProcess:
        """The process of a model, by its name or an alias; without a name, of the first one.

        Raises:
            ApiError: there is none of this name that the user may use.
        """
        allowed = [each for each in self.processes if may_use(principal, each)]
        for process in allowed:
            if name is None or name in process.names:
                return process
        for process in allowed:
            if "*" in process.names:
                return process
        names = ", ".join(shown(each.name) for each in allowed)
        text = f"there is no model {shown(name)}; this server has {names}"
        raise ApiError(404, text, param="model", code="model_not_found")

    @asynccontextmanager
    async def use(self, process: ModelProcess) -> AsyncIterator[None]:
        """Load a model and keep it loaded.

        Raises:
            ApiError: it can't be loaded.
        """
        # In a task of its own: other requests wait for it, too.
        await asyncio.shield(self._load(process))
        yield

    def _load(self, process: ModelProcess) -> asyncio.Task[None]:
        task = self._loads.get(process.name)
        if task is None or task.done():
            task = self._loads[process.name] = asyncio.create_task(process.start())
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

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
        return asyncio.run_coroutine_threadsafe(self._stop_all(timeout), self._loop).result()

    async def _stop_all(self, timeout: float) -> bool:
        ends = (each.stop(timeout + STOP_SECONDS) for each in self.processes)
        return all(await asyncio.gather(*ends))


def may_use(principal: Principal, process: ModelProcess) -> bool:
    """Whether the key of a user is for a model."""
    return principal.models is None or not principal.models.isdisjoint(process.names)


class Forwarded(Response):
    """The response of a model's process, passed on as it arrives.

    Args:
        process: of the model.
        target: the path for the process.
        streams: whether the client expects events. It then gets comments, which clients ignore,
            while the model is being loaded.
    """

    def __init__(
        self,
        router: Router,
        process: ModelProcess,
        body: bytes,
        target: bytes,
        streams: bool = False,
    ):
        self._router, self._process = router, process
        self._body, self._target, self._streams = body, target, streams
        self._has_begun = self._has_events = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await until_disconnect(receive, self._send_all(scope, send))

    async def _send_all(self, scope: Scope, send: Send) -> None:
        below = {**scope, "path": self._target.partition(b"?")[0].decode("latin-1")}
        try:
            async with self._router.answering():
                await self._answer(below, send)
        except ApiError as error:
            if self._has_events:
                await _send_body(send, event(protocol_of(below).event(error)))
                await _send_body(send, b"", more=False)
            elif not self._has_begun:
                await error_response(error, below)(below, _receive_nothing, send)
            else:
                # Half a body has no form for an error.
                logger.warning("%s", error.message)
                scope["state"]["connection"].transport.abort()

    async def _answer(self, scope: Scope, send: Send) -> None:
        progress = asyncio.create_task(self._show_progress(send))
        try:
            async with self._router.use(self._process):
                progress.cancel()
                await self._pass_on(scope, send)
        finally:
            progress.cancel()

    async def _pass_on(self, scope: Scope, send: Send) -> None:
        state = scope["state"]
        headers = [
            *((name, value) for name, value in scope["headers"] if _is_passed_on(name)),
            state["principal"].header(),
            (b"x-request-id", state["request_id"].encode()),
            (b"content-length", str(len(self._body)).encode()),
        ]
        sending = self._process.send(scope["method"], self._target, headers, self._body)
        async with sending as response:
            state["is_logged"] = True
            found = [(name.lower(), value) for name, value in response.headers]
            has_events = dict(found).get(b"content-type", b"").startswith(b"text/event-stream")
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
        await asyncio.sleep(FIRST_PROGRESS_SECONDS)
        self._has_events = True
        await self._begin(send, 200, _EVENT_HEADERS)
        while True:
            seconds = time.monotonic() - self._process.loading_since
            text = f": {self._process.name} is being loaded, {seconds:.0f} s\n\n"
            await _send_body(send, text.encode(errors="replace"))
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
