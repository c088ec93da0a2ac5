"""``Link``: numbered messages to and from another rank, whose end is noticed within seconds."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from mlx_paged.errors import one_line, shown

# A process that dies closes its socket at once. A machine that sleeps or loses its cable does not,
# nor does a process that is stopped: then these tell it.
PING_SECONDS = 2.0
SILENCE_SECONDS = 15.0
GOODBYE_SECONDS = 1.0  # how long a rank that ends may take to say why


def connection_over(sock: socket.socket) -> Connection:
    """Frames over a TCP socket. A read or write that gets no further for ``SILENCE_SECONDS`` raises
    ``BlockingIOError``. ``send_bytes`` and ``recv_bytes`` alone send bytes as they are.
    """
    sock.setblocking(True)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        _limit(sock, option, SILENCE_SECONDS)
    return Connection(os.dup(sock.fileno()))


def _limit(sock: socket.socket, option: int, seconds: float) -> None:
    timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with contextlib.suppress(OSError):  # On macOS, one that has ended takes none.
        sock.setsockopt(socket.SOL_SOCKET, option, timeval)


class Link:
    """One end of a connection to another rank that has authenticated itself.

    A message is its number, from 0, its kind and a value, as JSON. A thread reads whatever comes,
    so that the end of the other rank is noticed while this one waits in a collective, which has no
    time limit.

    Args:
        peer: the other rank.
        lost: called with what became of it if it ends without a goodbye, takes no messages, or
            sends what is none; from the thread that noticed.

    Attributes:
        is_over: this end has said goodbye, or no message will come from the other.
    """

    def __init__(self, sock: socket.socket, peer: int, lost: Callable[[str], object]) -> None:
        self.is_over = False
        self._peer, self._lost = peer, lost
        self._socket, self._connection = sock, connection_over(sock)
        self._sending = threading.RLock()
        self._num_sent = 0
        self._received: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        for work in (self._read, self._ping):
            threading.Thread(target=work, name=f"mlx_paged rank {peer}", daemon=True).start()

    def send(self, kind: str, value: object = None) -> None:
        """Send a message; nothing is sent behind one that did not go out whole."""
        with self._sending:
            message = json.dumps([self._num_sent, kind, value], separators=(",", ":"))
            self._num_sent += 1
            try:
                self._connection.send_bytes(message.encode())
            except OSError as error:
                self._end_sending()
                # Where the connection has ended, the thread that reads says why.
                if isinstance(error, BlockingIOError):
                    self._ended(f"has taken no message for {SILENCE_SECONDS:.0f} seconds")

    def receive(self) -> tuple[str, Any] | None:
        """Wait for the kind and the value of the next message; ``None`` once the peer has left."""
        message = self._received.get()
        if message is None:
            self._received.put(None)  # for the next call
        return message

    def close(self, reason: str | None = None) -> None:
        """Say goodbye, or why this rank ends. More than once is harmless."""
        self.is_over = True
        # Where another thread waits for the peer inside a frame, nothing more can be said.
        if self._sending.acquire(timeout=GOODBYE_SECONDS):
            _limit(self._socket, socket.SO_SNDTIMEO, GOODBYE_SECONDS)
            self.send("bye", reason)
            self._sending.release()
        self._end_sending()

    def _end_sending(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def _ping(self) -> None:
        while not self.is_over:
            self.send("ping")
            time.sleep(PING_SECONDS)

    def _read(self) -> None:
        try:
            self._read_messages()
        except BlockingIOError:
            self._ended(f"has said nothing for {SILENCE_SECONDS:.0f} seconds")
        except (EOFError, OSError):
            self._ended("died")
        except Exception:  # of bytes that may be anything
            self._ended("sent something that is not a message")
        self.is_over = True
        self._received.put(None)

    def _read_messages(self) -> None:
        """Read until the peer says that it ends, or sends a message that is not due."""
        for due in itertools.count():
            number, kind, value = json.loads(self._connection.recv_bytes())
            if number != due:
                return self._ended(f"sent message {shown(number)} where {due} was due")
            if kind == "bye":
                return None if value is None else self._ended(one_line(value))
            if kind != "ping":
                self._received.put((str(kind), value))

    def _ended(self, how: str) -> None:
        if not self.is_over:
            self._lost(f"rank {self._peer} {how}")
