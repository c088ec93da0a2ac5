"""What two ranks say to each other over a socket, and how the end of one is told to the other."""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, cast

import pytest
from helpers.ranks import REPOSITORY, FakeGroup

from mlx_paged.distributed import links
from mlx_paged.distributed.links import Link, connection_over
from mlx_paged.distributed.ranks import Ranks, RanksError

Ends = queue.SimpleQueue[str]


@pytest.fixture
def make_pair() -> Iterator[Callable[[], tuple[socket.socket, socket.socket]]]:
    """Makes connected sockets, which are closed at the end of the test."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def make() -> tuple[socket.socket, socket.socket]:
            ours = stack.enter_context(socket.create_connection(listener.getsockname()))
            return ours, stack.enter_context(listener.accept()[0])

        yield make


@pytest.fixture
def pair(
    make_pair: Callable[[], tuple[socket.socket, socket.socket]],
) -> Iterator[tuple[Link, Connection, Ends]]:
    """A link to rank 3, the other end of its socket, and what the link says of rank 3's end."""
    ours, theirs = make_pair()
    ends: Ends = queue.SimpleQueue()
    link = Link(ours, 3, ends.put)
    other = connection_over(theirs)
    theirs.close()
    assert other.recv_bytes() == b'[0,"ping",null]'
    # With nothing left to read, its end resets no connection.
    yield link, other, ends
    link.close()
    other.close()
    ours.close()


def write(connection: Connection, *messages: object) -> None:
    for message in messages:
        connection.send_bytes(json.dumps(message).encode())


def test_messages_of_any_size_arrive_in_their_order(pair: tuple[Link, Connection, Ends]):
    link, other, _ = pair
    values: list[Any] = [None, "a" * 3_000_000, {"b": [1, -0.5, True]}]

    def send() -> None:
        numbers = itertools.count()
        for value in values:
            write(other, [next(numbers), "ping", None], [next(numbers), "say", value])

    sender = threading.Thread(target=send)
    sender.start()
    assert [link.receive() for _ in values] == [("say", value) for value in values]
    sender.join()


def test_a_goodbye_is_no_failure(pair: tuple[Link, Connection, Ends]):
    link, other, ends = pair
    write(other, [0, "say", "the last one"], [1, "bye", None])
    assert [link.receive() for _ in range(3)] == [("say", "the last one"), None, None]
    assert link.is_closed
    assert ends.empty()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"", "died"),
        (b'[0,"bye","failed: no memory"]', "failed: no memory"),
        (b'[1,"say",null]', "sent message 1 instead of 0"),
        (b'["0","say",null]', "sent message '0' instead of 0"),
        (b'[0,"say"]', "sent an invalid message"),
        (b"{}", "sent an invalid message"),
        (b"\x80\x05.", "sent an invalid message"),
        (b"[" * 100_000, "sent an invalid message"),
    ],
)
def test_any_other_end_is_told_with_its_reason(
    pair: tuple[Link, Connection, Ends], said: bytes, reason: str
):
    _, other, ends = pair
    if said:
        other.send_bytes(said)
    other.close()
    assert ends.get(timeout=10) == f"rank 3 {reason}"


def test_a_message_that_comes_twice_is_refused(pair: tuple[Link, Connection, Ends]):
    link, other, ends = pair
    write(other, [0, "say", "once"], [0, "say", "once"])
    assert ends.get(timeout=10) == "rank 3 sent message 0 instead of 1"
    assert [link.receive() for _ in range(2)] == [("say", "once"), None]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (struct.pack("!i", 100) + b"[0,", "died"),
        (
            struct.pack("!iQ", -1, 1 << 62),
            "sent an invalid message",
        ),  # more than any memory
    ],
)
def test_a_frame_that_is_cut_or_too_large_is_an_end(make_pair: Any, header: bytes, reason: str):
    ours, theirs = make_pair()
    ends: Ends = queue.SimpleQueue()
    link = Link(ours, 3, ends.put)
    theirs.sendall(header)
    theirs.shutdown(socket.SHUT_WR)
    assert ends.get(timeout=10) == f"rank 3 {reason}"
    link.close()
    for each in (ours, theirs):
        each.close()


