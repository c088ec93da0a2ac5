"""``Admission``: how many sequences may wait. Imports no MLX."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlx_paged.server.errors import ApiError

WINDOW = 60.0  # seconds that the rate of a Retry-After is taken from
MAX_RETRY_AFTER = 60  # seconds


class Admission:
    """The queue limit: refuses sequences that would wait behind too many others.

        with admission.admit(params.n):
            ...                             # until the answer ends

    A sequence waits in the engine, for a place among ``max_num_seqs`` or for K/V memory. The engine
    says how many do. Those that it has not seen yet, as a step runs, are counted here.

    Args:
        max_queue_len: sequences that may wait.
        max_num_seqs: sequences that run at once.
        num_waiting: how many wait in the engine now.
        clock: in seconds.

    Attributes:
        num_open: sequences that are admitted and have not ended.
        num_refused: requests that were refused.
    """

    def __init__(
        self,
        max_queue_len: int,
        max_num_seqs: int,
        num_waiting: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.num_open = 0
        self.num_refused = 0
        self._max_queue_len = max_queue_len
        self._max_num_seqs = max_num_seqs
        self._num_waiting = num_waiting
        self._clock = clock
        self._start = clock()
        self._ends: deque[tuple[float, int]] = deque()  # when, and how many sequences

    @contextmanager
    def admit(self, num_seqs: int = 1) -> Iterator[None]:
        """Hold places for the sequences of a request until it ends. One that finds nobody is
        admitted, however many sequences it has.

        Raises:
            ApiError: 503 with ``Retry-After``: too many wait.
        """
        num_waiting, max_open = self._num_waiting(), self._max_num_seqs + self._max_queue_len
        for_memory = num_waiting and num_waiting + num_seqs > self._max_queue_len
        for_a_place = self.num_open and self.num_open + num_seqs > max_open
        if for_memory or for_a_place:
            self.num_refused += 1
            raise self._refusal(max(num_waiting, self.num_open - self._max_num_seqs))
        self.num_open += num_seqs
        try:
            yield
        finally:
            self.num_open -= num_seqs
            self._forget_old_ends()
            self._ends.append((self._clock(), num_seqs))

    def retry_after(self, num_ahead: int) -> int:
        """Seconds in which the sequences that wait would begin: ``num_ahead / rate``, within 1..60,
        where the rate is that at which sequences ended in the last minute.
        """
        self._forget_old_ends()
        num_ended = sum(num_seqs for _, num_seqs in self._ends)
        if not num_ended:
            return MAX_RETRY_AFTER
        seconds = min(WINDOW, self._clock() - self._start)
        return min(max(math.ceil(num_ahead * seconds / num_ended), 1), MAX_RETRY_AFTER)

    def _forget_old_ends(self) -> None:
        now = self._clock()
        while self._ends and self._ends[0][0] < now - WINDOW:
            self._ends.popleft()

    def _refusal(self, num_ahead: int) -> ApiError:
        return ApiError(
            503,
            f"{num_ahead:,} sequences wait already, and at most {self._max_queue_len:,} may; come "
            "back later",
            code="queue_full",
            headers={"Retry-After": str(self.retry_after(num_ahead))},
        )
