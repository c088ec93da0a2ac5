"""``Scheduler``: which requests run in the next step, and with how many tokens each. Pure Python,
no arrays.

Its unit is a :class:`Completion`: a request for n of them begins as one, and is forked when its
prompt is computed. Where the text below says request, it means one completion.

There is no prefill phase and no decode phase. A request has ``num_tokens`` and
``num_computed_tokens``, and a step's work is the difference, capped by a token budget: whole
prompts, chunks of them and decodes are one rule (as in vLLM's v1 scheduler, and Sarathi-Serve,
Agrawal et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from mlx_paged.core import BlockCopy, ComputedBlocks, KVCacheManager
from mlx_paged.core.computed_blocks import NOTHING_COMPUTED
from mlx_paged.engine.request import PENDING_TOKEN, Completion, CompletionStatus, Request
from mlx_paged.engine.scheduling.batch import (
    Batch,
    CopyBlocks,
    Scheduled,
    ShiftKeys,
    SwapIn,
    SwapOut,
    Taken,
)
from mlx_paged.engine.scheduling.prefix_cache import FoundPrefix, PrefixCache, SwapSpace
from mlx_paged.engine.scheduling.request_queues import RequestQueues, place_of
from mlx_paged.engine.scheduling.step_budget import TokenBudgets, token_budget
from mlx_paged.engine.speculation.speculation import (
    NO_SPECULATION,
    Speculation,
    Verification,
    add_drafts,
)
from mlx_paged.options.config import MAX_RUN_TOKENS, SchedulerConfig
from mlx_paged.request import SeqId, StopReason

if TYPE_CHECKING:  # The scheduler imports no arrays.
    from mlx_paged.cache import KVCache
    from mlx_paged.cache.contiguous import ContiguousKVCache
    from mlx_paged.engine.storing.tier_cache import TierCache

# The most rows of logits that a step computes for the log-probabilities of prompts. 256 rows of
# 152,000 logits take 156 MB in float32, several times over.
MAX_SCORED_ROWS = 256
# What a step tries to hold, in this order, after one that has held something: in a deterministic
# engine a chunk and the rows of others take turns, so that neither waits for long.
NEXT_TURNS: Mapping[Taken, Sequence[Taken]] = {
    "all": ("all",),
    "chunk": ("rows", "chunk"),
    "rows": ("chunk", "rows"),
}


class Scheduler:
    """Continuous batching: first come, first served, with priorities, in fair shares of the users.

    Each request has an ``order``, fixed when it is added: the current step, plus ``priority_steps``
    for each level of priority below the highest. Of the requests of a user, the one with the lowest
    order is admitted first and preempted last. While several users have requests, those of the user
    whose turn it is come before those of the others, and the first request of a user of whom
    nothing runs may take a place (:meth:`RequestQueues.requests_to_preempt`).

    A request is admitted when all its tokens fit now and, if others run, the watermark stays free.
    A running request is preempted, the last in order of the eligible ones, when

    - another running request finds no free block, or
    - the first waiting request exceeds ``max_num_seqs`` or the free blocks, and fits into what the
      preempted requests free. Only requests of its user that come after it in order, are less
      urgent, and were preempted fewer than ``MAX_PREEMPTIONS`` times are eligible; if they would
      not free enough, none is preempted.

    A preempted request frees its blocks and waits in its old place, to be recomputed or, if it fits
    into the :class:`SwapSpace`, swapped in.

    No request starves. With d levels between the most urgent request of a user and a given one, no
    request of that user that is added more than ``d * priority_steps`` steps later comes before it
    in order. If n others ever come before it, and none has more than m tokens, prompt and answer,
    it is finished at most ``d * priority_steps + (n + 1) * (max_num_seqs + 1) * m`` steps after it
    was added, for a user alone: the first running request advances in each step, so all are
    finished within ``max_num_seqs * m`` steps, after which the first of all is admitted, and takes
    ``m`` steps. (The time to read from a tier is extra.) In a deterministic engine, where chunks of
    prompts and rows of answers take turns, it is twice as many.

    Not thread-safe: one thread at a time.

    Args:
        manager: of the block tables; only the scheduler allocates and frees in it.
        cache: of the blocks of its pool.
        eos_token_ids: tokens that end a completion.
        swap_space: for preempted requests; none by default.
        speculation: makes drafts; none by default.
        tier: keeps blocks outside of the pool; none by default. A waiting request whose blocks are
            being read from it is skipped.
        context_length: the largest ``max_model_len`` that errors may advise; ``None`` for any.
        unshared: for a cache whose sequences share no blocks.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        cache: KVCache,
        config: SchedulerConfig,
        eos_token_ids: frozenset[int] = frozenset(),
        swap_space: SwapSpace | None = None,
        speculation: Speculation = NO_SPECULATION,
        tier: TierCache | None = None,
        context_length: int | None = None,
        unshared: ContiguousKVCache | None = None,
    ):
        self.manager = manager
        self.cache = cache
        self.config = config
        self.eos_token_ids = eos_token_ids
        self.swap_space = swap_space or SwapSpace(0)
        self.speculation = speculation
        self.context_length = context_length
        self._prefix_cache = PrefixCache(manager, self.swap_space, config, unshared)
        self.prefix_history = self._prefix_cache.history
        self._queues = RequestQueues(manager, cache, config, self._prefix_cache, context_length)
        self.running: Sequence[Completion] = self._queues.running
        self.waiting: Sequence[Completion] = self._queues.waiting
        self.completions: Mapping[SeqId, Completion] = MappingProxyType(self._queues.completions)
        self.verification = Verification(manager, self._prefix_cache)
        limit = config.max_num_batched_tokens
        self.limits = TokenBudgets(limit, min(limit, config.max_num_mixed_tokens))
        self.num_steps = 0
        self.num_preemptions = 0
        self._tier_cache = tier
        self._block_size = manager.pool.block_size
        self._max_num_tokens = 0  # of one request, in the newest step
        self._turns = NEXT_TURNS["rows" if config.deterministic else "all"]

    @property
    def max_num_blocks(self) -> int:
        """Blocks that the budget holds for a single sequence."""
        return self.cache.max_num_blocks()

    # A request comes and goes

    def check(self, request: Request) -> None:
        """Refuse a request that can never run, as :meth:`RequestQueues.check`; from any thread."""
        self._queues.check(request.completions[0])

    def add(self, request: Request) -> None:
        """Queue a request; one that is queued already, or finished meanwhile, is ignored."""
        first = request.completions[0]
        if first.is_finished or first.seq_id in self._queues.completions:
            return
        step = self.num_steps + request.priority * self.config.priority_steps
        self._queues.add(first, step)

    def add_fork(self, child: Completion) -> None:
        """Add another completion of a running request. It waits, to be recomputed, if there is no
        place for it, or if the cache can't share blocks and a copy does not fit.
        """
        first = child.request.completions[0]
        has_blocks = len(self.running) < self.config.max_num_seqs and self.cache.fork(
            self.manager, first.seq_id, child.seq_id
        )
        child.request.completions.append(child)
        self._queues.add_fork(child, has_blocks)

    def finish(
        self,
        completion: Completion,
        reason: str,
        stop_reason: StopReason = None,
        error: Exception | None = None,
    ) -> None:
        """Remove a request that is finished, aborted or failed, and free its blocks at once.

        One that was not added yet is marked as finished, so that :meth:`add` ignores it.
        """
        if completion.is_finished:
            return
        if self._queues.completions.get(completion.seq_id) is completion:
            self._queues.remove(completion)
            self._prefix_cache.end(completion)
            self.speculation.end(completion, self._block_size)
            if completion.seq_id in self.manager.tables:
                self.manager.free(completion.seq_id)
            self.swap_space.release(completion.seq_id)
            self._end_prefetch(completion)
        completion.status = CompletionStatus.FINISHED
        completion.finish_reason, completion.stop_reason = reason, stop_reason
        completion.error = error

    # A step

    def schedule(
        self,
        only: Completion | None = None,
        budgets: TokenBudgets | None = None,
        is_ahead: bool = False,
    ) -> Batch:
        """Plan the next step and allocate its slots; the batch is empty if nothing can run.

        Args:
            only: schedule no other request than this.
            budgets: of its new tokens (:func:`token_budget`); by default ``limits``.
            is_ahead: for :meth:`schedule_ahead`.
        """
        running, manager, queues = self.running, self.manager, self._queues
        queues.rank()
        self._shrink_pool(only, is_ahead)
        self.num_steps += 1
        self._max_num_tokens = queues.max_num_tokens()
        plan = Batch(0, MAX_SCORED_ROWS, only, is_ahead)
        for takes in self._turns:
            plan.takes = takes
            plan.token_budget = self._token_budget(plan, budgets or self.limits)
            urgent = self._first_urgent() if takes != "rows" and only is None else None
            # A decode takes at most one block. The pool grows once, before cached blocks are
            # evicted.
            self.cache.make_room(len(running) * len(manager.retentions))
            index, takes_all = 0, takes == "all"
            while index < len(running) and (takes_all or not plan.is_full):
                completion = running[index]
                if urgent is not None and place_of(urgent) < place_of(completion):
                    # At its place in the order: the requests before it are scheduled.
                    is_admitted = self._admit_urgent(plan, urgent, index)
                    index += is_admitted
                    may_admit = queues.may_admit_others(plan, urgent, is_admitted)
                    urgent = self._first_urgent(plan.passed) if may_admit else None
                    continue
                num_new_tokens = len(completion.token_ids) - completion.num_computed_tokens
                # 0 if the token that it awaits is its last one.
                is_other = only is not None and completion is not only
                if num_new_tokens == 0 or is_other or not (takes_all or plan.holds(completion)):
                    index += 1
                    continue
                if num_new_tokens > 1:
                    is_alone = only is not None or plan.takes == "chunk"
                    num_after = 0 if is_alone else len(running) - index - 1
                    num_new_tokens = self._next_chunk(plan, completion, num_after)
                copies = manager.allocate_slots(completion.seq_id, num_new_tokens)
                if copies is not None:
                    self._add_part(plan, completion, num_new_tokens, copies)
                    index += 1
                elif not self._make_way(plan, completion, num_new_tokens):
                    break
            if not plan.preempted:
                self._admit_waiting(plan)
                add_drafts(plan, self.speculation, manager, self.config.max_model_len)
            if plan.scheduled:
                break
        self._turns = NEXT_TURNS[plan.takes]
        queues.count_step()
        return plan

    def schedule_ahead(
        self, awaited: Iterable[Completion], budgets: TokenBudgets | None = None
    ) -> Batch | None:
        """Plan the step after one whose tokens are not read yet.

        No request is preempted or ended for it, since the unread tokens may end some.

        Args:
            awaited: the requests that get a token from the previous step.
            budgets: as :meth:`schedule`.

        Returns:
            ``None``, without a change, if there may be too few blocks: the tokens have to be read
            first.
        """
        queues = self._queues
        if not queues.fits_ahead():
            return None
        queues.rank()
        first = next(iter(queues.in_turn()), None)
        if first is not None and queues.num_blocks_to_shrink_by(first) > 0:
            return None
        urgent = self._first_urgent()
        if urgent is not None and queues.requests_to_preempt(
            urgent, self._prefix_cache.find(urgent).computed
        ):
            return None
        for completion in awaited:
            is_last = (
                completion.num_output_tokens + 1 == completion.request.params.max_tokens
                or completion.num_tokens + 1 >= self._max_num_tokens
            )
            if not is_last and not completion.is_finished:
                completion.token_ids.append(PENDING_TOKEN)
        return self.schedule(None, budgets, is_ahead=True)

    def _token_budget(self, plan: Batch, budgets: TokenBudgets) -> int:
        """The most new tokens of a step; in a deterministic engine its limit."""
        limits, speculation = self.limits, self.speculation
        if plan.takes != "all":
            return limits.prefill if plan.takes == "chunk" else limits.mixed
        is_shared = self._queues.are_shared
        return token_budget(budgets, limits, self.running, speculation.max_more, is_shared)

    def _make_way(self, plan: Batch, completion: Completion, num_new_tokens: int) -> bool:
        """Preempt the last request for a running one that finds no block, or end it if it is alone;
        False, without a change, in a step ahead.
        """
        if plan.is_ahead:
            return False
        if len(self.running) > 1:
            # The last in order: no request after this one is in the step yet.
            self._preempt(plan, self.running[-1])
            self.cache.make_room(num_new_tokens * len(self.manager.retentions))
        else:
            self._finish_unfit(plan, completion)
        return True

    def _shrink_pool(self, only: Completion | None, is_ahead: bool) -> None:
        """Shrink the pool if it has memory that the recurrent states of the next waiting request
        need; not in a step ahead, while the blocks that move are read.
        """
        if not self.waiting or self.manager.states is None or is_ahead:
            return
        completion = only or self._first_ready(self._queues.in_turn())
        if completion is None or completion.seq_id in self.manager.tables:
            return
        num_blocks = self._queues.num_blocks_to_shrink_by(completion)
        if num_blocks > 0:
            self.cache.shrink_slabs(self.manager.shrink_pool(num_blocks))

    def set_budget(self, nbytes: int) -> int:
        """Change the budget of K/V and recurrent states; returns what it is then. Cached K/V beyond
        it are evicted. Unfinished requests were admitted to the present budget, so it is only
        raised while there are any.
        """
        cache, manager = self.cache, self.manager
        if self.running or self.waiting:
            nbytes = max(nbytes, cache.nbytes_budget)
        num_blocks = min(cache.set_budget(nbytes), manager.num_free_blocks)
        cache.shrink_slabs(manager.shrink_pool(num_blocks))
        return cache.nbytes_budget

    def _next_chunk(self, plan: Batch, completion: Completion, num_after: int) -> int:
        """How many tokens of its prompt a running request computes in this step. It leaves a token
        of the budget to each request after it, so that it delays no decode.
        """
        num_new_tokens = completion.num_tokens - completion.num_computed_tokens
        num_new_tokens = min(num_new_tokens, plan.token_budget - num_after)
        num_new_tokens = min(num_new_tokens, self._max_chunk(plan, completion))
        num_needed = self.manager.num_needed_blocks(completion.seq_id, num_new_tokens)
        self.cache.make_room(num_needed + num_after)
        if plan.takes == "chunk":
            return num_new_tokens  # Never a part of it.
        num_left_blocks = num_after * len(self.manager.retentions)
        return self.manager.max_fitting(completion.seq_id, num_new_tokens, num_left_blocks)

    def _first_ready(self, waiting: Iterable[Completion]) -> Completion | None:
        """The first waiting request that does not have to wait for blocks to be read."""
        if self._tier_cache is None:
            return next(iter(waiting), None)
        return self._tier_cache.first_ready(waiting, self._queues, self._prefix_cache)

    def _end_prefetch(self, completion: Completion) -> int:
        """A request leaves the queue; returns how many tokens were read for it."""
        return 0 if self._tier_cache is None else self._tier_cache.end_prefetch(completion)

    def _first_urgent(self, passed: Sequence[Completion] = ()) -> Completion | None:
        """The first waiting request, if a running one may be preempted for it, or if it is the turn
        of its user before that of others.
        """
        waiting, running, queues = self.waiting, self.running, self._queues
        if not waiting or not running:
            return None
        if not queues.are_shared and waiting[0].order > running[-1].order:
            return None
        completion = self._first_ready(queues.in_turn(passed))
        is_first = completion is not None and queues.may_come_first(completion)
        return completion if is_first else None

    def _admit_urgent(self, plan: Batch, urgent: Completion, index: int) -> bool:
        """Admit a waiting request before those from ``index`` on, preempting the last of them where
        necessary. If that is not enough, nothing changes.
        """
        found = self._prefix_cache.find(urgent)
        preempted = self._queues.requests_to_preempt(urgent, found.computed)
        here = place_of(self.running[index])
        if (
            preempted is None
            or (preempted and plan.is_ahead)
            # It is in this step already.
            or any(place_of(each) < here for each in preempted)
            or self._prefix_cache.copies_any(found.hit, plan.new_block_ids)
        ):
            return False
        # A token of the budget is left to each request after it.
        num_left = len(self.running) - index - len(preempted) if plan.takes == "all" else 0
        if plan.token_budget <= num_left:
            return False
        for completion in preempted:
            self._preempt(plan, completion)
        plan.token_budget -= num_left
        is_admitted = self._admit(plan, urgent, found)
        plan.token_budget += num_left
        return is_admitted

    def _admit_waiting(self, plan: Batch) -> None:
        if not self.waiting or plan.takes == "rows":
            return
        queues, tables, max_num_seqs = self._queues, self.manager.tables, self.config.max_num_seqs
        num_running = queues.num_places(self.running)
        if self._tier_cache is not None:
            self._tier_cache.prefetch(queues.in_turn(), queues, self._prefix_cache)
        while self.waiting and plan.token_budget > 0 and num_running < max_num_seqs:
            if plan.is_full:
                return
            completion = plan.only or self._first_ready(queues.in_turn(plan.passed))
            # ``plan.only`` may run already, or have just ended.
            if completion is None or completion.is_finished or completion.seq_id in tables:
                return
            num_places = queues.num_places([completion])
            if num_running + num_places > max_num_seqs:
                return
            if self._admit(plan, completion, self._prefix_cache.find(completion)):
                num_running += num_places
            elif not self.running and not plan.is_ahead:
                # No running request could free blocks, so it would wait forever.
                self._finish_unfit(plan, completion)
            elif not queues.may_admit_others(plan, completion, is_admitted=False):
                return

    def _admit(self, plan: Batch, completion: Completion, found: FoundPrefix) -> bool:
        """Admit a waiting request if all its tokens fit now; otherwise nothing changes."""
        hit, computed, num_held = found.hit, found.computed, found.num_tokens
        num_left = self._queues.num_left_blocks(completion)
        if (
            self._prefix_cache.copies_any(hit, plan.new_block_ids)
            or self._queues.num_spare_blocks(completion, computed) < num_left
            or not self.cache.make_room_for_states(completion.num_seqs)
        ):
            return False
        num_new_tokens = min(completion.num_tokens - num_held, plan.token_budget)
        num_new_tokens = min(num_new_tokens, self._max_chunk(plan, completion, computed))
        # Taking blocks that were found evicts nothing.
        num_groups = len(self.manager.retentions)
        num_slots = num_held - computed.num_tokens + num_new_tokens
        num_new_blocks = -(-num_slots // self._block_size) * num_groups
        num_new_blocks += computed.num_loaded_blocks
        self.cache.make_room(num_new_blocks, completion.num_seqs, computed.num_free_blocks)
        num_fitting = self.manager.max_fitting(completion.seq_id, num_slots, num_left, computed)
        if plan.takes == "chunk" and num_fitting < num_slots:
            return False
        copies = self.manager.allocate_slots(completion.seq_id, num_fitting, computed)
        if copies is None:
            return False
        num_new_tokens -= num_slots - num_fitting
        if completion.status is CompletionStatus.WAITING:
            plan.begun.append(completion)
        self._prefix_cache.begin(completion, found, self._end_prefetch(completion))
        self._queues.run(completion)
        self.cache.make_room_for_states(0)  # A checkpoint that was found is kept again.
        if loads := self.manager.take_loads(completion.seq_id):
            plan.copies.append(SwapIn(completion.seq_id, loads))
        else:
            self.swap_space.release(completion.seq_id)
        plan.hit_block_ids.update(block.block_id for block in computed.blocks)
        completion.num_computed_tokens = num_held
        self._add_part(plan, completion, num_new_tokens, copies)
        return True

    def _max_chunk(
        self, plan: Batch, completion: Completion, computed: ComputedBlocks = NOTHING_COMPUTED
    ) -> int:
        """The most tokens of a request in a step, limited by its windows and, for log-probabilities
        of the prompt, by the rows of logits; in a deterministic engine, by its chunk or run, too.
        """
        max_run = self.manager.max_run(completion.seq_id, computed)
        if plan.takes != "all":
            num_computed = completion.num_computed_tokens + computed.num_tokens
            num_left = completion.num_prompt_tokens - num_computed
            size = self.limits.prefill
            chunk = min(size - num_computed % size, num_left)
            max_run = min(max_run, chunk if num_left > 0 else MAX_RUN_TOKENS)
        if completion.num_unscored_tokens:
            max_run = min(max_run, max(1, plan.scored_rows_budget))
        return max_run

    def _add_part(
        self, plan: Batch, completion: Completion, num_new_tokens: int, copies: list[BlockCopy]
    ) -> None:
        """Add a request, which has its slots, to the planned step."""
        start = completion.num_computed_tokens
        completion.num_computed_tokens = end = start + num_new_tokens
        num_logit_rows = 1 if end == len(completion.token_ids) else 0
        num_scored_rows = 0
        if completion.num_unscored_tokens:
            num_scored_rows = completion.num_scored_rows(start, end)
            num_logit_rows += num_scored_rows
            plan.scored_rows_budget -= num_scored_rows
        # This takes a third of the time of a NamedTuple's constructor.
        fields = (completion, start, num_new_tokens, num_logit_rows, num_scored_rows, ())
        part = tuple.__new__(Scheduled, fields)
        plan.scheduled.append(part)
        plan.token_budget -= num_new_tokens
        if num_new_tokens > 1:
            completion.request.share.work += num_new_tokens
        if copies:
            plan.copies.append(CopyBlocks(copies))
        if not self.manager.keeps_all:
            shifts = self.manager.take_key_shifts(completion.seq_id)
            plan.copies += [ShiftKeys(group, shift) for group, shift in shifts]
        if end % self._block_size < num_new_tokens:  # A block was filled.
            plan.new_block_ids.update(self._prefix_cache.cache_blocks(completion))

    def _finish_unfit(self, plan: Batch, completion: Completion) -> None:
        """End a request that does not fit, where no other request could free blocks, because the
        device has less memory than the budget allows: a running answer is cut, others fail.
        """
        if completion.status is CompletionStatus.RUNNING and completion.num_output_tokens:
            self.finish(completion, "length")
        else:
            self.finish(completion, "error", error=self._queues.prompt_too_long_error(completion))
        plan.finished.append(completion)

    def _preempt(self, plan: Batch, completion: Completion) -> None:
        self.num_preemptions += 1
        held, block_ids = self.manager.describe(completion.seq_id)
        if self.swap_space.reserve(completion.seq_id, held):
            plan.swap_outs.append(SwapOut(completion.seq_id, block_ids))
        elif self._tier_cache is not None:
            self._tier_cache.save_preempted(completion)
        self.manager.free(completion.seq_id)
        plan.preempted.append(completion)
        self._queues.requeue(completion)

    # After the step

    def append_token(
        self, completion: Completion, token_id: int, ahead: Batch | None = None
    ) -> None:
        """Append a sampled token to a request, and finish the request if it was the last.

        Args:
            ahead: the step after the one that sampled the token, if it is planned already.
        """
        token_ids, params = completion.token_ids, completion.request.params
        if token_ids[-1] == PENDING_TOKEN:
            token_ids[-1] = token_id
        else:
            token_ids.append(token_id)
        num_tokens = len(token_ids)
        # It fills a block and has K/V, because a step ahead computes it or because it was a draft.
        if not num_tokens % self._block_size and num_tokens <= completion.num_computed_tokens:
            new_block_ids = self._prefix_cache.cache_blocks(completion)
            if ahead is not None:
                ahead.new_block_ids.update(new_block_ids)
        num_output_tokens = num_tokens - completion.num_prompt_tokens
        if num_output_tokens > params.min_tokens:
            if token_id in self.eos_token_ids and not params.ignore_eos:
                return self.finish(completion, "stop")
            if token_id in params.stop_token_ids:
                return self.finish(completion, "stop", token_id)
            if params.stop_sequences and (sequence := completion.ending_sequence()) is not None:
                return self.finish(completion, "stop", sequence)
        if num_output_tokens == params.max_tokens or num_tokens >= self._max_num_tokens:
            self.finish(completion, "length")

    def discard(self, batch: Batch) -> None:
        """Roll back a failed step: its rows may not be written, and its requests wait again."""
        # Including the blocks of requests that have finished since.
        self.manager.evict_blocks(batch.new_block_ids)
        if batch.scheduled:
            self._prefix_cache.forget_last()
        for completion in batch.completions:
            # It waits already if it was also in the step after this one.
            if completion.status is CompletionStatus.RUNNING:
                self.manager.free(completion.seq_id)
                self._queues.requeue(completion)
        for transfer in batch.transfers:
            if isinstance(transfer, SwapOut | SwapIn):
                self.swap_space.release(transfer.seq_id)

    def start_over(self) -> None:
        """Let all running requests wait again, after all K/V in the pool were lost."""
        self.manager.reset()
        if self._tier_cache is not None:
            self._tier_cache.clear()
        self._prefix_cache.clear()
        for completion in list(self.running):
            self._queues.requeue(completion)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached K/V. While requests run, changes nothing and returns False."""
        is_reset = self.manager.reset_prefix_cache()
        if is_reset:
            self._prefix_cache.forget_last()
        return is_reset
