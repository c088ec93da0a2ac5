"""``PrefixCache``: what requests find of the K/V that others computed, and what others find of
theirs. Pure Python, no arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mlx_paged.core import (
    AbsentBlock,
    BlockHash,
    BlockTable,
    ComputedBlocks,
    KVCacheManager,
    extend_block_hashes,
)
from mlx_paged.core.computed_blocks import NOTHING_COMPUTED
from mlx_paged.engine.read_ahead import BlockTier
from mlx_paged.request import Request, SeqId


def extra_hash_keys(cache_salt: str | None) -> tuple[str, ...]:
    """What is hashed with each block besides its tokens."""
    return () if cache_salt is None else (cache_salt,)


class UnsharedKV(Protocol):
    """What a cache does whose sequences share no blocks: it copies forks and, in the place of a
    prefix cache, keeps the last sequence that ended.
    """

    def fork(self, manager: KVCacheManager, seq: SeqId, new_seq: SeqId) -> bool:
        """Add a second sequence with the same tokens, in blocks of its own; False, and nothing has
        changed, where there are too few.
        """
        ...

    def keep_last(self, table: BlockTable, block_hashes: Sequence[BlockHash]) -> None:
        """Keep a sequence that ends, whose first blocks have these hashes."""

    def num_kept_blocks(self, block_hashes: Sequence[BlockHash]) -> int:
        """How many of these blocks, from the first one on, the kept sequence begins with."""
        ...

    def take_last(self, table: BlockTable) -> None:
        """Let a new sequence, which has its slots, go on with what is kept."""

    def forget_last(self) -> None:
        """Keep nothing."""


class PrefixCache:
    """The full blocks of all requests, by the hashes of their tokens. Where sequences share no
    blocks it is the last one that ended.

    Args:
        unshared: of a cache whose sequences share no blocks.
        is_enabled: whether anything is found at all.
    """

    def __init__(
        self, manager: KVCacheManager, unshared: UnsharedKV | None, is_enabled: bool
    ) -> None:
        self._manager = manager
        self._block_size = manager.pool.block_size
        self._last_sequence = unshared if is_enabled else None
        self._finds_blocks = is_enabled and unshared is None

    def computed_blocks(self, request: Request) -> ComputedBlocks:
        """The blocks of the longest prefix of a request that are cached; none is taken."""
        if not self._finds_blocks:
            return NOTHING_COMPUTED
        self._hash_blocks(request)
        num_tokens = _num_findable_tokens(request)
        return self._manager.get_computed_blocks(request.block_hashes, num_tokens)

    def num_kept_tokens(self, request: Request) -> int:
        """Of a new request, the tokens with which the last sequence began; whole blocks."""
        if self._last_sequence is None:
            return 0
        self._hash_blocks(request)
        num_usable_blocks = max(0, _num_findable_tokens(request) - 1) // self._block_size
        hashes = request.block_hashes[:num_usable_blocks]
        return self._last_sequence.num_kept_blocks(hashes) * self._block_size

    def absent_blocks(self, request: Request, tier: BlockTier) -> Sequence[AbsentBlock]:
        """What a request could have of a tier beside what is cached."""
        self._hash_blocks(request)
        num_tokens = _num_findable_tokens(request)
        return self._manager.absent_blocks(request.block_hashes, num_tokens, tier.has)

    def begin(self, request: Request, num_held_tokens: int) -> None:
        """A request has its slots, the first of which the last sequence may fill."""
        if self._last_sequence is not None:
            self._manager.count_lookup(_num_findable_tokens(request), num_held_tokens)
            if num_held_tokens:
                self._last_sequence.take_last(self._manager.tables[request.seq_id])

    def cache_blocks(self, request: Request) -> list[int]:
        """Let others hit the blocks that are full after the newest step, as far as their tokens are
        known; returns the ids of those that are new.
        """
        if not self._finds_blocks:
            return []
        self._hash_blocks(request)
        num_new_blocks = self._manager.cache_blocks(request.seq_id, request.block_hashes)
        num_full_blocks = request.num_computed_tokens // self._block_size
        end = min(num_full_blocks, len(request.block_hashes))
        block_ids: list[int] = []
        for table in self._manager.groups[request.seq_id]:
            num_evicted = table.num_evicted_tokens // self._block_size
            begin = max(0, end - num_new_blocks - num_evicted)
            block_ids += table.packed_block_ids[begin : end - num_evicted]
        return block_ids

    def end(self, request: Request) -> None:
        """A request ends, whose blocks are about to be given back."""
        if self._last_sequence is not None:
            self._hash_blocks(request)
            num_full_blocks = request.num_computed_tokens // self._block_size
            hashes = request.block_hashes[:num_full_blocks]
            self._last_sequence.keep_last(self._manager.tables[request.seq_id], hashes)

    def forget_last(self) -> None:
        """Keep no sequence that has ended."""
        if self._last_sequence is not None:
            self._last_sequence.forget_last()

    def reset(self) -> bool:
        """Forget all that requests left, or return False and change nothing while some run."""
        if not self._manager.reset_prefix_cache():
            return False
        self.forget_last()
        return True

    def _hash_blocks(self, request: Request) -> None:
        token_ids = request.token_ids
        if request.awaits_token:
            if len(request.block_hashes) == (len(token_ids) - 1) // self._block_size:
                return
            token_ids = token_ids[:-1]
        extra_keys = extra_hash_keys(request.cache_salt)
        extend_block_hashes(request.block_hashes, token_ids, self._block_size, extra_keys)


def _num_findable_tokens(request: Request) -> int:
    """Tokens of which all but the last may be found: a row whose logits are wanted is computed."""
    if request.num_unscored_tokens:
        return request.num_prompt_tokens - request.num_unscored_tokens
    return request.num_tokens
