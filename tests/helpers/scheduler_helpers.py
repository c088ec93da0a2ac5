"""A scheduler over a pool without arrays: its steps are carried out on slots that say which context
they belong to.

A row's value is the hash of all tokens up to its own, so that whatever a request reads can be held
against what a fresh computation of its tokens would have written. The "model" draws the next token
from that hash: what a request answers is known beforehand, whatever the schedule.
"""

from __future__ import annotations

import pickle
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from paged_testing.integrity import check_scheduler

from mlx_paged.core import BlockCopy, BlockPool, KVCacheManager
from mlx_paged.core.tier import HostMemory
from mlx_paged.engine.request import Completion, Request
from mlx_paged.engine.scheduling.batch import Batch, CopyBlocks, Scheduled, SwapIn, SwapOut
from mlx_paged.engine.scheduling.prefix_cache import SwapSpace
from mlx_paged.engine.scheduling.request_queues import MAX_PREEMPTIONS
from mlx_paged.engine.scheduling.scheduler import Scheduler
from mlx_paged.engine.speculation.speculation import NO_SPECULATION, Speculation
from mlx_paged.options.config import SchedulerConfig
from mlx_paged.options.sampling_params import SamplingParams
from mlx_paged.request import SeqId

T = TypeVar("T")
VOCAB_SIZE = 40
GARBAGE = "garbage"


def context_rows(token_ids: Sequence[int], salt: str | None) -> list[int]:
    """The row of each token."""
    row = zlib.crc32((salt or "").encode())
    return [row := hash((row, token)) for token in token_ids]


def next_token(row: int, index: int) -> int:
    return hash((row, index)) % VOCAB_SIZE


def predicted_tokens(
    prompt: Sequence[int],
    max_tokens: int,
    index: int = 0,
    salt: str | None = None,
    eos_token_ids: frozenset[int] = frozenset(),
) -> list[int]:
    """What a completion's output must be if nothing cuts it short."""
    row = context_rows(prompt, salt)[-1]
    output: list[int] = []
    while len(output) < max_tokens:
        output.append(next_token(row, index))
        if output[-1] in eos_token_ids:
            break
        row = hash((row, output[-1]))
    return output


