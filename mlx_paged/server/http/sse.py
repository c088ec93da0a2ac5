"""Server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_paged.server.errors import FAILED, ApiError, WireProtocol, error_body, protocol_of
from mlx_paged.server.http.disconnects import ClientLeftError, until_disconnect

logger = logging.getLogger("mlx_paged.server")

DONE = b"data: [DONE]\n\n"
# What events say is made here, and nothing of it holds itself.
_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"))
_LIFE = b": the answer is on its way\n\n"

_HEADERS = {
    "Cache-Control": "no-cache",
    # nginx would hold events back until its buffer is full.
    "X-Accel-Buffering": "no",
}


class Closable(Protocol):
    """What an event stream is made of, such as an answer."""

    async def aclose(self) -> None: ...


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """An event with a JSON object, on one line; named for protocols that name theirs."""
    text = _ENCODER.encode(data)
    head = "" if name is None else f"event: {name}\n"
    # Half a character, which tokens may leave, has no UTF-8.
    return f"{head}data: {text}\n\n".encode(errors="replace")


class EventStream(Response):
    """A response of events, each of which is sent as soon as it is there.

    However it ends (the events are over, the client leaves, the server is cancelled), the generator
    is closed, and then its sources, also where the generator was never begun. An error that it
    raises is the last event, in the words of the path's protocol.

    Args:
        events: as :func:`event` makes them.
        sources: what the events come from.
    """

    media_type = "text/event-stream"
    max_pause = 10.0
    """Seconds without an event after which a comment shows proxies and clients that it lives."""

    def __init__(self, events: AsyncGenerator[bytes, None], *sources: Closable):
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._events = events
        self._sources = sources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send, protocol_of(scope)))
        except ClientLeftError:
            pass
        finally:
            await self._events.aclose()
            for source in self._sources:
                await source.aclose()

    async def _send_all(self, send: Send, protocol: WireProtocol) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        self._num_sent = 0
        pulse = asyncio.create_task(self._show_life(send))
        try:
            async for each in self._events:
                self._num_sent += 1
                await send({"type": "http.response.body", "body": each, "more_body": True})
        except Exception as error:
            last = _error_event(error, protocol)
            await send({"type": "http.response.body", "body": last, "more_body": True})
        finally:
            pulse.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _show_life(self, send: Send) -> None:
        while True:
            num_sent = self._num_sent
            await asyncio.sleep(self.max_pause)
            if num_sent == self._num_sent:
                await send({"type": "http.response.body", "body": _LIFE, "more_body": True})


def _error_event(error: Exception, protocol: WireProtocol) -> bytes:
    if not isinstance(error, ApiError):
        logger.error("a stream failed", exc_info=error)
        error = ApiError(500, FAILED)
    if protocol is WireProtocol.RESPONSES:
        data = responses_error(error)
        return event(data, data["type"])
    return event(
        error_body(error, protocol), "error" if protocol is WireProtocol.ANTHROPIC else None
    )


def responses_error(error: ApiError) -> dict[str, Any]:
    """The event of ``/v1/responses`` that says what went wrong: as the protocol describes it, and
    with the object that OpenAI's clients look for in any event.
    """
    body = error_body(error)["error"]
    said = {name: body[name] for name in ("code", "message", "param")}
    return {"type": "error", **said, "error": body}
