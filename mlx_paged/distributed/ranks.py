"""``Ranks``: the processes that run one model together, as one of them sees the others."""

from __future__ import annotations

import atexit
import functools
import importlib.metadata
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import mlx.core as mx

from mlx_paged import __version__
from mlx_paged.distributed.links import Link
from mlx_paged.distributed.meeting import meet
from mlx_paged.errors import one_line, shown, words_for_all
from mlx_paged.launch import is_launched
from mlx_paged.standard_streams import say

# Ranks are started together, but one of them may be slow to import, or wait for a disk.
START_SECONDS = 120.0
# What MLX's ring raises when a peer is gone, and how long a link may take to notice the same.
_PEER_LOST = "connection to a peer was lost"
_LOST_SECONDS = 3.0
# Packages whose versions can change a token, a text or a message between ranks.
_PACKAGES = ("mlx", "mlx-lm", "transformers", "tokenizers")


class RanksError(RuntimeError):
    """The ranks can't work together; the message names the rank and the reason."""


class Ranks:
    """The ranks of a group.

    Rank 0 leads: it sends its decisions to the others, which do the same in the same order. If a
    rank dies, raises in the middle of a step or sends an unexpected message, all others exit within
    seconds, with a line on stderr and status 1, whatever they are doing: a collective that waits
    for a dead rank never returns.

    Args:
        group: MLX's group, of at least two ranks.
        sockets: authenticated, by rank: on rank 0 to all others, elsewhere to rank 0.
    """

    def __init__(self, group: mx.distributed.Group, sockets: Mapping[int, socket.socket]):
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self._ending = threading.Lock()
        self._links: dict[int, Link] = {}
        for peer, sock in sorted(sockets.items()):
            self._links[peer] = Link(sock, peer, self._lost)

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def send(self, kind: str, value: object = None) -> None:
        """Send a message from rank 0 to all others, or from another rank to rank 0. The value has
        to be serialisable as JSON.

        Raises:
            RanksError: a receiver has ended.
        """
        for rank, link in self._links.items():
            if link.is_over:
                raise RanksError(f"[ranks] rank {rank} has ended")
            link.send(kind, value)

    def receive(self, *kinds: str, rank: int = 0) -> tuple[str, Any]:
        """Wait for a rank's next message: its kind and value. Any other kind ends this process.

        Raises:
            RanksError: that rank has ended.
        """
        message = self._links[rank].receive()
        if message is None:
            raise RanksError(f"[ranks] rank {rank} has ended")
        if message[0] not in kinds:
            self._lost(f"rank {rank} sent {shown(message[0])} instead of {' or '.join(kinds)}")
        return message

    def all_gather(self, value: object) -> list[Any]:
        """The values of all ranks, by rank, on each of them. A collective call: every rank has to
        make it at the same point. Values have to be serialisable as JSON.
        """
        if not self.is_leader:
            self.send("value", value)
            return list(self.receive("value")[1])
        values = [value, *(self.receive("value", rank=rank)[1] for rank in self._links)]
        self.send("value", values)
        return values

    def compare(self, facts: Mapping[str, object]) -> None:
        """Check that all ranks have the same package versions and the same facts, as texts.

        Raises:
            RanksError: on every rank; the message has the first fact that differs, and both values.
        """
        versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
        versions["mlx-paged"] = __version__
        facts = {f"the version of {name}": each for name, each in versions.items()} | {**facts}
        leaders, *others = self.all_gather({name: str(fact) for name, fact in facts.items()})
        for rank, theirs in enumerate(others, 1):
            for name in leaders | theirs:
                first, second = leaders.get(name, "missing"), theirs.get(name, "missing")
                if first != second:
                    raise RanksError(
                        f"[ranks] {name} is {one_line(first)} on rank 0 and {one_line(second)} on "
                        f"rank {rank}; it must be the same on all ranks"
                    )

    def fail(self, error: BaseException) -> NoReturn:
        """End this process and all others for an error: the ranks' bookkeeping differs from now on,
        or others wait in a collective.
        """
        if _PEER_LOST in str(error):
            # The thread that reads from that peer is about to report which rank it was.
            time.sleep(_LOST_SECONDS)
        self._end(f"failed: {words_for_all(error)}")

    def close(self) -> None:
        """Leave the group. In the others, :meth:`receive` raises ``RanksError`` then. Can be called
        more than once.
        """
        for link in self._links.values():
            link.close()

    def _lost(self, what: str) -> NoReturn:
        self._end(f"ends, since {what}")

    def _end(self, text: str) -> NoReturn:
        self._ending.acquire()  # Only the first failure is reported.
        say(f"[ranks] rank {self.rank} {text}")
        for link in list(self._links.values()):
            link.close(text)
        # The main thread may wait in a collective, which no exception interrupts.
        os._exit(1)


@functools.cache
def connect(group: mx.distributed.Group) -> Ranks:
    """Connect the ranks of a group; every rank has to call it.

    Raises:
        RanksError: they could not connect.
    """
    try:
        ranks = Ranks(group, meet(group))
    except OSError as error:
        raise RanksError(one_line(error)) from error
    atexit.register(ranks.close)
    return ranks


@functools.cache
def launched_ranks() -> Ranks | None:
    """Connect the ranks that ``mlx.launch`` started; every rank has to call it. ``None`` for a
    single process.

    Raises:
        RanksError: MLX could not form the group, or the ranks could not connect.
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
seconds, line = float(sys.argv[1]), sys.argv[2]
if not select.select([0], [], [], seconds)[0]:
    print(line, file=sys.stderr)
    os.kill(os.getppid(), 9)
"""


def _given_up_after(seconds: float) -> subprocess.Popen[bytes]:
    """A watchdog process that kills this one unless its ``with`` block ends in time.

    MLX waits for other ranks without a timeout and holds the GIL, so no thread of this process
    could do it.
    """
    line = (
        f"[ranks] rank {os.environ['MLX_RANK']} ends, since MLX did not form the group within "
        f"{seconds:.0f} seconds: a rank is missing, or can't be reached"
    )
    command = [sys.executable, "-I", "-S", "-c", _GIVE_UP, str(seconds), line]
    return subprocess.Popen(command, stdin=subprocess.PIPE)
