"""Whom the scheduler lets wait while blocks are brought from beside the pool."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.completions import new_completion
from helpers.scheduler_helpers import FakeSupply
from paged_testing.integrity import check_scheduler

from mlx_paged.block_store import Read
from mlx_paged.core import hash_token_blocks
from mlx_paged.core.tier import BlockHeader, Tier
from mlx_paged.engine.request import Completion
from mlx_paged.engine.scheduling.prefix_cache import SwapSpace
from mlx_paged.engine.scheduling.scheduler import Scheduler
from mlx_paged.engine.storing import tier_cache
from mlx_paged.engine.storing.tier_cache import MAX_READ_AHEAD, TierCache
from mlx_paged.options.config import SchedulerConfig
from mlx_paged.options.sampling_params import SamplingParams
from mlx_paged.request import SeqId

BLOCK_SIZE = 4


class Supply(FakeSupply):
    """A pool for a disk cache. A block's bytes are of no importance."""

    def __init__(self, num_blocks: int):
        super().__init__(num_blocks, BLOCK_SIZE)
        self.pool = self.manager.pool
        self.config = SimpleNamespace(
            nbytes=1 << 30,
            nbytes_per_token=1,
            state_nbytes=0,
            block_size=BLOCK_SIZE,
            groups=(0,),
            keeps_kv=True,
            block_nbytes=lambda group: BLOCK_SIZE,
        )

    def read_blocks(self, group: int, block_ids: Sequence[int]) -> list[bytes]:
        return [bytes(BLOCK_SIZE) for _ in block_ids]

    def write_blocks(self, group: int, block_ids: Sequence[int], contents: Sequence[bytes]) -> None:
        assert all(len(content) == BLOCK_SIZE for content in contents)


class Shelf(Tier):
    """Has the blocks of some tokens."""

    def __init__(self, *texts: Sequence[int]):
        self.stored = {each for text in texts for each in hash_token_blocks(text, BLOCK_SIZE)}
        self.num_asked = 0

    def has(self, key: bytes) -> bool:
        self.num_asked += 1
        return key in self.stored


class Worker:
    """Reads when it is told to, and notes what is offered to it."""

    def __init__(self, tier: Tier, *_: int):
        self.has = tier.has
        self.offered: list[bytes] = []
        self.is_full = False

    def read(self, read: Read, block_hashes: Sequence[bytes]) -> None:
        assert not read.is_reading
        read.pending.extend(block_hashes)

    def take(self, read: Read, max_nbytes: int) -> list[tuple[bytes, bytes]]:
        taken = []
        while read.ready and max_nbytes > 0:
            taken.append(read.ready.popleft())
            max_nbytes -= len(taken[-1][1])
        return taken

    def cancel(self, read: Read) -> None:
        read.pending.clear()
        read.ready.clear()

    def has_room(self, nbytes: int) -> bool:
        return not self.is_full

    def offer(self, header: BlockHeader, content: bytes) -> None:
        self.offered.append(header.block_hash)

    def finish(self) -> None:
        pass

    def close(self, timeout: float) -> bool:
        return True


class Disk(TierCache):
    """Brings blocks when it is told to."""

    store: Shelf
    _worker: Any

    def reading(self) -> dict[SeqId, list[bytes]]:
        found = {seq_id: list(each.pending) for seq_id, each in self._prefetches.items()}
        return {seq_id: keys for seq_id, keys in found.items() if keys}

    def bring(self, seq_id: SeqId, is_busy: bool = False) -> None:
        read = self._prefetches[seq_id]
        read.ready.extend((key, bytes(BLOCK_SIZE)) for key in read.pending)
        read.pending.clear()
        self.poll(is_busy)


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_cache, "BlockWorker", Worker)


def tokens(seed: int, num_tokens: int = 10) -> list[int]:
    return [100 * seed + index for index in range(num_tokens)]


def completion_of(seed: int, num_tokens: int = 10, **params: int) -> Completion:
    sampling = SamplingParams(**{"max_tokens": 30, **params})
    return new_completion(str(seed), tokens(seed, num_tokens), sampling)


def make(
    *texts: Sequence[int], num_blocks: int = 60, num_swap_blocks: int = 0, **config: float
) -> tuple[Scheduler, Disk, Supply]:
    supply = Supply(num_blocks)
    disk = Disk(supply, Shelf(*texts), num_parameters=1)
    disk.saves_preempted = True
    swap_space = SwapSpace(num_swap_blocks)
    scheduler = Scheduler(
        supply.manager, supply, SchedulerConfig(**config), swap_space=swap_space, tier=disk
    )
    return scheduler, disk, supply


