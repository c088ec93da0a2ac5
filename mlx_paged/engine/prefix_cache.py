"""``PrefixCache``: full blocks that requests share by the hashes of their tokens. Pure Python, no
arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mlx_paged.core import (
    AbsentBlock,
    BlockHash,
    ComputedBlocks,
    KVCacheManager,
    extend_block_hashes,
)
from mlx_paged.core.computed_blocks import NOTHING_COMPUTED
from mlx_paged.engine.request import Completion

if TYPE_CHECKING:  # The scheduler imports no arrays.
    from mlx_paged.cache.contiguous import ContiguousKVCache


def extra_hash_keys(cache_salt: str | None) -> tuple[str, ...]:
    """What is hashed with each block in addition to its tokens."""
    return () if cache_salt is None else (cache_salt,)


class PrefixCache:
    """The full blocks of all requests, by the hashes of their tokens; or, if sequences share no
    blocks, the last finished sequence.

    Args:
        unshared: a cache whose sequences share no blocks; ``None`` for others.
        is_enabled: whether prefix caching is enabled.
    """

    def __init__(
        self, manager: KVCacheManager, unshared: ContiguousKVCache | None, is_enabled: bool
    ) -> None:
        self._manager = manager
        self._block_size = manager.pool.block_size
        self._last_sequence = unshared if is_enabled else None
        self._finds_blocks = is_enabled and unshared is None

    def computed_blocks(self, completion: Completion) -> ComputedBlocks:
        """The blocks of the longest cached prefix of a request, which are not allocated yet."""
        if not self._finds_blocks:
            return NOTHING_COMPUTED
        self._hash_blocks(completion)
        num_tokens = _num_findable_tokens(completion)
        return self._manager.get_computed_blocks(completion.block_hashes, num_tokens)

    def num_kept_tokens(self, completion: Completion) -> int:
        """How many tokens of a new request the kept sequence begins with, in full blocks."""
        if self._last_sequence is None:
            return 0
        self._hash_blocks(completion)
        num_usable_blocks = max(0, _num_findable_tokens(completion) - 1) // self._block_size
        hashes = completion.block_hashes[:num_usable_blocks]
        return self._last_sequence.num_kept_blocks(hashes) * self._block_size

    def absent_blocks(
        self, completion: Completion, has: Callable[[BlockHash], bool]
    ) -> Sequence[AbsentBlock]:
        """The blocks of a request that a tier has and the pool lacks."""
        self._hash_blocks(completion)
        num_tokens = _num_findable_tokens(completion)
        return self._manager.absent_blocks(completion.block_hashes, num_tokens, has)

    def begin(self, completion: Completion, num_held_tokens: int) -> None:
        """A request has got its slots, into which the kept sequence may be moved."""
        if self._last_sequence is not None:
            self._manager.count_lookup(_num_findable_tokens(completion), num_held_tokens)
            if num_held_tokens:
                self._last_sequence.take_last(self._manager.tables[completion.seq_id])

    def cache_blocks(self, completion: Completion) -> list[int]:
        """Cache the blocks that the newest step has filled, as far as their tokens are known;
        returns the ids of the new ones.
        """
        if not self._finds_blocks:
            return []
        self._hash_blocks(completion)
        num_new_blocks = self._manager.cache_blocks(completion.seq_id, completion.block_hashes)
        num_full_blocks = completion.num_computed_tokens // self._block_size
        end = min(num_full_blocks, len(completion.block_hashes))
        block_ids: list[int] = []
        for table in self._manager.groups[completion.seq_id]:
            num_evicted = table.num_evicted_tokens // self._block_size
            begin = max(0, end - num_new_blocks - num_evicted)
            block_ids += table.packed_block_ids[begin : end - num_evicted]
        return block_ids

    def end(self, completion: Completion) -> None:
        """A request is finished, and its blocks are about to be freed."""
        if self._last_sequence is not None:
            self._hash_blocks(completion)
            num_full_blocks = completion.num_computed_tokens // self._block_size
            hashes = completion.block_hashes[:num_full_blocks]
            self._last_sequence.keep_last(self._manager.tables[completion.seq_id], hashes)

    def forget_last(self) -> None:
        """Drop the kept sequence."""
        if self._last_sequence is not None:
            self._last_sequence.forget_last()

    def reset(self) -> bool:
        """Drop all cached blocks; False, without a change, while requests are running."""
        if not self._manager.reset_prefix_cache():
            return False
        self.forget_last()
        return True

    def _hash_blocks(self, completion: Completion) -> None:
        token_ids = completion.token_ids
        if completion.awaits_token:
            if len(completion.block_hashes) == (len(token_ids) - 1) // self._block_size:
                return
            token_ids = token_ids[:-1]
        extra_keys = extra_hash_keys(completion.request.cache_salt)
        extend_block_hashes(completion.block_hashes, token_ids, self._block_size, extra_keys)


def _num_findable_tokens(completion: Completion) -> int:
    """Tokens of which all but the last may be cached: rows whose logits are needed are computed."""
    if completion.num_unscored_tokens:
        return completion.num_prompt_tokens - completion.num_unscored_tokens
    return completion.num_tokens
