"""``Ranks``: the processes that run one model together, as one of them sees the others.

Every rank has its own engine and scheduler. Schedulers read no clock, and no memory but the pool's,
so the same requests in the same order and the same tokens give the same plans. Rank 0 leads: it
sends what it was asked, the start of each step and the sampled tokens, and the others replay that.
Followers sample nothing, so they need neither the functions of a request nor its grammar.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, NoReturn

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged import __version__
from mlx_paged.distributed.links import Link, RanksError, meet
from mlx_paged.distributed.values import from_json
from mlx_paged.errors import ArgumentError, harmless, one_line, shown, words_for_all
from mlx_paged.models.kv_cache import kv_budget
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.ops import device

# Ranks are started together, but one of them may be slow to import, or wait for a disk.
START_SECONDS = 120.0
# What MLX's ring raises when a peer is gone, and how long a link may take to notice the same.
_PEER_LOST = "connection to a peer was lost"
_LOST_SECONDS = 3.0
# Packages whose versions can change a token, a text or a message between ranks.
_PACKAGES = ("mlx", "mlx-lm", "transformers", "tokenizers")


class Ranks:
    """The ranks of a group; without a group, this process alone, which sends nothing.

    If a rank dies, raises in the middle of a step or sends an unexpected message, all others exit
    within seconds, with a line on stderr and status 1, whatever they are doing: a collective that
    waits for a dead rank never returns.

    Args:
        group: MLX's group, of at least two ranks.
        sockets: authenticated, by rank: on rank 0 to all others, elsewhere to rank 0.
    """

    def __init__(
        self,
        group: mx.distributed.Group | None = None,
        sockets: Mapping[int, socket.socket] | None = None,
    ):
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self._ending = threading.Lock()
        self._links: dict[int, Link] = {}
        for peer, sock in sorted((sockets or {}).items()):
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
            if link.is_closed:
                raise RanksError(f"[ranks] rank {rank} has ended")
            link.send(kind, value)

    def lead(self, kind: str, value: Callable[[], object] = lambda: None) -> None:
        """On rank 0, send what the others have to replay; ``value`` is called only if there are
        others. Elsewhere this does nothing.
        """
        if self.size > 1 and self.is_leader:
            self.send(kind, value())

    def follow(self, replays: Mapping[str, Callable[[Any], object]]) -> Any:
        """On another rank, replay what rank 0 does until it sends a result of
        :meth:`Engine.share`; return or raise that. An exception of a replay ends all ranks.

        Args:
            replays: by the kind of message; called with its value.

        Raises:
            RanksError: rank 0 has ended.
        """
        do = {**replays, "result": from_json}
        kind = result = None
        while kind != "result":
            kind, value = self.receive(*do)
            try:
                result = do[kind](value)
            except BaseException as error:
                self.fail(error)  # Rank 0 may wait for this rank in a collective.
        if isinstance(result, BaseException):
            raise result
        return result

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

    def fail(self, error: BaseException) -> None:
        """End this process and all others for an error: the ranks' bookkeeping differs from now on,
        or others wait in a collective. A process that is alone goes on.
        """
        if self.size == 1:
            return
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
        with contextlib.suppress(OSError, ValueError):  # stderr may be full or closed
            print(harmless(f"[ranks] rank {self.rank} {text}"), file=sys.stderr, flush=True)
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


def join_ranks(
    model: LanguageModel, tokenizer: TokenizerWrapper | None, settings: Mapping[str, object]
) -> Ranks:
    """Connect the ranks that a model is split over, and check that they match. Without a group, the
    model is not split.

    Args:
        settings: of the engine, by name.

    Raises:
        ArgumentError: a setting is not supported on several ranks.
        RanksError: the ranks have different packages, settings, models or tokenizers.
    """
    if model.group is None:
        return Ranks()
    if settings.get("draft_model") is not None:
        raise ArgumentError(
            "[ranks] draft_model can't be combined with several ranks; with num_draft_tokens "
            "alone, drafts are looked up in the request's own tokens",
            "draft_model",
        )
    ranks, args = connect(model.group), model.args
    config = vars(args) if dataclasses.is_dataclass(args) else {"vocab_size": args.vocab_size}
    facts: dict[str, object] = {
        **{f"the setting {name}": repr(value) for name, value in sorted(settings.items())},
        "the device": "CPU" if device.is_cpu() else "GPU",
        "the kind of model": type(model),
        **{f"{name} of the model": repr(value) for name, value in sorted(config.items())},
        # The shares of all ranks have equal shapes.
        "the names, shapes and types of the weights": [
            (name, leaf.shape, leaf.dtype)
            for name, leaf in dict(tree_flatten(model.parameters())).items()
        ],
    }
    if tokenizer is not None:
        vocabulary = repr(sorted(tokenizer.get_vocab().items())).encode(errors="replace")
        facts |= {
            "the tokenizer": type(tokenizer._tokenizer),
            "the vocabulary of the tokenizer": blake2b(vocabulary, digest_size=8).hexdigest(),
            "the end of sequence of the tokenizer": sorted(tokenizer.eos_token_ids),
        }
    ranks.compare(facts)
    return ranks


def smallest_budget(
    ranks: Ranks, kv_cache_bytes: str | int | None, model: LanguageModel
) -> str | int:
    """The largest K/V budget that fits on every rank. A token takes the same number of bytes on
    each of them, so equal bytes are equal numbers of blocks.
    """
    budget = kv_budget(kv_cache_bytes, model)
    if budget.nbytes is None:
        return f"{budget.num_blocks}blocks"
    return int(min(ranks.all_gather(budget.nbytes)))


@functools.cache
def launched_ranks() -> Ranks | None:
    """Connect the ranks that ``mlx.launch`` started; every rank has to call it. ``None`` for a
    single process.

    Raises:
        RanksError: MLX could not form the group, or the ranks could not connect.
    """
    if "MLX_RANK" not in os.environ:
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
