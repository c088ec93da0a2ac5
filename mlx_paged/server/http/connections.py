"""``Connection``: uvicorn's connection with timeouts and a limit on the number of connections."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from http import HTTPStatus
from typing import Any

import h11
from starlette.types import Message, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_paged.server.errors import ApiError, error_body

logger = logging.getLogger("mlx_paged.server")


class Connection(H11Protocol):
    """A connection that is closed if its client keeps the server waiting.

    uvicorn itself waits without end for the head of a request, and for a client that stops reading.

    Attributes:
        max_connections: further connections are refused with 503.
        head_seconds: the maximum time from the beginning of a connection, or the end of a response,
            to the end of the next request's head; and for the rest of a request that was answered
            before it was complete.
        stall_seconds: the maximum time in which a client reads nothing of what is to be sent.
    """

    max_connections = 1024
    head_seconds = 30.0
    stall_seconds = 60.0

    reset_seconds = 0.1  # between two checks whether a half-closed connection was reset

    _is_refused = False
    _is_half_closed = False
    _was_cut = False
    _deadline: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Writing is paused exactly while there is unsent data.
        transport.set_write_buffer_limits(high=0)
        self.app_state = {**self.app_state, "connection": self}
        self._is_lost = asyncio.Event()
        if len(self.connections) > self.max_connections:
            self._refuse(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        # Data from a refused client is read and dropped: if the connection were closed at once, the
        # client might not receive the response.
        if not self._is_refused:
            super().data_received(data)
            self._watch()

    def handle_events(self) -> None:
        """Also ends the connection after a request with two lengths (RFC 9112, section 6.3): a
        proxy may have read another end of it, and what follows may not be its client's.
        """
        before = self.scope
        super().handle_events()
        if self.scope is not before and _has_two_lengths(self.headers):
            # The request is not handled before this method returns.
            self.headers.append((b"connection", b"close"))

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more: it has left, or it is waiting for the response. If it has left,
        its system answers data with a reset.

        Returns:
            Whether the connection stays open, because a complete request is not answered yet.
        """
        if not self._is_answering() or self.conn.their_state not in (h11.DONE, h11.MUST_CLOSE):
            return False
        self._is_half_closed = True
        if self.conn.our_state is h11.SEND_RESPONSE and self.scope["http_version"] == "1.1":
            # Data that all clients ignore. HTTP/1.0 has no such response.
            event = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
            self.transport.write(self.conn.send(event))
        self._check_for_reset()
        return True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_half_closed and not self._is_answering():
            self.transport.close()
        self._watch()

    async def has_sent(self, send: Send, message: Message) -> bool:
        """Send the last message of a response, wait until all data is sent or the connection is
        lost, and return whether all data was sent.
        """
        is_open = not self.transport.is_closing()
        await send(message)
        await self.flow.drain()
        if self.transport.is_closing():  # by the server, or because the client can't be reached
            await self._is_lost.wait()
        return is_open and not self._was_cut

    def connection_lost(self, exc: Exception | None) -> None:
        self._was_cut = exc is not None or self.flow.write_paused
        self._is_lost.set()
        for timer in (self._deadline, self._stall):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            # Invalid data after a request that is being answered: no response is possible.
            self.transport.close()
            return
        self.transport.write(_plain_response(ApiError(400, msg)))
        self.transport.close()

    def _is_answering(self) -> bool:
        return self.conn.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY)

    def _check_for_reset(self) -> None:
        client: socket.socket = self.transport.get_extra_info("socket")
        if self.transport.is_closing() or not self._is_answering():
            return
        if client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._abort("has disconnected")
        else:
            self.loop.call_later(self.reset_seconds, self._check_for_reset)

    def _watch(self) -> None:
        """Run the timer exactly while the client has to send something."""
        waits = self._is_refused or self.conn.their_state is h11.IDLE
        # The request was answered before it was complete.
        waits = waits or (
            self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY
        )
        if not waits and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        elif waits and self._deadline is None:
            self._deadline = self.loop.call_later(self.head_seconds, self._abort, "sends nothing")

    def _watch_reader(self, num_unread: int | None = None) -> None:
        """Abort the connection if the client has read nothing since ``num_unread`` bytes were
        unsent.
        """
        now = self.transport.get_write_buffer_size()
        if num_unread is not None and now >= num_unread:
            self._abort("reads nothing")
        else:
            self._stall = self.loop.call_later(self.stall_seconds, self._watch_reader, now)

    def _refuse(self, transport: asyncio.Transport) -> None:
        self._is_refused = True
        logger.warning("a connection was refused: there are %d already", self.max_connections)
        error = ApiError(503, "too many connections; retry later", headers={"Retry-After": "5"})
        transport.write(_plain_response(error))
        if transport.can_write_eof():
            transport.write_eof()

    def _abort(self, why: str) -> None:
        logger.debug("a connection was closed: its client %s", why)
        self.transport.abort()


def _has_two_lengths(headers: list[tuple[bytes, bytes]]) -> bool:
    return {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}


def connection_class(max_connections: int) -> type[Connection]:
    """A class of connections for ``uvicorn.Config(http=...)``."""
    limits: dict[str, Any] = {"max_connections": max_connections}
    return type("Connection", (Connection,), limits)


def _plain_response(error: ApiError) -> bytes:
    """An HTTP response for a connection without a valid request."""
    body = json.dumps(error_body(error)).encode()
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **error.headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    reason = HTTPStatus(error.status).phrase
    return f"HTTP/1.1 {error.status} {reason}\r\n{head}\r\n".encode() + body
