"""How large, how deep and how slow a request may be."""

from __future__ import annotations

import asyncio
import re

import numpy as np
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_paged.server.errors import ApiError, error_response

BODY_SECONDS = 60.0
MAX_BODIES = 8  # of the largest size, that are read at the same time
MAX_JSON_DEPTH = 64
MAX_JSON_VALUES = 2**20
MAX_JSON_NUMBER = 64  # characters
MAX_HEADERS = 100
MAX_HEAD_BYTES = 2**16
MAX_PATH_BYTES = 2**13

_METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_LONG_NUMBER = re.compile(rb"[0-9+\-.eE]{%d}" % (MAX_JSON_NUMBER + 1))
_LARGE_BODY = 2**18  # bytes; it is looked at in a thread


class Limits:
    """Middleware: reads the body of a request, and passes on what is not too large.

    The application behind it finds the whole body there, as JSON that is safe to parse.

    Args:
        max_body_bytes: of one request. Bodies that are being read have ``MAX_BODIES`` times as many
            together.
        body_seconds: in which a body has to be there.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, body_seconds: float = BODY_SECONDS):
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._body_seconds = body_seconds
        self._nbytes_held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            check_head(scope)
            if scope["method"] in _METHODS_WITH_BODY:
                receive = _replayed(await self._body(scope, receive), receive)
        except _DisconnectedError:
            return
        except ApiError as error:
            request_id = scope.get("state", {}).get("request_id")
            await error_response(error, scope["path"], request_id)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self._max_body_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._body_seconds):
                body = await self._read(receive)
        except TimeoutError as error:
            raise ApiError(
                408, f"the body was not there after {self._body_seconds:g} seconds"
            ) from error
        if len(body) >= _LARGE_BODY:
            await asyncio.to_thread(check_json, body)
        else:
            check_json(body)
        return body

    async def _read(self, receive: Receive) -> bytes:
        chunks: list[bytes] = []
        nbytes = 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _DisconnectedError
                chunk = message.get("body", b"")
                chunks.append(chunk)
                nbytes += len(chunk)
                self._nbytes_held += len(chunk)
                if nbytes > self._max_body_bytes:
                    raise self._too_large()
                if self._nbytes_held > MAX_BODIES * self._max_body_bytes:
                    raise ApiError(
                        503, "too many large requests at once", headers={"Retry-After": "2"}
                    )
                if not message.get("more_body"):
                    return b"".join(chunks)
        finally:
            self._nbytes_held -= nbytes

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body of a request has at most {self._max_body_bytes:,} bytes here; "
            "--max-body-bytes changes that",
        )


class _DisconnectedError(Exception):
    """The client left before its request was there."""


def _replayed(body: bytes, receive: Receive) -> Receive:
    """``receive`` as if the whole body had come at once; then it waits for the client to leave."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return first.pop() if first else await receive()

    return receive_again


def check_head(scope: Scope) -> None:
    """Raise :class:`ApiError` for too many or too long headers, or a path that is too long."""
    headers = scope["headers"]
    nbytes = sum(len(name) + len(value) for name, value in headers)
    if len(headers) > MAX_HEADERS or nbytes > MAX_HEAD_BYTES:
        raise ApiError(
            431, f"a request has at most {MAX_HEADERS} headers with {MAX_HEAD_BYTES:,} bytes"
        )
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_PATH_BYTES:
        raise ApiError(414, f"a path has at most {MAX_PATH_BYTES:,} bytes")


def check_json(body: bytes) -> None:
    """Raise :class:`ApiError` for a body that is no UTF-8, or that would be dear to parse: too
    deep, too many values, or numbers that are too long. Whether it is JSON is left to the parser.
    """
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is no UTF-8 at byte {error.start}") from error
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Each value has at most a name and a text, and so four quotes.
    if unescaped.count(b'"') > 4 * MAX_JSON_VALUES:
        raise _too_many_values()
    bare = b"".join(unescaped.split(b'"')[::2])
    if bare.count(b",") >= MAX_JSON_VALUES:
        raise _too_many_values()
    if _LONG_NUMBER.search(bare):
        raise ApiError(400, f"the body has a number of more than {MAX_JSON_NUMBER} characters")
    if _depth(bare) > MAX_JSON_DEPTH:
        raise ApiError(400, f"the body is nested deeper than {MAX_JSON_DEPTH}")


def _too_many_values() -> ApiError:
    return ApiError(400, f"the body has more than {MAX_JSON_VALUES:,} values")


def _depth(bare: bytes) -> int:
    """How deep brackets are nested in JSON without its strings."""
    brackets = bare.translate(None, _NO_BRACKETS)
    if len(brackets) <= MAX_JSON_DEPTH:
        return 0  # not deeper than that
    codes = np.frombuffer(brackets, np.uint8)
    opens = (codes == ord("[")) | (codes == ord("{"))
    return int(np.cumsum(np.where(opens, 1, -1)).max())


_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
