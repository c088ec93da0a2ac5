"""Statistics of an engine and its disk tier; and ``EngineView``: the pool, block by block, and the
requests at one moment, for observers.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_not
from typing import Literal, TypeAlias

import numpy as np

from mlx_paged.core import KVCacheManager, KVCacheManagerStats
from mlx_paged.core.block_table import BlockTable
from mlx_paged.engine.request import Completion, CompletionStatus, Request


@dataclass(frozen=True)
class DiskTierStats:
    """The contents of the folder, by all processes that use it, and what this engine did with it.

    Attributes:
        num_blocks, nbytes: in the folder, as far as this process knows.
        num_read_blocks: found there and read; ``num_read_tokens`` are those that went into the
            pool.
        num_dropped_blocks: not written, because the writer was too slow or everything is pinned.
        num_corrupt_blocks: damaged files, which were removed.
        num_evicted_blocks: removed to keep the limits.
        nbytes_written: size of what this engine has written.
        num_read_states, num_saved_states: blocks of the above that are recurrent states.
        failure: why the folder is no longer used; ``None`` if there is no failure.
    """

    num_blocks: int = 0
    nbytes: int = 0
    num_read_blocks: int = 0
    num_read_tokens: int = 0
    num_written_blocks: int = 0
    num_dropped_blocks: int = 0
    num_corrupt_blocks: int = 0
    num_evicted_blocks: int = 0
    num_read_states: int = 0
    num_saved_states: int = 0
    nbytes_written: int = 0
    failure: str | None = None


@dataclass(frozen=True)
class EngineStats(KVCacheManagerStats):
    """Memory of an engine in bytes, and its counters since it was made."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_drafted_tokens: int  # drafts that were verified
    num_accepted_tokens: int  # of these
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
    disk_tier: DiskTierStats | None = None


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


def view_of(manager: KVCacheManager, requests: Mapping[str, Request]) -> EngineView:
    """The current view, from any thread; takes 60 ns per block."""
    now = time.perf_counter()
    views = [request_view(request, manager.groups, now) for request in list(requests.values())]
    return EngineView(manager.pool.block_size, block_bytes(manager), views)


def block_bytes(manager: KVCacheManager) -> bytes:
    """``EngineView.blocks``."""
    # These loops in C hold the GIL, so that no step of another thread runs between two blocks.
    blocks = manager.pool.blocks[1:]
    num_holders = np.fromiter(map(attrgetter("ref_cnt"), blocks), np.int32, len(blocks))
    hashes = map(attrgetter("block_hash"), blocks)
    is_cached = np.fromiter(map(is_not, hashes, repeat(None)), np.uint8, len(blocks))
    return (np.minimum(num_holders, MAX_HOLDERS).astype(np.uint8) | is_cached << 7).tobytes()


def request_view(
    request: Request, groups: Mapping[Hashable, Sequence[BlockTable]], now: float
) -> RequestView:
    completions = list(request.completions)
    block_ids: set[int] = set()
    for completion in completions:
        for table in groups.get(completion.seq_id, ()):
            block_ids.update(table.block_ids)
    return RequestView(
        request.request_id,
        _state_of(completions),
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


def _state_of(completions: Sequence[Completion]) -> State:
    statuses = {completion.status for completion in completions}
    if CompletionStatus.RUNNING in statuses:
        return "running"
    return "preempted" if CompletionStatus.PREEMPTED in statuses else "waiting"
