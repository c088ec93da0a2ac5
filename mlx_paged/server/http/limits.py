"""Limits on the size of requests, the time to receive them, and the number of waiting sequences."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_paged.errors import shown
from mlx_paged.server.errors import ApiError, error_response
from mlx_paged.server.http.access import ANONYMOUS, Principal

if TYPE_CHECKING:
    from mlx_paged.engine.stats import SequenceCounts

BODY_SECONDS = 60.0
MAX_BODIES = 8  # of maximum size, in requests that are not answered yet
MAX_HEADERS = 100
MAX_HEAD_BYTES = 2**16
MAX_PATH_BYTES = 2**13

_METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})

WINDOW = 60.0  # seconds over which the rate for Retry-After is measured
MAX_RETRY_AFTER = 60  # seconds


class Limits:
    """Middleware that reads the whole body of a request and refuses bodies that are too large or
    encoded.

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
        self._max_num_bytes = MAX_BODIES * max_body_bytes
        self._body_seconds = body_seconds
        self._nbytes_held: Counter[str] = Counter()  # by user

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        principal = scope.get("state", {}).get("principal", ANONYMOUS)
        chunks: list[bytes] = []
        try:
            check_head(scope)
            if scope["method"] in _METHODS_WITH_BODY:
                await self._read(scope, receive, principal, chunks)
                receive = _replay(b"".join(chunks), receive)
            await self._app(scope, receive, send)
        except ClientDisconnect:
            pass
        except ApiError as error:
            await error_response(error, scope)(scope, receive, send)
        finally:
            self._nbytes_held[principal.name] -= sum(map(len, chunks))

    async def _read(
        self, scope: Scope, receive: Receive, principal: Principal, chunks: list[bytes]
    ) -> None:
        """Read the body into ``chunks``; raises :class:`ApiError` if it becomes too much."""
        headers = dict(scope["headers"])
        encoding = headers.get(b"content-encoding", b"").strip().lower().decode("latin-1")
        if encoding not in ("", "identity"):
            what = (
                f"the content encoding {shown(encoding)} is not supported; send the body unencoded"
            )
            raise ApiError(415, what, headers={"Accept-Encoding": "identity"})
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self._max_body_bytes:
            raise self._too_large()
        num_bytes, max_of_user = 0, self._max_num_bytes // (1 if principal.is_alone else 2)
        message: Message = {"more_body": True}
        try:
            async with asyncio.timeout(self._body_seconds):
                while message.get("more_body"):
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    chunks.append(message.get("body", b""))
                    num_bytes += len(chunks[-1])
                    self._nbytes_held[principal.name] += len(chunks[-1])
                    if num_bytes > self._max_body_bytes:
                        raise self._too_large()
                    is_too_much = self._nbytes_held[principal.name] > max_of_user
                    if is_too_much or self._nbytes_held.total() > self._max_num_bytes:
                        text, later = "too many large requests at once", {"Retry-After": "2"}
                        raise ApiError(503, text, headers=later)
        except TimeoutError as error:
            text = f"the body was not complete after {self._body_seconds:g} seconds"
            raise ApiError(408, text) from error

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body of a request may have at most {self._max_body_bytes:,} bytes; the server's "
            "--max-body-bytes changes that",
        )


def _replay(body: bytes, receive: Receive) -> Receive:
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


class QueueLimit:
    """The queue limit: refuses sequences if too many are waiting.

        with admission.admit(params.n):
            ...                             # until the first token arrives

    Sequences wait in the engine, for one of ``max_num_seqs`` places or for K/V memory. Those
    without a first token are counted here, since the engine does not know yet those that arrive
    while a step is running; those with a first token are counted by the engine only, so a slow
    reader takes no place in the queue.

    A user who has less than an equal share of all places, running and waiting, is admitted although
    the queue is full of the requests of others. With k users there, these may then be up to 1 + 1/2
    + ... + 1/k times as many as fit.

    Args:
        max_queue_len: the maximum number of waiting sequences.
        max_num_seqs: the maximum number of running sequences.
        counts: returns the engine's current numbers.
        clock: returns seconds.

    Attributes:
        num_pending: admitted sequences without a first token, of all users.
    """

    def __init__(
        self,
        max_queue_len: int,
        max_num_seqs: int,
        counts: Callable[[], SequenceCounts],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._num_pending: Counter[str | None] = Counter()  # by user
        self._max_queue_len = max_queue_len
        self._max_num_seqs = max_num_seqs
        self._counts = counts
        self._clock = clock
        self._start = clock()
        self._begun: deque[tuple[float, int]] = deque()  # time and number of sequences

    @property
    def num_pending(self) -> int:
        return self._num_pending.total()

    @contextmanager
    def admit(self, num_seqs: int = 1, user: str | None = None) -> Iterator[None]:
        """Hold places in the queue until the sequences of a request begin. A user of whom nothing
        is there may have any request, regardless of its number of sequences.

        Raises:
            ApiError: 503 with ``Retry-After`` if too many sequences are waiting, and those of this
                user are more than an equal share of them.
        """
        num_running, num_waiting, begun = self._counts()
        num_admitted = sum(begun.values()) + self.num_pending
        # Sequences that wait while fewer than max_num_seqs run are waiting for memory.
        num_places = num_running if num_waiting else self._max_num_seqs
        max_admitted = num_places + self._max_queue_len
        if num_admitted and num_admitted + num_seqs > max_admitted:
            users = {user, *begun, *self._num_pending}
            num_own = begun.get(user, 0) + self._num_pending[user]
            # Of a user alone all are there.
            if len(users) == 1 or (num_own and (num_own + num_seqs) * len(users) > max_admitted):
                raise self._refusal(max(num_admitted - num_places, 0))
        self._num_pending[user] += num_seqs
        try:
            yield
        finally:
            self._num_pending[user] -= num_seqs
            if not self._num_pending[user]:
                del self._num_pending[user]
            self._forget_old()
            self._begun.append((self._clock(), num_seqs))

    def retry_after(self, num_ahead: int) -> int:
        """Estimated seconds until the waiting sequences begin: ``num_ahead / rate``, within 1..60,
        where ``rate`` is how many sequences per second began in the last minute.
        """
        self._forget_old()
        num_begun = sum(num_seqs for _, num_seqs in self._begun)
        if not num_begun:
            return MAX_RETRY_AFTER
        seconds = min(WINDOW, self._clock() - self._start)
        return min(max(math.ceil(num_ahead * seconds / num_begun), 1), MAX_RETRY_AFTER)

    def _forget_old(self) -> None:
        now = self._clock()
        while self._begun and self._begun[0][0] < now - WINDOW:
            self._begun.popleft()

    def _refusal(self, num_ahead: int) -> ApiError:
        return ApiError(
            503,
            f"{num_ahead:,} sequences are waiting already, and at most {self._max_queue_len:,} may "
            "wait; retry later",
            code="queue_full",
            headers={"Retry-After": str(self.retry_after(num_ahead))},
        )
