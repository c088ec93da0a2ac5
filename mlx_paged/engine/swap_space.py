"""``SwapSpace``: which preempted requests have K/V beside the pool, and how many blocks of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from mlx_paged.argument_values import as_integer
from mlx_paged.config import KVBudget
from mlx_paged.core import SequenceTables
from mlx_paged.core.tier import BlockHeader, HostMemory, Tier, private_key
from mlx_paged.errors import ArgumentError, shown
from mlx_paged.request import SeqId

if TYPE_CHECKING:  # the scheduler, which uses the swap space, imports no arrays
    from mlx_paged.cache import KVCache

SwapName: TypeAlias = SeqId | str
"""A preempted sequence, or the salt of requests that begin with held K/V."""

# Floating-point operations that a chip does in the time in which it moves one byte: an M1 does
# 2.6 TFLOPS at 68 GB/s, and its successors are close to that.
OPERATIONS_PER_BYTE = 38
# The default swap space, as a share of the K/V budget.
DEFAULT_SWAP_SHARE = 1 / 8


def is_moving_cheaper(num_parameters: int, nbytes_per_token: int, operations_per_byte: int) -> bool:
    """Whether a token's K/V are moved in less time than they are computed, which takes two
    operations per parameter. The rule knows sizes and no clock, so that every machine decides
    alike.

    Args:
        operations_per_byte: that the chip does in the time in which one byte is moved.
    """
    return nbytes_per_token * operations_per_byte < 2 * num_parameters


def is_swapping_cheaper(num_parameters: int, kv_nbytes_per_token: int) -> bool:
    """Whether K/V are copied out and in again in less time than they are computed."""
    return is_moving_cheaper(num_parameters, 2 * kv_nbytes_per_token, OPERATIONS_PER_BYTE)


def num_swap_blocks(swap_bytes: str | int | None, cache: KVCache, num_parameters: int) -> int:
    """The blocks that a swap space of ``swap_bytes`` holds, by default ``DEFAULT_SWAP_SHARE`` of
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
            f"{cache.kind} cache are computed again; leave it out",
            "swap_bytes",
        )
    if budget.num_blocks is not None:
        return budget.num_blocks
    return (budget.nbytes or 0) // config.nbytes_per_block


class Swapped(NamedTuple):
    """What the swap space has for a request."""

    name: SwapName
    held: SequenceTables


class SwapSpace:
    """The K/V of preempted requests, in whole blocks, and their recurrent states; what fits is
    swapped, anything else is computed again.

    Beside them, K/V that can't be computed may be held for all requests of a salt, which begin with
    them. They don't count.

    Args:
        num_blocks: the most blocks to keep; 0 never swaps.
        num_state_blocks: what a sequence's recurrent state counts as.
        tier: where the blocks lie, host memory by default. What it stores it keeps until it is
            discarded: a block has no other copy.
    """

    def __init__(self, num_blocks: int, num_state_blocks: int = 0, tier: Tier | None = None):
        self.num_blocks = num_blocks
        self.tier = tier or HostMemory()
        self._num_state_blocks = num_state_blocks
        self._held: dict[SwapName, SequenceTables] = {}
        self._owners: dict[SwapName, bytes] = {}  # in the tier
        self._is_shared: set[SwapName] = set()  # those of salts

    def pin(self, cache_salt: str, held: SequenceTables) -> None:
        """Keep the first tokens of all requests of a salt, whose blocks are stored next."""
        self._is_shared.add(cache_salt)
        self._keep(cache_salt, held)

    def num_pinned_tokens(self, cache_salt: str | None) -> int:
        """Tokens that are held for requests of a salt."""
        return self._held[cache_salt].num_tokens if cache_salt in self._is_shared else 0

    def find(self, seq_id: SeqId, cache_salt: str | None) -> Swapped | None:
        """What a sequence can go on with: its own K/V, or those that are held for its salt."""
        for name in (seq_id, cache_salt):
            if name in self._held:
                return Swapped(name, self._held[name])
        return None

    @property
    def num_used_blocks(self) -> int:
        """Blocks of preempted requests."""
        return sum(held.num_blocks + self._num_state_blocks for held in self._swapped())

    @property
    def num_used_tokens(self) -> int:
        """Tokens of preempted requests."""
        return sum(held.num_tokens for held in self._swapped())

    def _swapped(self) -> list[SequenceTables]:
        # A copy: any thread may ask for stats.
        return [held for name, held in list(self._held.items()) if name not in self._is_shared]

    def num_tokens_of(self, seq_id: SeqId) -> int:
        """Tokens of a sequence that are swapped out."""
        return self._held[seq_id].num_tokens if seq_id in self._held else 0

    def reserve(self, seq_id: SeqId, held: SequenceTables) -> bool:
        """Keep memory for a sequence until :meth:`release`; False if it doesn't fit."""
        num_blocks = held.num_blocks + self._num_state_blocks
        if num_blocks > self.num_blocks - self.num_used_blocks:
            return False
        self._keep(seq_id, held)
        return True

    def _keep(self, name: SwapName, held: SequenceTables) -> None:
        self._held[name], self._owners[name] = held, os.urandom(16)

    def headers(self, name: SwapName) -> list[list[BlockHeader]]:
        """Of the blocks of each group of layers, in their order."""
        owner = self._owners[name]
        return [
            [
                BlockHeader(private_key(owner, group, index), group=group)
                for index in range(table.num_blocks + table.num_sinks)
            ]
            for group, table in enumerate(self._held[name].tables)
        ]

    def release(self, name: SwapName) -> None:
        """Forget a sequence's K/V, if there are any. What is held for a salt stays."""
        if name in self._held and name not in self._is_shared:
            for headers in self.headers(name):
                self.tier.discard([header.block_hash for header in headers])
            del self._held[name], self._owners[name]

    def clear(self) -> None:
        """Forget the K/V of all sequences."""
        for name in set(self._held) - self._is_shared:
            self.release(name)
