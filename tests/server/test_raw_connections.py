"""Clients of bare sockets that send halves, rubbish and bombs, or read nothing: limits hold, and
others are served meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest
from helpers.asgi import IdleEngine, echo
from helpers.fast_lane import mostly_slow
from helpers.servers import wait_until

from mlx_paged.server.http import http_server
from mlx_paged.server.http.http_server import Connection, Gate, HttpServer, bind
from mlx_paged.server.http.limits import Limits
from mlx_paged.server.http.logs import RequestLog
from mlx_paged.server.settings import ServerSettings

POST = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
LARGE = 2**24  # bytes
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def app(scope, receive, send) -> None:
    """Answers with the body. At /long, an answer has no end; at /large and /slow it is
    more than buffers hold in one part, at /slow later, or never, if the client leaves.
    """
    if scope["path"] == "/slow":
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(leaving(receive), float(scope["query_string"]))
    if scope["path"] in ("/slow", "/large"):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * LARGE})
        return
    if scope["path"] != "/long":
        await echo(scope, receive, send)
        return
    left = asyncio.create_task(leaving(receive))
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while not left.done():
        await send({"type": "http.response.body", "body": b"x" * 2**16, "more_body": True})
        await asyncio.sleep(0.001)


async def leaving(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Served:
    """A server in a thread, and clients of its address."""

    def __init__(self, server: HttpServer, address: tuple[str, int]):
        self.server = server
        self.address = address

    @property
    def connections(self) -> list[Connection]:
        return list(self.server.server_state.connections)  # type: ignore[arg-type]

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=10)

    def ask(self, *parts: bytes) -> bytes:
        """Everything that is answered to these bytes, until the server closes the connection."""
        with self.connect() as client:
            for part in parts:
                with contextlib.suppress(ConnectionError):
                    client.sendall(part)
            return read_all(client)

    def is_serving(self) -> bool:
        return self.ask(POST + b"Content-Length: 2\r\nConnection: close\r\n\r\n{}").endswith(b"{}")


def read_all(client: socket.socket) -> bytes:
    chunks = []
    with contextlib.suppress(ConnectionError):
        while chunk := client.recv(2**16):
            chunks.append(chunk)
    return b"".join(chunks)


def read_answer(client: socket.socket) -> bytes:
    """One answer, whose length is in its head; what there is of it, if the server closes."""
    answer, missing = b"", 1
    while missing and (chunk := client.recv(missing)):
        answer += chunk
        head, end, body = answer.partition(b"\r\n\r\n")
        if end:
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            missing = length - len(body)
    return answer


@contextlib.contextmanager
def serving(max_connections: int = 50, drain_seconds: float = 0.0) -> Iterator[Served]:
    sockets, engine = bind("127.0.0.1", 0), IdleEngine()
    limits = Limits(app, max_body_bytes=10_000, body_seconds=0.4)
    gate = Gate(limits, engine, max_connections)  # type: ignore[arg-type]
    settings = ServerSettings(drain_seconds=drain_seconds)
    server = HttpServer(RequestLog(gate), gate, engine, settings)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run, args=[sockets])
    thread.start()
    try:
        yield Served(server, sockets[0].getsockname())
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(autouse=True)
def ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "ABORT_SECONDS", 0.1)
    monkeypatch.setattr(http_server, "STOP_SECONDS", 0.1)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients are waited for only shortly."""
    monkeypatch.setattr(Connection, "head_seconds", 0.8)
    monkeypatch.setattr(Connection, "stall_seconds", 0.5)


@pytest.fixture
def served(short: None) -> Iterator[Served]:
    with serving() as served:
        yield served
        assert served.is_serving()


def status_of(answer: bytes) -> int:
    return int(answer.split()[1]) if answer else 0


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([b"rubbish\r\n\r\n"], 400),
        ([b"\x00\xff\x16\x03\x01" * 100 + b"\r\n\r\n"], 400),
        ([b"GET / HTTP/1.1\r\n\r\n"], 400),  # no host
        ([POST + b"Content-Length: many\r\n\r\n"], 400),
        ([POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n"], 400),
        ([POST + b"Transfer-Encoding: gzip\r\n\r\n"], 400),
        ([GET[:-2] + b"X: " + b"a" * 300_000 + b"\r\n\r\n"], 400),  # longer than is read at once
        ([GET[:-2] + b"X: 1\r\n" * 101 + b"Connection: close\r\n\r\n"], 431),
        ([POST + b"Content-Length: 10001\r\nConnection: close\r\n\r\n"], 413),
        ([POST + b"Transfer-Encoding: chunked\r\n\r\n", b"zz\r\n"], 400),
        ([b"GET /" + b"a" * 9000 + GET[5:-2] + b"Connection: close\r\n\r\n"], 414),
    ],
)
def test_rubbish_is_refused_with_json(served: Served, parts: list[bytes], status: int):
    answer = served.ask(*parts)
    assert status_of(answer) == status
    head, body = answer.split(b"\r\n\r\n", 1)
    assert b"application/json" in head
    assert json.loads(body)["error"]["message"]


