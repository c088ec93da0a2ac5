"""How the ranks connect, and ``Link``: numbered messages to another rank, and the detection of its
failure.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_paged.errors import one_line, shown

# A process that dies closes its socket at once. These detect a machine that sleeps or loses its
# cable, and a process that is stopped.
PING_SECONDS = 2.0
SILENCE_SECONDS = 15.0
GOODBYE_SECONDS = 1.0  # the time limit for sending the reason why a rank ends

# How long rank 0 waits for the others, and how many strangers may be connected meanwhile.
MEETING_SECONDS = 30.0
MAX_CALLERS = 32
_HEARD = b"heard"
_POLL_SECONDS = 0.02
_ADDRESS_BYTES = 1024


class RanksError(RuntimeError):
    """The ranks can't work together; the message names the rank and the reason."""


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
        is_closed: this end was closed, or the peer sends nothing more.
    """

    def __init__(self, sock: socket.socket, peer: int, lost: Callable[[str], object]) -> None:
        self.is_closed = False
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
        self.is_closed = True
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
        while not self.is_closed:
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
            self.is_closed = True
            self._received.put(None)

    def _ended(self, how: str) -> None:
        if not self.is_closed:
            self._lost(f"rank {self._peer} {how}")


# Before there are links: rank 0 listens, and broadcasts its address through MLX's group.


def meet(group: mx.distributed.Group) -> dict[int, socket.socket]:
    """Connect rank 0 with each of the others.

    Rank 0 listens at a free port of the address that the launcher gave it. MLX broadcasts the
    address and a secret, which both sides prove to know before any other message.

    Returns:
        The sockets by rank: on rank 0 those of all others, elsewhere that of rank 0.

    Raises:
        OSError: they did not connect within ``MEETING_SECONDS``.
    """
    if group.rank() > 0:
        host, port, secret = json.loads(_broadcast(b"", group))
        return {0: _call(host, port, secret.encode(), group.rank())}
    host, secret = launcher_address(), secrets.token_hex(32)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        address = host or socket.gethostname(), listener.getsockname()[1], secret
        _broadcast(json.dumps(address).encode(), group)
        return _accept(listener, secret.encode(), group.size())


def _broadcast(data: bytes, group: mx.distributed.Group) -> bytes:
    """The bytes of rank 0, padded with spaces, on every rank; the others pass none."""
    padded = data.ljust(_ADDRESS_BYTES) if data else bytes(_ADDRESS_BYTES)
    shared = mx.distributed.all_sum(mx.array(list(padded), dtype=mx.uint8), group=group)
    return bytes(shared.tolist())  # type: ignore[arg-type]


def launcher_address() -> str:
    """The address of rank 0 in the launcher's settings; empty if they have none."""
    address = os.environ.get("MLX_JACCL_COORDINATOR", "")
    if file := os.environ.get("MLX_HOSTFILE"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            address = address or json.loads(Path(file).read_text())[0][0]
    return address.rpartition(":")[0].strip("[]")


def _accept(listener: socket.socket, secret: bytes, size: int) -> dict[int, socket.socket]:
    """The sockets of the other ranks. Each caller is authenticated in its own thread, so a silent
    stranger delays no rank. At most ``MAX_CALLERS`` are connected before they are authenticated, so
    that strangers can't use up the descriptors of this process: one more replaces the oldest.
    """
    met: dict[int, socket.socket] = {}
    meeting = threading.Lock()  # No caller is admitted and hung up on at once.
    callers: list[socket.socket] = []  # not authenticated yet, the oldest first
    deadline = time.monotonic() + MEETING_SECONDS
    listener.settimeout(_POLL_SECONDS)
    while len(met) < size - 1 and time.monotonic() < deadline:
        caller: socket.socket | None
        try:
            caller, _ = listener.accept()
        except TimeoutError:
            continue
        except OSError:  # The process has no descriptor left, or the caller has gone.
            caller = None
        with meeting:
            callers = [each for each in callers if each.fileno() >= 0 and each not in met.values()]
            _hang_up(callers[: 1 if caller is None else max(0, len(callers) - MAX_CALLERS + 1)])
        if caller is None:
            time.sleep(_POLL_SECONDS)
            continue
        callers.append(caller)
        arguments = caller, secret, size, met, meeting
        threading.Thread(target=_admit, args=arguments, daemon=True).start()
    with meeting:
        _hang_up(each for each in callers if each not in met.values())
    missing = [str(rank) for rank in range(1, size) if rank not in met]
    if missing:
        raise ConnectionError(
            f"[ranks] rank {', '.join(missing)} did not connect to rank 0 within "
            f"{MEETING_SECONDS:.0f} seconds"
        )
    return met


def _hang_up(callers: Iterable[socket.socket]) -> None:
    for caller in callers:
        with contextlib.suppress(OSError):
            caller.shutdown(socket.SHUT_RDWR)  # This ends its thread.
        caller.close()


def _admit(
    caller: socket.socket,
    secret: bytes,
    size: int,
    met: dict[int, socket.socket],
    meeting: threading.Lock,
) -> None:
    """Record an authenticated caller by its rank; hang up on anyone else."""
    with contextlib.suppress(Exception):  # A stranger can send anything.
        connection = connection_over(caller)
        deliver_challenge(connection, secret)
        answer_challenge(connection, secret)
        rank = int(connection.recv_bytes(8))
        with meeting:
            if caller.fileno() >= 0:
                connection.send_bytes(_HEARD)
                if 0 < rank < size:
                    met.setdefault(rank, caller)
    with meeting:
        if caller not in met.values():
            _hang_up([caller])


def _call(host: str, port: int, secret: bytes, rank: int) -> socket.socket:
    deadline = time.monotonic() + MEETING_SECONDS
    while True:
        try:
            with socket.create_connection((host, port), timeout=MEETING_SECONDS) as sock:
                connection = connection_over(sock)
                answer_challenge(connection, secret)
                deliver_challenge(connection, secret)
                connection.send_bytes(str(rank).encode())
                connection.recv_bytes(len(_HEARD))
                return sock.dup()
        except Exception as error:  # Another program can listen there, and send anything.
            # Rank 0 hangs up when too many strangers call.
            is_hung_up = isinstance(error, EOFError | ConnectionResetError | BrokenPipeError)
            if is_hung_up and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                continue
            raise ConnectionError(
                f"[ranks] rank {rank} can't reach rank 0 at {host}, port {port}: {one_line(error)}"
            ) from error