def test_silence_is_an_end(make_pair: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(links, "SILENCE_SECONDS", 0.1)
    ours, theirs = make_pair()
    ends: Ends = queue.SimpleQueue()
    link = Link(ours, 1, ends.put)
    assert ends.get(timeout=10) == "rank 1 has sent nothing for 0 seconds"
    link.close()
    for each in (ours, theirs):
        each.close()


def test_nothing_follows_a_message_that_a_peer_did_not_take_whole(
    make_pair: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(links, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(links, "PING_SECONDS", 0.01)
    # Its own silence is another end.
    monkeypatch.setattr(Link, "_read", lambda link: None)
    ours, theirs = make_pair()
    ends: Ends = queue.SimpleQueue()
    link = Link(ours, 1, ends.put)
    long = "a" * 50_000_000
    link.send("say", long)
    assert ends.get_nowait() == "rank 1 has accepted no message for 0 seconds"
    link.send("say", "later")
    link.close("later still")
    arrived = bytearray()
    while part := theirs.recv(1 << 20):
        arrived += part
    # Pings of any number, and then the beginning of the long message.
    text = re.sub(rb'.{4}\[\d+,"ping",null\]', b"", arrived, flags=re.S)
    assert re.fullmatch(rb'.{4}\[\d+,"say","a+', text, re.S)
    assert len(text) < len(long)
    assert ends.empty()
    for each in (ours, theirs):
        each.close()


def test_a_rank_that_ends_waits_for_no_peer_inside_a_frame(
    make_pair: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(links, "GOODBYE_SECONDS", 0.05)
    ours, theirs = make_pair()
    link = Link(ours, 1, lambda what: None)
    sender = threading.Thread(target=link.send, args=("say", "a" * 50_000_000), daemon=True)
    sender.start()
    arrived = bytearray()
    while b"say" not in arrived:  # behind a ping, perhaps
        arrived += theirs.recv(1024)
    # It sends, and its peer takes no more for now.
    link.close("in the middle")
    while part := theirs.recv(1 << 20):
        arrived += part
    sender.join()
    assert b"in the middle" not in arrived
    for each in (ours, theirs):
        each.close()


def test_an_end_is_told_once_where_it_closes_the_link_and_the_peer_takes_no_goodbye(
    make_pair: Any, monkeypatch: pytest.MonkeyPatch
):
    """As :class:`Ranks` ends: it closes its links in the middle of the message that was stuck."""
    ours, theirs = make_pair()
    ends: list[str] = []

    def lost(how: str) -> None:
        ends.append(how)
        link.close(how)

    link = Link(ours, 1, lost)

    def takes_nothing(connection: Connection, data: bytes) -> None:
        raise BlockingIOError

    monkeypatch.setattr(Connection, "send_bytes", takes_nothing)
    link.send("say")
    theirs.close()
    assert link.receive() is None
    assert ends == ["rank 1 has accepted no message for 15 seconds"]
    ours.close()


def test_nothing_of_a_message_is_unpickled(make_pair: Any):
    package = REPOSITORY / "mlx_paged"
    modules = [*package.glob("distributed/*.py"), package / "engine" / "steps.py"]
    sources = "".join(module.read_text() for module in modules)
    assert re.findall(r"pickle|marshal|shelve|(?<![\w.])(?:eval|exec)\(", sources) == []
    # Others of a connection's methods pickle.
    calls = re.findall(r"connection\.(\w+)\(", sources)
    assert set(calls) == {"send_bytes", "recv_bytes"}


def ranks_of(
    size: int, ends: Ends, monkeypatch: pytest.MonkeyPatch, make_pair: Any
) -> tuple[Ranks, Ranks]:
    """Ranks 0 and 1 in this process, and what would end it."""
    monkeypatch.setattr(Ranks, "_end", lambda ranks, text: ends.put(f"{ranks.rank} {text}"))
    ours, theirs = make_pair()
    return Ranks(cast(Any, FakeGroup(2, 0)), {1: ours}), Ranks(
        cast(Any, FakeGroup(2, 1)), {0: theirs}
    )


def test_ranks_gather_compare_and_leave(make_pair: Any, monkeypatch: pytest.MonkeyPatch):
    ends: Ends = queue.SimpleQueue()
    leader, follower = ranks_of(2, ends, monkeypatch, make_pair)
    told: list[object] = []

    def follow() -> None:
        told.append(follower.all_gather(7))
        told.append(follower.all_gather(False))
        try:
            follower.compare({"the colour": "red"})
        except RanksError as error:
            told.append(str(error))
        try:
            follower.compare({"a long text": "a" * 1000})
        except RanksError as error:
            told.append(len(str(error)) < 1000)
        told.append(follower.receive("say", "step"))
        follower.close()

    thread = threading.Thread(target=follow)
    thread.start()
    assert leader.all_gather(9) == [9, 7]
    assert leader.all_gather(True) == [True, False]
    words = "the colour is blue on rank 0 and red on rank 1; it must be the same on all ranks"
    with pytest.raises(RanksError, match=words):
        leader.compare({"the colour": "blue"})
    # What does not fit into the message counts, too.
    with pytest.raises(RanksError, match=r"a long text is a+\.{3} on rank 0 and a+\.{3} on rank 1"):
        leader.compare({"a long text": "a" * 1000 + "b"})
    leader.send("say", {"a": 1})
    thread.join()
    assert told == [[9, 7], [True, False], f"[ranks] {words}", True, ("say", {"a": 1})]
    with pytest.raises(RanksError, match="rank 1 has ended"):
        leader.all_gather(1)
    with pytest.raises(RanksError, match="rank 1 has ended"):
        leader.send("say", 1)
    leader.close()
    with pytest.raises(RanksError, match="rank 0 has ended"):
        follower.receive("say")
    assert ends.empty()


def test_a_message_of_another_kind_than_is_due_ends_the_process(
    make_pair: Any, monkeypatch: pytest.MonkeyPatch
):
    ends: Ends = queue.SimpleQueue()
    leader, follower = ranks_of(2, ends, monkeypatch, make_pair)
    leader.send("\x1b[2J", 1)
    follower.receive("step", "abort")
    follower.send("say", 1)
    leader.all_gather(1)
    assert [ends.get_nowait() for _ in range(2)] == [
        r"1 ends, since rank 0 sent '\x1b[2J' instead of step or abort",
        "0 ends, since rank 1 sent 'say' instead of value",
    ]
    for each in (leader, follower):
        each.close()
