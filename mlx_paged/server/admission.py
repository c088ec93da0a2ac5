"""``Admission``: limits the number of waiting sequences. Imports no MLX."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from mlx_paged.engine.request import PENDING_TOKEN
from mlx_paged.server.errors import ApiError

if TYPE_CHECKING:
    from mlx_paged.engine.async_engine import AsyncEngine

WINDOW = 60.0  # seconds over which the rate for Retry-After is measured
MAX_RETRY_AFTER = 60  # seconds


class Counts(NamedTuple):
    """Numbers of sequences in an engine.

    Args:
        num_new: running or waiting sequences without a first token. These are also pending here.
        by_user: running and waiting sequences, and those without a first token, of each user.
    """

    num_running: int
    num_waiting: int
    num_new: int
    by_user: Mapping[str | None, tuple[int, int]] = MappingProxyType({})


def counts_of(engine: AsyncEngine) -> Counts:
    """The current numbers of an engine, read without waiting for its step."""
    scheduler = engine.engine.scheduler
    running, waiting = (list(each) for each in (scheduler.running, scheduler.waiting))
    num_new = 0
    by_user: dict[str | None, tuple[int, int]] = {}
    for completion in (*running, *waiting):
        # The pending token of the step in flight does not count yet.
        is_new = completion.num_output_tokens == (completion.token_ids[-1] == PENDING_TOKEN)
        num_new += is_new
        user = completion.request.user
        num_of_user, num_new_of_user = by_user.get(user, (0, 0))
        by_user[user] = num_of_user + 1, num_new_of_user + is_new
    return Counts(len(running), len(waiting), num_new, by_user)


class Admission:
    """The queue limit: refuses sequences if too many are waiting.

        with admission.admit(params.n):
            ...                             # until the first token arrives

    Sequences wait in the engine, for one of ``max_num_seqs`` places or for K/V memory. The engine
    reports how many there are; sequences that it has not added yet, because a step is running, are
    counted here. Sequences with a first token are counted by the engine only, so a slow reader
    takes no place in the queue.

    A user who has less than an equal share of all places, running and waiting, is admitted although
    the queue is full of the requests of others. With k users there, these may then be up to 1 + 1/2
    + ... + 1/k times as many as fit.

    Args:
        max_queue_len: the maximum number of waiting sequences.
        max_num_seqs: the maximum number of running sequences.
        counts: returns the engine's current numbers.
        clock: returns seconds.

    Attributes:
        num_pending: admitted sequences without a first token, of all users.
    """

    def __init__(
        self,
        max_queue_len: int,
        max_num_seqs: int,
        counts: Callable[[], Counts],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._num_pending: Counter[str | None] = Counter()  # by user
        self._max_queue_len = max_queue_len
        self._max_num_seqs = max_num_seqs
        self._counts = counts
        self._clock = clock
        self._start = clock()
        self._begun: deque[tuple[float, int]] = deque()  # time and number of sequences

    @property
    def num_pending(self) -> int:
        return self._num_pending.total()

    @contextmanager
    def admit(self, num_seqs: int = 1, user: str | None = None) -> Iterator[None]:
        """Hold places in the queue until the sequences of a request begin. A user of whom nothing
        is there may have any request, regardless of its number of sequences.

        Raises:
            ApiError: 503 with ``Retry-After`` if too many sequences are waiting, and those of this
                user are more than an equal share of them.
        """
        num_running, num_waiting, num_new, by_user = self._counts()
        num_unseen = max(self.num_pending - num_new, 0)
        num_there = num_running + num_waiting + num_unseen
        # Sequences that wait while fewer than max_num_seqs run are waiting for memory.
        num_places = num_running if num_waiting else self._max_num_seqs
        num_most = num_places + self._max_queue_len
        if num_there and num_there + num_seqs > num_most:
            users = {user, *by_user, *self._num_pending}
            num_own = self._num_there_of(user, by_user)
            # Of a user alone all are there.
            if len(users) == 1 or (num_own and (num_own + num_seqs) * len(users) > num_most):
                raise self._refusal(max(num_there - num_places, 0))
        self._num_pending[user] += num_seqs
        try:
            yield
        finally:
            self._num_pending[user] -= num_seqs
            if not self._num_pending[user]:
                del self._num_pending[user]
            self._forget_old()
            self._begun.append((self._clock(), num_seqs))

    def _num_there_of(self, user: str | None, by_user: Mapping[str | None, tuple[int, int]]) -> int:
        """The sequences of a user, in the engine or not seen by it yet."""
        num_seen, num_new = by_user.get(user, (0, 0))
        return num_seen + max(self._num_pending[user] - num_new, 0)

    def retry_after(self, num_ahead: int) -> int:
        """Estimated seconds until the waiting sequences begin: ``num_ahead / rate``, within 1..60,
        where ``rate`` is how many sequences per second began in the last minute.
        """
        self._forget_old()
        num_begun = sum(num_seqs for _, num_seqs in self._begun)
        if not num_begun:
            return MAX_RETRY_AFTER
        seconds = min(WINDOW, self._clock() - self._start)
        return min(max(math.ceil(num_ahead * seconds / num_begun), 1), MAX_RETRY_AFTER)

    def _forget_old(self) -> None:
        now = self._clock()
        while self._begun and self._begun[0][0] < now - WINDOW:
            self._begun.popleft()

    def _refusal(self, num_ahead: int) -> ApiError:
        return ApiError(
            503,
            f"{num_ahead:,} sequences are waiting already, and at most {self._max_queue_len:,} may "
            "wait; retry later",
            code="queue_full",
            headers={"Retry-After": str(self.retry_after(num_ahead))},
        )
