"""``ComputedBlocks``: the blocks with which a request begins."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from mlx_paged.core.block_table import TableState
from mlx_paged.core.checkpoints import Checkpoint
from mlx_paged.core.free_queue import KVCacheBlock
from mlx_paged.core.sequence_states import SequenceState


class SequenceTables(NamedTuple):
    """What a preempted request held, without its blocks: the table of each group of layers, the
    recurrent state, if the model has one, and whether the K/V are foreign.
    """

    tables: Sequence[TableState]
    state: SequenceState | None = None
    is_foreign: bool = False

    @property
    def num_tokens(self) -> int:
        return self.tables[0].num_tokens

    @property
    def num_blocks(self) -> int:
        return sum(table.num_blocks + table.num_sinks for table in self.tables)


class BlockLoad(NamedTuple):
    """Blocks of a group of layers that have to be filled from a tier."""

    group: int
    indices: Sequence[int]  # among the stored blocks of the group
    block_ids: Sequence[int]


class ComputedBlocks(NamedTuple):
    """The blocks with which a request begins: a prefix hit of ``num_tokens`` tokens, or what it
    held when it was preempted, of which the pool may still have the first blocks. Each group of
    layers has the blocks that its retention keeps.
    """

    groups: Sequence[Sequence[KVCacheBlock]] = ((),)
    num_tokens: int = 0
    num_queried_tokens: int = 0  # of the request whose prefix was looked up
    checkpoint: Checkpoint | None = None  # the recurrent state after the last block
    # Tokens whose K/V are cached; more than ``num_tokens`` if no state was kept after them.
    num_tokens_with_kv: int = 0
    resumed: SequenceTables | None = None  # the blocks after those of ``groups`` are loaded

    @property
    def blocks(self) -> list[KVCacheBlock]:
        """The blocks of all groups."""
        return list(itertools.chain.from_iterable(self.groups))

    @property
    def is_foreign(self) -> bool:
        """Whether any of the K/V, or the recurrent state, are foreign."""
        return (
            any(block.is_foreign for block in self.blocks)
            or (self.checkpoint is not None and self.checkpoint.is_foreign)
            or (self.resumed is not None and self.resumed.is_foreign)
        )

    @property
    def num_loaded_blocks(self) -> int:
        """New blocks that have to be filled from a tier."""
        return self.resumed.num_blocks - len(self.blocks) if self.resumed else 0

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of the pool that a request takes when it begins with these."""
        return sum(block.ref_cnt == 0 for block in self.blocks)


NOTHING_COMPUTED = ComputedBlocks()
