"""How the ranks find each other: MLX's group tells all of them where rank 0 listens."""

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
_LOOK_SECONDS = 0.02
_PLACE_BYTES = 1024


def meet(group: mx.distributed.Group) -> dict[int, socket.socket]:
    """Connect rank 0 with each of the others.

    Rank 0 listens at a free port of the address that the launcher gave it. MLX broadcasts where
    that is, and a secret: both sides prove that they know it before anything else is said.

    Returns:
        The sockets by rank: on rank 0 those of all others, elsewhere that of rank 0.

    Raises:
        OSError: they did not meet within ``MEETING_SECONDS``.
    """
    if group.rank() > 0:
        host, port, secret = json.loads(_broadcast(b"", group))
        return {0: _call(host, port, secret.encode(), group.rank())}
    host, secret = launcher_address(), secrets.token_hex(32)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        place = host or socket.gethostname(), listener.getsockname()[1], secret
        _broadcast(json.dumps(place).encode(), group)
        return _accept(listener, secret.encode(), group.size())


def _broadcast(data: bytes, group: mx.distributed.Group) -> bytes:
    """The bytes of rank 0, padded with spaces, on every rank; the others give none."""
    padded = data.ljust(_PLACE_BYTES) if data else bytes(_PLACE_BYTES)
    shared = mx.distributed.all_sum(mx.array(list(padded), dtype=mx.uint8), group=group)
    return bytes(shared.tolist())  # type: ignore[arg-type]


def launcher_address() -> str:
    """The address of its own at which MLX lets rank 0 listen, as the launcher's settings say it;
    empty if they don't.
    """
    address = os.environ.get("MLX_JACCL_COORDINATOR", "")
    if file := os.environ.get("MLX_HOSTFILE"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            address = address or json.loads(Path(file).read_text())[0][0]
    return address.rpartition(":")[0].strip("[]")


def _accept(listener: socket.socket, secret: bytes, size: int) -> dict[int, socket.socket]:
    """The sockets of the other ranks. Each caller is heard in a thread of its own, so that none
    waits for a stranger who says nothing.
    """
    met: dict[int, socket.socket] = {}
    callers = []
    deadline = time.monotonic() + MEETING_SECONDS
    listener.settimeout(_LOOK_SECONDS)
    while len(met) < size - 1 and time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            caller, _ = listener.accept()
            callers.append(caller)
            threading.Thread(target=_hear, args=(caller, secret, size, met), daemon=True).start()
    for caller in callers:
        if caller not in met.values():
            with contextlib.suppress(OSError):
                caller.shutdown(socket.SHUT_RDWR)  # It wakes the thread that hears it.
            caller.close()
    missing = [str(rank) for rank in range(1, size) if rank not in met]
    if missing:
        raise ConnectionError(
            f"[ranks] rank {', '.join(missing)} did not connect to rank 0 within "
            f"{MEETING_SECONDS:.0f} seconds"
        )
    return met


def _hear(caller: socket.socket, secret: bytes, size: int, met: dict[int, socket.socket]) -> None:
    """Note a caller under its rank, if it is one of the ranks."""
    with contextlib.suppress(Exception):  # A stranger may say anything.
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
    except Exception as error:  # Another program that listens there may say anything.
        raise ConnectionError(
            f"[ranks] rank {rank} can't reach rank 0 at {host}, port {port}: {one_line(error)}"
        ) from error
