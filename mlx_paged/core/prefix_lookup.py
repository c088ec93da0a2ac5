"""``look_up``: the longest cached prefix of a request."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from mlx_paged.core.block_hash import BlockHash
from mlx_paged.core.block_pool import BlockPool
from mlx_paged.core.free_queue import KVCacheBlock
from mlx_paged.core.retention import Retention
from mlx_paged.core.sequence_states import SequenceStates
from mlx_paged.core.tier import STATES


class AbsentBlock(NamedTuple):
    """A block that a tier has and the pool lacks, by its group of layers and its hash there; or the
    recurrent state after a block, in the group :data:`STATES`.
    """

    group: int
    block_hash: BlockHash
    num_tokens: int = 0  # that a state covers


def group_hashes(block_hashes: Sequence[BlockHash], group: int) -> Sequence[BlockHash]:
    """The hashes of blocks in a group of layers. Blocks of different groups have the same tokens,
    but the rows of different layers.
    """
    if group == 0:
        return block_hashes
    return [BlockHash(block_hash + group.to_bytes(2, "little")) for block_hash in block_hashes]


def state_key(block_hash: BlockHash) -> BlockHash:
    """The key of the recurrent state after a block."""
    return group_hashes([block_hash], STATES)[0]


def nowhere(block_hash: BlockHash) -> bool:
    """The default of ``is_elsewhere``: there is no tier."""
    return False


class PrefixLookup:
    """The blocks of a prefix in one group of layers that are cached or can be loaded."""

    def __init__(
        self,
        pool: BlockPool,
        retention: Retention,
        block_hashes: Sequence[BlockHash],
        group: int,
        is_elsewhere: Callable[[BlockHash], bool],
    ) -> None:
        self._pool = pool
        self._is_elsewhere = is_elsewhere
        self._retention = retention
        self._block_hashes = block_hashes
        self._group = group
        self._found: dict[int, KVCacheBlock | AbsentBlock | None] = {}

    def longest(self, num_blocks: int) -> int:
        """The longest prefix, of at most ``num_blocks`` blocks, for which all blocks that the next
        token sees are cached.
        """
        block_size = self._pool.block_size
        num_sinks = self._retention.num_sink_tokens // block_size
        for index in range(min(num_blocks, num_sinks)):
            if self._get(index) is None:
                return index
        if self._retention.num_recent_tokens is None:
            index = num_sinks
            while index < num_blocks and self._get(index) is not None:
                index += 1
            return index
        # From the end: a missing block rules out every prefix that needs it.
        index = num_blocks = self._findable(num_blocks)
        while index > self._retention.first_recent_block(num_blocks, block_size):
            index -= 1
            if self._get(index) is None:
                num_blocks = self._findable(index)
                index = min(index, num_blocks)
        return num_blocks

    def _findable(self, num_blocks: int) -> int:
        """The longest prefix of up to ``num_blocks`` blocks that may be in the prefix cache."""
        block_size = self._pool.block_size
        while not self._retention.is_findable(num_blocks * block_size):
            num_blocks -= 1
        return num_blocks

    def blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """The cached blocks of a table of the first ``num_blocks`` blocks."""
        found = map(self._get, self._wanted(num_blocks))
        return [block for block in found if isinstance(block, KVCacheBlock)]

    def absent(self, num_blocks: int) -> list[AbsentBlock]:
        """The blocks of that table that have to be loaded."""
        found = map(self._get, self._wanted(num_blocks))
        return [block for block in found if isinstance(block, AbsentBlock)]

    def _wanted(self, num_blocks: int) -> Iterable[int]:
        return self._retention.kept_blocks(num_blocks, self._pool.block_size)

    def _get(self, index: int) -> KVCacheBlock | AbsentBlock | None:
        if index not in self._found:
            (block_hash,) = group_hashes(self._block_hashes[index : index + 1], self._group)
            block = self._pool.get_cached_block(block_hash)
            self._found[index] = block
            if block is None and self._is_elsewhere(block_hash):
                self._found[index] = AbsentBlock(self._group, block_hash)
        return self._found[index]


def look_up(
    pool: BlockPool,
    retentions: Sequence[Retention],
    states: SequenceStates | None,
    block_hashes: Sequence[BlockHash],
    num_tokens: int,
    is_elsewhere: Callable[[BlockHash], bool] = nowhere,
) -> tuple[list[PrefixLookup], int, int]:
    """Look up the blocks of a request of ``num_tokens`` tokens.

    Returns:
        The lookup of each group of layers; the number of blocks of the longest prefix that the
        request can begin with, which leaves at least its last token; and that of the longest prefix
        with K/V, whether or not a recurrent state was kept at its end.
    """
    num_blocks = min(len(block_hashes), max(0, num_tokens - 1) // pool.block_size)
    lookups = [
        PrefixLookup(pool, retention, block_hashes, group, is_elsewhere)
        for group, retention in enumerate(retentions)
    ]
    of_kv = [lookup.longest for lookup in lookups]
    num_with_kv = num_blocks = _longest_of_all(of_kv, num_blocks)
    if states is not None and num_blocks:
        of_states = partial(_longest_with_state, states, block_hashes, is_elsewhere)
        num_blocks = _longest_of_all([of_states, *of_kv], num_blocks)
    return lookups, num_blocks, num_with_kv


def absent_states(
    states: SequenceStates | None, block_hashes: Sequence[BlockHash], block_size: int
) -> list[AbsentBlock]:
    """The recurrent state after these blocks, if the model has states and must load this one."""
    if states is None or not block_hashes or block_hashes[-1] in states.checkpoints:
        return []
    num_tokens = len(block_hashes) * block_size
    return [AbsentBlock(STATES, state_key(block_hashes[-1]), num_tokens)]


def _longest_with_state(
    states: SequenceStates,
    block_hashes: Sequence[BlockHash],
    is_elsewhere: Callable[[BlockHash], bool],
    num_blocks: int,
) -> int:
    """The longest prefix of up to ``num_blocks`` blocks whose state is kept, here or in a tier."""
    for number in range(num_blocks, 0, -1):
        block_hash = block_hashes[number - 1]
        if block_hash in states.checkpoints or is_elsewhere(state_key(block_hash)):
            return number
    return 0


def _longest_of_all(limits: Sequence[Callable[[int], int]], num_blocks: int) -> int:
    """The most blocks that all limits allow."""
    # Each may lower the result of the previous one; a single limit is called once.
    remaining = len(limits)
    for longest_of in itertools.cycle(limits):
        longest = longest_of(num_blocks)
        remaining = len(limits) if longest < num_blocks else remaining
        num_blocks, remaining = longest, remaining - 1
        if not remaining:
            break
    return num_blocks
