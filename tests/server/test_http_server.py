"""What the server does before and around requests: sockets, its gate, how many may connect."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from contextlib import contextmanager

import pytest
from helpers.asgi import IdleEngine, ask, echo

from mlx_paged.errors import ArgumentError, EngineStoppedError
from mlx_paged.server import program
from mlx_paged.server.http import http_server
from mlx_paged.server.http.http_server import Gate, bind, close_all, is_loopback, url_of


@contextmanager
def bound(host: str, port: int = 0):
    sockets = bind(host, port)
    try:
        yield sockets
    finally:
        close_all(sockets)


def test_a_free_port_is_found_and_listens_at_once():
    with bound("127.0.0.1") as (one,):
        assert is_loopback([one])
        port = one.getsockname()[1]
        assert url_of("127.0.0.1", [one]) == f"http://127.0.0.1:{port}"
        assert url_of("localhost", [one]) == f"http://localhost:{port}"
        with socket.create_connection(("127.0.0.1", port)):
            pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_every_address_is_reached_from_here_by_loopback():
    with bound("0.0.0.0") as sockets:
        assert not is_loopback(sockets)
        assert url_of("0.0.0.0", sockets).startswith("http://127.0.0.1:")
    for host, url in [("::", "http://[::1]:"), ("::1", "http://[::1]:"), ("", "http://127.0.0.1:")]:
        with bound("127.0.0.1") as sockets:
            assert url_of(host, sockets).startswith(url)


def test_a_name_is_bound_at_all_addresses_that_the_machine_has(monkeypatch):
    """``localhost`` may have an address of IPv6, which the machine may lack."""
    infos = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0)),  # nobody's
    ]
    monkeypatch.setattr(http_server.socket, "getaddrinfo", lambda *_, **__: infos)
    with bound("localhost", 1) as sockets:
        assert len(sockets) == 1
    monkeypatch.setattr(http_server.socket, "getaddrinfo", lambda *_, **__: infos[1:])
    with pytest.raises(ArgumentError, match="can't listen on host"):
        bind("localhost", 1)


def test_one_address_whose_port_is_in_use_takes_back_the_others(monkeypatch):
    made = []

    def listening(family: int, address: tuple[object, ...]) -> socket.socket:
        if made:
            raise OSError(errno.EADDRINUSE, "in use")
        made.append(socket.socket())
        return made[0]

    infos = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 7)) for each in ("a", "b")]
    monkeypatch.setattr(http_server, "_listen", listening)
    monkeypatch.setattr(http_server.socket, "getaddrinfo", lambda *_, **__: infos)
    with pytest.raises(ArgumentError, match="port 7 is in use"):
        bind("localhost", 7)
    assert made[0].fileno() == -1


def test_the_gate_answers_503_while_the_server_ends_and_when_the_engine_failed():
    engine = IdleEngine()
    gate = Gate(echo, engine)  # type: ignore[arg-type]
    assert ask(gate, "POST", "/v1/messages").status == 200
    engine.failure = EngineStoppedError("no GPU")
    failed = ask(gate, "POST", "/v1/messages")
    assert (failed.status, failed.headers["retry-after"]) == (503, "10")
    assert failed.json["error"] == {
        "type": "overloaded_error",
        "message": "the engine stopped; retry later",
    }
    assert ask(gate, path="/health").status == 503
    engine.failure = None
    gate.is_closed = True
    closed = ask(gate, path="/health")
    assert closed.json["error"]["message"] == "the server is shutting down; retry later"
    assert closed.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("limits", "wanted", "num_connections"),
    [
        ((256, resource.RLIM_INFINITY), (8192, resource.RLIM_INFINITY), 8064),  # macOS
        ((1024, 4096), (4096, 4096), 3968),
        ((2**20, 2**20), None, 8064),
        ((64, 64), None, 16),
    ],
)
def test_as_many_may_connect_as_files_may_be_open(
    monkeypatch, limits: tuple[int, int], wanted: tuple[int, int] | None, num_connections: int
):
    now = [limits]
    monkeypatch.setattr(program.resource, "getrlimit", lambda _: now[-1])
    monkeypatch.setattr(program.resource, "setrlimit", lambda _, each: now.append(each))
    assert program.max_connections() == num_connections
    assert now[1:] == ([] if wanted is None else [wanted])


def test_no_part_of_an_answer_waits_for_the_client_to_acknowledge_the_one_before():
    async def accepted() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            found.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        [listener] = bind("127.0.0.1", 0)
        async with await asyncio.start_server(connected, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            value = await found
            writer.close()
        return value

    assert asyncio.run(accepted()) != 0
