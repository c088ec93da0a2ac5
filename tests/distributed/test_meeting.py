"""How the ranks find each other, beside strangers that find them, too."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Listener
from pathlib import Path

import pytest
from helpers.ranks import ends, started

from mlx_paged.distributed import links

SECRET = b"what MLX's group was told"


class Place:
    """Where rank 0 listens, and who is connected with it."""

    def __init__(self, listener: socket.socket):
        self.listener = listener
        self.port: int = listener.getsockname()[1]
        self.sockets: list[socket.socket] = []

    def connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port))
        sock.settimeout(60)
        self.sockets.append(sock)
        return sock

    def call(self, rank: int) -> None:
        self.sockets.append(links._call("127.0.0.1", self.port, SECRET, rank))

    def accept(self, size: int) -> dict[int, socket.socket]:
        """The ranks that call meanwhile, and those that are there."""
        callers = [threading.Thread(target=self.call, args=[rank]) for rank in range(1, size)]
        for caller in callers:
            caller.start()
        try:
            met = links._accept(self.listener, SECRET, size)
        finally:
            for caller in callers:
                caller.join()
        self.sockets += met.values()
        return met


@pytest.fixture
def place() -> Iterator[Place]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = Place(listener)
        yield place
        for sock in place.sockets:
            sock.close()


def read_to_the_end(sock: socket.socket) -> bytes:
    data = b""
    while part := sock.recv(1024):
        data += part
    return data


def test_twenty_silent_strangers_keep_no_rank_waiting(place: Place):
    """If the ranks had to wait for the first of them, they would not meet in time."""
    strangers = [place.connect() for _ in range(20)]
    met = place.accept(4)
    assert sorted(met) == [1, 2, 3]
    called = [sock.getsockname() for sock in place.sockets[20:]]
    assert {sock.getpeername() for sock in met.values()} <= set(called)
    # They got a challenge each, of 11 + 20 bytes and more behind 4 of length, and no more.
    assert {read_to_the_end(each)[4:15] for each in strangers} == {b"#CHALLENGE#"}


def test_a_rank_that_is_hung_up_on_calls_again(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(links, "MAX_CALLERS", 1)
    deliver, num_late = links.deliver_challenge, 0

    def deliver_late(connection, secret):
        nonlocal num_late
        num_late += 1
        if num_late == 1:
            place.connect()  # The next caller replaces this one.
            connection.recv_bytes()
        deliver(connection, secret)

    monkeypatch.setattr(links, "deliver_challenge", deliver_late)
    assert sorted(place.accept(2)) == [1] and num_late > 2


RANK_0 = """
import resource, socket, sys
from mlx_paged.distributed import links

resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))  # macOS gives 256
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    sys.stdin.readline()
    print(sorted(links._accept(listener, sys.argv[1].encode(), 4)), flush=True)
"""


@pytest.mark.parametrize("limit", [128, 24])
def test_300_silent_strangers_do_not_use_up_the_descriptors_of_rank_0(limit: int):
    rank_0 = subprocess.Popen(
        [sys.executable, "-c", RANK_0.replace("128", str(limit)), SECRET.decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with rank_0:
        assert rank_0.stdin is not None and rank_0.stdout is not None
        port = int(rank_0.stdout.readline())
        strangers: list[socket.socket] = []
        threads = [
            threading.Thread(
                target=lambda rank: strangers.append(links._call("127.0.0.1", port, SECRET, rank)),
                args=[rank],
            )
            for rank in (1, 2, 3)
        ]
        try:
            for number in range(300):
                if number == 20:  # the backlog of the listener is not full yet
                    rank_0.stdin.write("\n")
                    rank_0.stdin.flush()
                if number % 100 == 50:
                    threads[number // 100].start()
                with contextlib.suppress(ConnectionRefusedError):  # when the ranks have met
                    strangers.append(socket.create_connection(("127.0.0.1", port), timeout=60))
            assert rank_0.stdout.readline() == "[1, 2, 3]\n"
        finally:
            rank_0.kill()
            for thread in threads:
                thread.join()
            for stranger in strangers:
                stranger.close()


PROGRAM = """
import socket
from mlx_paged.distributed import launched_ranks

listen, strangers = socket.create_server, []

def listen_among_strangers(address, **options):
    listener = listen(address, **options)
    strangers.extend(socket.create_connection(listener.getsockname()) for _ in range(20))
    return listener

socket.create_server = listen_among_strangers
ranks = launched_ranks()
print(ranks.all_gather(ranks.rank), len(strangers))
if strangers:
    try:
        socket.create_connection(strangers[0].getpeername())
    except ConnectionRefusedError:
        print("listens no more")
