"""Statistics of an engine; and ``EngineView``: the pool, block by block, and the requests at one
moment, for observers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from operator import attrgetter, is_not
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from mlx_paged.cache import KVCache
from mlx_paged.core import KVCacheManager, KVCacheManagerStats
from mlx_paged.core.block_table import BlockTable
from mlx_paged.engine.reports import Latencies
from mlx_paged.engine.request import CompletionStatus, Request
from mlx_paged.engine.scheduling.scheduler import Scheduler
from mlx_paged.engine.storing.tier_cache import TierCache, TierCacheStats
from mlx_paged.models.matmul import Matmul, MatmulStats
from mlx_paged.request import SpecDecodingStats


@dataclass(frozen=True)
class EngineStats(KVCacheManagerStats):
    """Memory of an engine in bytes, and its counters since it was made."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    spec_decoding: SpecDecodingStats  # of all requests
    num_prompt_tokens: int  # of requests that got a first token
    num_cached_prompt_tokens: int  # of these
    num_read_prompt_tokens: int  # of these, read from disk
    num_generation_tokens: int
    num_finished: Mapping[str, int]  # completions, by finish reason
    num_steps: int
    busy_seconds: float  # spent in steps
    num_swapped_tokens: int  # in host memory now
    nbytes_held: int  # allocated for K/V now
    nbytes_budget: int
    nbytes_activations: int  # peak of a step, on top of weights and K/V; an estimate
    nbytes_checkpoints: int  # of recurrent states kept for prefix hits, on top of K/V
    deterministic: bool  # whether each request has the same bits in any batch
    matmul: MatmulStats  # which one runs in linear layers, for how many rows
    disk_tier: TierCacheStats | None = None


def stats_of(
    scheduler: Scheduler,
    cache: KVCache,
    latencies: Latencies,
    disk_tier: TierCache | None,
    nbytes_activations: int,
    matmul: Matmul,
) -> EngineStats:
    """Memory, requests and counters, from any thread."""
    of_manager = scheduler.manager.stats()
    return EngineStats(
        **asdict(of_manager),
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_preemptions=scheduler.num_preemptions,
        spec_decoding=scheduler.verification.spec_decoding,
        num_prompt_tokens=int(latencies.prompt_tokens.sum),
        num_cached_prompt_tokens=latencies.num_cached_prompt_tokens,
        num_read_prompt_tokens=latencies.num_read_prompt_tokens,
        num_generation_tokens=latencies.num_generation_tokens,
        num_finished=dict(latencies.num_finished),
        num_steps=latencies.num_steps,
        busy_seconds=latencies.busy_seconds,
        num_swapped_tokens=scheduler.swap_space.num_used_tokens,
        nbytes_held=cache.nbytes_held,
        nbytes_budget=cache.nbytes_budget,
        nbytes_activations=nbytes_activations,
        nbytes_checkpoints=of_manager.num_checkpoints * cache.config.state_nbytes,
        deterministic=scheduler.config.deterministic,
        matmul=matmul.stats(),
        disk_tier=None if disk_tier is None else disk_tier.stats(),
    )


class SequenceCounts(NamedTuple):
    """Numbers of sequences.

    Args:
        begun: running or waiting sequences that have a first token, by user.
    """

    num_running: int
    num_waiting: int
    begun: Mapping[str | None, int]

    @classmethod
    def of(cls, scheduler: Scheduler) -> SequenceCounts:
        """The current numbers, from any thread."""
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        begun = Counter(
            completion.request.user
            for completion in (*running, *waiting)
            # The pending token of the step in flight does not count yet.
            if completion.num_output_tokens > completion.awaits_token
        )
        return cls(len(running), len(waiting), begun)


CACHED = 128
MAX_HOLDERS = 127

State: TypeAlias = Literal["waiting", "running", "preempted"]


