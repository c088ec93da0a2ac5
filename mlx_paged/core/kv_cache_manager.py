"""`KVCacheManager`: the block tables of all requests over one pool, and the prefix cache between
them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from mlx_paged.core.block_hash import BlockHash
from mlx_paged.core.block_pool import BlockPool
from mlx_paged.core.block_table import BlockCopy, BlockTable
from mlx_paged.core.errors import BlockTableError, IntegrityError
from mlx_paged.core.kv_cache_block import KVCacheBlock

RequestId = Hashable


class ComputedBlocks(NamedTuple):
    """A prefix hit: blocks that hold the first `num_tokens` tokens of a request. Held by nobody for
    it yet.
    """

    blocks: Sequence[KVCacheBlock] = ()
    num_tokens: int = 0
    num_queried_tokens: int = 0  # that were looked for


NOTHING_COMPUTED = ComputedBlocks()


@dataclass(frozen=True)
class KVCacheManagerStats:
    """What the manager holds now, and what its prefix cache did since it was made."""

    num_requests: int
    num_tokens: int  # of all requests; those in shared blocks count for each
    num_blocks: int  # without the null block
    num_used_blocks: int
    num_cached_blocks: int  # in the prefix index, in use or free
    num_unfilled_slots: int  # allocated and not filled: fragmentation
    num_evictions: int
    num_queried_tokens: int
    num_hit_tokens: int

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0..1."""
        return self.num_used_blocks / max(1, self.num_blocks)

    @property
    def hit_rate(self) -> float:
        """Share of the tokens asked for that were found, 0..1."""
        return self.num_hit_tokens / max(1, self.num_queried_tokens)