class FakeSupply:
    """A pool that grows up to a budget, and gives less when the device has no more; as
    `PagedKVCache`.

    Args:
        num_blocks: the budget.
        initial_blocks: those that are there at once; all by default.
        device_blocks: what the device really has.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        initial_blocks: int | None = None,
        device_blocks: int = 10**9,
    ):
        self.manager = KVCacheManager(
            BlockPool(1 + (num_blocks if initial_blocks is None else initial_blocks), block_size)
        )
        self.budget = num_blocks
        self.device_blocks = device_blocks

    def max_num_blocks(self, num_seqs: int = 1) -> int:
        return self.budget

    def num_growable_blocks(self, num_new_seqs: int = 0) -> int:
        return self.budget - self.manager.pool.num_usable_blocks

    def make_room_for_states(self, num_new_seqs: int) -> bool:
        return True

    def num_blocks_to_shrink_by(self, num_new_seqs: int) -> int:
        return 0

    def fork(self, manager: KVCacheManager, seq: SeqId, new_seq: SeqId) -> bool:
        manager.fork(seq, new_seq)
        return True

    def shrink_slabs(self, copies: Sequence[BlockCopy]) -> None:
        raise AssertionError("it has no states that need memory of blocks")

    def make_room(self, num_blocks: int, num_new_seqs: int = 0, num_found: int = 0) -> None:
        pool = self.manager.pool
        num_missing = min(num_blocks - pool.num_empty_blocks, self.num_growable_blocks())
        if num_missing <= 0:
            return
        if pool.num_usable_blocks + num_missing > self.device_blocks:
            self.budget = pool.num_usable_blocks
            return
        pool.grow(num_missing)


class SimulatedCache:
    """What each slot holds, and the steps that change it."""

    def __init__(self, manager: KVCacheManager):
        self.manager = manager
        self.block_size = manager.pool.block_size
        self.rows: dict[int, int | str] = {}

    def slots(self, block_ids: Sequence[int], start: int, end: int) -> list[int]:
        size = self.block_size
        return [block_ids[t // size] * size + t % size for t in range(start, end)]

    def block(self, block_id: int) -> list[int | str | None]:
        """The rows of a block."""
        return [self.rows.get(slot) for slot in self.slots([block_id], 0, self.block_size)]

    def move(self, batch: Batch, swap_space: SwapSpace) -> None:
        """Carry out the transfers, in their order."""
        for transfer in batch.transfers:
            if isinstance(transfer, SwapOut):
                for group, ids in enumerate(transfer.block_ids):
                    headers = swap_space.headers(transfer.seq_id)[group]
                    for header, block_id in zip(headers, ids, strict=True):
                        swap_space.tier.store(header, pickle.dumps(self.block(block_id)))
            elif isinstance(transfer, CopyBlocks):
                for source, destination in transfer.copies:
                    for offset in range(self.block_size):
                        row = self.rows.get(source * self.block_size + offset)
                        self.rows[destination * self.block_size + offset] = row
            else:
                for group, indices, block_ids in transfer.loads:
                    headers = swap_space.headers(transfer.seq_id)[group]
                    assert indices[-1] == len(headers) - 1, (
                        "what was swapped out is swapped in to its end"
                    )
                    for index, block_id in zip(indices, block_ids, strict=True):
                        content = swap_space.tier.load(headers[index].block_hash)
                        assert content is not None, "it was stored"
                        first = block_id * self.block_size
                        self.rows.update(enumerate(pickle.loads(content), first))
                swap_space.release(transfer.seq_id)

    def compute(self, batch: Batch) -> None:
        """Write the new rows and read the context; a step that says it shares no new block gets
        no help from the order.
        """
        parts = batch.scheduled
        if batch.shares_new_blocks:
            for part in parts:
                self.write(part)
            for part in parts:
                self.check_context(part.completion, part.draft_token_ids)
        else:
            for part in reversed(parts):
                self.write(part)
                self.check_context(part.completion, part.draft_token_ids)

    def write(self, part: Scheduled) -> None:
        completion, begin, end = part.completion, part.start, part.start + part.num_new_tokens
        rows = context_rows(
            [*completion.token_ids, *part.draft_token_ids], completion.request.cache_salt
        )
        slots = self.slots(self.manager.tables[completion.seq_id].block_ids, begin, end)
        self.rows.update(zip(slots, rows[begin:end], strict=True))

    def check_context(self, completion: Completion, drafts: Sequence[int] = ()) -> None:
        num_tokens = completion.num_computed_tokens
        block_ids = self.manager.tables[completion.seq_id].block_ids
        found = [self.rows.get(slot) for slot in self.slots(block_ids, 0, num_tokens)]
        expected = context_rows(
            [*completion.token_ids, *drafts][:num_tokens], completion.request.cache_salt
        )
        assert found == expected, f"{completion} reads what is not its own, blocks {block_ids}"

    def written_slots(self, batch: Batch) -> list[int]:
        """The slots that a step writes; if it fails, their contents are unknown."""
        tables = self.manager.tables
        slots: list[int] = []
        for swap_in in of_kind(batch, SwapIn):
            for load in swap_in.loads:
                slots += self.slots(load.block_ids, 0, len(load.block_ids) * self.block_size)
        for completion, start, count, *_ in batch.scheduled:
            slots += self.slots(tables[completion.seq_id].block_ids, start, start + count)
        for _, destination in all_copies(batch):
            slots += range(destination * self.block_size, (destination + 1) * self.block_size)
        return slots


class FakeEngine:
    """The loop around a scheduler, as `Engine`'s, with every invariant checked at every step.

    Args:
        num_blocks: the budget.
        swap_blocks: the most blocks in host memory; 0 never swaps.
        supply: `initial_blocks`, `device_blocks` of :class:`FakeSupply`.
        speculation: who makes drafts.
        config: fields of `SchedulerConfig`; no watermark unless it is given.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 4,
        *,
        swap_blocks: int = 0,
        supply: dict | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        speculation: Speculation = NO_SPECULATION,
        **config,
    ):
        self.supply = FakeSupply(num_blocks, block_size, **supply or {})
        self.manager = self.supply.manager
        self.pool = self.manager.pool
        self.swap_space: SwapSpace = SwapSpace(swap_blocks)
        defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "watermark": 0.0}
        self.config = SchedulerConfig(**defaults | config)
        self.scheduler = Scheduler(
            self.manager, self.supply, self.config, eos_token_ids, self.swap_space, speculation
        )
        self.cache = SimulatedCache(self.manager)
        self.completions: dict[str, list[Completion]] = {}
        self.suspects: deque[Completion] = deque()
        self.counts: Counter[str] = Counter()
        self.ran_before: set[SeqId] = set()  # before the newest step
        self.has_users = False  # whether requests of different users came

    def request(
        self, name: str, prompt: Sequence[int], max_tokens: int = 4, n: int = 1, **options
    ) -> Request:
        params = {
            key: options.pop(key) for key in ("ignore_eos", "stop_token_ids") if key in options
        }
        return Request(
            name, prompt, SamplingParams(max_tokens=max_tokens, n=n, **params), **options
        )

    def add(
        self, name: str, prompt: Sequence[int], max_tokens: int = 4, n: int = 1, **options
    ) -> Completion:
        """Add a request, and return its first completion; options are those of `Request`, and
        `ignore_eos` and `stop_token_ids`.
        """
        request = self.request(name, prompt, max_tokens, n, **options)
        known = [each[0].request.user for each in self.completions.values()]
        self.has_users = self.has_users or (bool(known) and known[0] != request.user)
        self.scheduler.check(request)
        self.scheduler.add(request)
        self.completions[name] = request.completions
        return request.completions[0]

    def abort(self, name: str) -> None:
        for completion in self.completions[name]:
            self.scheduler.finish(completion, "abort")

    def step(self, only: Completion | None = None, fails: str | None = None) -> Batch:
        """One step; it may fail `"at once"`, or `"computing"` after the transfers."""
        self.ran_before = {completion.seq_id for completion in self.scheduler.running}
        output = self.scheduler.schedule(only)
        self.check_output(output, only)
        if not output.scheduled:
            # What was to be swapped out will not be copied.
            self.scheduler.discard(output)
        elif fails is None:
            self.cache.move(output, self.swap_space)
            self.cache.compute(output)
            self.sample(output)
        else:
            written_slots = self.cache.written_slots(output)
            if fails != "at once":
                self.cache.move(output, self.swap_space)
            self.cache.rows.update(dict.fromkeys(written_slots, GARBAGE))
            self.scheduler.discard(output)
            self.counts["failed"] += 1
            if len(output.completions) > 1:
                self.suspects.extend(output.completions)
        self.check()
        return output

    def sample(self, batch: Batch) -> None:
        sampled: list[Completion] = []
        for part in batch.scheduled:
            if part.draft_token_ids:
                self.verify(part)
            elif part.num_logit_rows:
                completion = part.completion
                sampled += [completion, *map(completion.fork, range(1, completion.num_seqs))]
        for completion in sampled:
            if completion.seq_id not in self.scheduler.completions:
                self.counts["forks"] += 1
                self.scheduler.add_fork(completion)
        for completion in sampled:
            row = context_rows(completion.token_ids, completion.request.cache_salt)[-1]
            self.scheduler.append_token(completion, next_token(row, completion.index))

    def verify(self, part: Scheduled) -> None:
        completion, num_accepted = part.completion, 0
        self.scheduler.verification.begin(part)
        for draft in (*part.draft_token_ids, None):
            row = context_rows(completion.token_ids, completion.request.cache_salt)[-1]
            token = next_token(row, completion.index)
            if token == draft:
                self.scheduler.verification.accept(completion)
                num_accepted += 1
            self.scheduler.append_token(completion, token)
            if token != draft or completion.is_finished:
                break
        num_drafts = num_accepted if token == draft else len(part.draft_token_ids)
        self.scheduler.verification.count(completion, num_drafts, num_accepted)
        self.scheduler.verification.end(completion)
        self.scheduler.speculation.drafter.note(completion, num_drafts, num_accepted)
        self.counts["drafted"] += len(part.draft_token_ids)
        self.counts["accepted"] += num_accepted

    def check_output(self, output: Batch, only: Completion | None) -> None:
        scheduler, counts = self.scheduler, self.counts
        assert output.num_tokens <= self.config.max_num_batched_tokens
        for completion, start, count, num_logit_rows, num_scored_rows, drafts in output.scheduled:
            assert count >= 1 and start + count == completion.num_computed_tokens
            num_left = completion.num_tokens + len(drafts) - completion.num_computed_tokens
            assert num_logit_rows == (1 + len(drafts) if num_left == 0 else 0)
            assert num_scored_rows == 0  # Log-probabilities of a prompt are not wanted here.
            assert not drafts or (num_left == 0 and count == 1 + len(drafts) and only is None)
        assert not (output.preempted and output.drafted), "drafts preempt no request"
        swap_outs, swap_ins = of_kind(output, SwapOut), of_kind(output, SwapIn)
        assert len(scheduler.running) <= self.config.max_num_seqs
        if not self.has_users:
            num_seqs = sum(completion.num_seqs for completion in scheduler.running)
            assert num_seqs <= self.config.max_num_seqs
        scheduled = {completion.seq_id for completion in output.completions}
        assert len(scheduled) == len(output.completions), "no request is in a step twice"
        if only is None:
            # Decodes wait for no prompt: every running request is in the step.
            assert scheduled == {completion.seq_id for completion in scheduler.running}
            assert scheduled or output.finished or not scheduler.completions, "somebody goes on"
        else:
            assert scheduled <= {only.seq_id}
        if self.has_users:
            self.check_taken(output)
        else:
            self.check_preempted(output)
        counts["steps"] += 1
        counts["preempted"] += len(output.preempted)
        counts["swap_outs"] += len(swap_outs)
        counts["swap_ins"] += len(swap_ins)
        counts["copies"] += len(all_copies(output))
        counts["shared_steps"] += output.shares_new_blocks
        counts["hit_tokens"] += len(output.hit_block_ids) * self.pool.block_size
        for completion in output.finished:
            counts["cut" if completion.finish_reason == "length" else "refused"] += 1

    def check_preempted(self, output: Batch) -> None:
        """Who is sent away comes after all who run. Those who come in such a step are more urgent
        than one who goes.
        """
        if not output.preempted:
            return
        assert output.preempted[0].order == max(each.order for each in output.preempted)
        goes = {each.seq_id: each.num_computed_tokens == 0 for each in output.preempted}
        assert all(goes.values()) and not goes.keys() & {each.seq_id for each in output.completions}
        came = [each for each in output.completions if each.seq_id not in self.ran_before]
        for completion in came:
            assert any(
                completion.request.priority < each.request.priority
                and completion.order < each.order
                for each in output.preempted
            ), "no request is admitted in a step in which blocks ran out"
        for completion in output.completions:
            if completion not in came and completion.order > output.preempted[-1].order:
                # It was passed over: none of those that came may take its place.
                assert came
                assert completion.num_preemptions >= MAX_PREEMPTIONS or any(
                    completion.request.priority <= each.request.priority
                    or completion.order < each.order
                    for each in came
                )

    def check_taken(self, output: Batch) -> None:
        """Who is sent away is not in the step, and does not come back in it."""
        ran = {each.seq_id for each in output.completions}
        assert all(each.num_computed_tokens == 0 for each in output.preempted)
        assert not ran & {each.seq_id for each in output.preempted}
        came = {
            each.request.user for each in output.completions if each.seq_id not in self.ran_before
        }
        # Places that another user's first request takes; others make way for more blocks.
        gone = {each.request.user for each in output.preempted}
        self.counts["taken"] += bool(came) and bool(gone - came)

    def check(self) -> None:
        """Every invariant, between two steps."""
        scheduler, swap_space = self.scheduler, self.swap_space
        check_scheduler(scheduler)
        assert set(self.manager.tables) == {completion.seq_id for completion in scheduler.running}
        for completion in scheduler.running:
            self.cache.check_context(completion)
            assert completion.num_computed_tokens < completion.num_tokens
        keys = {
            header.block_hash for name in swap_space._held for header in swap_space.headers(name)[0]
        }
        assert isinstance(swap_space.tier, HostMemory) and set(swap_space.tier._blocks) == keys
        assert set(swap_space._held) <= {completion.seq_id for completion in scheduler.waiting}
        assert 0 <= swap_space.num_used_blocks <= swap_space.num_blocks
        for block in self.pool.blocks[1:]:
            # Nothing that others may hit holds less than it promises.
            if block.block_hash is not None:
                rows = [
                    self.cache.rows.get(slot)
                    for slot in self.cache.slots([block.block_id], 0, self.pool.block_size)
                ]
                assert None not in rows and GARBAGE not in rows, (
                    f"block {block.block_id} was never written"
                )

    def run(self, max_steps: int = 1000) -> list[dict[str, int]]:
        """Step until no request is left; which requests ran in each step, with how many tokens."""
        steps = []
        while self.scheduler.completions:
            assert len(steps) < max_steps, (
                f"unfinished after {max_steps} steps: {list(self.scheduler.completions.values())}"
            )
            steps.append(ran(self.step()))
        self.check_whole()
        return steps

    def step_until(self, holds: Callable[[Batch], object]) -> Batch:
        """Step until something holds of a step, and return that step."""
        for _ in range(100):
            output = self.step()
            if holds(output):
                return output
        raise AssertionError("it did not come in 100 steps")

    def check_whole(self) -> None:
        """Everything was given back."""
        assert (
            not self.scheduler.running
            and not self.scheduler.waiting
            and not self.scheduler.completions
        )
        assert not self.manager.tables and self.pool.num_used_blocks == 0
        assert self.pool.num_free_blocks == self.pool.num_usable_blocks
        assert self.swap_space.num_used_tokens == 0 and not self.swap_space._held

    def check_answers(self) -> None:
        """Every completion that came to its end by itself says what was predicted; any other a
        beginning of it.
        """
        for completions in self.completions.values():
            for completion in completions:
                prompt, params = (
                    completion.token_ids[: completion.num_prompt_tokens],
                    completion.request.params,
                )
                limit = params.max_tokens if params.max_tokens > 0 else 10**4
                eos = self.scheduler.eos_token_ids
                # Not all of it, where there is no limit.
                num_tokens = min(limit, completion.num_output_tokens + 1)
                expected = predicted_tokens(
                    prompt, num_tokens, completion.index, completion.request.cache_salt, eos
                )
                found = completion.output_token_ids
                assert found == expected[: len(found)], completion
                if completion.finish_reason == "stop" and completion.stop_reason is None:
                    assert found[-1] in eos and found == expected
                elif completion.finish_reason == "length" and len(found) < limit:
                    assert (
                        completion.num_tokens > self.scheduler.max_num_blocks * self.pool.block_size
                    )
                elif completion.finish_reason == "length":
                    assert len(found) == limit


def name_of(completion: Completion) -> str:
    return (
        completion.request_id
        if completion.request.params.n == 1
        else f"{completion.request_id}{completion.index}"
    )


def ran(batch: Batch) -> dict[str, int]:
    """Who is in a step, in order, with how many tokens."""
    return {name_of(part.completion): part.num_new_tokens for part in batch.scheduled}


def of_kind(batch: Batch, kind: type[T]) -> list[T]:
    """The transfers of one kind."""
    return [transfer for transfer in batch.transfers if isinstance(transfer, kind)]


def all_copies(batch: Batch) -> list[tuple[int, int]]:
    return [tuple(copy) for transfer in of_kind(batch, CopyBlocks) for copy in transfer.copies]


def names(completions: Sequence[Completion]) -> list[str]:
    return [name_of(completion) for completion in completions]


def tokens(num_tokens: int, first: int = 100) -> list[int]:
    """A prompt that no other with another `first` begins like."""
    return list(range(first, first + num_tokens))
