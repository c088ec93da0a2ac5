"""``Ranks``: this process among those that run one model together."""

from __future__ import annotations

import atexit
import functools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import mlx.core as mx

from mlx_paged.distributed.links import Link, Message
from mlx_paged.distributed.meeting import meet
from mlx_paged.errors import one_line, shown
from mlx_paged.launch import is_launched
from mlx_paged.standard_streams import say

# Ranks are started together, but one of them may be slow to import, or wait for a disk.
START_SECONDS = 120.0
# What MLX's ring raises where a peer is gone, and how long our own sockets may take to notice.
_PEER_LOST = "connection to a peer was lost"
_LOST_SECONDS = 3.0

T = TypeVar("T")


class RanksError(RuntimeError):
    """The ranks can't work together; the message says which of them, and why."""


class Ranks:
    """The ranks of a group, as one of them sees the others.

    Rank 0 leads: it tells the others what it decided, and they do the same in the same order. What
    all of them have a say in, they vote on. If a rank dies, raises in the middle of a step, or says
    what is not due, all others end within seconds, each with a line on stderr and exit status 1,
    wherever they are: a collective that waits for a dead rank never returns.

    Args:
        group: of MLX, of two ranks or more.
        sockets: to the other ranks, on rank 0; elsewhere to rank 0. They are authenticated.
    """

    def __init__(self, group: mx.distributed.Group, sockets: Mapping[int, socket.socket]):
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self._ending = threading.Lock()
        self._links: dict[int, Link] = {}
        for peer, sock in sorted(sockets.items()):
            self._links[peer] = Link(sock, peer, self._lost)

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    # Messages

    def send(self, kind: str, value: object = None) -> None:
        """Send a message from rank 0 to all others, or from another rank to rank 0. The value is
        one that JSON has.

        Raises:
            RanksError: one of them has left.
        """
        for link in self._links.values():
            if link.has_left:
                raise RanksError(f"[ranks] rank {link.peer} has ended")
            link.send(kind, value)

    def receive(self, *kinds: str) -> Message:
        """Wait for the next message of rank 0. One of another kind ends this process.

        Raises:
            RanksError: rank 0 has ended.
        """
        return self._receive(self._links[0], kinds)

    def _receive(self, link: Link, kinds: Sequence[str]) -> Message:
        message = link.receive()
        if message is None:
            raise RanksError(f"[ranks] rank {link.peer} has ended")
        if message[0] not in kinds:
            due = " or ".join(kinds)
            self._end(f"ends, since rank {link.peer} sent {shown(message[0])} where {due} was due")
        return message

    # Agreements

    def agree(self, value: object, decide: Callable[[list[Any]], T]) -> T:
        """What rank 0 decides from the values of all ranks, in their order; every rank has to ask
        at the same place. Values and decisions are what JSON has.
        """
        if self.is_leader:
            votes = [self._receive(link, ["vote"])[1] for link in self._links.values()]
            decision = decide([value, *votes])
            self.send("decision", decision)
        else:
            self.send("vote", value)
            decision = self.receive("decision")[1]
        return decision

    def compare(self, facts: Mapping[str, str]) -> None:
        """Hold what must be equal on all ranks against that of rank 0.

        Raises:
            RanksError: on every rank; the message names the first fact that differs, and both
                values.
        """
        difference = self.agree(dict(facts), _difference)
        if difference is not None:
            raise RanksError(difference)

    # The end

    def fail(self, text: str, error: BaseException) -> NoReturn:
        """End this process, and tell the others why: the bookkeeping of the ranks is not the same
        any more, or others wait in a collective.

        Args:
            text: what happened, on one line.
            error: that was raised here. Its message need not be in ``text``.
        """
        if _PEER_LOST in str(error):
            # The thread that reads from that peer is about to say which of them it was.
            time.sleep(_LOST_SECONDS)
        self._end(text)

    def close(self) -> None:
        """Leave the others: this rank takes part in nothing any more. More than once is harmless.

        Followers return from :meth:`receive` with an error that says so.
        """
        for link in self._links.values():
            link.close()

    def _lost(self, peer: int, reason: str) -> NoReturn:
        """Another rank is gone; from the thread that noticed."""
        self._end(f"ends, since rank {peer} {reason}")

    def _end(self, text: str) -> NoReturn:
        self._ending.acquire()  # One line is enough.
        say(f"[ranks] rank {self.rank} {text}")
        for link in self._links.values():
            link.close("failed", text)
        # The main thread may wait in a collective, where no exception reaches it.
        os._exit(1)


def _difference(everybody: list[dict[str, str]]) -> str | None:
    """The first fact that is not the same everywhere, in words."""
    leaders = everybody[0]
    for rank, facts in enumerate(everybody[1:], 1):
        for name in dict.fromkeys([*leaders, *facts]):
            ours, theirs = leaders.get(name, "missing"), facts.get(name, "missing")
            if ours != theirs:
                return (
                    f"[ranks] {name} is {one_line(ours)} on rank 0 and {one_line(theirs)} on rank "
                    f"{rank}; it must be the same on all ranks"
                )
    return None


@functools.cache
def connect(group: mx.distributed.Group) -> Ranks:
    """The ranks of a group, connected with each other; every rank has to call it.

    Raises:
        RanksError: they did not meet.
    """
    try:
        ranks = Ranks(group, meet(group))
    except OSError as error:
        raise RanksError(one_line(error)) from error
    atexit.register(ranks.close)
    return ranks


@functools.cache
def launched_ranks() -> Ranks | None:
    """The ranks that ``mlx.launch`` started together with this process, connected; ``None`` for a
    process of its own. Every rank has to call it.

    Raises:
        RanksError: they did not meet.
    """
    if not is_launched():
        return None
    try:
        with _given_up_after(START_SECONDS):
            group = mx.distributed.init(strict=True, backend="any")
    except (RuntimeError, ValueError) as error:
        raise RanksError(f"[ranks] MLX can't form the group: {one_line(error)}") from error
    return None if group.size() == 1 else connect(group)


_GIVE_UP = """
import os, select, sys
seconds, process, line = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if not select.select([0], [], [], seconds)[0]:
    print(line, file=sys.stderr)
    os.kill(process, 9)
"""


@contextmanager
def _given_up_after(seconds: float) -> Iterator[None]:
    """End this process unless the body ends before that.

    MLX waits for other ranks without end, and holds Python's lock meanwhile: no thread of this
    process could look at a clock.
    """
    line = (
        f"[ranks] rank {os.environ['MLX_RANK']} ends, since MLX did not form the group within "
        f"{seconds:.0f} seconds: a rank is missing, or can't be reached"
    )
    watch = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GIVE_UP, str(seconds), str(os.getpid()), line],
        stdin=subprocess.PIPE,
    )
    try:
        yield
    finally:
        watch.communicate()
