"""``Link``: a socket between two ranks, which says within seconds that the other one is gone."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Callable
from enum import IntEnum

# A process that dies closes its socket at once. A machine that sleeps or loses its cable does not:
# then these say it.
PING_SECONDS = 2.0
SILENCE_SECONDS = 15.0

_HEADER = struct.Struct("<BQ")  # kind, bytes that follow


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1  # the first one: proves that the caller is one of the ranks
    MESSAGE = 2
    PING = 3
    BYE = 4  # the rank ends, and all is well
    FAILED = 5  # the rank ends; the text says why


class Link:
    """One end of a connection to another rank.

    A thread reads whatever comes, so that the end of the other rank is noticed while this one waits
    in a collective, which has no time limit.

    Args:
        connection: connected, with the greetings exchanged.
        peer: the other rank.
        gone: called, from the reading thread, with the peer and the reason if it ends without
            having said goodbye.

    Attributes:
        num_sent_bytes: of messages, their headers included.
        has_left: the peer said goodbye; no message will come any more.
    """

    def __init__(
        self, connection: socket.socket, peer: int, gone: Callable[[int, str], None]
    ) -> None:
        self.peer = peer
        self.num_sent_bytes = 0
        self.has_left = False
        self._connection = connection
        self._gone = gone
        self._is_closed = False
        self._sending = threading.Lock()
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        connection.settimeout(SILENCE_SECONDS)
        for work in (self._read, self._ping):
            name = f"mlx_paged rank {peer}"
            threading.Thread(target=work, name=name, daemon=True).start()

    def send(self, payload: bytes, kind: Kind = Kind.MESSAGE) -> None:
        """Send a frame; one that can't be sent is lost, and ``gone`` says why."""
        if kind is Kind.MESSAGE:
            self.num_sent_bytes += _HEADER.size + len(payload)
        with contextlib.suppress(OSError), self._sending:
            write_frame(self._connection, kind, payload)

    def receive(self) -> bytes | None:
        """Wait for the next message; ``None`` once the peer has left."""
        message = self._messages.get()
        if message is None:
            self._messages.put(None)  # for whoever asks next
        return message

    def close(self, kind: Kind = Kind.BYE, text: str = "") -> None:
        """Say goodbye, or why this rank ends. More than once is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        self.send(text.encode(), kind)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def _ping(self) -> None:
        silence = threading.Event()
        while not self._is_closed and not self.has_left:
            self.send(b"", Kind.PING)
            silence.wait(PING_SECONDS)

    def _read(self) -> None:
        reason = self._read_frames()
        if reason is not None and not self._is_closed:
            self._gone(self.peer, reason)
        self.has_left = True
        self._messages.put(None)

    def _read_frames(self) -> str | None:
        """Read until the peer ends; returns why it did, ``None`` if it said goodbye."""
        try:
            while True:
                kind, payload = read_frame(self._connection)
                if kind is Kind.MESSAGE:
                    self._messages.put(payload)
                elif kind is Kind.BYE:
                    return None
                elif kind is Kind.FAILED:
                    return payload.decode(errors="replace")
        except TimeoutError:
            return f"has said nothing for {SILENCE_SECONDS:.0f} seconds"
        except (OSError, ValueError):
            return "died"


def read_frame(connection: socket.socket, limit: int = 1 << 40) -> tuple[Kind, bytes]:
    """The next frame.

    Args:
        limit: the most bytes that it may have.

    Raises:
        OSError: the connection ends.
        ValueError: it is no frame, or too large.
    """
    kind, length = _HEADER.unpack(_read_exactly(connection, _HEADER.size))
    if length > limit:
        raise ValueError(f"a frame of {length} bytes")
    return Kind(kind), _read_exactly(connection, length)


def write_frame(connection: socket.socket, kind: Kind, payload: bytes) -> None:
    connection.sendall(_HEADER.pack(kind, len(payload)) + payload)


def _read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = connection.recv(min(num_bytes - len(data), 1 << 20))
        if not part:
            raise ConnectionError("the connection has ended")
        data += part
    return bytes(data)
