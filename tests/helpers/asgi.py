"""One request to an ASGI application, without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Answered(NamedTuple):
    """What an application answered; status 0 is nothing."""

    status: int
    headers: dict[str, str]
    body: bytes
    state: dict[str, Any]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    app: Any,
    method: str = "GET",
    path: str = "/",
    headers: Mapping[str, str | None] | None = None,
    body: Iterable[bytes] = (b"",),
    leaves: bool = False,
    state: dict[str, Any] | None = None,
) -> Answered:
    """Send a request in chunks; without ``leaves``, its client waits for the answer.

    Args:
        headers: beside ``host``, which ``None`` leaves out.
    """
    return asyncio.run(asked(app, method, path, headers, body, leaves, state))


async def asked(
    app: Any,
    method: str = "GET",
    path: str = "/",
    headers: Mapping[str, str | None] | None = None,
    body: Iterable[bytes] = (b"",),
    leaves: bool = False,
    state: dict[str, Any] | None = None,
) -> Answered:
    chunks = list(body)
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
        "headers": [
            (name.lower().encode(), value.encode("latin-1"))
            for name, value in {"host": "127.0.0.1:8000", **(headers or {})}.items()
            if value is not None
        ],
        "state": {} if state is None else state,
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if chunks:
            chunk = chunks.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": bool(chunks) or leaves}
        if not leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    if not sent:
        return Answered(0, {}, b"", scope["state"])
    return Answered(
        sent[0]["status"],
        {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]},
        b"".join(message.get("body", b"") for message in sent[1:]),
        scope["state"],
    )


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers with the body that it got."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class IdleEngine:
    """Stands for an engine that runs."""

    def __init__(self) -> None:
        self.num_aborts = 0
        self.failure: Exception | None = None

    def stopped(self) -> Exception | None:
        return self.failure

    def abort_all(self) -> None:
        self.num_aborts += 1

    def shutdown(self, timeout: float) -> bool:
        return True

    def step_seconds(self) -> float:
        return 0.0
