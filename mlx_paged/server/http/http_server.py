"""``HttpServer``: uvicorn with sockets that are bound early, limits on connections, and a graceful
shutdown.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol

import h11
import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_paged.cli.streams import say
from mlx_paged.errors import ArgumentError, shown, system_reason
from mlx_paged.server.errors import OPENAI, ApiError, Guard
from mlx_paged.server.http.access import is_loopback_name
from mlx_paged.server.settings import KeyFile, ServerSettings

logger = logging.getLogger("mlx_paged.server")

BACKLOG = 2048
ABORT_SECONDS = 5.0  # for aborted answers to send their error
STOP_SECONDS = 1.0  # after that, for a step to end, and for the answers that it held up
STEP_SECONDS = 5.0  # for a step to end once no request is left
MAX_CONNECTIONS = 1024
_TICKS_PER_CHECK, _TICKS_PER_REREAD = 5, 10  # of connections, of the key file; 10 are a second
_RESTART_SECONDS, _CONNECTION_SECONDS = "10", "5"  # after which a client may retry
_LENGTHS = {b"content-length", b"transfer-encoding"}


def bind(host: str, port: int) -> list[socket.socket]:
    """Listen on every address of ``host``.

    This is done before the model is loaded, so a port in use is reported at once, and early clients
    wait.

    Raises:
        ArgumentError: the host is unknown, or the system refuses the address.
    """
    try:
        infos = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ArgumentError(
            f"[server] host {shown(host)} is unknown: {system_reason(error)}", "host"
        ) from error
    sockets: list[socket.socket] = []
    number = None  # of the system's refusal
    for family, _, _, _, address in dict.fromkeys(infos):
        if port == 0 and sockets:
            break  # a port that is free on one address may be in use on another
        try:
            sockets.append(_listen(family, address))
        except OSError as error:
            number = error.errno
            # "localhost" may have an IPv6 address on a machine without IPv6.
            if number not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                break
    if sockets and number not in (errno.EADDRINUSE, errno.EACCES):
        return sockets
    close_all(sockets)
    argument = "port"
    if number == errno.EADDRINUSE:
        what = f"port {port} is in use on {host}; choose another with --port, or 0 for a free one"
    elif number == errno.EACCES:
        what = f"there is no permission to listen on port {port}; choose another with --port"
    else:
        why = os.strerror(number) if number else "it has no address"
        what, argument = f"can't listen on host {shown(host)}: {why}", "host"
    raise ArgumentError(f"[server] {what}", argument)


def close_all(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()


def _listen(family: int, address: tuple[object, ...]) -> socket.socket:
    made = socket.create_server(address, family=family, backlog=BACKLOG)
    # Unless TCP is named, asyncio leaves Nagle's algorithm on, and the second part of each response
    # waits for the client's delayed acknowledgement, 40 ms.
    return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, made.detach())


def is_loopback(sockets: list[socket.socket]) -> bool:
    """Whether only this machine can reach the sockets."""
    return all(is_loopback_name(each.getsockname()[0]) for each in sockets)


def url_of(host: str, sockets: list[socket.socket]) -> str:
    """The server's URL on this machine."""
    port = sockets[0].getsockname()[1]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)
    return f"http://{f'[{name}]' if ':' in name and name[0] != '[' else name}:{port}"


class Answering(Protocol):
    """What answers the requests: the engine, or a router with the processes of its models."""

    def stopped(self) -> Exception | None:
        """Why no request can be answered any more; ``None`` if they can."""
        ...

    def step_seconds(self) -> float:
        """How long the step that runs has been running; 0 if none is."""
        ...

    def abort_all(self) -> None:
        """End all requests with an error."""
        ...

    def shutdown(self, timeout: float) -> bool:
        """Stop, and return whether everything has ended in time."""
        ...


