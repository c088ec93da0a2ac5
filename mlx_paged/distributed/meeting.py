"""How the ranks connect: rank 0 listens, and broadcasts its address through MLX's group."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from multiprocessing.connection import answer_challenge, deliver_challenge
from pathlib import Path

import mlx.core as mx

from mlx_paged.distributed.links import connection_over
from mlx_paged.errors import one_line

MEETING_SECONDS = 30.0
MAX_CALLERS = 32
_HEARD = b"heard"
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
