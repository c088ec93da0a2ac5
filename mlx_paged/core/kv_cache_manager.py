"""``KVCacheManager``: the block tables of all requests over one pool, and the prefix cache that
they share.
"""

from __future__ import annotations

import itertools
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType

from mlx_paged.core.block_hash import BlockHash
from mlx_paged.core.block_need import BlockNeed
from mlx_paged.core.block_pool import BlockPool
from mlx_paged.core.block_table import BlockCopy, BlockTable, TableState
from mlx_paged.core.computed_blocks import (
    NOTHING_COMPUTED,
    BlockLoad,
    ComputedBlocks,
    SequenceTables,
)
from mlx_paged.core.errors import BlockTableError
from mlx_paged.core.free_queue import KVCacheBlock
from mlx_paged.core.key_positions import KeyShift
from mlx_paged.core.manager_stats import KVCacheManagerStats, stats_of
from mlx_paged.core.prefix_lookup import AbsentBlock, absent_states, group_hashes, look_up
from mlx_paged.core.retention import KEEP_ALL, Retention
from mlx_paged.core.sequence_states import SequenceState, SequenceStates

RequestId = Hashable


class KVCacheManager:
    """Tracks which request holds which blocks. Names and semantics are those of vLLM's v1 core.

    The life of a request:

        computed = manager.get_computed_blocks(block_hashes, num_tokens)
        copies = manager.allocate_slots(request_id, num_new_tokens, computed)
        # None: out of blocks, and nothing has changed
        manager.cache_blocks(request_id, block_hashes)
        ...  # further steps: allocate_slots, cache_blocks
        manager.free(request_id)

    Blocks can be hit after ``cache_blocks``, even before their rows are written. Another request of
    the same step may share them if every layer writes the rows of the whole step before it reads
    any; otherwise call ``cache_blocks`` after the step. Blocks of a failed step must be removed
    from the prefix cache (:meth:`evict_blocks`).

    Unlike in vLLM, a partly filled block that is shared (after ``fork``) or hashed is copied before
    it is written: apply the copies that ``allocate_slots`` returns, in order, before the step. Not
    thread-safe: one thread at a time.

    Layers that keep the same tokens form a *group*. Each group has its own block tables over the
    shared pool, and a block holds the rows of one group's layers. Most models have a single group,
    which keeps all tokens. Blocks outside the window of a group return to the pool in
    ``allocate_slots``, and a prefix hit needs only the blocks of each group that the next token
    sees.

    Args:
        pool: the blocks.
        retentions: what each group of layers keeps.
        states: the recurrent states of all requests; ``None`` for a model without recurrent layers.
        whole_run: as :class:`BlockNeed`.

    Attributes:
        groups: the block tables of each request, one per group of layers, the oldest request first.
            Change them only through the manager.
        tables: the first table of each request.
        block_need: how many blocks requests need.
    """

    def __init__(
        self,
        pool: BlockPool,
        retentions: Sequence[Retention] = (KEEP_ALL,),
        states: SequenceStates | None = None,
        whole_run: int = 1,
    ) -> None:
        self.pool = pool
        self.retentions = tuple(retentions)
        self.keeps_all = self.retentions == (KEEP_ALL,)
        self.states = states
        self.block_need = BlockNeed(self.retentions, pool.block_size, whole_run)
        self._groups: dict[RequestId, list[BlockTable]] = {}
        self.groups: Mapping[RequestId, Sequence[BlockTable]] = MappingProxyType(self._groups)
        self._tables: dict[RequestId, BlockTable] = {}
        self.tables: Mapping[RequestId, BlockTable] = MappingProxyType(self._tables)
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0
        self._num_stateless_tokens = 0
        self._loads: dict[RequestId, list[BlockLoad]] = {}

    def reset(self) -> None:
        """Drop all requests and their states. No block returns to the pool, which has to be reset
        as well (:meth:`BlockPool.reset`).
        """
        self._groups.clear()
        self._tables.clear()
        self._loads.clear()
        if self.states is not None:
            self.states.reset()

    def num_tokens(self, request_id: RequestId) -> int:
        """Tokens with slots; 0 when there is no such request."""
        table = self._tables.get(request_id)
        return 0 if table is None else table.num_tokens

    def get_computed_blocks(
        self, block_hashes: Sequence[BlockHash], num_tokens: int
    ) -> ComputedBlocks:
        """The longest cached prefix of a request of ``num_tokens`` tokens, in whole blocks.

        It has at most ``num_tokens - 1`` tokens, since the last one must be computed for its
        logits. In a model with recurrent layers it ends at a checkpoint. The blocks are not taken
        yet: ``allocate_slots`` of any other request may take or evict them, so call it for this
        request first.

        Args:
            block_hashes: of the request's full blocks (``hash_token_blocks``).
        """
        lookups, num_blocks, num_with_kv = look_up(
            self.pool, self.retentions, self.states, block_hashes, num_tokens
        )
        found = [lookup.blocks(num_blocks) for lookup in lookups]
        checkpoint = None
        if self.states is not None and num_blocks:
            checkpoint = self.states.checkpoints.get(block_hashes[num_blocks - 1])
        block_size = self.pool.block_size
        return ComputedBlocks(
            found, num_blocks * block_size, num_tokens, checkpoint, num_with_kv * block_size
        )

    def describe(self, request_id: RequestId) -> tuple[SequenceTables, list[list[int]]]:
        """What a request holds, and the ids of its blocks in each group of layers: the blocks of
        its tokens, then the sinks as they were computed. With their contents it can resume later in
        other blocks (:meth:`resumed`). Blocks that its next token does not see return to the pool.

        Raises:
            KeyError: no such request.
        """
        num_tokens = self._table(request_id).num_tokens
        tables: list[TableState] = []
        block_ids: list[list[int]] = []
        for table in self._groups[request_id]:
            table.evict()
            tables.append(table.state())
            # Without blocks that are reserved and still empty.
            blocks = [*table.blocks[: tables[-1].num_blocks], *list(table)[len(table) :]]
            block_ids.append([block.block_id for block in blocks])
        state = None
        if self.states is not None:
            state = SequenceState(num_tokens, self.states.get(request_id, num_tokens))
        return SequenceTables(tables, state, self._tables[request_id].is_foreign), block_ids

    def resumed(self, held: SequenceTables, hit: ComputedBlocks) -> ComputedBlocks:
        """The computed blocks of a request that resumes after a preemption.

        Args:
            held: from :meth:`describe`.
            hit: its prefix hit. Blocks of windows are loaded in any case, because their keys may
                have been shifted since they were computed.
        """
        hits = itertools.chain(hit.groups, itertools.repeat(()))
        groups = [
            blocks[: table.num_blocks] if retention.num_recent_tokens is None else ()
            for retention, blocks, table in zip(self.retentions, hits, held.tables, strict=False)
        ]
        return ComputedBlocks(groups, held.num_tokens, hit.num_queried_tokens, resumed=held)

    def take_loads(self, request_id: RequestId) -> list[BlockLoad]:
        """The blocks of a resumed request that have to be filled before a step reads them; each is
        returned once.
        """
        return self._loads.pop(request_id, [])

    def absent_blocks(
        self,
        block_hashes: Sequence[BlockHash],
        num_tokens: int,
        is_elsewhere: Callable[[BlockHash], bool],
    ) -> list[AbsentBlock]:
        """What has to be loaded for a longer prefix than :meth:`get_computed_blocks` finds: the
        recurrent state at its end, and the blocks of each group of layers, first token first.

        Args:
            is_elsewhere: whether a tier has a block, by its hash in its group. It is also called
                for a block or two after the last one that the tier has.
        """
        lookups, num_blocks, _ = look_up(
            self.pool, self.retentions, self.states, block_hashes, num_tokens, is_elsewhere
        )
        absent = absent_states(self.states, block_hashes[:num_blocks], self.pool.block_size)
        of_groups = (lookup.absent(num_blocks) for lookup in lookups)
        return [*absent, *itertools.chain.from_iterable(of_groups)]

    def num_needed_blocks(
        self,
        request_id: RequestId,
        num_new_tokens: int,
        computed: ComputedBlocks = NOTHING_COMPUTED,
    ) -> int:
        """Free blocks that ``allocate_slots`` takes, including those of ``computed``, after blocks
        outside the request's windows were freed.
        """
        tables = self._groups.get(request_id)
        if tables is not None:
            return sum(table.num_new_blocks(num_new_tokens) for table in tables)
        return self.block_need.num_blocks_to_begin(computed, num_new_tokens)

    def num_freed_blocks(
        self, request_ids: Iterable[RequestId], computed: ComputedBlocks = NOTHING_COMPUTED
    ) -> int:
        """Blocks that become free when all these requests are freed, except those of ``computed``.

        Raises:
            KeyError: no such request.
        """
        held: Counter[KVCacheBlock] = Counter()
        for request_id in request_ids:
            self._table(request_id)
            held.update(itertools.chain.from_iterable(self._groups[request_id]))
        for block in computed.blocks:
            del held[block]
        return sum(block.ref_cnt == count for block, count in held.items())

    def max_run(self, request_id: RequestId, computed: ComputedBlocks = NOTHING_COMPUTED) -> int:
        """How many tokens may be added in one step: those that see the same earlier tokens."""
        num_tokens = self.num_tokens(request_id) + computed.num_tokens
        runs = [retention.max_run(num_tokens) for retention in self.retentions]
        return min([run for run in runs if run is not None], default=sys.maxsize)

    def max_fitting(
        self,
        request_id: RequestId,
        num_new_tokens: int,
        num_left_blocks: int = 0,
        computed: ComputedBlocks = NOTHING_COMPUTED,
    ) -> int:
        """How many of ``num_new_tokens`` tokens fit in one step that leaves ``num_left_blocks``
        blocks free; at least 1.

        Where all tokens are kept, all of them: they need the same blocks in one step or in many. A
        window returns blocks between two steps, so a shorter step needs fewer blocks at a time.
        """
        if self.keeps_all:
            return num_new_tokens
        for table in self._groups.get(request_id, ()):
            table.evict()
        num_free_blocks = self.pool.num_free_blocks - num_left_blocks

        def num_needed(count: int) -> int:
            return self.num_needed_blocks(request_id, count, computed)

        if num_needed(num_new_tokens) <= num_free_blocks:
            return num_new_tokens
        return max(1, bisect_right(range(1, num_new_tokens), num_free_blocks, key=num_needed))

    def max_more(self, request_id: RequestId) -> int:
        """How many more tokens may be added to the step of those that were allocated last; 0 if
        older tokens would have to leave the window first.
        """
        if self.keeps_all:
            return sys.maxsize
        for table in self._groups[request_id]:
            if table.retention.num_evicted(table.num_tokens) > table.num_evicted_tokens:
                return 0
        return self.max_run(request_id)

    def allocate_slots(
        self,
        request_id: RequestId,
        num_new_tokens: int,
        computed: ComputedBlocks = NOTHING_COMPUTED,
    ) -> list[BlockCopy] | None:
        """Allocate slots for ``num_new_tokens`` more tokens of a request. A new request begins with
        the ``computed`` blocks.

        Returns:
            Copy-on-write pairs, ``[]`` almost always. None if there are not enough blocks; then
            nothing has changed, except that blocks outside their window returned to the pool.
            Compare with None: ``[]`` is falsy, too.

        Raises:
            ValueError: for fewer than 1 new token.
            BlockTableError: for computed blocks of a request that is not new.
        """
        if num_new_tokens < 1:
            raise ValueError(
                f"KVCacheManager.allocate_slots: num_new_tokens must be at least 1, "
                f"got {num_new_tokens}"
            )
        tables = self._groups.get(request_id)
        if tables is not None:
            if computed.num_tokens:
                raise BlockTableError(
                    f"KVCacheManager.allocate_slots: request {request_id!r} already has "
                    f"{tables[0].num_tokens} tokens, so its {computed.num_tokens} computed ones "
                    "can't be added"
                )
            if self.keeps_all:
                if num_new_tokens == 1:  # A decode, which is most calls.
                    return tables[0].append_token()
            else:
                for table in tables:
                    table.evict()
        num_needed = self.num_needed_blocks(request_id, num_new_tokens, computed)
        if num_needed > self.pool.num_free_blocks:
            return None
        if tables is None:
            tables = self._begin(request_id, computed)
        copies: list[BlockCopy] = []
        for table in tables:
            more = table.reserve(num_new_tokens)
            assert more is not None, "the blocks were counted"
            copies += more
            table.advance(num_new_tokens)
        return copies

    def _begin(self, request_id: RequestId, computed: ComputedBlocks) -> list[BlockTable]:
        """The tables of a new request, for which there are enough blocks."""
        tables = [BlockTable(self.pool, retention) for retention in self.retentions]
        # The computed blocks are taken first: to allocate new ones may evict free ones.
        self.pool.touch(computed.blocks)
        num_hit_tokens = computed.num_tokens
        if computed.resumed is None:
            for table, blocks in zip(tables, computed.groups, strict=False):
                table.adopt(blocks, computed.num_tokens)
        else:
            self._loads[request_id] = self._resume(tables, computed, computed.resumed)
            num_hit_tokens = min(map(len, computed.groups)) * self.pool.block_size
        if computed.is_foreign:
            for table in tables:
                table.is_foreign = True
        self._groups[request_id], self._tables[request_id] = tables, tables[0]
        if self.states is not None:
            self.states.begin(
                request_id,
                computed.num_tokens,
                computed.checkpoint,
                computed.num_queried_tokens,
                computed.num_tokens_with_kv,
            )
            if computed.resumed and computed.resumed.state:
                self.states.put({request_id: computed.resumed.state})
            elif computed.num_tokens_with_kv:
                self._num_stateless_tokens += computed.num_tokens_with_kv - computed.num_tokens
        # Counted here and not at the lookup, which a refused request repeats.
        self.count_lookup(computed.num_queried_tokens, num_hit_tokens)
        return tables

    def _resume(
        self, tables: Sequence[BlockTable], computed: ComputedBlocks, held: SequenceTables
    ) -> list[BlockLoad]:
        loads = []
        groups = zip(tables, computed.groups, held.tables, strict=True)
        for group, (table, hits, state) in enumerate(groups):
            num_kept = state.num_blocks + state.num_sinks
            new_blocks = self.pool.get_new_blocks(num_kept - len(hits))
            assert new_blocks is not None, "the blocks were counted"
            table.resume(state, [*hits, *new_blocks])
            if new_blocks:
                ids = [block.block_id for block in new_blocks]
                loads.append(BlockLoad(group, range(len(hits), num_kept), ids))
        return loads

    def count_lookup(self, num_queried_tokens: int, num_hit_tokens: int) -> None:
        """Count the prefix lookup of a request that begins."""
        self._num_queried_tokens += num_queried_tokens
        self._num_hit_tokens += num_hit_tokens

    def take_key_shifts(self, request_id: RequestId) -> list[tuple[int, KeyShift]]:
        """The key shifts to apply before the slots allocated last are written, in order, each with
        its group of layers: sinks follow their window, or positions start over. Each is returned
        once.
        """
        return [
            (group, shift)
            for group, table in enumerate(self._groups[request_id])
            for shift in table.positions.take_shifts()
        ]

    def cache_blocks(self, request_id: RequestId, block_hashes: Sequence[BlockHash]) -> int:
        """Enter the full blocks of a request into the prefix cache; return how many are new there.

        Args:
            block_hashes: of the request's leading blocks, those to cache (``hash_token_blocks``);
                hashes after its last full block are ignored.
        """
        num_cached = self._table(request_id).cache_full_blocks(block_hashes)
        for group, table in enumerate(self._groups[request_id][1:], 1):
            # Hashes of blocks that are cached already are not needed.
            begin = table.num_cached_blocks
            new_hashes = group_hashes(block_hashes[begin:], group)
            num_new = table.cache_full_blocks([*block_hashes[:begin], *new_hashes])
            num_cached = max(num_cached, num_new)
        return num_cached

    def free(self, request_id: RequestId) -> list[KVCacheBlock]:
        """Free the blocks of a finished, aborted or preempted request, tail first; return those
        that no other request holds. Cached ones can be hit until they are evicted.

        Raises:
            KeyError: no such request.
        """
        first_table = self._table(request_id)
        if self.states is not None:
            self.states.name(request_id, first_table)
            self.states.free(request_id)
        self._loads.pop(request_id, None)
        del self._tables[request_id]
        freed = [table.free() for table in self._groups.pop(request_id)]
        return list(itertools.chain.from_iterable(freed))

    def fork(self, request_id: RequestId, new_request_id: RequestId) -> None:
        """Add a second request with the same tokens, which shares all blocks until one of the two
        writes.

        Raises:
            KeyError: no such request.
            ValueError: the new request exists already.
        """
        self._table(request_id)
        if new_request_id in self._groups:
            raise ValueError(f"KVCacheManager.fork: request {new_request_id!r} exists already")
        children = [parent.fork() for parent in self._groups[request_id]]
        self._groups[new_request_id], self._tables[new_request_id] = children, children[0]
        if self.states is not None:
            self.states.fork(request_id, new_request_id)

    def trim(self, request_id: RequestId, num_tokens: int) -> int:
        """Drop a request's tokens from ``num_tokens`` on, after rejected drafts or a failed step.

        Returns:
            How many tokens it has now. It is fewer when drafts are rejected in a model with
            recurrent layers, where the whole step with the drafts is rolled back.

        Raises:
            KeyError: no such request.
            BlockTableError: ``num_tokens`` is negative or beyond its length, evicted tokens would
                be needed again, or its recurrent state can't be cut; nothing has changed.
        """
        self._table(request_id)
        tables = self._groups[request_id]
        for table in tables if not self.keeps_all else ():
            table.retention.check_evicted(num_tokens, table.num_evicted_tokens)
        if self.states is not None:
            num_tokens = self.states.trim(request_id, num_tokens)
        for table in tables:
            table.trim_to(num_tokens)
        return num_tokens

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Remove blocks from the prefix cache, whether free or in use, because a failed step did
        not fill them.
        """
        if self.states is not None:
            block_ids = list(block_ids)
            hashes = (self.pool.get_block(block_id).block_hash for block_id in block_ids)
            self.states.checkpoints.remove(filter(None, hashes))
        self.pool.evict_blocks(block_ids)

    def shrink_pool(self, num_blocks: int) -> list[BlockCopy]:
        """Drop free blocks from the pool, those that would be taken next. No step may be in flight.

        Returns:
            Copies of blocks that have moved to lower ids, to be made before the slabs shrink.
        """
        copies = self.pool.shrink_by(num_blocks)
        if copies:
            for table in itertools.chain.from_iterable(self._groups.values()):
                table.renumber()
        return copies

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache, or return False and change nothing while a block is in use."""
        if not self.pool.reset_prefix_cache():
            return False
        if self.states is not None:
            self.states.checkpoints.clear()
        return True

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return self.pool.num_free_blocks

    def stats(self) -> KVCacheManagerStats:
        """Current figures. Any thread may call it, and may see a step in progress."""
        of_requests = list(self._groups.values())
        return stats_of(
            self.pool,
            of_requests,
            self._num_queried_tokens,
            self._num_hit_tokens,
            0 if self.states is None else len(self.states.checkpoints),
            self._num_stateless_tokens,
        )

    def _table(self, request_id: RequestId) -> BlockTable:
        if request_id not in self._tables:
            raise KeyError(
                f"KVCacheManager: no request {request_id!r}; there are {list(self._tables)}"
            )
        return self._tables[request_id]
