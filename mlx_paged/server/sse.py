"""Server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.responses import StreamingResponse

DONE = b"data: [DONE]\n\n"

_HEADERS = {
    "Cache-Control": "no-cache",
    # nginx would hold events back until its buffer is full.
    "X-Accel-Buffering": "no",
}


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """An event with a JSON object, on one line; named for protocols that name theirs."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {text}\n\n".encode()


class EventStream(StreamingResponse):
    """A response of events, which closes its generator however the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]):
        super().__init__(events, headers=_HEADERS)
        self._events = events

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