@dataclass(frozen=True)
class RequestView:
    """One request, all its completions together.

    Args:
        num_computed_tokens: of its longest completion, including the current step.
        num_cached_tokens: prompt tokens that were in the prefix cache.
        num_read_tokens: of these, read from disk for it.
        num_output_tokens: of all completions.
        num_blocks: distinct blocks that it holds.
        age: seconds since it arrived.
    """

    request_id: str
    state: State
    priority: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_read_tokens: int
    num_output_tokens: int
    num_blocks: int
    num_preemptions: int
    age: float


@dataclass(frozen=True)
class EngineView:
    """The pool and the requests, read without a lock, perhaps in the middle of a step.

    Args:
        blocks: one byte per usable block, by block id from 1. Its lowest seven bits are the number
            of sequences that hold the block, at most ``MAX_HOLDERS``; ``CACHED`` is set while it is
            in the prefix cache. 0 is free and empty.
        requests: those whose end is not reported yet, in the order of their arrival.
    """

    block_size: int
    blocks: bytes
    requests: list[RequestView]

    def cells(self, num_cells: int) -> tuple[int, dict[str, bytes]]:
        """Group the blocks into at most ``num_cells`` cells of neighbours.

        Returns:
            The number of blocks of each cell but the last one, which may have fewer; and one byte
            per cell for each of ``held`` and ``cached`` (the share of its blocks that requests
            hold, or that are free but cached; 255 is all of them) and ``holders`` (the largest
            number of holders of a block).
        """
        blocks = np.frombuffer(self.blocks, np.uint8)
        blocks_per_cell = max(1, -(-len(blocks) // num_cells))
        begins = np.arange(0, len(blocks), blocks_per_cell)
        sizes = np.diff(np.append(begins, len(blocks)))
        holders = blocks & MAX_HOLDERS
        shown = {"held": holders > 0, "cached": (holders == 0) & (blocks & CACHED != 0)}
        counts = {name: np.add.reduceat(each, begins, dtype=int) for name, each in shown.items()}
        # Shares are rounded up, so that a single block of a large cell is not lost.
        cells = {
            name: np.ceil(255 * count / sizes).astype(np.uint8).tobytes()
            for name, count in counts.items()
        }
        return blocks_per_cell, {**cells, "holders": np.maximum.reduceat(holders, begins).tobytes()}


def view_of(manager: KVCacheManager, requests: Mapping[str, Request]) -> EngineView:
    """The current view, from any thread; takes 60 ns per block."""
    now = time.perf_counter()
    views = [_request_view(request, manager.groups, now) for request in list(requests.values())]
    # These loops in C hold the GIL, so that no step of another thread runs between two blocks.
    blocks = manager.pool.blocks[1:]
    num_holders = np.fromiter(map(attrgetter("ref_cnt"), blocks), np.int32, len(blocks))
    hashes = map(attrgetter("block_hash"), blocks)
    is_cached = np.fromiter(map(is_not, hashes, repeat(None)), np.uint8, len(blocks))
    block_bytes = np.minimum(num_holders, MAX_HOLDERS).astype(np.uint8) | is_cached << 7
    return EngineView(manager.pool.block_size, block_bytes.tobytes(), views)


def _request_view(
    request: Request, groups: Mapping[Hashable, Sequence[BlockTable]], now: float
) -> RequestView:
    completions = list(request.completions)
    statuses = {completion.status for completion in completions}
    state: State = "preempted" if CompletionStatus.PREEMPTED in statuses else "waiting"
    block_ids: set[int] = set()
    for completion in completions:
        for table in groups.get(completion.seq_id, ()):
            block_ids.update(table.block_ids)
    return RequestView(
        request.request_id,
        "running" if CompletionStatus.RUNNING in statuses else state,
        request.priority,
        len(request.prompt_token_ids),
        max(completion.num_computed_tokens for completion in completions),
        request.num_cached_tokens,
        request.num_read_tokens,
        sum(len(completion.output.token_ids) for completion in completions),
        len(block_ids),
        sum(completion.num_preemptions for completion in completions),
        now - request.arrival_time,
    )
