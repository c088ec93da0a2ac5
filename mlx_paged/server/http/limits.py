"""Limits on the size of requests and the time to receive them."""

from __future__ import annotations

import asyncio
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_paged.server.errors import ApiError, error_response
from mlx_paged.server.http.disconnects import ClientLeftError
from mlx_paged.server.http.tidying import Tidying

BODY_SECONDS = 60.0
MAX_BODIES = 8  # of maximum size, in requests that are not answered yet
MAX_HEADERS = 100
MAX_HEAD_BYTES = 2**16
MAX_PATH_BYTES = 2**13

_METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class Limits:
    """Middleware that reads the whole body of a request and refuses bodies that are too large.

    The bytes of a body count until the request is answered, since what was parsed from it stays in
    memory as long.

    Args:
        max_body_bytes: the limit for one request. The limit for all requests together is
            ``MAX_BODIES`` times this, and half of that for one user if there are others.
        body_seconds: the maximum time to receive a body.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, body_seconds: float = BODY_SECONDS):
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._body_seconds = body_seconds
        self._nbytes_held: Counter[str] = Counter()  # by user
        self._tidying = Tidying()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = _HeldBytes(self._nbytes_held, self._max_body_bytes, scope)
        try:
            try:
                check_head(scope)
                if scope["method"] in _METHODS_WITH_BODY:
                    receive = _replayed(await self._body(scope, receive, held), receive)
            except ClientLeftError:
                return
            except ApiError as error:
                await error_response(error, scope)(scope, receive, send)
                return
            await self._app(scope, receive, send)
        finally:
            held.release()
            self._tidying.note(held.num_bytes)

    async def _body(self, scope: Scope, receive: Receive, held: _HeldBytes) -> bytes:
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self._max_body_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._body_seconds):
                return await self._read(receive, held)
        except TimeoutError as error:
            raise ApiError(
                408, f"the body was not complete after {self._body_seconds:g} seconds"
            ) from error

    async def _read(self, receive: Receive, held: _HeldBytes) -> bytes:
        chunks: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            chunk = message.get("body", b"")
            chunks.append(chunk)
            if held.num_bytes + len(chunk) > self._max_body_bytes:
                raise self._too_large()
            held.add(len(chunk))
            if not message.get("more_body"):
                return b"".join(chunks)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body of a request may have at most {self._max_body_bytes:,} bytes; the server's "
            "--max-body-bytes changes that",
        )


class _HeldBytes:
    """The bytes of a request's body, counted in the totals of all users.

    Attributes:
        num_bytes: the bytes of this request.
    """

    def __init__(self, by_user: Counter[str], max_body_bytes: int, scope: Scope):
        self.num_bytes = 0
        principal = scope.get("state", {}).get("principal")
        self._user = "-" if principal is None else principal.name
        self._by_user = by_user
        self._max_num_bytes = MAX_BODIES * max_body_bytes
        is_alone = principal is None or principal.is_alone
        self._max_of_user = self._max_num_bytes // (1 if is_alone else 2)

    def add(self, num_bytes: int) -> None:
        """Hold more bytes; raises :class:`ApiError` beyond the user's or the overall limit."""
        self.num_bytes += num_bytes
        self._by_user[self._user] += num_bytes
        is_too_much = self._by_user[self._user] > self._max_of_user
        if is_too_much or self._by_user.total() > self._max_num_bytes:
            raise ApiError(503, "too many large requests at once", headers={"Retry-After": "2"})

    def release(self) -> None:
        """Release the bytes, once the request is answered."""
        self._by_user[self._user] -= self.num_bytes
        if not self._by_user[self._user]:
            del self._by_user[self._user]


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that returns the whole body first, and then continues with ``receive``."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return first.pop() if first else await receive()

    return receive_again


def check_head(scope: Scope) -> None:
    """Raise :class:`ApiError` if the headers are too many or too long, or the path is too long."""
    headers = scope["headers"]
    nbytes = sum(len(name) + len(value) for name, value in headers)
    if len(headers) > MAX_HEADERS or nbytes > MAX_HEAD_BYTES:
        raise ApiError(
            431, f"a request may have at most {MAX_HEADERS} headers with {MAX_HEAD_BYTES:,} bytes"
        )
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_PATH_BYTES:
        raise ApiError(414, f"a path may have at most {MAX_PATH_BYTES:,} bytes")
