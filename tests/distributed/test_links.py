"""What two ranks say to each other over a socket, and how the end of one is told to the other."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator

import pytest
from helpers.ranks import FakeGroup

from mlx_paged.distributed import links, meeting
from mlx_paged.distributed.links import Kind, Link, write_frame
from mlx_paged.distributed.ranks import Ranks, RanksError

Ends = queue.SimpleQueue[tuple[int, str]]


@pytest.fixture
def pair() -> Iterator[tuple[Link, socket.socket, Ends]]:
    """A link to rank 3, the other end of its socket, and what the link says of rank 3's end."""
    ours, theirs = socket.socketpair()
    ends: Ends = queue.SimpleQueue()
    link = Link(ours, 3, lambda peer, reason: ends.put((peer, reason)))
    yield link, theirs, ends
    link.close()
    theirs.close()
    ours.close()


def test_messages_of_any_size_arrive_in_their_order(pair: tuple[Link, socket.socket, Ends]):
    link, theirs, _ = pair
    messages = [b"", b"a" * 3_000_000, b"b"]

    def send() -> None:
        for message in messages:
            write_frame(theirs, Kind.PING, b"")
            write_frame(theirs, Kind.MESSAGE, message)

    sender = threading.Thread(target=send)
    sender.start()
    assert [link.receive() for _ in messages] == messages
    sender.join()


def test_a_goodbye_is_no_failure(pair: tuple[Link, socket.socket, Ends]):
    link, theirs, ends = pair
    write_frame(theirs, Kind.MESSAGE, b"the last one")
    write_frame(theirs, Kind.BYE, b"")
    assert [link.receive() for _ in range(3)] == [b"the last one", None, None]
    assert link.has_left
    assert ends.empty()


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        ((Kind.FAILED, b"failed in a step"), "failed in a step"),
        (None, "died"),
        (b"GET / HTTP/1.1\r\n\r\n", "died"),
    ],
)
def test_any_other_end_is_told_with_its_reason(
    pair: tuple[Link, socket.socket, Ends], frame: tuple[Kind, bytes] | bytes | None, reason: str
):
    _, theirs, ends = pair
    if isinstance(frame, bytes):
        theirs.sendall(frame)
    elif frame is not None:
        write_frame(theirs, *frame)
    theirs.close()
    assert ends.get(timeout=10) == (3, reason)


def test_silence_is_an_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(links, "SILENCE_SECONDS", 0.1)
    ours, theirs = socket.socketpair()
    ends: Ends = queue.SimpleQueue()
    link = Link(ours, 1, lambda peer, reason: ends.put((peer, reason)))
    assert ends.get(timeout=10) == (1, "has said nothing for 0 seconds")
    link.close()
    for each in (ours, theirs):
        each.close()


def test_rank_0_takes_callers_that_know_the_secret_and_no_strangers():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        stranger = socket.create_connection(("127.0.0.1", port))
        write_frame(stranger, Kind.HELLO, b"1 guessed")
        place = {"hosts": ["127.0.0.1"], "port": port, "secret": "known"}
        called: list[socket.socket] = []
        caller = threading.Thread(target=lambda: called.append(meeting._call(place, 1)))
        caller.start()
        connections = meeting._accept(listener, "known", 2)
        caller.join()
        assert list(connections) == [1]
        assert connections[1].getpeername() == called[0].getsockname()
        assert stranger.recv(1) == b""
        for each in (stranger, called[0], connections[1]):
            each.close()


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(meeting, "MEETING_SECONDS", 0.05)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(ConnectionError, match="rank 1, 2 did not connect to rank 0"),
    ):
        meeting._accept(listener, "secret", 3)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("MLX_JACCL_COORDINATOR", "192.168.5.1:9000", "192.168.5.1"),
        ("MLX_HOSTFILE", '[["[fe80::1]:5000"], ["10.0.0.2:5000"]]', "fe80::1"),
        ("MLX_HOSTFILE", "broken", None),
    ],
)
def test_the_address_of_rank_0_is_what_the_launcher_was_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path, name: str, value: str, expected: str | None
):
    for each in ("MLX_JACCL_COORDINATOR", "MLX_HOSTFILE"):
        monkeypatch.delenv(each, raising=False)
    if name == "MLX_HOSTFILE":
        (tmp_path / "hosts.json").write_text(value)
        value = str(tmp_path / "hosts.json")
    monkeypatch.setenv(name, value)
    assert meeting.launcher_address() == expected


def test_ranks_vote_compare_and_leave():
    ours, theirs = socket.socketpair()
    ends: Ends = queue.SimpleQueue()

    def gone(peer: int, reason: str) -> None:
        ends.put((peer, reason))

    leader = Ranks(FakeGroup(2, 0), {1: Link(ours, 1, gone)})
    follower = Ranks(FakeGroup(2, 1), {0: Link(theirs, 0, gone)})
    told: list[object] = []

    def follow() -> None:
        told.append(follower.minimum(7))
        told.append(follower.all_can(False))
        try:
            follower.compare({"the colour": "red"})
        except RanksError as error:
            told.append(str(error))
        told.append(follower.hear())
        follower.close()

    thread = threading.Thread(target=follow)
    thread.start()
    assert leader.minimum(9) == 7
    assert leader.all_can(True) is False
    words = "the colour is blue on rank 0 and red on rank 1; it must be the same on all ranks"
    with pytest.raises(RanksError, match=words):
        leader.compare({"the colour": "blue"})
    leader.tell({"a": 1})
    thread.join()
    assert told == [7, False, f"[ranks] {words}", {"a": 1}]
    with pytest.raises(RanksError, match="rank 1 has ended"):
        leader.gather(1)
    with pytest.raises(RanksError, match="rank 1 has ended"):
        leader.tell(1)
    leader.close()
    with pytest.raises(RanksError, match="rank 0 has ended"):
        follower.hear()
    assert ends.empty()
    for each in (ours, theirs):
        each.close()
