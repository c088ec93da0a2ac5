"""``Admission``: how many sequences may wait. Imports no MLX."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from mlx_paged.server.errors import ApiError

WINDOW = 60.0  # seconds that the rate of a Retry-After is taken from
MAX_RETRY_AFTER = 60  # seconds


class Counts(NamedTuple):
    """Sequences of an engine.

    Args:
        num_new: of those that run or wait, those without a first token: they are pending here, too.
    """

    num_running: int
    num_waiting: int
    num_new: int


class Admission:
    """The queue limit: refuses sequences that would wait behind too many others.

        with admission.admit(params.n):
            ...                             # until the first token is there

    A sequence waits in the engine, for a place among ``max_num_seqs`` or for K/V memory. The engine
    says how many do. Those that it has not seen yet, as a step runs, are counted here. What has
    begun is the engine's to count, so a client that reads slowly takes no other's place.

    Args:
        max_queue_len: sequences that may wait.
        max_num_seqs: sequences that run at once.
        counts: what the engine has now.
        clock: in seconds.

    Attributes:
        num_pending: sequences that were admitted and have not begun.
    """

    def __init__(
        self,
        max_queue_len: int,
        max_num_seqs: int,
        counts: Callable[[], Counts],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.num_pending = 0
        self._max_queue_len = max_queue_len
        self._max_num_seqs = max_num_seqs
        self._counts = counts
        self._clock = clock
        self._start = clock()
        self._begun: deque[tuple[float, int]] = deque()  # when, and how many sequences

    @contextmanager
    def admit(self, num_seqs: int = 1) -> Iterator[None]:
        """Hold places in the queue until the sequences of a request begin. A request that finds
        no client is admitted, however many sequences it has.

        Raises:
            ApiError: 503 with ``Retry-After``: too many wait.
        """
        num_running, num_waiting, num_new = self._counts()
        num_unseen = max(self.num_pending - num_new, 0)
        num_there = num_running + num_waiting + num_unseen
        # Where some wait though there are places, it is for memory.
        num_places = num_running if num_waiting else self._max_num_seqs
        if num_there and num_there + num_seqs > num_places + self._max_queue_len:
            raise self._refusal(max(num_there - num_places, 0))
        self.num_pending += num_seqs
        try:
            yield
        finally:
            self.num_pending -= num_seqs
            self._forget_old()
            self._begun.append((self._clock(), num_seqs))

    def retry_after(self, num_ahead: int) -> int:
        """Seconds in which the sequences that wait would begin: ``num_ahead / rate``, within 1..60,
        where the rate is that at which sequences began in the last minute.
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
            f"{num_ahead:,} sequences wait already, and at most {self._max_queue_len:,} may; come "
            "back later",
            code="queue_full",
            headers={"Retry-After": str(self.retry_after(num_ahead))},
        )