def names(scheduler: Scheduler) -> list[str]:
    return [each.request_id for each in scheduler.schedule().completions]


def test_a_request_waits_for_its_blocks_and_hits_them() -> None:
    scheduler, tier, _ = make(tokens(1))
    one = completion_of(1)
    scheduler.add(one.request)
    assert names(scheduler) == []
    assert tier.reading()[one.seq_id] == hash_token_blocks(tokens(1), BLOCK_SIZE)
    assert names(scheduler) == []
    tier.bring(one.seq_id)
    (part,) = scheduler.schedule().scheduled
    assert (part.start, part.num_new_tokens) == (8, 2)
    assert (one.request.num_cached_tokens, one.request.num_read_tokens) == (8, 8)
    check_scheduler(scheduler)


def test_a_step_that_others_wait_for_takes_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_cache, "MAX_STEP_NBYTES", BLOCK_SIZE + 1)
    scheduler, disk, _ = make(tokens(1, 21), tokens(2, 21))
    first, second = completion_of(1, 21), completion_of(2, 21)
    for each in (first, second):
        scheduler.add(each.request)
    assert names(scheduler) == []
    disk.bring(first.seq_id, is_busy=True)
    disk.bring(second.seq_id, is_busy=True)
    assert disk.stats().num_read_tokens == 4 * BLOCK_SIZE and names(scheduler) == []
    disk.poll(is_busy=True)
    assert names(scheduler) == ["1"], "the last one of its five, and one of the other's"
    disk.poll(is_busy=False)
    assert names(scheduler) == ["2"]
    assert [each.request.num_read_tokens for each in (first, second)] == [20, 20]


def test_what_is_lost_meanwhile_is_looked_for_once_more_and_then_computed() -> None:
    scheduler, disk, _ = make(tokens(1, 21))
    one = completion_of(1, 21)
    scheduler.add(one.request)
    assert names(scheduler) == []
    read = disk._prefetches[one.seq_id]
    disk.store.stored -= set(read.pending)
    read.pending.clear()  # The first one is a miss.
    num_asked = disk.store.num_asked
    assert names(scheduler) == ["1"] and one.request.num_cached_tokens == 0
    assert disk.store.num_asked > num_asked


def test_a_request_that_waits_when_the_disk_cache_is_closed_is_computed() -> None:
    scheduler, disk, _ = make(tokens(1))
    one = completion_of(1)
    scheduler.add(one.request)
    assert names(scheduler) == [] and disk.reading()
    assert disk.close(1)
    assert names(scheduler) == ["1"] and disk.reading() == {}
    assert one.request.num_cached_tokens == 0


def test_others_go_past_a_request_that_waits_for_its_blocks() -> None:
    scheduler, tier, _ = make(tokens(1))
    one = completion_of(1)
    scheduler.add(one.request)
    scheduler.add(completion_of(2).request)
    assert names(scheduler) == ["2"]
    tier.bring(one.seq_id)
    assert "1" in names(scheduler)
    assert [each.request_id for each in scheduler.running] == ["1", "2"], "it has its old order"


def test_nothing_is_asked_twice_in_a_stay_and_nothing_is_read_that_is_there() -> None:
    scheduler, tier, supply = make(tokens(1))
    one, again = completion_of(1), new_completion("again", tokens(1, 9))
    scheduler.add(one.request)
    names(scheduler)
    num_asked = tier.store.num_asked
    names(scheduler)
    assert tier.store.num_asked == num_asked
    tier.bring(one.seq_id)
    names(scheduler)
    scheduler.add(again.request)
    assert "again" in names(scheduler), "what it needs is in the pool"
    assert again.request.num_read_tokens == 0 < again.request.num_cached_tokens
    assert supply.manager.pool.num_used_blocks


def test_the_last_token_is_computed_even_if_all_blocks_are_there() -> None:
    scheduler, tier, _ = make(tokens(1, 8))
    one = completion_of(1, num_tokens=8)
    scheduler.add(one.request)
    names(scheduler)
    assert len(tier.reading()[one.seq_id]) == 1


MANY = range(1, 3 * MAX_READ_AHEAD)


def test_everybody_whose_turn_it_is_is_read_for() -> None:
    scheduler, tier, _ = make(*map(tokens, MANY))
    for seed in MANY:
        scheduler.add(completion_of(seed).request)
    assert names(scheduler) == []
    assert len(tier.reading()) == len(MANY)
    for seq_id in list(tier.reading()):
        tier.bring(seq_id)
    assert len(names(scheduler)) == len(MANY)
    assert all(each.request.num_read_tokens == 8 for each in scheduler.running)


