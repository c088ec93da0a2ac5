"""Statistics of an engine and its disk tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlx_paged.core import KVCacheManagerStats


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
