"""How the ranks find each other: MLX's group tells all of them where rank 0 listens."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import time
from pathlib import Path

import mlx.core as mx

from mlx_paged.distributed.links import Kind, read_frame, write_frame

MEETING_SECONDS = 30.0
_TRY_SECONDS = 3.0  # for one address
_MAX_HELLO_BYTES = 256


def meet(group: mx.distributed.Group) -> dict[int, socket.socket]:
    """Connect rank 0 with each of the others.

    Rank 0 listens at a free port of the address that the launcher gave it. Where that is, and a
    secret that callers have to know, is broadcast by MLX.

    Returns:
        The sockets by rank: on rank 0 those of all others, elsewhere that of rank 0.

    Raises:
        ConnectionError: they did not meet within ``MEETING_SECONDS``.
    """
    if group.rank() > 0:
        return {0: _call(json.loads(broadcast(b"", group)), group.rank())}
    host = launcher_address()
    with _listen(host) as listener:
        place = {
            "hosts": [host] if host else own_addresses(),
            "port": listener.getsockname()[1],
            "secret": secrets.token_hex(32),
        }
        broadcast(json.dumps(place).encode(), group)
        return _accept(listener, str(place["secret"]), group.size())


def broadcast(data: bytes, group: mx.distributed.Group) -> bytes:
    """The bytes of rank 0, on every rank."""
    is_source = group.rank() == 0
    length = mx.distributed.all_sum(mx.array([len(data) if is_source else 0]), group=group)
    num_bytes: int = length.tolist()[0]  # type: ignore[index, assignment]
    row = mx.array(list(data) if is_source else [0] * num_bytes, dtype=mx.uint8)
    shared: list[int] = mx.distributed.all_sum(row, group=group).tolist()  # type: ignore[assignment]
    return bytes(shared)


def launcher_address() -> str | None:
    """The address at which the launcher's settings say that rank 0 is reached, if they do."""
    coordinator = os.environ.get("MLX_JACCL_COORDINATOR")
    if coordinator:
        return _host_of(coordinator)
    file = os.environ.get("MLX_HOSTFILE")
    if file:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            return _host_of(json.loads(Path(file).read_text())[0][0])
    return None


def own_addresses() -> list[str]:
    """The addresses of this machine, as far as its name leads to them."""
    name = socket.gethostname()
    addresses: list[str] = []
    with contextlib.suppress(OSError):
        addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None)]
    return list(dict.fromkeys([*addresses, name, "127.0.0.1"]))


def _host_of(address: object) -> str:
    host, _, _ = str(address).rpartition(":")
    return host.strip("[]")


def _listen(host: str | None) -> socket.socket:
    if host is None:
        return socket.create_server(("", 0))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family)
    except OSError:
        # An address that others reach this machine by, and which is none of its own.
        return socket.create_server(("", 0), family=family)


def _accept(listener: socket.socket, secret: str, size: int) -> dict[int, socket.socket]:
    connections: dict[int, socket.socket] = {}
    deadline = time.monotonic() + MEETING_SECONDS
    while len(connections) < size - 1:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            missing = sorted(set(range(1, size)) - set(connections))
            raise ConnectionError(
                f"[ranks] rank {', '.join(map(str, missing))} did not connect to rank 0 within "
                f"{MEETING_SECONDS:.0f} seconds"
            ) from None
        rank = _greeted(connection, secret)
        if rank is None:
            connection.close()  # a stranger
        else:
            connections[rank] = connection
    return connections


def _greeted(connection: socket.socket, secret: str) -> int | None:
    """The rank of a caller; ``None`` for one who does not know the secret."""
    connection.settimeout(_TRY_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError, ValueError):
        kind, payload = read_frame(connection, _MAX_HELLO_BYTES)
        rank, _, said = payload.decode().partition(" ")
        if kind is Kind.HELLO and hmac.compare_digest(said.encode(), secret.encode()):
            write_frame(connection, Kind.HELLO, b"")
            return int(rank)
    return None


def _call(place: dict[str, object], rank: int) -> socket.socket:
    hosts, port = place["hosts"], place["port"]
    assert isinstance(hosts, list) and isinstance(port, int)
    failures = []
    for host in hosts:
        try:
            connection = socket.create_connection((host, port), timeout=_TRY_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            write_frame(connection, Kind.HELLO, f"{rank} {place['secret']}".encode())
            connection.settimeout(MEETING_SECONDS)
            kind, _ = read_frame(connection, _MAX_HELLO_BYTES)
            if kind is Kind.HELLO:
                return connection
        except (OSError, ValueError) as error:
            failures.append(f"{host}: {error}")
    raise ConnectionError(
        f"[ranks] rank {rank} can't reach rank 0 at port {port} of {'; '.join(failures)}"
    )
