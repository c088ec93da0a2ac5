"""``EngineStats``: what an engine holds, and did since it was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlx_paged.core import KVCacheManagerStats
from mlx_paged.engine.disk_tier_stats import DiskTierStats


@dataclass(frozen=True)
class EngineStats(KVCacheManagerStats):
    """What the engine holds, and did since it was made; memory in bytes."""

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
    # To other ranks: messages, and what a ring sends of the activations of all tokens so far.
    nbytes_sent: int = 0
    disk_tier: DiskTierStats | None = None
