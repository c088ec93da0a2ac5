"""``RequestQueues``: the requests that are not finished, in their order; which of the waiting ones
fit, and which of the running ones make way for them. Pure Python, no arrays.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from mlx_paged.core import ComputedBlocks, KVCacheManager
from mlx_paged.core.computed_blocks import NOTHING_COMPUTED
from mlx_paged.engine.request import Completion, CompletionStatus, Share
from mlx_paged.engine.scheduling.batch import Batch
from mlx_paged.engine.scheduling.prefix_cache import PrefixCache
from mlx_paged.errors import (
    ArgumentError,
    PromptTooLongError,
    prompt_beyond_context,
    prompt_too_long,
)
from mlx_paged.options.config import SchedulerConfig
from mlx_paged.request import SeqId

if TYPE_CHECKING:  # The scheduler imports no arrays.
    from mlx_paged.cache import KVCache

# At most this many requests that arrive after a waiting one are admitted before it because it does
# not fit yet.
MAX_PASSING = 256
# By how much work a user may lag behind the one with the most. A user who asks for less than a fair
# share saves up no more than this, and a new user begins with it.
MAX_LAG = 2048
# A user takes the only running sequence of another one whose work is ahead by this much. So where
# there are more users than places, each turn takes at least this many steps.
MIN_LEAD = 1024
# The most times that a request is preempted for a more urgent one, which bounds recomputation.
MAX_PREEMPTIONS = 8

_by_order = attrgetter("order")


def place_of(completion: Completion) -> tuple[int, tuple[int, ...]]:
    """The place among the running requests: first by user, then by the order of the requests."""
    return completion.request.share.rank, completion.order


def num_seqs(completions: Iterable[Completion]) -> int:
    """The number of sequences, counting all completions of requests that are not forked yet."""
    return sum([completion.num_seqs for completion in completions])


class RequestQueues:
    """The running and the waiting requests, each in the ``order`` that it gets when it is added.

    While several users have requests, the running ones are ordered by user first. Places go to the
    user of whom the fewest sequences run. The tokens of a step for prompts go by virtual time over
    counted work, as in the virtual token counters of Sheng et al. 2024: work is the tokens of
    prompts that are computed, and one for each step of each running sequence. Nothing here reads a
    clock, so all ranks of a model count alike.

    Args:
        manager, cache, config, context_length: as :class:`Scheduler`.
        prefix_cache: finds what waiting requests begin with.

    Attributes:
        running: the requests that hold blocks. Read-only; the methods change it.
        waiting: those that hold none, new or preempted.
        completions: all of them.
        num_users: the number of users with requests.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        cache: KVCache,
        config: SchedulerConfig,
        prefix_cache: PrefixCache,
        context_length: int | None = None,
    ) -> None:
        self.running: list[Completion] = []
        self.waiting: list[Completion] = []
        self.completions: dict[SeqId, Completion] = {}
        self.num_users = 0
        # With those of users without requests whose past work still counts.
        self._shares: dict[str | None, Share] = {}
        self._numbers, self._arrivals = itertools.count(), itertools.count()
        self._manager = manager
        self._block_need = manager.block_need
        self._cache = cache
        self._config = config
        self._prefix_cache = prefix_cache
        self._max_num_tokens: dict[int, int] = {}  # by the number of blocks
        self._context_length = context_length

    def add(self, completion: Completion, step: int) -> None:
        """Queue a new request, after those with a lower ``step``, or an equal one."""
        completion.order = (step, next(self._arrivals), completion.index)
        user = completion.request.user
        share = self._shares.get(user)
        if share is None or not share.is_active:
            min_work = self._min_work
            share = share or Share(user, next(self._numbers), min_work)
            share.work = max(share.work, min_work)
            self._shares[user] = share
            self.num_users += 1
        completion.request.share = share
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
        if not completion.request.share.is_active:
            self.num_users -= 1
            if not self.num_users:
                self._shares.clear()

    # Several users

    @property
    def are_shared(self) -> bool:
        """Whether several users have requests."""
        return self.num_users > 1

    def rank(self) -> None:
        """Order the running requests by whose turn it is, for the next step."""
        if not self.are_shared:
            return
        active = [share for share in self._shares.values() if share.is_active]
        # First, with the tokens for prompts: one of whom nothing runs yet, then the least work.
        active.sort(key=lambda share: (share.num_running > 0, share.work, share.number))
        if any(share.rank != rank for rank, share in enumerate(active)):
            for rank, share in enumerate(active):
                share.rank = rank
            self.running.sort(key=place_of)

    def count_step(self) -> None:
        """Count what running sequences had of a step; the scheduler counts tokens of prompts."""
        if len(self._shares) == 1:
            return  # There is no other to compare with.
        for share in self._shares.values():
            share.work += share.num_running
        min_work = self._min_work
        for user, share in list(self._shares.items()):
            if share.is_active:
                share.work = max(share.work, min_work)
            elif share.work <= min_work:
                del self._shares[user]  # The same as a new user.

    @property
    def _min_work(self) -> int:
        works = [share.work for share in self._shares.values() if share.is_active]
        return max(works) - MAX_LAG if works else 0

    def in_turn(self, passed: Sequence[Completion] = ()) -> Iterable[Completion]:
        """The waiting requests in the order in which they may be admitted.

        Args:
            passed: of users of whom nothing runs, and that do not fit in this step. Only others of
                whom nothing runs may pass them, and only ``MAX_PASSING`` requests that came later.
        """
        if not self.are_shared:
            return () if passed else self.waiting
        users = [share for share in self._shares.values() if share.waiting]
        # The next is the one of whom the fewest completions run, then the one with the least work.
        users.sort(key=attrgetter("num_running", "work", "number"))
        if passed:
            last = min(each.order[1] for each in passed) + MAX_PASSING
            heads = (each.waiting[0] for each in users if not each.num_running)
            return [each for each in heads if each.order[1] <= last and each not in passed]
        return itertools.chain.from_iterable(each.waiting for each in users)

    def num_places(self, completions: Sequence[Completion]) -> int:
        """How many of ``max_num_seqs`` places requests take. A request that is not forked yet takes
        one for each completion; while several users have requests it takes one, and completions
        without a place wait.
        """
        return len(completions) if self.are_shared else num_seqs(completions)

    def may_admit_others(self, plan: Batch, completion: Completion, is_admitted: bool) -> bool:
        """Whether others may be admitted in a step after a request was, or was not, since it does
        not fit.
        """
        if not self.are_shared or plan.only is not None:
            return is_admitted
        if plan.preempted or not (is_admitted or completion.request.share.num_running == 0):
            return False  # What was freed in this step is not given to others, nor taken back.
        if not is_admitted:
            plan.passed = (*plan.passed, completion)
        return True

    # Whether a request fits

    def check(self, completion: Completion) -> None:
        """Refuse a request that can never run; from any thread.

        Raises:
            PromptTooLongError: its prompt, and the first token of an answer if there is one, exceed
                ``max_model_len``, or the budget can never hold it; the message has the numbers.
            ValueError: it has more completions than ``max_num_seqs``.
        """
        limit, is_pooled = self._config.max_model_len, completion.request.pooling is not None
        if limit is not None and completion.num_tokens >= limit + is_pooled:
            raise prompt_beyond_context(
                completion.num_tokens, limit, self._context_length, has_answer=not is_pooled
            )
        if completion.num_seqs > self._config.max_num_seqs:
            raise ArgumentError(
                f"[scheduler] {completion.num_seqs} completions of one request are more than may "
                f"run at once, {self._config.max_num_seqs}; raise max_num_seqs"
            )
        num_needed = self._block_need.max_num_held_blocks(completion.num_tokens)
        if num_needed > self._cache.max_num_blocks():
            raise self.prompt_too_long_error(completion)
        if num_needed > (num_blocks := self._cache.max_num_blocks(completion.num_seqs)):
            raise ArgumentError(
                f"[scheduler] {completion.num_seqs} completions of one prompt of "
                f"{completion.num_tokens} tokens don't fit: beside their recurrent states "
                f"kv_cache_bytes holds {max(0, num_blocks)} blocks of K/V, and the prompt needs "
                f"{num_needed}; ask for fewer, or raise kv_cache_bytes",
                "n",
            )

    def prompt_too_long_error(self, completion: Completion) -> PromptTooLongError:
        """The error of a request that the budget can't hold, with the numbers."""
        num_tokens, block_size = completion.num_tokens, self._manager.pool.block_size
        num_needed = self._block_need.max_num_held_blocks(num_tokens)
        return prompt_too_long(num_tokens, num_needed, block_size, self._cache.max_num_blocks())

    def max_num_tokens(self) -> int:
        """The most tokens of one request, of which the last has no K/V."""
        num_blocks = self._cache.max_num_blocks()
        if num_blocks not in self._max_num_tokens:
            fitting = self._block_need.max_num_tokens(num_blocks) + 1
            limit = self._config.max_model_len
            self._max_num_tokens = {num_blocks: fitting if limit is None else min(fitting, limit)}
        return self._max_num_tokens[num_blocks]

    def num_left_blocks(self, completion: Completion) -> int:
        """Blocks that stay free when a waiting request is admitted: the watermark, which the first
        request of a user does not need, because others make way for it where blocks run out.
        """
        return self._num_watermark_blocks if completion.request.share.num_running else 0

    @property
    def _num_watermark_blocks(self) -> int:
        return math.ceil(self._config.watermark * self._cache.max_num_blocks())

    def _num_free_blocks(self, num_new_seqs: int = 0) -> int:
        """Blocks that can be taken, cached ones included, if this many more sequences run."""
        return self._manager.num_free_blocks + self._cache.num_growable_blocks(num_new_seqs)

    def num_spare_blocks(self, completion: Completion, computed: ComputedBlocks) -> int:
        """Free blocks that are left after admitting a request; negative if there are too few."""
        num_needed = self._block_need.num_blocks_to_admit(completion.num_tokens, computed)
        return self._num_free_blocks(completion.num_seqs) - num_needed

    def fits(self, completions: Sequence[Completion]) -> bool:
        """Whether all tokens of waiting requests fit, without any cached blocks."""
        need = self._block_need.max_num_held_blocks
        num_needed = sum(need(each.num_tokens) for each in completions)
        return num_needed <= self._num_free_blocks(num_seqs(completions))

    def fits_ahead(self) -> bool:
        """Whether there are blocks for all running requests in the step after the one in flight."""
        manager, num_free = self._manager, self._num_free_blocks()
        budget = self._config.max_num_batched_tokens
        max_needed = len(self.running) + -(-budget // manager.pool.block_size)
        if manager.keeps_all and max_needed <= num_free:
            return True
        num_needed = 0
        for completion in self.running:
            num_new_tokens = min(completion.num_tokens - completion.num_computed_tokens + 1, budget)
            num_needed += manager.num_needed_blocks(completion.seq_id, num_new_tokens)
        return num_needed <= num_free

    def num_blocks_to_shrink_by(self, completion: Completion) -> int:
        """By how many blocks the pool has to shrink so that a waiting request, which fits, and the
        states of its sequences are admitted; 0 if it does not fit.
        """
        num_blocks = self._cache.num_blocks_to_shrink_by(completion.num_seqs)
        num_places = self.num_places([*self.running, completion])
        if num_blocks <= 0 or num_places > self._config.max_num_seqs:
            return 0
        computed = self._prefix_cache.find(completion).computed
        num_spare = self.num_spare_blocks(completion, computed) - self.num_left_blocks(completion)
        # Blocks of the pool that the states take in any case.
        num_taken = -self._cache.num_growable_blocks(completion.num_seqs)
        return 0 if num_spare < 0 else max(num_taken, min(num_blocks, num_spare + num_taken))

    # Which requests make way for another

    def may_come_first(self, waiting: Completion) -> bool:
        """Whether a waiting request may be admitted before some running ones in a step."""
        share, last = waiting.request.share, self.running[-1].request.share
        is_full = len(self.running) >= self._config.max_num_seqs
        if share.rank < last.rank and not (is_full and share.num_running):
            return True
        return any(_is_preemptible(each, waiting) for each in self.running)

    def requests_to_preempt(
        self, urgent: Completion, computed: ComputedBlocks
    ) -> list[Completion] | None:
        """The requests that have to be preempted to admit a waiting one, the last in order first;
        ``None`` if preempting all eligible requests is not enough.

        Args:
            computed: what the waiting one begins with.
        """
        running, manager = self.running, self._manager
        num_missing_seqs = self.num_places([*running, urgent]) - self._config.max_num_seqs
        num_needed = self._block_need.num_blocks_to_admit(urgent.num_tokens, computed)
        if self.are_shared and not urgent.request.share.num_running:
            if num_missing_seqs <= 0 and num_needed <= self._num_free_blocks(urgent.num_seqs):
                return []
            states = manager.states
            if num_missing_seqs <= 0 and states is not None and states.num_released:
                return None  # The memory of those that made way is free soon.
            return self._preempted_for_fairness(urgent, computed, num_missing_seqs > 0)
        eligible = [each for each in reversed(running) if _is_preemptible(each, urgent)]
        for count in range(len(eligible) + 1):
            preempted = eligible[:count]
            num_free = self._num_free_blocks(urgent.num_seqs - num_seqs(preempted))
            num_free += manager.num_freed_blocks([each.seq_id for each in preempted], computed)
            num_left = self._num_watermark_blocks if count < len(running) else 0
            has_places = num_missing_seqs <= self.num_places(preempted)
            if has_places and num_needed + num_left <= num_free:
                return preempted
        return None

    def _preempted_for_fairness(
        self, urgent: Completion, computed: ComputedBlocks, needs_place: bool
    ) -> list[Completion] | None:
        """The running request that makes way for one of a user of whom nothing runs; ``None`` if
        none has to.

        It is of the user with the most sequences or, if there are enough places, with the most
        blocks: more than an equal share, and not the user's only sequence, unless much more was
        done for that user. Of that user's requests it is the last one in order, of those that were
        preempted least often, so that none is preempted again and again.

        One is enough if places are short. If blocks are, it may take some steps with one each; none
        is preempted if these blocks will not be enough.
        """
        completions: dict[Share, list[Completion]] = {}
        for completion in self.running:
            completions.setdefault(completion.request.share, []).append(completion)
        total = self._config.max_num_seqs
        amounts = {share: len(each) for share, each in completions.items()}
        if not needs_place:
            total = self._cache.max_num_blocks()
            amounts = {share: self._num_freed_blocks(each) for share, each in completions.items()}
        min_work = urgent.request.share.work + MIN_LEAD
        eligible = [
            share
            for share, each in completions.items()
            if amounts[share] * self.num_users > total and (len(each) > 1 or share.work >= min_work)
        ]
        freed = [completion for share in eligible for completion in completions[share]]
        num_freed = self._num_freed_blocks(freed, computed)
        if not eligible or self.num_spare_blocks(urgent, computed) + num_freed < 0:
            return None
        chosen = max(eligible, key=lambda share: (amounts[share], share.work, share.number))
        return [min(reversed(completions[chosen]), key=attrgetter("num_preemptions"))]

    def _num_freed_blocks(
        self, completions: Sequence[Completion], computed: ComputedBlocks = NOTHING_COMPUTED
    ) -> int:
        """Blocks that running requests would free, and those for which their recurrent states would
        leave memory.
        """
        num_freed = self._manager.num_freed_blocks([each.seq_id for each in completions], computed)
        num_of_states = self._num_free_blocks(-num_seqs(completions)) - self._num_free_blocks()
        return num_freed + num_of_states

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


def _is_preemptible(running: Completion, waiting: Completion) -> bool:
    """Whether a running request may be preempted so that a more urgent one of its user is
    admitted.
    """
    return (
        waiting.order < running.order
        and waiting.request.share is running.request.share
        and waiting.request.priority < running.request.priority
        and running.num_preemptions < MAX_PREEMPTIONS
    )


def _remove(
    queue: list[Completion], completion: Completion, key: Callable[[Completion], Any]
) -> None:
    index = bisect_left(queue, key(completion), key=key)
    if index == len(queue) or queue[index] is not completion:
        raise ValueError(f"[scheduler] {completion} is not in its queue")
    del queue[index]
