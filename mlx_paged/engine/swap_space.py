"""``SwapSpace``: the K/V of preempted requests that are swapped out of the pool."""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import TYPE_CHECKING

from mlx_paged.argument_values import as_integer
from mlx_paged.config import KVBudget
from mlx_paged.core import SequenceTables
from mlx_paged.core.tier import BlockHeader, GuardedTier, HostMemory, Tier, private_key
from mlx_paged.errors import ArgumentError, shown
from mlx_paged.request import SeqId

if TYPE_CHECKING:  # the scheduler, which uses the swap space, imports no arrays
    from mlx_paged.cache import KVCache

# Floating-point operations per byte of memory bandwidth: an M1 has 2.6 TFLOPS and 68 GB/s, and its
# successors are close to that.
OPERATIONS_PER_BYTE = 38
# The same for a disk: that of an M1 reads some 2.6 GB/s.
OPERATIONS_PER_DISK_BYTE = 1_000
# The default swap space, as a share of the K/V budget.
DEFAULT_SWAP_SHARE = 1 / 8


def is_moving_cheaper(num_parameters: int, nbytes_per_token: int, operations_per_byte: int) -> bool:
    """Whether moving a token's K/V takes less time than computing them, which takes two operations
    per parameter. The rule depends on sizes and no clock, so that all machines decide alike.

    Args:
        operations_per_byte: of the chip's speed and the bandwidth of the move.
    """
    return nbytes_per_token * operations_per_byte < 2 * num_parameters


def is_swapping_cheaper(num_parameters: int, kv_nbytes_per_token: int) -> bool:
    """Whether copying K/V out and back takes less time than computing them."""
    return is_moving_cheaper(num_parameters, 2 * kv_nbytes_per_token, OPERATIONS_PER_BYTE)


def is_reading_cheaper(num_parameters: int, kv_nbytes_per_token: int) -> bool:
    """Whether reading K/V from disk takes less time than computing them."""
    return is_moving_cheaper(num_parameters, kv_nbytes_per_token, OPERATIONS_PER_DISK_BYTE)


def num_swap_blocks(swap_bytes: str | int | None, cache: KVCache, num_parameters: int) -> int:
    """The number of blocks of a swap space of ``swap_bytes``, by default ``DEFAULT_SWAP_SHARE`` of
    the budget if swapping is cheaper than computing.

    Raises:
        ArgumentError: it is neither a budget nor 0, or the cache can't swap.
    """
    config = cache.config
    if swap_bytes is None:
        is_cheaper = is_swapping_cheaper(num_parameters, config.nbytes_per_token)
        can_swap = cache.kind == "paged"
        return int(config.num_blocks * DEFAULT_SWAP_SHARE) if can_swap and is_cheaper else 0
    is_zero = isinstance(swap_bytes, str) and swap_bytes.strip() == "0"
    if is_zero or as_integer(swap_bytes) == 0:
        return 0
    budget = KVBudget.parse(swap_bytes, "swap_bytes")
    if cache.kind != "paged":
        raise ArgumentError(
            f"[engine] swap_bytes={shown(swap_bytes)} needs kv='paged': preempted requests of a "
            f"{cache.kind} cache are recomputed; leave it out",
            "swap_bytes",
        )
    if budget.num_blocks is not None:
        return budget.num_blocks
    return (budget.nbytes or 0) // config.nbytes_per_block


class SwapSpace:
    """The K/V of preempted requests, in whole blocks, with their recurrent states. Requests that
    don't fit are recomputed.

    Args:
        num_blocks: the most blocks to keep; 0 never swaps.
        num_state_blocks: how many blocks a sequence's recurrent state counts as.
        tier: stores the blocks, by default in host memory, until they are discarded. Requests whose
            blocks it loses are recomputed.
    """

    def __init__(self, num_blocks: int, num_state_blocks: int = 0, tier: Tier | None = None):
        self.num_blocks = num_blocks
        self.tier = tier or HostMemory()
        self._has_said_why = False
        self._num_state_blocks = num_state_blocks
        self._held: dict[SeqId, SequenceTables] = {}
        self._owners: dict[SeqId, bytes] = {}  # of the blocks, in the tier

    @property
    def tier(self) -> Tier:
        return self._tier

    @tier.setter
    def tier(self, tier: Tier) -> None:
        self._tier = tier if type(tier) is HostMemory else GuardedTier(tier)

    def find(self, seq_id: SeqId) -> SequenceTables | None:
        """The tables of a sequence whose K/V are here."""
        return self._held.get(seq_id)

    @property
    def num_used_blocks(self) -> int:
        """The number of blocks in use."""
        # Over a copy, because any thread may read the stats.
        return sum(each.num_blocks + self._num_state_blocks for each in list(self._held.values()))

    @property
    def num_used_tokens(self) -> int:
        """The number of tokens whose K/V are here."""
        return sum(each.num_tokens for each in list(self._held.values()))

    def num_tokens_of(self, seq_id: SeqId) -> int:
        """The number of tokens of a sequence that are swapped out."""
        return self._held[seq_id].num_tokens if seq_id in self._held else 0

    def reserve(self, seq_id: SeqId, held: SequenceTables) -> bool:
        """Reserve memory for a sequence until :meth:`release`; False if it doesn't fit, or if the
        tier has failed.
        """
        num_blocks = held.num_blocks + self._num_state_blocks
        if num_blocks > self.num_blocks - self.num_used_blocks or self._has_failed():
            return False
        self._held[seq_id], self._owners[seq_id] = held, os.urandom(16)
        return True

    def headers(self, seq_id: SeqId) -> list[list[BlockHeader]]:
        """The headers of the blocks of each group of layers, in order."""
        owner = self._owners[seq_id]
        return [
            [
                BlockHeader(private_key(owner, group, index), group=group)
                for index in range(table.num_blocks + table.num_sinks)
            ]
            for group, table in enumerate(self._held[seq_id].tables)
        ]

    def release(self, seq_id: SeqId) -> None:
        """Discard the K/V of a sequence, if there are any."""
        if seq_id in self._held:
            for headers in self.headers(seq_id):
                self.tier.discard([header.block_hash for header in headers])
            del self._held[seq_id], self._owners[seq_id]

    def clear(self) -> None:
        """Discard the K/V of all sequences."""
        for seq_id in list(self._held):
            self.release(seq_id)

    def _has_failed(self) -> bool:
        """Whether the tier has failed; warns once."""
        failure = self.tier.failure
        if failure is not None and not self._has_said_why:
            self._has_said_why = True
            # If warnings are errors, this one would stop the engine.
            with contextlib.suppress(Warning):
                warnings.warn(
                    f"[engine] {failure}; from now on preempted requests are computed again",
                    stacklevel=2,
                )
        return failure is not None