def test_a_request_with_two_lengths_is_the_last_one_of_its_connection(served: Served):
    hidden = POST.replace(b"POST / ", b"POST /hidden ") + b"Content-Length: 0\r\n\r\n"
    lengths = b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
    for head in (
        POST + lengths,
        POST + b"\r\n".join(reversed(lengths.split(b"\r\n")[:2])) + b"\r\n\r\n",
    ):
        answer = served.ask(head + b"2\r\n{}\r\n0\r\n\r\n" + hidden)
        assert status_of(answer) == 200 and answer.count(b"HTTP/1.1") == 1
        assert b"connection: close" in answer.lower() and answer.endswith(b"{}")
    # A kept connection answers both requests.
    answer = served.ask(
        POST + b"Content-Length: 2\r\n\r\n{}" + hidden[:-2] + b"Connection: close\r\n\r\n"
    )
    assert answer.count(b"HTTP/1.1") == 2


def test_half_a_head_and_no_head_at_all_are_given_up(served: Served):
    with served.connect() as silent, served.connect() as half, served.connect() as slow:
        half.sendall(GET[:-2])
        end = time.monotonic() + 10
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < end:  # a byte now and then does not help
                slow.sendall(b"X")
                time.sleep(0.05)
        assert time.monotonic() < end
        assert served.is_serving()
        assert (read_all(silent), read_all(half), read_all(slow)) == (b"", b"", b"")


def test_half_a_body_is_given_up_and_answered(served: Served):
    with served.connect() as client:
        client.sendall(POST + b"Content-Length: 100\r\n\r\n{")
        assert served.is_serving()
        assert status_of(read_answer(client)) == 408
        assert read_all(client) == b""  # it is closed, too


def test_a_kept_connection_serves_again_and_is_closed_when_it_is_silent(served: Served):
    with served.connect() as client:
        for _ in range(3):
            client.sendall(POST + b"Content-Length: 2\r\n\r\n{}")
            assert read_answer(client).endswith(b"{}")
        assert read_all(client) == b""


def test_a_bomb_of_chunks_is_refused_while_it_comes(served: Served):
    with served.connect() as client:
        client.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        sent = 0
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                client.sendall(b"400\r\n" + b" " * 1024 + b"\r\n")
                sent += 1024
        answer = read_all(client)
    assert status_of(answer) in (413, 0)  # or the answer was lost with the connection
    assert sent <= 200 * 1024


def test_a_client_that_sends_on_behind_its_refusal_reads_it_and_is_cut(served: Served):
    with served.connect() as client:
        client.sendall(POST + b"Content-Length: 1000000\r\n\r\n")
        assert status_of(read_answer(client)) == 413
        end = time.monotonic() + 10
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < end:
                client.sendall(b" " * 10)
                time.sleep(0.02)
        assert time.monotonic() < end


def test_rubbish_behind_a_request_is_refused_after_the_answer(served: Served):
    answer = served.ask(POST + b"Content-Length: 2\r\n\r\n{}" + b"rubbish\r\n\r\n" * 3)
    first, second = answer.split(b"{}", 1)
    assert (status_of(first), status_of(second)) == (200, 400)


