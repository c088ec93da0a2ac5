"""``Connection``: uvicorn's connection with limits on who connects and says nothing, or reads
nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any

import h11
from starlette.types import Message, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_paged.server.errors import ApiError, error_body

logger = logging.getLogger("mlx_paged.server")


class Connection(H11Protocol):
    """A connection, which is closed when its client keeps the server waiting.

    uvicorn itself waits for the head of a request, and for a client that reads nothing, forever.

    Attributes:
        max_connections: more are told to come back.
        head_seconds: between the beginning of a connection, or the end of an answer, and the end of
            the next request's head; and for a client to send the rest of a request that is answered
            already.
        stall_seconds: in which a client has to read something of what waits to be sent.
    """

    max_connections = 1024
    head_seconds = 30.0
    stall_seconds = 60.0

    reset_seconds = 0.1  # between two looks whether a client that says no more has left

    _is_refused = False
    _says_no_more = False
    _was_cut = False
    _deadline: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Writing is paused exactly while something waits to be sent.
        transport.set_write_buffer_limits(high=0)
        self.app_state = {**self.app_state, "connection": self}
        self._is_lost = asyncio.Event()
        if len(self.connections) > self.max_connections:
            self._refuse(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        # What a client that is refused says is read and dropped: to close at once would take the
        # answer from it.
        if not self._is_refused:
            super().data_received(data)
            self._watch()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client says no more: it has left, or it waits for its answer. Its system tells, by a
        reset, once something was sent to it.

        Returns:
            Whether the connection stays open: there is a whole request that is not answered.
        """
        if not self._is_answering() or self.conn.their_state not in (h11.DONE, h11.MUST_CLOSE):
            return False
        self._says_no_more = True
        if self.conn.our_state is h11.SEND_RESPONSE and self.scope["http_version"] == "1.1":
            # All clients read over it. HTTP/1.0 has nothing like it.
            event = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
            self.transport.write(self.conn.send(event))
        self._look_for_reset()
        return True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._says_no_more and not self._is_answering():
            self.transport.close()
        self._watch()

    async def has_sent(self, send: Send, message: Message) -> bool:
        """Send the last message of a response, wait until nothing of it waits to be sent, and say
        whether all of it has left for the client.
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
            # Rubbish behind a request that is being answered: there is no place for an answer.
            self.transport.close()
            return
        self.transport.write(_plain_response(ApiError(400, msg)))
        self.transport.close()

    def _is_answering(self) -> bool:
        return self.conn.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY)

    def _look_for_reset(self) -> None:
        client: socket.socket = self.transport.get_extra_info("socket")
        if self.transport.is_closing() or not self._is_answering():
            return
        if client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._give_up("has left")
        else:
            self.loop.call_later(self.reset_seconds, self._look_for_reset)

    def _watch(self) -> None:
        """Run the clock exactly while the client is to say something."""
        waits = self._is_refused or self.conn.their_state is h11.IDLE
        # It was answered before all of it was there.
        waits = waits or (
            self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY
        )
        if not waits and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        elif waits and self._deadline is None:
            self._deadline = self.loop.call_later(self.head_seconds, self._give_up, "says nothing")

    def _watch_reader(self, num_unread: int | None = None) -> None:
        """Give the client up if it read nothing since there were ``num_unread`` bytes for it."""
        now = self.transport.get_write_buffer_size()
        if num_unread is not None and now >= num_unread:
            self._give_up("reads nothing")
        else:
            self._stall = self.loop.call_later(self.stall_seconds, self._watch_reader, now)

    def _refuse(self, transport: asyncio.Transport) -> None:
        self._is_refused = True
        logger.warning("more than %d connections: one was refused", self.max_connections)
        error = ApiError(503, "too many connections; come back later", headers={"Retry-After": "5"})
        transport.write(_plain_response(error))
        if transport.can_write_eof():
            transport.write_eof()

    def _give_up(self, why: str) -> None:
        logger.debug("a connection was closed: its client %s", why)
        self.transport.abort()


def connection_class(max_connections: int) -> type[Connection]:
    """A class of connections for ``uvicorn.Config(http=...)``."""
    limits: dict[str, Any] = {"max_connections": max_connections}
    return type("Connection", (Connection,), limits)


def _plain_response(error: ApiError) -> bytes:
    """An answer of HTTP where no request could be read."""
    body = json.dumps(error_body(error)).encode()
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **error.headers,
    }
    reason = {400: "Bad Request", 503: "Service Unavailable"}[error.status]
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {error.status} {reason}\r\n{head}\r\n".encode() + body
