"""How the ranks connect: rank 0 listens, and broadcasts its address through MLX's group."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from multiprocessing.connection import answer_challenge, deliver_challenge
from pathlib import Path

import mlx.core as mx

from mlx_paged.distributed.links import connection_over
from mlx_paged.errors import one_line

MEETING_SECONDS = 30.0
_POLL_SECONDS = 0.02
_ADDRESS_BYTES = 1024


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
    stranger delays no rank.
    """
    met: dict[int, socket.socket] = {}
    callers = []
    deadline = time.monotonic() + MEETING_SECONDS
    listener.settimeout(_POLL_SECONDS)
    while len(met) < size - 1 and time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            caller, _ = listener.accept()
            callers.append(caller)
            handshake = threading.Thread(
                target=_admit, args=(caller, secret, size, met), daemon=True
            )
            handshake.start()
    for caller in callers:
        if caller not in met.values():
            with contextlib.suppress(OSError):
                caller.shutdown(socket.SHUT_RDWR)  # This ends its thread.
            caller.close()
    missing = [str(rank) for rank in range(1, size) if rank not in met]
    if missing:
        raise ConnectionError(
            f"[ranks] rank {', '.join(missing)} did not connect to rank 0 within "
            f"{MEETING_SECONDS:.0f} seconds"
        )
    return met


def _admit(caller: socket.socket, secret: bytes, size: int, met: dict[int, socket.socket]) -> None:
    """Record an authenticated caller by its rank."""
    with contextlib.suppress(Exception):  # A stranger can send anything.
        connection = connection_over(caller)
        deliver_challenge(connection, secret)
        answer_challenge(connection, secret)
        rank = int(connection.recv_bytes(8))
        if 0 < rank < size:
            met.setdefault(rank, caller)


def _call(host: str, port: int, secret: bytes, rank: int) -> socket.socket:
    try:
        with socket.create_connection((host, port), timeout=MEETING_SECONDS) as sock:
            connection = connection_over(sock)
            answer_challenge(connection, secret)
            deliver_challenge(connection, secret)
            connection.send_bytes(str(rank).encode())
            return sock.dup()
    except Exception as error:  # Another program can listen there, and send anything.
        raise ConnectionError(
            f"[ranks] rank {rank} can't reach rank 0 at {host}, port {port}: {one_line(error)}"
        ) from error