def test_a_client_that_reads_nothing_is_cut(served: Served):
    with served.connect() as client:
        client.sendall(b"GET /long HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: served.server.server_state.tasks)
        wait_until(lambda: not served.server.server_state.tasks)


def test_a_client_that_reads_little_and_often_is_not_cut(served: Served):
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        client.settimeout(10)
        client.connect(served.address)
        wait_until(lambda: served.connections)
        # Without room in between, what is read here is seen there.
        sender = served.connections[0].transport.get_extra_info("socket")
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**12)
        client.sendall(b"GET /long HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: any(each.flow.write_paused for each in served.connections))
        end = time.monotonic() + 3 * Connection.stall_seconds
        while time.monotonic() < end:
            assert client.recv(2**10)
            time.sleep(0.02)
        assert served.server.server_state.tasks


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says of requests, without their times."""
    return [record.getMessage().rpartition(" ")[0] for record in caplog.records]


def test_what_is_logged_as_complete_was_read_to_the_end(
    short: None, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "mlx_paged.server")
    with serving() as served:
        with served.connect() as client:  # which reads nothing, and is cut
            client.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
            wait_until(lambda: lines_of(caplog))
        client = served.connect()
        client.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        client.recv(1)
        client.close()
        wait_until(lambda: len(lines_of(caplog)) == 2)
        last = b"GET /large HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert len(served.ask(last)) > LARGE
        wait_until(lambda: len(lines_of(caplog)) == 3)
    assert lines_of(caplog)[:3] == [
        "- GET /large 200 disconnected",
        "- GET /large 200 disconnected",
        "- GET /large 200",
    ]


@mostly_slow(
    "head",
    [
        b"GET /slow?0.25 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /slow?0.25 HTTP/1.0\r\n\r\n",
        b"POST /slow?0.25 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}",
        b"GET /slow?0.25 HTTP/1.1\r\nHost: localhost\r\n\r\n" + GET,  # two of them
    ],
    quick=(0, 1),
)
def test_a_client_that_says_no_more_and_reads_on_gets_its_answer(served: Served, head: bytes):
    with served.connect() as client:
        client.sendall(head)
        client.shutdown(socket.SHUT_WR)
        answer = read_all(client)  # and the connection is closed behind it
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    assert answer.startswith(interim) == (b"HTTP/1.0" not in head)
    assert answer.count(b"HTTP/1.1 200") == head.count(b"HTTP/1")


def test_http_client_reads_over_what_asks_whether_it_is_there(served: Served):
    connection = HTTPConnection(*served.address, timeout=10)
    connection.request("GET", "/slow?0.25", headers={"Host": "localhost"})
    connection.sock.shutdown(socket.SHUT_WR)
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize("path", [b"/slow?1000", b"/long"])
def test_a_client_that_leaves_takes_its_request_along(served: Served, path: bytes):
    client = served.connect()
    client.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    wait_until(lambda: served.server.server_state.tasks)
    client.close()
    wait_until(lambda: not served.server.server_state.tasks)


def test_a_request_that_ends_in_the_middle_is_given_up(served: Served):
    with served.connect() as client:
        client.sendall(POST + b"Content-Length: 100\r\n\r\n{")
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == b""


def test_more_connections_than_there_may_be_are_told_to_come_back():
    with serving(max_connections=3) as served:
        kept = [served.connect() for _ in range(3)]
        for client in kept:
            client.sendall(POST + b"Content-Length: 2\r\n\r\n{}")
            assert read_answer(client).endswith(b"{}")
        answer = served.ask(GET)
        assert status_of(answer) == 503
        assert b"retry-after: 5" in answer.lower()
        kept[0].sendall(POST + b"Content-Length: 2\r\n\r\n{}")
        assert read_answer(kept[0]).endswith(b"{}")
        for client in kept:
            client.close()
        wait_until(served.is_serving)


def test_hundreds_of_clients_that_vanish_leave_nothing():
    with serving(max_connections=500) as served:
        clients = [served.connect() for _ in range(300)]
        for number, client in enumerate(clients):
            client.sendall(
                [b"", b"GET", POST, POST + b"Content-Length: 9\r\n\r\n{", GET][number % 5]
            )
        for client in clients:
            client.close()
        wait_until(lambda: not served.server.server_state.connections)
        wait_until(lambda: not served.server.server_state.tasks)
        assert served.is_serving()


def test_a_kept_connection_is_told_that_the_server_ends():
    with serving(drain_seconds=30) as served:
        running, kept = served.connect(), served.connect()
        running.sendall(b"GET /long HTTP/1.1\r\nHost: localhost\r\n\r\n")
        running.recv(10)
        kept.sendall(POST + b"Content-Length: 2\r\n\r\n{}")
        assert read_answer(kept).endswith(b"{}")
        reader = threading.Thread(target=read_all, args=[running])
        reader.start()
        served.server.should_exit = True
        wait_until(lambda: is_refused(served.address))
        kept.sendall(POST + b"Content-Length: 2\r\n\r\n{}")
        answer = read_all(kept)
        assert status_of(answer) == 503
        assert b"retry-after: 10" in answer.lower()
        assert b"the server is shutting down" in answer
        running.shutdown(socket.SHUT_RDWR)
        reader.join()
        running.close()
        kept.close()


def test_a_client_that_leaves_while_the_server_ends_is_not_waited_for():
    with serving(drain_seconds=60) as served, served.connect() as client:
        client.sendall(b"GET /slow?1000 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: served.server.server_state.tasks)
        served.server.should_exit = True
        wait_until(lambda: is_refused(served.address))
        client.close()
        wait_until(lambda: not served.server.server_state.tasks)


def is_refused(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=1).close()
    except ConnectionRefusedError:
        return True
    return False


def test_the_server_ends_in_time_whatever_its_clients_do():
    with serving(drain_seconds=0.2) as served:
        stuck = served.connect()
        stuck.sendall(b"GET /long HTTP/1.1\r\nHost: localhost\r\n\r\n")
        served.connect()
    stuck.close()