class Gate(Guard):
    """Answers 503 while the server shuts down, after its engine has failed, and on more connections
    than there may be.
    """

    def __init__(self, app: ASGIApp, engine: Answering, max_connections: int = MAX_CONNECTIONS):
        super().__init__(app)
        self._engine = engine
        self._max_connections = max_connections
        self.is_closed = False

    def refusal(self, scope: Scope) -> ApiError | None:
        if {name for name, _ in scope["headers"]} >= _LENGTHS:
            # A proxy may have read another end of this request, and what follows may not be its
            # client's (RFC 9112, section 6.3). uvicorn closes the connection after the response.
            scope["headers"].append((b"connection", b"close"))
        connection = scope.get("state", {}).get("connection")
        if self.is_closed:
            what, seconds = "the server is shutting down", _RESTART_SECONDS
        elif self._engine.stopped():
            what, seconds = "the engine stopped", _RESTART_SECONDS
        elif connection is not None and connection.number > self._max_connections:
            what, seconds = "too many connections", _CONNECTION_SECONDS
        else:
            return None
        headers = {"Retry-After": seconds, "Connection": "close"}
        return ApiError(503, f"{what}; retry later", headers=headers)


class Connection(H11Protocol):
    """uvicorn's connection with the bounds that its settings lack: the time until the head of a
    request is there, and the time in which a client reads nothing of a response. Besides, a client
    that sends no more but reads on is answered, invalid requests are answered with JSON, and it is
    known whether a response was read.

    Attributes:
        head_seconds: the maximum time from the beginning of a connection, or the end of a response,
            to the end of the next request's head; and for the rest of a request that was answered
            before it was complete.
        stall_seconds: the maximum time in which a client reads nothing of what is to be sent.
        number: how many connections there were when it was made, itself included.
    """

    head_seconds = 30.0
    stall_seconds = 60.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Writing is paused exactly while there is unsent data.
        transport.set_write_buffer_limits(high=0)
        self.number = len(self.connections)
        self._client: socket.socket = transport.get_extra_info("socket")
        self.app_state = {**self.app_state, "connection": self}
        self._is_lost = asyncio.Event()
        self._was_cut = self._is_half_closed = False
        self._num_unread = 0
        self._waits_since = self._last_read = self.loop.time()

    def check(self) -> None:
        """Close the connection if its client keeps the server waiting or has disconnected."""
        now, unread = self.loop.time(), self.transport.get_write_buffer_size()
        if not 0 < self._num_unread <= unread:
            self._num_unread, self._last_read = unread, now
        # In the second case, the request was answered before it was complete.
        ours, theirs = self.conn.our_state, self.conn.their_state
        waits = theirs is h11.IDLE or (ours is h11.DONE and theirs is h11.SEND_BODY)
        if waits and now > self._waits_since + self.head_seconds:
            why = "sends nothing"
        elif now > self._last_read + self.stall_seconds:
            why = "reads nothing"
        elif self._is_half_closed and self._client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            why = "has disconnected"
        else:
            return
        logger.debug("a connection was closed: its client %s", why)
        self.transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._num_unread = 0

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more: it is waiting for the response, or it has left, in which case
        its system answers data with a reset. Returns whether the connection stays open, because a
        complete request is not answered yet.
        """
        if not self._is_answering() or self.conn.their_state not in (h11.DONE, h11.MUST_CLOSE):
            return False
        self._is_half_closed = True
        if self.conn.our_state is h11.SEND_RESPONSE and self.scope["http_version"] == "1.1":
            # Data that all clients ignore. HTTP/1.0 has no such response.
            event = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
            self.transport.write(self.conn.send(event))
        return True

    def _is_answering(self) -> bool:
        return self.conn.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._waits_since = self.loop.time()
        if self._is_half_closed and not self._is_answering():
            self.transport.close()

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
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        # Otherwise it is invalid data after a request that is being answered.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = OPENAI.body(ApiError(400, msg), None)
            found = JSONResponse(body, 400, {"Connection": "close"})
            head = h11.Response(status_code=400, headers=found.raw_headers, reason="Bad Request")
            for event in (head, h11.Data(data=bytes(found.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class HttpServer(uvicorn.Server):
    """Serves until a signal arrives or the engine fails.

    To shut down, it stops listening, answers 503 on open connections, and lets running answers
    continue for ``drain_seconds``. Then it aborts them, and each ends with an error. At last it
    ends the engine.

    Args:
        app: contains ``gate``.
        announce: called once requests are served.
        key_file: reread when it changes, and on SIGHUP.

    Attributes:
        has_failed: whether the engine stopped by itself.
        has_abandoned: whether a step of the engine did not end.
    """

    def __init__(
        self,
        app: ASGIApp,
        gate: Gate,
        engine: Answering,
        settings: ServerSettings,
        announce: Callable[[], None] = lambda: None,
        key_file: KeyFile | None = None,
    ):
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="off",
                loop="asyncio",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=math.ceil(Connection.head_seconds),
                timeout_graceful_shutdown=1,
                backlog=BACKLOG,
            )
        )
        self.has_failed = self.has_abandoned = False
        self._key_file = key_file
        self._had_terminal = has_terminal()
        self._gate = gate
        self._engine = engine
        self._settings = settings
        self._step_hangs = self._was_interrupted = False
        self._announce = announce

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM and SIGINT (Ctrl-C) end the server; a second SIGINT ends the process at once."""
        if sig == signal.SIGINT and self._was_interrupted:
            say("")
            # Without waiting for the engine's step, which may take long, and without finalising
            # Python and MLX while it runs.
            os._exit(130)
        if sig == signal.SIGINT:
            self._was_interrupted = True
            say("[waiting for running answers; press Ctrl-C again to end at once]")
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # as under nohup
        if threading.current_thread() is threading.main_thread() and not is_ignored:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._hang_up)
        self._announce()

    def _hang_up(self) -> None:
        """Handle SIGHUP. It ends the server if its terminal was closed, which sends one; otherwise
        a server with a key file rereads it.
        """
        if self._key_file is None or (self._had_terminal and not has_terminal()):
            self.should_exit = True
        else:
            self._key_file.reread()

    async def on_tick(self, counter: int) -> bool:
        if self._engine.stopped() is not None:
            self.has_failed = True
            return True
        self._check_step()
        if counter % _TICKS_PER_CHECK == 0:
            self._check_connections()
        if self._key_file is not None and counter % _TICKS_PER_REREAD == 0:
            self._key_file.reread_if_changed()
        return await super().on_tick(counter)

    def _check_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.check()  # type: ignore[union-attr]

    def _check_step(self) -> None:
        """Log once that a step hangs, and when it ends after all."""
        hangs = self._engine.step_seconds() > self._settings.step_timeout
        if hangs and not self._step_hangs:
            logger.error("a step of the engine has run for %g seconds", self._settings.step_timeout)
        elif self._step_hangs and not hangs:
            logger.warning("the step that hung has ended")
        self._step_hangs = hangs

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gate.is_closed = True
        for server in self.servers:
            server.close()
        if not self.has_failed:
            num_running, seconds = len(self.server_state.tasks), self._settings.drain_seconds
            logger.info("shutting down; %d requests have %g s to finish", num_running, seconds)
            await self._wait_for_answers(seconds)
        if self.server_state.tasks:
            logger.warning("%d requests are aborted", len(self.server_state.tasks))
        await self._wait_for_answers(ABORT_SECONDS, self._engine.abort_all)
        if self.server_state.tasks:
            # If a step hangs, its requests get an error that the engine has stopped.
            await asyncio.to_thread(self._engine.shutdown, STOP_SECONDS)
            await self._wait_for_answers(STOP_SECONDS)
        await super().shutdown(sockets)
        if not self.has_failed:
            has_ended = await asyncio.to_thread(self._engine.shutdown, STEP_SECONDS)
            self.has_abandoned = not has_ended

    async def _wait_for_answers(
        self, seconds: float, before_each_check: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until no request is running, or the time is over."""
        tasks, end = self.server_state.tasks, time.monotonic() + seconds
        while tasks and time.monotonic() < end:
            before_each_check()
            self._check_connections()
            await asyncio.sleep(0.05)


def has_terminal() -> bool:
    """Whether the process has a controlling terminal; it loses one that is closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