def test_of_those_whose_turn_is_far_the_first_ones_are_read_for() -> None:
    scheduler, tier, _ = make(*map(tokens, MANY), max_num_seqs=1)
    scheduler.add(completion_of(99).request)
    assert names(scheduler) == ["99"]
    for seed in MANY:
        scheduler.add(completion_of(seed).request)
    names(scheduler)
    assert len(tier.reading()) == MAX_READ_AHEAD


def test_blocks_are_brought_while_blocks_are_free_and_not_taken_meanwhile() -> None:
    scheduler, tier, _ = make(*map(tokens, MANY), num_blocks=6, watermark=0.0)
    for seed in MANY:
        scheduler.add(completion_of(seed).request)
    assert names(scheduler) == []
    assert len(tier.reading()) == 2, "ten tokens are three blocks"
    for seq_id in list(tier.reading()):
        tier.bring(seq_id)
    assert names(scheduler) == ["1", "2"]
    for each in list(scheduler.running):
        scheduler.finish(each, "stop")
    assert names(scheduler) == []
    assert len(tier.reading()) == 2, "then for the next ones"


def test_a_request_that_shares_what_runs_needs_no_room_for_it() -> None:
    scheduler, tier, _ = make(tokens(1, 20), num_blocks=9)
    scheduler.add(completion_of(1, 20).request)
    tier.store.stored.clear()
    assert names(scheduler) == ["1"]
    tier.store.stored |= set(hash_token_blocks(tokens(1, 20), BLOCK_SIZE))
    again = new_completion("again", [*tokens(1, 20), 7], SamplingParams(max_tokens=2))
    scheduler.add(again.request)
    assert "again" in names(scheduler)
    assert again.request.num_cached_tokens == 20


@pytest.mark.parametrize("end", ["abort", "all K/V are lost"])
def test_reading_ends_with_the_request(end: str) -> None:
    scheduler, tier, _ = make(tokens(1))
    one = completion_of(1)
    scheduler.add(one.request)
    names(scheduler)
    if end == "abort":
        scheduler.finish(one, "abort")
        assert tier.reading() == {}
    else:
        scheduler.start_over()
        assert tier.reading() == {}
        names(scheduler)
        assert one.seq_id in tier.reading(), "it is asked for again"
    check_scheduler(scheduler)


def preempted(pays: bool, num_swap_blocks: int = 0) -> tuple[Scheduler, Disk, Completion]:
    """Of two requests that fill the pool, the second, which had to go. The disk took nothing before
    that.
    """
    scheduler, tier, supply = make(num_blocks=8, num_swap_blocks=num_swap_blocks)
    tier.saves_preempted = pays
    first, second = completion_of(1, 12), completion_of(2, 12)
    scheduler.add(first.request)
    scheduler.add(second.request)
    while not second.num_preemptions:
        tier._worker.is_full = False
        batch = scheduler.schedule()
        tier._worker.is_full = True
        tier.save(batch, [])
        for each in batch.completions:
            if each.num_computed_tokens == each.num_tokens:
                scheduler.append_token(each, 7)
    tier.store.stored |= set(second.block_hashes)
    assert supply.manager.num_tokens(second.seq_id) == 0
    return scheduler, tier, second


def test_the_blocks_of_a_preempted_request_are_kept_and_read_again() -> None:
    scheduler, tier, second = preempted(pays=True)
    assert tier._worker.offered == second.block_hashes[: second.num_saved_blocks] != []
    first = scheduler.running[0]
    scheduler.finish(first, "stop")
    pool = scheduler.manager.pool
    pool.evict_blocks(range(1, pool.num_blocks))
    names(scheduler)
    assert len(tier.reading()[second.seq_id]) == (second.num_tokens - 1) // BLOCK_SIZE


def test_they_are_computed_where_that_is_cheaper_and_kept_in_host_memory_where_that_has_room() -> (
    None
):
    scheduler, tier, _ = preempted(pays=False)
    assert tier._worker.offered == []
    scheduler.finish(scheduler.running[0], "stop")
    scheduler.manager.pool.evict_blocks(range(1, scheduler.manager.pool.num_blocks))
    assert names(scheduler) == ["2"]
    scheduler, tier, _ = preempted(pays=True, num_swap_blocks=100)
    assert tier._worker.offered == []
    scheduler.finish(scheduler.running[0], "stop")
    scheduler.manager.pool.evict_blocks(range(1, scheduler.manager.pool.num_blocks))
    assert names(scheduler) == ["2"]
    assert tier.reading() == {}, "it is swapped in"
