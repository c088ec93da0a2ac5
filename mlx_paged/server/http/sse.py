"""Streams of answers: server-sent events, or lines of JSON."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from mlx_paged.server.errors import (
    FAILED,
    ApiError,
    WireProtocol,
    protocol_of,
    until_disconnect,
)

if TYPE_CHECKING:
    from mlx_paged.server.generations import Answer

logger = logging.getLogger("mlx_paged.server")

DONE = b"data: [DONE]\n\n"
# Events contain no circular references.
_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"))

HEADERS = {
    "Cache-Control": "no-cache",
    # Otherwise nginx buffers events.
    "X-Accel-Buffering": "no",
}


def event(data: Mapping[str, Any]) -> bytes:
    """An event with a JSON object on one line. If the object has a ``type``, the event is named by
    it, as in Anthropic's API and in ``/v1/responses``.
    """
    name = f"event: {data['type']}\n" if "type" in data else ""
    # Lone surrogates, which tokens may produce, can't be encoded as UTF-8.
    return f"{name}data: {_ENCODER.encode(data)}\n\n".encode(errors="replace")


def line(data: Mapping[str, Any]) -> bytes:
    """A JSON object on a line of its own, as in Ollama's API."""
    return f"{_ENCODER.encode(data)}\n".encode(errors="replace")


class EventStream(StreamingResponse):
    """A response of events, each of which is sent immediately.

    However it ends (after the last event, by a disconnect, by cancellation), the generator and then
    its sources are closed, even if the generator was never started. An error that it raises becomes
    the last event, in the format of the path's protocol.

    Args:
        events: made by :attr:`encode`.
        sources: the answers that the events are made from.

    Attributes:
        encode: makes an event of an object.
        comment: makes of a text what clients ignore.
        max_pause: seconds without an event after which a comment is sent.
    """

    media_type = "text/event-stream"
    encode = staticmethod(event)
    comment = staticmethod(lambda text: f": {text}\n\n".encode(errors="replace"))
    max_pause = 10.0

    def __init__(self, events: AsyncGenerator[bytes, None], *sources: Answer):
        super().__init__(events, headers=HEADERS)
        self._events = events
        self._sources = sources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send, protocol_of(scope)))
        except ClientDisconnect:
            pass
        finally:
            await self._events.aclose()
            for source in self._sources:
                await source.aclose()

    async def _send_all(self, send: Send, protocol: WireProtocol) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        self._num_sent = 0
        keeping_alive = asyncio.create_task(self._keep_alive(send))
        try:
            async for each in self._events:
                self._num_sent += 1
                await send({"type": "http.response.body", "body": each, "more_body": True})
        except Exception as error:
            last = self.encode(_error_event(error, protocol))
            await send({"type": "http.response.body", "body": last, "more_body": True})
        finally:
            keeping_alive.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            num_sent = self._num_sent
            await asyncio.sleep(self.max_pause)
            if num_sent == self._num_sent:
                body = self.comment("the answer is on its way")
                await send({"type": "http.response.body", "body": body, "more_body": True})


class LineStream(EventStream):
    """A response of lines of JSON."""

    media_type = "application/x-ndjson"
    encode = staticmethod(line)
    comment = staticmethod(lambda text: b" ")  # JSON may have spaces before an object.


def _error_event(error: Exception, protocol: WireProtocol) -> dict[str, Any]:
    if not isinstance(error, ApiError):
        logger.error("a stream failed", exc_info=error)
        error = ApiError(500, FAILED)
    return protocol.event(error)
