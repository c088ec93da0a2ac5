"""``Admission``: whether a waiting request may run now. Pure Python, no arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from mlx_paged.config import SchedulerConfig
from mlx_paged.core import AbsentBlock, BlockHash, ComputedBlocks, KVCacheManager
from mlx_paged.core.computed_blocks import NOTHING_COMPUTED
from mlx_paged.engine.batch import Batch
from mlx_paged.engine.prefix_cache import PrefixCache
from mlx_paged.engine.request import Completion, Share
from mlx_paged.engine.request_queues import MIN_LEAD, RequestQueues
from mlx_paged.engine.swap_space import SwapSpace
from mlx_paged.errors import (
    ArgumentError,
    PromptTooLongError,
    prompt_beyond_context,
    prompt_too_long,
)

if TYPE_CHECKING:  # The scheduler imports no arrays.
    from mlx_paged.cache import KVCache

# The most times that a request is preempted for a more urgent one, which bounds recomputation.
MAX_PREEMPTIONS = 8


class Found(NamedTuple):
    """The K/V that are available for a waiting request."""

    hit: ComputedBlocks  # in the prefix cache
    computed: ComputedBlocks  # what it begins with: the hit, or more by its swapped-out blocks


def num_seqs(completions: Iterable[Completion]) -> int:
    """The number of sequences, counting all completions of requests that are not forked yet."""
    return sum(completion.num_seqs for completion in completions)


class Admission:
    """The rules of admission: what a request finds, whether it fits, and which requests have to be
    preempted for it. Changes nothing.

    Args: as :class:`Scheduler`.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        cache: KVCache,
        config: SchedulerConfig,
        swap_space: SwapSpace,
        prefix_cache: PrefixCache,
        context_length: int | None,
    ) -> None:
        self._manager = manager
        self._block_need = manager.block_need
        self._cache = cache
        self._config = config
        self._swap_space = swap_space
        self._prefix_cache = prefix_cache
        self._context_length = context_length

    def _num_free_blocks(self, num_new_seqs: int = 0) -> int:
        """Blocks that can be taken, cached ones included, if this many more sequences run."""
        return self._manager.num_free_blocks + self._cache.num_growable_with(num_new_seqs)

    @property
    def max_num_blocks(self) -> int:
        """Blocks that the budget holds for a single sequence."""
        return self._cache.max_num_blocks()

    def max_num_tokens(self, num_blocks: int) -> int:
        """The most tokens of one request in ``num_blocks`` blocks; its last token has no K/V."""
        most, limit = self._block_need.max_num_tokens(num_blocks) + 1, self._config.max_model_len
        return most if limit is None else min(most, limit)

    def check(self, completion: Completion) -> None:
        """Refuse a request that can never run; from any thread.

        Raises:
            PromptTooLongError: its prompt leaves no token for an answer within ``max_model_len``,
                or the budget can never hold it; the message has the numbers.
            ValueError: it has more completions than ``max_num_seqs``.
        """
        limit = self._config.max_model_len
        if limit is not None and completion.num_tokens >= limit:
            raise prompt_beyond_context(completion.num_tokens, limit, self._context_length)
        if completion.num_seqs > self._config.max_num_seqs:
            raise ArgumentError(
                f"[scheduler] {completion.num_seqs} completions of one request are more than may "
                f"run at once, {self._config.max_num_seqs}; raise max_num_seqs"
            )
        num_needed = self._block_need.max_num_held_blocks(completion.num_tokens)
        if num_needed > self.max_num_blocks:
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
        num_needed = self._block_need.max_num_held_blocks(completion.num_tokens)
        return prompt_too_long(
            completion.num_tokens, num_needed, self._manager.pool.block_size, self.max_num_blocks
        )

    def absent_blocks(
        self, completion: Completion, has: Callable[[BlockHash], bool]
    ) -> Sequence[AbsentBlock]:
        """The blocks of a waiting request to read from a tier; none if it is swapped out.

        Args:
            has: whether the tier has a block.
        """
        if self._swap_space.num_tokens_of(completion.seq_id):
            return ()
        return self._prefix_cache.absent_blocks(completion, has)

    def fits(self, completions: Sequence[Completion]) -> bool:
        """Whether all tokens of waiting requests fit, without any cached blocks."""
        need = self._block_need
        num_needed = sum(need.max_num_held_blocks(each.num_tokens) for each in completions)
        return num_needed <= self._num_free_blocks(num_seqs(completions))

    def fits_ahead(self, running: Sequence[Completion]) -> bool:
        """Whether there are blocks for all running requests in the step after the one in flight."""
        manager, num_free = self._manager, self._num_free_blocks()
        budget = self._config.max_num_batched_tokens
        num_most = len(running) + -(-budget // self._manager.pool.block_size)
        if manager.keeps_all and num_most <= num_free:
            return True
        num_needed = 0
        for completion in running:
            num_new_tokens = min(completion.num_tokens - completion.num_computed_tokens + 1, budget)
            num_needed += manager.num_needed_blocks(completion.seq_id, num_new_tokens)
        return num_needed <= num_free

    def comes_first(self, waiting: Completion, running: Sequence[Completion]) -> bool:
        """Whether a waiting request may be admitted before some running ones in a step."""
        if waiting.request.share.rank < running[-1].request.share.rank:
            is_full = len(running) >= self._config.max_num_seqs
            if not is_full or not waiting.request.share.num_running:
                return True
        return any(self.is_preemptible(each, waiting) for each in running)

    @staticmethod
    def is_preemptible(running: Completion, waiting: Completion) -> bool:
        """Whether a running request may be preempted so that a more urgent one of its user is
        admitted.
        """
        return (
            waiting.order < running.order
            and waiting.request.share is running.request.share
            and waiting.request.priority < running.request.priority
            and running.num_preemptions < MAX_PREEMPTIONS
        )

    def requests_to_preempt(
        self, urgent: Completion, found: Found, queues: RequestQueues
    ) -> list[Completion] | None:
        """The requests that have to be preempted to admit a waiting one, the last in order first;
        ``None`` if preempting all eligible requests is not enough.
        """
        running = queues.running
        num_missing_seqs = queues.num_places([*running, urgent]) - self._config.max_num_seqs
        num_needed = self._block_need.num_blocks_to_admit(urgent.num_tokens, found.computed)
        num_free = self._num_free_blocks(urgent.num_seqs)
        if queues.shares.are_shared and not urgent.request.share.num_running:
            if num_missing_seqs <= 0 and num_needed <= num_free:
                return []
            states = self._manager.states
            if num_missing_seqs <= 0 and states is not None and states.num_released:
                return None  # The memory of those that made way is free soon.
            taken = self._place_to_take(urgent, found, queues, num_missing_seqs > 0)
            return None if taken is None else [taken]
        preempted: list[Completion] = []
        for completion in [*reversed(running), None]:
            is_alone = len(preempted) == len(running)
            num_left = 0 if is_alone else self.num_watermark_blocks
            if num_missing_seqs <= 0 and num_needed + num_left <= num_free:
                return preempted
            if completion is not None and self.is_preemptible(completion, urgent):
                preempted.append(completion)
                num_missing_seqs -= queues.num_places([completion])
                seq_ids = [each.seq_id for each in preempted]
                num_free = self._num_free_blocks(urgent.num_seqs - num_seqs(preempted))
                num_free += self._manager.num_freed_blocks(seq_ids, found.computed)
        return None

    def _place_to_take(
        self, urgent: Completion, found: Found, queues: RequestQueues, lacks_place: bool
    ) -> Completion | None:
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
        for completion in queues.running:
            completions.setdefault(completion.request.share, []).append(completion)
        num_users = queues.shares.num_active
        amounts = {share: len(each) for share, each in completions.items()}
        total = self._config.max_num_seqs
        if not lacks_place:
            total = self.max_num_blocks
            amounts = {share: self._num_freed_blocks(each) for share, each in completions.items()}
        least_work = urgent.request.share.work + MIN_LEAD
        eligible = [
            share
            for share, each in completions.items()
            if amounts[share] * num_users > total and (len(each) > 1 or share.work >= least_work)
        ]
        if not eligible:
            return None
        freed = [completion for share in eligible for completion in completions[share]]
        num_freed = self._num_freed_blocks(freed, found.computed)
        if self.num_spare_blocks(urgent, found.computed) + num_freed < 0:
            return None
        most = max(eligible, key=lambda share: (amounts[share], share.work, share.number))
        return min(reversed(completions[most]), key=attrgetter("num_preemptions"))

    def _num_freed_blocks(
        self, completions: Sequence[Completion], computed: ComputedBlocks = NOTHING_COMPUTED
    ) -> int:
        """Blocks that running requests would free, and those for which their recurrent states would
        leave memory.
        """
        num_freed = self._manager.num_freed_blocks([each.seq_id for each in completions], computed)
        num_of_states = self._num_free_blocks(-num_seqs(completions)) - self._num_free_blocks()
        return num_freed + num_of_states

    @property
    def num_watermark_blocks(self) -> int:
        """Blocks that stay free when a request is admitted while others run."""
        return math.ceil(self._config.watermark * self.max_num_blocks)

    def num_spare_blocks(self, completion: Completion, computed: ComputedBlocks) -> int:
        """Free blocks that are left after admitting a request; negative if there are too few."""
        num_needed = self._block_need.num_blocks_to_admit(completion.num_tokens, computed)
        return self._num_free_blocks(completion.num_seqs) - num_needed

    def num_blocks_to_give_up(self, completion: Completion, queues: RequestQueues) -> int:
        """By how many blocks the pool has to shrink so that a waiting request, which fits, and the
        states of its sequences are admitted; 0 if it does not fit.
        """
        num_blocks = self._cache.num_blocks_to_give_up(completion.num_seqs)
        num_places = queues.num_places([*queues.running, completion])
        if num_blocks <= 0 or num_places > self._config.max_num_seqs:
            return 0
        computed = self.find(completion).computed
        num_left = self.num_watermark_blocks if completion.request.share.num_running else 0
        if self.num_spare_blocks(completion, computed) < num_left:
            return 0
        num_needed = self._block_need.num_blocks_to_admit(completion.num_tokens, computed)
        num_free = self._manager.num_free_blocks - num_needed - num_left
        num_surplus = -self._cache.num_growable_with(completion.num_seqs)
        return max(num_surplus, min(num_blocks, num_free))

    def find(self, completion: Completion) -> Found:
        """Look up the K/V for a waiting request, without taking them."""
        hit = computed = self._prefix_cache.computed_blocks(completion)
        swapped = self._swap_space.find(completion.seq_id)
        if swapped is not None and swapped.num_tokens > hit.num_tokens:
            computed = self._manager.resumed(swapped, hit)
        return Found(hit, computed)

    def is_early(self, plan: Batch, found: Found) -> bool:
        """Whether a request needs copies of blocks that the planned step writes, which would be
        made too early: copies come before the step.
        """
        if not plan.new_block_ids:
            return False
        copied = self._block_need.copied_blocks(found.hit)
        return any(block.block_id in plan.new_block_ids for block in copied)
