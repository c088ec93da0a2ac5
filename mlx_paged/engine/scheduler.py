"""`Scheduler`: which requests run in the next step, and with how many tokens each. Pure Python, no
arrays.

There is no prefill phase and no decode phase. A request has ``num_tokens`` and
``num_computed_tokens``, and a step's work is the difference, capped by a token budget: whole
prompts, chunks of them and decodes are one rule (as in vLLM's v1 scheduler, and Sarathi-Serve,
Agrawal et al. 2024)."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Protocol

from mlx_paged.cache import SwappedKV
from mlx_paged.config import SchedulerConfig
from mlx_paged.core import BlockCopy, ComputedBlocks, KVCacheManager, extend_block_hashes
from mlx_paged.core.kv_cache_manager import NOTHING_COMPUTED
from mlx_paged.engine.scheduler_output import SchedulerOutput, SwapIn, SwapOut
from mlx_paged.engine.swap_space import SwapSpace
from mlx_paged.errors import prompt_beyond_context, prompt_too_long
from mlx_paged.request import Request, RequestStatus, SeqId

by_order = attrgetter("order")


def extra_hash_keys(cache_salt: str | None) -> tuple[str, ...]:
    """What is hashed with each block besides its tokens."""
    return () if cache_salt is None else (cache_salt,)


class BlockSupply(Protocol):
    """What the scheduler needs of a cache."""

    manager: KVCacheManager

    @property
    def num_growable_blocks(self) -> int:
        """Blocks that the budget allows beyond those of the pool."""
        ...

    def make_room(self, num_blocks: int) -> None:
        """Grow until so many blocks can be taken without evicting any, as far as the budget allows."""


class Scheduler:
    """Continuous batching: first come, first served, with priorities.

    Each request has an ``order``, fixed when it comes: the step of its arrival, plus
    ``priority_steps`` for each level of priority that it stands behind. The lowest order runs first
    and is preempted last, so an urgent request overtakes, and since the order of those that come
    later grows for ever, nobody is overtaken for ever.

    A request is admitted when all its tokens fit now (and leave the watermark, beside others). When
    a running one finds no block, the last in order is preempted: its blocks are given back and it
    waits in its old place, to be computed anew or swapped in, as :class:`SwapSpace` finds cheaper.

    Not thread-safe: one thread at a time.

    Args:
        supply: whose ``manager`` holds the block tables; the scheduler alone allocates and frees
            requests in it.
        eos_token_ids: tokens that end a completion.
        swap_space: where preempted requests may go; none by default.
    """

    def __init__(
        self,
        supply: BlockSupply,
        config: SchedulerConfig,
        eos_token_ids: frozenset[int] = frozenset(),
        swap_space: SwapSpace[SwappedKV] | None = None,
    ):
        self.supply = supply
        self.manager = supply.manager
        self.config = config
        self.eos_token_ids = eos_token_ids
        self.swap_space = swap_space or SwapSpace(0)
        self.running: list[Request] = []  # by order
        self.waiting: list[Request] = []  # by order
        self.num_steps = 0
        self.num_preemptions = 0
        self._requests: dict[SeqId, Request] = {}
        self._arrivals = itertools.count()
        self._block_size = self.manager.pool.block_size
        self._max_num_tokens = 0  # that the budget holds, as of this step

    @property
    def requests(self) -> Mapping[SeqId, Request]:
        """All that are not finished."""
        return MappingProxyType(self._requests)

    @property
    def max_num_blocks(self) -> int:
        """Blocks that the budget holds."""
        # In this order: a pool that grows meanwhile, in another thread, must not make it less.
        return self.supply.num_growable_blocks + self.manager.pool.num_usable_blocks

    # A request comes and goes

    def check(self, request: Request) -> None:
        """Refuse at once what can never run; from any thread.

        Raises:
            PromptTooLongError: its prompt leaves no room for an answer within ``max_model_len``, or
                the budget can't hold it, ever; with the sum.
            ValueError: it has more completions than may run at once.
        """
        limit = self.config.max_model_len
        if limit is not None and request.num_tokens >= limit:
            raise prompt_beyond_context(request.num_tokens, limit)
        if request.num_seqs > self.config.max_num_seqs:
            raise ValueError(
                f"[scheduler] {request.num_seqs} completions of one request are more than may run at once, "
                f"{self.config.max_num_seqs}; raise max_num_seqs"
            )
        if -(-request.num_tokens // self._block_size) > self.max_num_blocks:
            raise prompt_too_long(request.num_tokens, self._block_size, self.max_num_blocks)

    def add(self, request: Request) -> None:
        """Let a request wait for its turn; one that is there already, or finished meanwhile, is
        left as it is.
        """
        if request.is_finished or request.seq_id in self._requests:
            return
        step = self.num_steps + request.priority * self.config.priority_steps
        request.order = (step, next(self._arrivals), request.index)
        self._requests[request.seq_id] = request
        insort(self.waiting, request, key=by_order)

    def add_fork(self, request: Request, child: Request) -> None:
        """Let a further completion of a running request run: it shares all blocks until one of the
        two writes.
        """
        self.manager.fork(request.seq_id, child.seq_id)
        self._requests[child.seq_id] = child
        insort(self.running, child, key=by_order)

    def finish(
        self,
        request: Request,
        reason: str,
        stop_reason: int | str | None = None,
        error: Exception | None = None,
    ) -> None:
        """Take a request out, wherever it is, and give back all its blocks at once: finished,
        aborted or failed.

        One that was never added is marked as finished, and will not be added.
        """
        if request.is_finished:
            return
        if self._requests.get(request.seq_id) is request:
            _remove(
                self.running if request.status is RequestStatus.RUNNING else self.waiting, request
            )
            if request.seq_id in self.manager.tables:
                self.manager.free(request.seq_id)
            self.swap_space.give_back(request.seq_id)
            del self._requests[request.seq_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason, request.error = reason, stop_reason, error

    # A step

    def schedule(self, only: Request | None = None) -> SchedulerOutput:
        """Choose the next step and allocate its slots. Empty when there is nothing to do.

        Args:
            only: schedule this request and no other.
        """
        self.num_steps += 1
        self._max_num_tokens = self.max_num_blocks * self._block_size
        output = SchedulerOutput()
        token_budget = self._schedule_running(output, self.config.max_num_batched_tokens, only)
        if not output.preempted:
            self._admit_waiting(output, token_budget, only)
        return output

    def _schedule_running(
        self, output: SchedulerOutput, token_budget: int, only: Request | None
    ) -> int:
        running = self.running
        # A decode takes one block at most. Asked for once, before any of them evicts what is
        # cached.
        self.supply.make_room(len(running))
        index = 0
        while index < len(running):
            request = running[index]
            if only is not None and request is not only:
                index += 1
                continue
            num_new_tokens = len(request.token_ids) - request.num_computed_tokens
            if num_new_tokens > 1:
                # A prompt leaves a token of the budget to each request behind it: no decode waits
                # for it.
                num_left = 0 if only is not None else len(running) - index - 1
                num_new_tokens = min(num_new_tokens, token_budget - num_left)
                self.supply.make_room(
                    self.manager.num_needed_blocks(request.seq_id, num_new_tokens) + num_left
                )
            copies = self.manager.allocate_slots(request.seq_id, num_new_tokens)
            if copies is not None:
                self._schedule(output, request, num_new_tokens, copies)
                token_budget -= num_new_tokens
                index += 1
            elif len(running) > 1:
                # The last in order; nobody behind `index` is in this step yet.
                self._preempt(output, running[-1])
            else:
                # Alone, and the memory that its budget promised was not to be had.
                if request.num_output_tokens:
                    self.finish(request, "length")
                    output.finished.append(request)
                else:
                    self._fail(output, request)
        return token_budget

    def _admit_waiting(
        self, output: SchedulerOutput, token_budget: int, only: Request | None
    ) -> None:
        num_seqs = sum(request.num_seqs for request in self.running) if self.waiting else 0
        while self.waiting and token_budget > 0:
            request = self.waiting[0] if only is None else only
            # The only one wanted may run already, or have ended just now.
            is_waiting = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            if not is_waiting or num_seqs + request.num_seqs > self.config.max_num_seqs:
                return
            computed = self._computed_blocks(request)
            num_held = max(self.swap_space.num_tokens_of(request.seq_id), computed.num_tokens)
            num_needed = self.manager.num_needed_blocks(
                request.seq_id, request.num_tokens - computed.num_tokens, computed
            )
            num_spare = self.manager.num_free_blocks + self.supply.num_growable_blocks - num_needed
            num_kept_free = self.config.watermark * self.max_num_blocks if self.running else 0
            copies, num_new_tokens = None, 0
            if num_spare >= num_kept_free:
                num_new_tokens = min(request.num_tokens - num_held, token_budget)
                num_slots = num_held - computed.num_tokens + num_new_tokens
                # Not for those that were found: taking them evicts nothing.
                self.supply.make_room(-(-num_slots // self._block_size))
                copies = self.manager.allocate_slots(request.seq_id, num_slots, computed)
            if copies is None:
                if self.running:
                    return
                # Nobody runs who could give back blocks: waiting would be for ever.
                self._fail(output, request)
                continue
            _remove(self.waiting, request)
            insort(self.running, request, key=by_order)
            num_seqs += request.num_seqs
            if request.status is RequestStatus.WAITING:
                request.num_cached_tokens = computed.num_tokens
            request.status = RequestStatus.RUNNING
            if num_held > computed.num_tokens:
                output.swap_ins.append(SwapIn(request.seq_id, computed.num_tokens, num_held))
            else:
                self.swap_space.give_back(request.seq_id)
            output.hit_block_ids.update(block.block_id for block in computed.blocks)
            request.num_computed_tokens = num_held
            self._schedule(output, request, num_new_tokens, copies)
            token_budget -= num_new_tokens

    def _schedule(
        self,
        output: SchedulerOutput,
        request: Request,
        num_new_tokens: int,
        copies: list[BlockCopy],
    ) -> None:
        request.num_computed_tokens = num_computed_tokens = (
            request.num_computed_tokens + num_new_tokens
        )
        output.requests.append(request)
        output.num_new_tokens.append(num_new_tokens)
        if copies:
            output.copies.append(copies)
        if (
            num_computed_tokens % self._block_size < num_new_tokens
        ):  # The end of a block was passed.
            self._cache_blocks(output, request)

    def _computed_blocks(self, request: Request) -> ComputedBlocks:
        if not self.config.enable_prefix_caching:
            return NOTHING_COMPUTED
        self._hash_blocks(request)
        return self.manager.get_computed_blocks(request.block_hashes, request.num_tokens)

    def _cache_blocks(self, output: SchedulerOutput, request: Request) -> None:
        """Let others hit the blocks that are full after this step, from this step on."""
        if not self.config.enable_prefix_caching:
            return
        self._hash_blocks(request)
        num_new_blocks = self.manager.cache_blocks(request.seq_id, request.block_hashes)
        num_full_blocks = request.num_computed_tokens // self._block_size
        block_ids = self.manager.tables[request.seq_id].block_ids
        output.new_block_ids.update(block_ids[num_full_blocks - num_new_blocks : num_full_blocks])

    def _hash_blocks(self, request: Request) -> None:
        extra_keys = extra_hash_keys(request.cache_salt)
        extend_block_hashes(request.block_hashes, request.token_ids, self._block_size, extra_keys)

    def _fail(self, output: SchedulerOutput, request: Request) -> None:
        """There is no room for its tokens, and nobody who could make some."""
        error = prompt_too_long(request.num_tokens, self._block_size, self.max_num_blocks)
        self.finish(request, "error", error=error)
        output.finished.append(request)

    def _preempt(self, output: SchedulerOutput, request: Request) -> None:
        self.num_preemptions += 1
        num_tokens = request.num_computed_tokens
        if self.swap_space.take_place(request.seq_id, num_tokens):
            block_ids = list(self.manager.tables[request.seq_id].block_ids)
            output.swap_outs.append(SwapOut(request.seq_id, block_ids, num_tokens))
        self.manager.free(request.seq_id)
        output.preempted.append(request)
        self._wait_again(request)

    def _wait_again(self, request: Request) -> None:
        _remove(self.running, request)
        insort(self.waiting, request, key=by_order)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        request.num_computed_tokens = 0

    # After the step

    def append_token(self, request: Request, token_id: int) -> None:
        """A token was sampled for a request whose tokens are all computed; finishes it if that was
        the last.
        """
        request.token_ids.append(token_id)
        params = request.params
        if token_id in self.eos_token_ids and not params.ignore_eos:
            self.finish(request, "stop")
        elif token_id in params.stop_token_ids:
            self.finish(request, "stop", token_id)
        elif (
            request.num_output_tokens == params.max_tokens
            or request.num_tokens == self.config.max_model_len
            # No room for the token's own K/V.
            or request.num_tokens > self._max_num_tokens
        ):
            self.finish(request, "length")

    def discard(self, output: SchedulerOutput) -> None:
        """The step failed: its rows may not be written. Its requests wait again and are computed
        anew.
        """
        # Also those of requests that have ended since.
        self.manager.pool.evict_blocks(output.new_block_ids)
        for request in output.requests:
            if not request.is_finished:
                self.manager.free(request.seq_id)
                self._wait_again(request)
        for swap_in in output.swap_ins:
            self.swap_space.give_back(swap_in.seq_id)
        for swap_out in output.swap_outs:
            self.swap_space.give_back(swap_out.seq_id)

    def restart(self, requests: Iterable[Request]) -> None:
        """Begin again with these unfinished requests, which wait in their old places and hold
        nothing.

        Whatever the queues and the tables were before is forgotten; the supply has a manager
        without tables by now."""
        self.manager = self.supply.manager
        self.swap_space.clear()
        self.running, self.waiting, self._requests = [], [], {}
        for request in requests:
            if request.order:
                self._requests[request.seq_id] = request
                insort(self.waiting, request, key=by_order)
            else:
                self.add(request)

    def check_integrity(self) -> None:
        """Verify queues against tables and blocks; for tests and debugging. Raises IntegrityError,
        AssertionError.
        """
        self.manager.check_integrity()
        running = {request.seq_id for request in self.running}
        assert {
            seq
            for seq, request in self._requests.items()
            if request.status is RequestStatus.RUNNING
        } == running
        assert set(self._requests) == running | {request.seq_id for request in self.waiting}
        assert running <= set(self.manager.tables), "a running request has a table"
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=by_order)
        for request in self.waiting:
            assert request.seq_id not in self.manager.tables, "a waiting request holds nothing"
        for request in self.running:
            assert self.manager.num_tokens(request.seq_id) == request.num_computed_tokens
            assert request.num_computed_tokens <= request.num_tokens


def _remove(queue: list[Request], request: Request) -> None:
    """Take a request out of a queue that is in order; raises ``ValueError`` if it is not there."""
    index = bisect_left(queue, request.order, key=by_order)
    if index == len(queue) or queue[index] is not request:
        raise ValueError(f"[scheduler] {request} is not in its queue")
    del queue[index]
