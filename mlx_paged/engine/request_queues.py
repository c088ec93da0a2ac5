"""``RequestQueues``: the requests that are not finished, in their order, and how much was done for
each user. Pure Python.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from mlx_paged.engine.batch import Batch
from mlx_paged.engine.request import Completion, CompletionStatus, Share
from mlx_paged.request import SeqId

# At most this many requests that arrive after a waiting one are admitted before it because it does
# not fit yet.
MAX_PASSING = 256
# By how much work a user may lag behind the one with the most. A user who asks for less than a fair
# share saves up no more than this, and a new user begins with it.
MAX_LAG = 2048
# A user takes the only running sequence of another one whose work is ahead by this much. So where
# there are more users than places, each turn takes at least this many steps.
MIN_LEAD = 1024

_by_order = attrgetter("order")


def place_of(completion: Completion) -> tuple[int, tuple[int, ...]]:
    """The place among the running requests: first by user, then by the order of the requests."""
    return completion.request.share.rank, completion.order


class FairShares:
    """The shares of all users with requests, and of those whose past work still counts.

    Places go to the user of whom the fewest sequences run. The tokens of a step for prompts go by
    virtual time over counted work, as in the virtual token counters of Sheng et al. 2024: work is
    the tokens of prompts that are computed, and one for each step of each running sequence. Nothing
    here reads a clock, so all ranks of a model count alike.

    Attributes:
        num_active: the number of users with requests.
    """

    def __init__(self) -> None:
        self.num_active = 0
        self._shares: dict[str | None, Share] = {}
        self._numbers = itertools.count()

    @property
    def are_shared(self) -> bool:
        """Whether several users have requests."""
        return self.num_active > 1

    def join(self, user: str | None) -> Share:
        """The share of a user, who is about to have a request."""
        share = self._shares.get(user)
        if share is not None and share.is_active:
            return share
        least = self._least_work
        if share is None:
            share = Share(user, next(self._numbers), least)
            self._shares[user] = share
        share.work = max(share.work, least)
        self.num_active += 1
        return share

    def leave(self, share: Share) -> None:
        """A request of a user has ended."""
        if share.is_active:
            return
        self.num_active -= 1
        if not self.num_active:
            self._shares.clear()

    def in_turn(self) -> list[Share]:
        """The users with waiting requests, in the order in which they are admitted."""
        waiting = [share for share in self._shares.values() if share.waiting]
        return sorted(waiting, key=attrgetter("admission_turn"))

    def rank(self) -> bool:
        """Rank the users for the next step; returns whether that changed any rank."""
        active = [share for share in self._shares.values() if share.is_active]
        has_changed = False
        for rank, share in enumerate(sorted(active, key=attrgetter("step_turn"))):
            has_changed = has_changed or share.rank != rank
            share.rank = rank
        return has_changed

    def count_step(self) -> None:
        """Count what running sequences had of a step; the scheduler counts tokens of prompts."""
        if len(self._shares) == 1:
            return  # There is no other to compare with.
        for share in self._shares.values():
            share.work += share.num_running
        least = self._least_work
        for user, share in list(self._shares.items()):
            if share.is_active:
                share.work = max(share.work, least)
            elif share.work <= least:
                del self._shares[user]  # The same as a new user.

    @property
    def _least_work(self) -> int:
        works = [share.work for share in self._shares.values() if share.is_active]
        return max(works) - MAX_LAG if works else 0


class RequestQueues:
    """The running and the waiting requests, each in the ``order`` that it gets when it is added.

    While several users have requests, the running ones are ordered by user first, as ``rank`` last
    ranked the users.

    Attributes:
        running: the requests that hold blocks. Read-only; the methods change it.
        waiting: those that hold none, new or preempted.
        requests: all of them.
        shares: of the users.
    """

    def __init__(self) -> None:
        self.running: list[Completion] = []
        self.waiting: list[Completion] = []
        self.completions: dict[SeqId, Completion] = {}
        self.shares = FairShares()
        self._arrivals = itertools.count()

    def add(self, completion: Completion, step: int) -> None:
        """Queue a new request, after those with a lower ``step``, or an equal one."""
        completion.order = (step, next(self._arrivals), completion.index)
        completion.request.share = self.shares.join(completion.request.user)
        self.completions[completion.seq_id] = completion
        self._wait(completion)

    def add_fork(self, child: Completion, has_blocks: bool) -> None:
        """Add a fork of a running request: running, or waiting to be recomputed."""
        self.completions[child.seq_id] = child
        if has_blocks:
            self._run(child)
        else:
            child.status, child.num_computed_tokens = CompletionStatus.PREEMPTED, 0
            self._wait(child)

    def run(self, completion: Completion) -> None:
        """Move a waiting request to the running ones."""
        self._remove(completion)
        self._run(completion)
        completion.status = CompletionStatus.RUNNING

    def requeue(self, completion: Completion) -> None:
        """Move a running request back to its place among the waiting ones, to be recomputed."""
        self._remove(completion)
        self._wait(completion)
        completion.status = CompletionStatus.PREEMPTED
        completion.num_preemptions += 1
        completion.num_computed_tokens = 0

    def remove(self, completion: Completion) -> None:
        """Remove a request; the caller sets its status."""
        self._remove(completion)
        del self.completions[completion.seq_id]
        self.shares.leave(completion.request.share)

    # Several users

    def rank(self) -> None:
        """Order the running requests by whose turn it is, for the next step."""
        if self.shares.are_shared and self.shares.rank():
            self.running.sort(key=place_of)

    def in_turn(self, passed: Sequence[Completion] = ()) -> Iterable[Completion]:
        """The waiting requests in the order in which they may be admitted.

        Args:
            passed: of users of whom nothing runs, and that do not fit in this step. Only others of
                whom nothing runs may pass them, and only ``MAX_PASSING`` requests that came later.
        """
        if not self.shares.are_shared:
            return () if passed else self.waiting
        users = self.shares.in_turn()
        if passed:
            users = [each for each in users if not each.num_running]
            last = min(each.order[1] for each in passed) + MAX_PASSING
            heads = (each.waiting[0] for each in users)
            return [each for each in heads if each.order[1] <= last and each not in passed]
        return itertools.chain.from_iterable(each.waiting for each in users)

    def num_places(self, completions: Sequence[Completion]) -> int:
        """How many of ``max_num_seqs`` places requests take. A request that is not forked yet takes
        one for each completion; while several users have requests it takes one, and completions
        without a place wait.
        """
        if self.shares.are_shared:
            return len(completions)
        return sum([completion.num_seqs for completion in completions])

    def may_admit_others(self, plan: Batch, completion: Completion, is_admitted: bool) -> bool:
        """Whether others may be admitted in a step after a request was, or was not, since it does
        not fit.
        """
        if not self.shares.are_shared or plan.only is not None:
            return is_admitted
        if plan.preempted or not (is_admitted or completion.request.share.num_running == 0):
            return False  # What was freed in this step is not given to others, nor taken back.
        if not is_admitted:
            plan.passed = (*plan.passed, completion)
        return True

    # Inside

    def _run(self, completion: Completion) -> None:
        insort(self.running, completion, key=place_of)
        completion.request.share.num_running += 1

    def _wait(self, completion: Completion) -> None:
        for queue in (self.waiting, completion.request.share.waiting):
            insort(queue, completion, key=_by_order)

    def _remove(self, completion: Completion) -> None:
        """Remove a request from its queues; raises ``ValueError`` if it is not there."""
        if completion.status is CompletionStatus.RUNNING:
            _remove(self.running, completion, place_of)
            completion.request.share.num_running -= 1
        else:
            for queue in (self.waiting, completion.request.share.waiting):
                _remove(queue, completion, _by_order)


def _remove(
    queue: list[Completion], completion: Completion, key: Callable[[Completion], Any]
) -> None:
    index = bisect_left(queue, key(completion), key=key)
    if index == len(queue) or queue[index] is not completion:
        raise ValueError(f"[scheduler] {completion} is not in its queue")
    del queue[index]
