"""``Link``: numbered messages to and from another rank, and the detection of its failure."""

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

# A process that dies closes its socket at once. These detect a machine that sleeps or loses its
# cable, and a process that is stopped.
PING_SECONDS = 2.0
SILENCE_SECONDS = 15.0
GOODBYE_SECONDS = 1.0  # the time limit for sending the reason why a rank ends


def connection_over(sock: socket.socket) -> Connection:
    """Frames over a TCP socket. A read or write without progress for ``SILENCE_SECONDS`` raises
    ``BlockingIOError``. Use only ``send_bytes`` and ``recv_bytes``, which send plain bytes.
    """
    sock.setblocking(True)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        _limit(sock, option, SILENCE_SECONDS)
    return Connection(os.dup(sock.fileno()))


def _limit(sock: socket.socket, option: int, seconds: float) -> None:
    timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with contextlib.suppress(OSError):  # macOS refuses it once the peer has closed.
        sock.setsockopt(socket.SOL_SOCKET, option, timeval)


class Link:
    """One end of an authenticated connection to another rank.

    A message is JSON: its number, counted from 0, its kind and a value. A thread reads all the
    time, so a failure of the peer is noticed even while this rank waits in a collective, which has
    no timeout.

    Args:
        peer: the other rank.
        lost: called with a description of the failure if the peer disconnects without saying
            goodbye, stops accepting messages or sends an invalid one; in the thread that noticed.

    Attributes:
        is_over: this end was closed, or the peer sends nothing more.
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
        """Send a message. Nothing is sent after one that was sent only in part."""
        with self._sending:
            message = json.dumps([self._num_sent, kind, value], separators=(",", ":"))
            self._num_sent += 1
            try:
                self._connection.send_bytes(message.encode())
            except OSError as error:
                self._end_sending()
                # Of any other error the thread that reads reports the cause.
                if isinstance(error, BlockingIOError):
                    self._ended(f"has accepted no message for {SILENCE_SECONDS:.0f} seconds")

    def receive(self) -> tuple[str, Any] | None:
        """Wait for the next message: its kind and value; ``None`` once the connection is over."""
        message = self._received.get()
        if message is None:
            self._received.put(None)  # for the next call
        return message

    def close(self, reason: str | None = None) -> None:
        """Say goodbye, with a reason if this rank failed. Can be called more than once."""
        self.is_over = True
        # Without the lock, another thread is in the middle of a frame: the reason can't be sent.
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
        """Read until the peer says goodbye, fails, or sends a message with an unexpected number."""
        try:
            for expected in itertools.count():
                number, kind, value = json.loads(self._connection.recv_bytes())
                if number != expected:
                    return self._ended(f"sent message {shown(number)} instead of {expected}")
                if kind == "bye":
                    return None if value is None else self._ended(one_line(value))
                if kind != "ping":
                    self._received.put((str(kind), value))
        except BlockingIOError:
            self._ended(f"has sent nothing for {SILENCE_SECONDS:.0f} seconds")
        except (EOFError, OSError):
            self._ended("died")
        except Exception:  # The bytes can be anything.
            self._ended("sent an invalid message")
        finally:
            self.is_over = True
            self._received.put(None)

    def _ended(self, how: str) -> None:
        if not self.is_over:
            self._lost(f"rank {self._peer} {how}")
