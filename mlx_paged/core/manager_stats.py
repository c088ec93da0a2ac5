"""``KVCacheManagerStats``: figures of block tables over a pool."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_paged.core.block_pool import BlockPool
from mlx_paged.core.block_table import BlockTable


@dataclass(frozen=True)
class KVCacheManagerStats:
    """What the manager holds now, and what its prefix cache has done since it was made."""

    num_requests: int
    num_tokens: int  # of all requests; those in shared blocks count for each
    num_usable_blocks: int
    num_used_blocks: int
    num_cached_blocks: int  # in the prefix index, in use or free
    num_empty_blocks: int  # free, and not in the prefix index
    num_unfilled_slots: int  # allocated and not filled: fragmentation
    num_evictions: int
    num_queried_tokens: int
    num_hit_tokens: int
    # Of a model with recurrent layers: checkpoints that are kept, and tokens with cached K/V that
    # were not hit because there was no checkpoint after them.
    num_checkpoints: int
    num_stateless_tokens: int

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0..1."""
        return self.num_used_blocks / max(1, self.num_usable_blocks)

    @property
    def hit_rate(self) -> float:
        """Share of the queried tokens that were found, 0..1."""
        return self.num_hit_tokens / max(1, self.num_queried_tokens)


def stats_of(
    pool: BlockPool,
    of_requests: Sequence[Sequence[BlockTable]],
    num_queried_tokens: int,
    num_hit_tokens: int,
    num_checkpoints: int,
    num_stateless_tokens: int,
) -> KVCacheManagerStats:
    """Count what the tables of requests hold."""
    tables = list(itertools.chain.from_iterable(of_requests))
    # Forks may share a partly filled block; its unfilled slots are those of the fullest fork.
    unfilled: dict[int, int] = {}
    for table in tables:
        num_unfilled_slots = table.num_unfilled_slots
        for last in table.blocks[-1:] if num_unfilled_slots else ():
            unfilled[last.block_id] = min(
                unfilled.get(last.block_id, pool.block_size), num_unfilled_slots
            )
    return KVCacheManagerStats(
        num_requests=len(of_requests),
        num_tokens=sum(tables[0].num_tokens for tables in of_requests),
        num_usable_blocks=pool.num_usable_blocks,
        num_used_blocks=pool.num_used_blocks,
        num_cached_blocks=pool.num_cached_blocks,
        num_empty_blocks=pool.num_empty_blocks,
        num_unfilled_slots=sum(unfilled.values()),
        num_evictions=pool.num_evictions,
        num_queried_tokens=num_queried_tokens,
        num_hit_tokens=num_hit_tokens,
        num_checkpoints=num_checkpoints,
        num_stateless_tokens=num_stateless_tokens,
    )