"""


@pytest.mark.slow
def test_a_group_that_twenty_silent_strangers_called_first_starts(tmp_path: Path):
    with started(4, ["-c", PROGRAM], tmp_path) as processes:
        ended = ends(processes)
    said = ["[0, 1, 2, 3] 20\nlistens no more\n", *["[0, 1, 2, 3] 0\n"] * 3]
    expected = [(0, each, "") for each in said]
    assert [(each.status, each.out, each.err) for each in ended] == expected


def frame(data: bytes) -> bytes:
    return struct.pack("!i", len(data)) + data


@pytest.mark.parametrize(
    "said",
    [
        frame(b"a guess"),
        frame(b"x" * 257),
        struct.pack("!i", 0x7FFFFFFF),
        struct.pack("!iQ", -1, 1 << 62),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0\0",
    ],
)
def test_a_stranger_is_not_heard(place: Place, said: bytes):
    stranger = place.connect()
    stranger.sendall(said)
    stranger.shutdown(socket.SHUT_WR)
    assert sorted(place.accept(2)) == [1]
    answer = read_to_the_end(stranger)
    assert b"#WELCOME#" not in answer


def test_a_caller_with_another_secret_is_refused(place: Place):
    refused: list[str] = []

    def call() -> None:
        try:
            links._call("127.0.0.1", place.port, b"a guess", 1)
        except ConnectionError as error:
            refused.append(str(error))

    stranger = threading.Thread(target=call)
    stranger.start()
    # Rank 1 calls behind it.
    met = meeting_behind(place, stranger.join)
    assert sorted(met) == [1]
    (line,) = refused
    assert line.startswith(f"[ranks] rank 1 can't reach rank 0 at 127.0.0.1, port {place.port}: ")


def meeting_behind(place: Place, wait: Callable[[], None]) -> dict[int, socket.socket]:
    def call() -> None:
        wait()
        place.call(1)

    caller = threading.Thread(target=call)
    caller.start()
    met = links._accept(place.listener, SECRET, 2)
    caller.join()
    place.sockets += met.values()
    return met


def test_a_rank_tells_the_secret_to_no_one_and_hears_no_one_without_it():
    """Who listens where rank 0 should be proves that it knows the secret, too."""
    with Listener(("127.0.0.1", 0), authkey=b"another") as listener:
        accepted: list[str] = []

        def accept() -> None:
            try:
                listener.accept()
            except Exception as error:
                accepted.append(type(error).__name__)

        thread = threading.Thread(target=accept)
        thread.start()
        with pytest.raises(ConnectionError, match="rank 1 can't reach rank 0"):
            links._call("127.0.0.1", listener.address[1], SECRET, 1)
        thread.join()
    assert accepted == ["AuthenticationError"]


def test_a_rank_comes_once_and_is_one_of_the_group(place: Place):
    def call() -> None:
        for rank in (1, 1, 0, 3, 77, 2):
            place.call(rank)

    caller = threading.Thread(target=call)
    caller.start()
    met = links._accept(place.listener, SECRET, 3)
    caller.join()
    assert sorted(met) == [1, 2]
    met[1].sendall(b"hello")
    met[1].shutdown(socket.SHUT_WR)
    said = [read_to_the_end(sock) for sock in place.sockets[:-1]]
    assert sorted(said[:2]) == [b"", b"hello"]
    assert said[2:] == [b""] * 3
    place.sockets += met.values()


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch, place: Place):
    monkeypatch.setattr(links, "MEETING_SECONDS", 0.05)
    with pytest.raises(ConnectionError, match="rank 1, 2 did not connect to rank 0 within 0 sec"):
        links._accept(place.listener, SECRET, 3)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("MLX_JACCL_COORDINATOR", "192.168.5.1:9000", "192.168.5.1"),
        ("MLX_HOSTFILE", '[["[fe80::1]:5000"], ["10.0.0.2:5000"]]', "fe80::1"),
        ("MLX_HOSTFILE", "broken", ""),
    ],
)
def test_the_address_of_rank_0_is_what_the_launcher_was_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path, name: str, value: str, expected: str
):
    for each in ("MLX_JACCL_COORDINATOR", "MLX_HOSTFILE"):
        monkeypatch.delenv(each, raising=False)
    if name == "MLX_HOSTFILE":
        (tmp_path / "hosts.json").write_text(value)
        value = str(tmp_path / "hosts.json")
    monkeypatch.setenv(name, value)
    assert links.launcher_address() == expected
