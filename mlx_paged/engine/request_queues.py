"""``RequestQueues``: the requests that are not finished, in their order. Pure Python."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from operator import attrgetter

from mlx_paged.core import KVCacheManager
from mlx_paged.request import Request, RequestStatus, SeqId

_by_order = attrgetter("order")


class RequestQueues:
    """The running and the waiting requests, both in the ``order`` that a request gets when it is
    added.

    Attributes:
        running: the requests that hold blocks. Read-only; the methods change it.
        waiting: those that hold none, new or preempted.
        requests: all of them.
    """

    def __init__(self) -> None:
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.requests: dict[SeqId, Request] = {}
        self._arrivals = itertools.count()

    def add(self, request: Request, step: int) -> None:
        """Queue a new request, after those with a lower ``step``, or an equal one."""
        request.order = (step, next(self._arrivals), request.index)
        self.requests[request.seq_id] = request
        insort(self.waiting, request, key=_by_order)

    def add_fork(self, child: Request, has_blocks: bool) -> None:
        """Add a fork of a running request: running, or waiting to be recomputed."""
        self.requests[child.seq_id] = child
        if not has_blocks:
            child.status, child.num_computed_tokens = RequestStatus.PREEMPTED, 0
        insort(self.running if has_blocks else self.waiting, child, key=_by_order)

    def run(self, request: Request) -> None:
        """Move a waiting request to the running ones."""
        _remove(self.waiting, request)
        insort(self.running, request, key=_by_order)
        request.status = RequestStatus.RUNNING

    def requeue(self, request: Request) -> None:
        """Move a running request back to its place among the waiting ones, to be recomputed."""
        _remove(self.running, request)
        insort(self.waiting, request, key=_by_order)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        request.num_computed_tokens = 0

    def remove(self, request: Request) -> None:
        """Remove a request; the caller sets its status."""
        is_running = request.status is RequestStatus.RUNNING
        _remove(self.running if is_running else self.waiting, request)
        del self.requests[request.seq_id]

    def check_integrity(self, manager: KVCacheManager) -> None:
        """Check the queues against the tables of a manager. Raises AssertionError."""
        running = {request.seq_id for request in self.running}
        assert {
            seq for seq, request in self.requests.items() if request.status is RequestStatus.RUNNING
        } == running
        assert set(self.requests) == running | {request.seq_id for request in self.waiting}
        assert running <= set(manager.tables), "a running request has a table"
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_by_order)
        for request in self.waiting:
            assert request.seq_id not in manager.tables, "a waiting request holds nothing"
        for request in self.running:
            assert manager.num_tokens(request.seq_id) == request.num_computed_tokens
            assert request.num_computed_tokens <= request.num_tokens


def _remove(queue: list[Request], request: Request) -> None:
    """Remove a request from a sorted queue; raises ``ValueError`` if it is not there."""
    index = bisect_left(queue, request.order, key=_by_order)
    if index == len(queue) or queue[index] is not request:
        raise ValueError(f"[scheduler] {request} is not in its queue")
    del queue[index]
