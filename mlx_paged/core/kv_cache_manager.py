"""``KVCacheManager``: the block tables of all requests over one pool, and the prefix cache that
they share.
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
from mlx_paged.core.integrity import check_pool_integrity, check_table_integrity
from mlx_paged.core.kv_cache_block import KVCacheBlock

RequestId = Hashable


class ComputedBlocks(NamedTuple):
    """A prefix hit: the blocks that hold the first ``num_tokens`` tokens of a request, which does
    not hold them yet.
    """

    blocks: Sequence[KVCacheBlock] = ()
    num_tokens: int = 0
    num_queried_tokens: int = 0  # of the request whose prefix was looked up


NOTHING_COMPUTED = ComputedBlocks()


@dataclass(frozen=True)
class KVCacheManagerStats:
    """What the manager holds now, and what its prefix cache has done since it was made."""

    num_requests: int
    num_tokens: int  # of all requests; those in shared blocks count for each
    num_usable_blocks: int
    num_used_blocks: int
    num_cached_blocks: int  # in the prefix index, in use or free
    num_unfilled_slots: int  # allocated and not filled: fragmentation
    num_evictions: int
    num_queried_tokens: int
    num_hit_tokens: int

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0..1."""
        return self.num_used_blocks / max(1, self.num_usable_blocks)

    @property
    def hit_rate(self) -> float:
        """Share of the tokens asked for that were found, 0..1."""
        return self.num_hit_tokens / max(1, self.num_queried_tokens)