class KVCacheManager:
    """Who holds which block, by request; names and meaning as in vLLM's v1 core.

    A new request:

        computed = manager.get_computed_blocks(block_hashes, num_tokens) copies =
        manager.allocate_slots(request_id, num_new_tokens, computed)   # None: out of blocks,
        nothing changed manager.cache_blocks(request_id, block_hashes) ...
        # steps: allocate_slots, cache_blocks manager.free(request_id)

    Blocks can be hit from `cache_blocks` on, which may be before their rows are written: another
    request of the same step may share them, if every layer writes the rows of the whole step before
    it reads any. Where that can't be had, call it after the step. What a step that failed let
    others hit has to leave the index (`BlockPool.evict_blocks`).

    Unlike vLLM, a partly filled block that is shared (after `fork`) or hashed is copied before it
    is written: apply the copies that `allocate_slots` returns, in order, before the step. Not
    thread-safe: one thread at a time.

    Args:
        pool: the blocks.
        shares_blocks: False for storage in which a block's rows belong to one sequence: no block is
            ever held by two requests. A prefix hit then finds only blocks that nobody holds, and
            `fork` takes new blocks."""

    def __init__(self, pool: BlockPool, shares_blocks: bool = True) -> None:
        self.pool = pool
        self.shares_blocks = shares_blocks
        self._tables: dict[RequestId, BlockTable] = {}
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0

    @property
    def tables(self) -> Mapping[RequestId, BlockTable]:
        """The block table of each request, oldest first. Read them; change them through the
        manager.
        """
        return MappingProxyType(self._tables)

    def num_tokens(self, request_id: RequestId) -> int:
        """Tokens with slots; 0 when there is no such request."""
        table = self._tables.get(request_id)
        return 0 if table is None else table.num_tokens

    # A request's life

    def get_computed_blocks(
        self, block_hashes: Sequence[BlockHash], num_tokens: int
    ) -> ComputedBlocks:
        """The longest cached prefix of a request of `num_tokens` tokens, in whole blocks.

        At most `num_tokens - 1` tokens: the last one must be computed for its logits. Without
        `shares_blocks` the prefix ends before the first block that a request holds. Nothing is
        taken: the next `allocate_slots` of any request may take or evict these blocks, so pass them
        to that of this request first.

        Args:
            block_hashes: of the request's full blocks (`hash_token_blocks`).
        """
        blocks: list[KVCacheBlock] = []
        for block_hash in block_hashes[: max(0, num_tokens - 1) // self.pool.block_size]:
            block = self.pool.get_cached_block(block_hash)
            if block is None or self._is_taken(block):
                break
            blocks.append(block)
        return ComputedBlocks(blocks, len(blocks) * self.pool.block_size, num_tokens)

    def num_needed_blocks(
        self,
        request_id: RequestId,
        num_new_tokens: int,
        computed: ComputedBlocks = NOTHING_COMPUTED,
    ) -> int:
        """Free blocks that `allocate_slots` would take, computed ones that are free now included."""
        table = self._tables.get(request_id)
        if table is not None:
            return table.num_new_blocks(num_new_tokens)
        num_free_hits = sum(block.ref_cnt == 0 for block in computed.blocks)
        return num_free_hits + -(-num_new_tokens // self.pool.block_size)

    def allocate_slots(
        self,
        request_id: RequestId,
        num_new_tokens: int,
        computed: ComputedBlocks = NOTHING_COMPUTED,
    ) -> list[BlockCopy] | None:
        """Slots for `num_new_tokens` more tokens of a request, behind `computed` ones if it is new.

        Returns:
            Copy-on-write pairs, `[]` almost always; None when there are not enough blocks, and
            nothing has changed. (`[]` is false, too: compare with None.)

        Raises:
            ValueError: fewer than 1 new token.
            BlockTableError: computed blocks for a request that has a table already, or, without
                `shares_blocks`, computed blocks that another request has taken since.
        """
        if num_new_tokens < 1:
            raise ValueError(
                f"KVCacheManager.allocate_slots: num_new_tokens must be at least 1, got {num_new_tokens}"
            )
        table = self._tables.get(request_id)
        if table is not None and computed.num_tokens:
            raise BlockTableError(
                f"KVCacheManager.allocate_slots: request {request_id!r} has {table.num_tokens} tokens already, "
                f"so its {computed.num_tokens} computed ones have no place"
            )
        if table is not None and num_new_tokens == 1:  # Most calls by far: a decode.
            return table.append_token()
        for block in computed.blocks:
            if self._is_taken(block):
                raise BlockTableError(
                    f"KVCacheManager.allocate_slots: request {request_id!r} can't share computed "
                    f"block {block.block_id}, which another request holds (shares_blocks is False)"
                )
        if self.num_needed_blocks(request_id, num_new_tokens, computed) > self.pool.num_free_blocks:
            return None
        if table is None:
            # Taken before anything is evicted, or the new blocks could be these.
            self.pool.touch(computed.blocks)
            table = self._tables[request_id] = BlockTable(self.pool)
            table.adopt(computed.blocks, computed.num_tokens)
            # Counted here and not at the lookup: a request that is refused looks again.
            self._num_queried_tokens += computed.num_queried_tokens
            self._num_hit_tokens += computed.num_tokens
        copies = table.reserve(num_new_tokens)
        assert copies is not None, "the blocks were counted"
        table.advance(num_new_tokens)
        return copies

    def cache_blocks(self, request_id: RequestId, block_hashes: Sequence[BlockHash]) -> int:
        """Let others hit the full blocks of a request; returns how many are new to the index.

        Args:
            block_hashes: of its tokens, at least those of its full blocks that shall be found; more
                are not used.
        """
        return self._table(request_id).cache_full_blocks(block_hashes)

    def free(self, request_id: RequestId) -> list[KVCacheBlock]:
        """Give back a request's blocks, tail first; those that are cached can be hit until they are
        evicted.

        Finished, aborted and preempted requests alike. Returns the blocks that became free.
        KeyError if not there."""
        freed = self._table(request_id).free()
        del self._tables[request_id]
        return freed

    def fork(self, request_id: RequestId, new_request_id: RequestId) -> bool:
        """Add a second request with the same tokens.

        It shares all blocks until one of the two writes. Without `shares_blocks` it gets as many
        new blocks instead, and the caller copies the rows: block by block, from
        `tables[request_id]` to `tables[new_request_id]`.

        Returns:
            False when there are not enough blocks for that, and nothing has changed.

        Raises:
            KeyError: no such request.
            ValueError: the new one exists.
        """
        table = self._table(request_id)
        if new_request_id in self._tables:
            raise ValueError(f"KVCacheManager.fork: request {new_request_id!r} exists already")
        if self.shares_blocks:
            child = table.fork()
        else:
            child = BlockTable(self.pool)
            if child.reserve(table.num_tokens) is None:
                return False
            child.advance(table.num_tokens)
        self._tables[new_request_id] = child
        return True

    def trim(self, request_id: RequestId, num_tokens: int) -> None:
        """Forget a request's tokens from `num_tokens` on: rejected speculation, or a step that
        failed.

        Raises:
            KeyError: no such request.
            BlockTableError: `num_tokens` is negative or more than it has.
        """
        self._table(request_id).trim_to(num_tokens)

    def reset_prefix_cache(self) -> bool:
        """Forget everything cached; False, and nothing has changed, while any block is in use."""
        return self.pool.reset_prefix_cache()

    # Figures

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return self.pool.num_free_blocks

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0..1."""
        return self.pool.usage

    def stats(self) -> KVCacheManagerStats:
        """May be called from another thread, too; figures of a step under way then mix before and
        after.
        """
        tables = list(self._tables.values())
        # A partly filled block that forks share is one block: unfilled is what its fullest holder
        # leaves.
        unfilled: dict[int, int] = {}
        for table in tables:
            num_unfilled_slots = table.num_unfilled_slots
            for last in table.blocks[-1:] if num_unfilled_slots else ():
                unfilled[last.block_id] = min(
                    unfilled.get(last.block_id, self.pool.block_size), num_unfilled_slots
                )
        return KVCacheManagerStats(
            num_requests=len(tables),
            num_tokens=sum(table.num_tokens for table in tables),
            num_blocks=self.pool.num_blocks - 1,
            num_used_blocks=self.pool.num_used_blocks,
            num_cached_blocks=self.pool.num_cached_blocks,
            num_unfilled_slots=sum(unfilled.values()),
            num_evictions=self.pool.num_evictions,
            num_queried_tokens=self._num_queried_tokens,
            num_hit_tokens=self._num_hit_tokens,
        )

    def check_integrity(self) -> None:
        """Verify every invariant of pool and tables; O(blocks), for tests and for debugging. Raises
        IntegrityError.
        """
        for table in self._tables.values():
            table.check_integrity()
        self.pool.check_integrity(self._tables.values())
        for block in self.pool.blocks if not self.shares_blocks else ():
            if block.ref_cnt > 1:
                raise IntegrityError(
                    f"check_integrity: block {block.block_id} has ref_cnt {block.ref_cnt} > 1, "
                    f"and shares_blocks is False"
                )

    def _is_taken(self, block: KVCacheBlock) -> bool:
        """Whether no further request may hold this block."""
        return not self.shares_blocks and block.ref_cnt > 0

    def _table(self, request_id: RequestId) -> BlockTable:
        if request_id not in self._tables:
            raise KeyError(
                f"KVCacheManager: no request {request_id!r}; there are {list(self._tables)}"
            )
        return self._tables[request_id]