class KVCacheManager:
    """Knows which request holds which blocks; names and meaning as in vLLM's v1 core.

    The life of a request:

        computed = manager.get_computed_blocks(block_hashes, num_tokens)
        copies = manager.allocate_slots(request_id, num_new_tokens, computed)
        # None: out of blocks, and nothing has changed
        manager.cache_blocks(request_id, block_hashes)
        ...  # further steps: allocate_slots, cache_blocks
        manager.free(request_id)

    Blocks can be hit from ``cache_blocks`` on, even before their rows are written. Another request
    of the same step may share them if every layer writes the rows of the whole step before it reads
    any; otherwise call ``cache_blocks`` after the step. Blocks of a step that failed have to leave
    the index (``BlockPool.evict_blocks``).

    Unlike in vLLM, a partly filled block that is shared (after ``fork``) or hashed is copied before
    it is written: apply the copies that ``allocate_slots`` returns, in order, before the step. Not
    thread-safe: one thread at a time.

    Args:
        pool: the blocks.
        shares_blocks: False for storage in which a block's rows belong to one sequence. No block is
            then ever held by two requests: a prefix hit finds only blocks that nobody holds, and
            ``fork`` takes new blocks.
    """

    def __init__(self, pool: BlockPool, shares_blocks: bool = True) -> None:
        self.pool = pool
        self.shares_blocks = shares_blocks
        self._tables: dict[RequestId, BlockTable] = {}
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0

    @property
    def tables(self) -> Mapping[RequestId, BlockTable]:
        """The block table of each request, oldest first. Change them only through the manager."""
        return MappingProxyType(self._tables)

    def num_tokens(self, request_id: RequestId) -> int:
        """Tokens with slots; 0 when there is no such request."""
        table = self._tables.get(request_id)
        return 0 if table is None else table.num_tokens

    def get_computed_blocks(
        self, block_hashes: Sequence[BlockHash], num_tokens: int
    ) -> ComputedBlocks:
        """The longest cached prefix of a request of ``num_tokens`` tokens, in whole blocks.

        It has at most ``num_tokens - 1`` tokens, since the last one must be computed for its
        logits. Without ``shares_blocks`` it ends before the first block that a request holds. No
        block is
        taken: the next ``allocate_slots`` of any request may take or evict these, so pass them to
        that of this request first.

        Args:
            block_hashes: of the request's full blocks (``hash_token_blocks``).
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
        """Free blocks that ``allocate_slots`` would take, those of ``computed`` included."""
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
        """Allocate slots for ``num_new_tokens`` more tokens of a request. A new request begins with
        the ``computed`` blocks.

        Returns:
            Copy-on-write pairs, ``[]`` almost always; None when there are not enough blocks, and
            nothing has changed. Compare with None: ``[]`` is false, too.

        Raises:
            ValueError: for fewer than 1 new token.
            BlockTableError: for computed blocks of a request that has a table already, and without
                ``shares_blocks`` for computed blocks that another request has taken since.
        """
        if num_new_tokens < 1:
            raise ValueError(
                f"KVCacheManager.allocate_slots: num_new_tokens must be at least 1, "
                f"got {num_new_tokens}"
            )
        table = self._tables.get(request_id)
        if table is not None and computed.num_tokens:
            raise BlockTableError(
                f"KVCacheManager.allocate_slots: request {request_id!r} has {table.num_tokens} "
                f"tokens already, so its {computed.num_tokens} computed ones have no place"
            )
        if table is not None and num_new_tokens == 1:  # A decode, which is most calls.
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
            # The computed blocks are taken first: new ones may be had by evicting free ones.
            self.pool.touch(computed.blocks)
            table = self._tables[request_id] = BlockTable(self.pool)
            table.adopt(computed.blocks, computed.num_tokens)
            # Counted here and not at the lookup, which a refused request repeats.
            self._num_queried_tokens += computed.num_queried_tokens
            self._num_hit_tokens += computed.num_tokens
        copies = table.reserve(num_new_tokens)
        assert copies is not None, "the blocks were counted"
        table.advance(num_new_tokens)
        return copies

    def cache_blocks(self, request_id: RequestId, block_hashes: Sequence[BlockHash]) -> int:
        """Let other requests hit the full blocks of this one; return how many are newly cached.

        Args:
            block_hashes: of the request's blocks (``hash_token_blocks``), as many as are to be
                cached; those beyond its full blocks are not used.
        """
        return self._table(request_id).cache_full_blocks(block_hashes)

    def free(self, request_id: RequestId) -> list[KVCacheBlock]:
        """Give back the blocks of a finished, aborted or preempted request, tail first; return
        those that became free. Cached ones can be hit until they are evicted.

        Raises:
            KeyError: no such request.
        """
        freed = self._table(request_id).free()
        del self._tables[request_id]
        return freed

    def fork(self, request_id: RequestId, new_request_id: RequestId) -> bool:
        """Add a second request with the same tokens.

        It shares all blocks until one of the two writes. Without ``shares_blocks`` it gets as many
        new blocks instead, and the caller copies the rows: block by block, from
        ``tables[request_id]`` to ``tables[new_request_id]``.

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
        """Forget a request's tokens from ``num_tokens`` on, after rejected speculation or a failed
        step.

        Raises:
            KeyError: no such request.
            BlockTableError: ``num_tokens`` is negative or more than it has.
        """
        self._table(request_id).trim_to(num_tokens)

    def reset_prefix_cache(self) -> bool:
        """Forget everything cached, or return False and change nothing while a block is in use."""
        return self.pool.reset_prefix_cache()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return self.pool.num_free_blocks

    def stats(self) -> KVCacheManagerStats:
        """Figures of this moment. Another thread may call it, and may then see a step half done."""
        tables = list(self._tables.values())
        # Forks may share a partly filled block: what its fullest holder leaves is unfilled.
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
            num_usable_blocks=self.pool.num_usable_blocks,
            num_used_blocks=self.pool.num_used_blocks,
            num_cached_blocks=self.pool.num_cached_blocks,
            num_unfilled_slots=sum(unfilled.values()),
            num_evictions=self.pool.num_evictions,
            num_queried_tokens=self._num_queried_tokens,
            num_hit_tokens=self._num_hit_tokens,
        )

    def check_integrity(self) -> None:
        """Verify every invariant of pool and tables. O(blocks), for tests and for debugging.

        Raises:
            IntegrityError: with the sum that failed.
        """
        for table in self._tables.values():
            check_table_integrity(table)
        check_pool_integrity(self.pool, self._tables.values())
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
