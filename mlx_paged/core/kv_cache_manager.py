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
from mlx_paged.core.integrity import check_integrity
from mlx_paged.core.key_positions import KeyShift
from mlx_paged.core.manager_stats import KVCacheManagerStats, stats_of
from mlx_paged.core.prefix_lookup import AbsentBlock, absent_states, group_hashes, look_up
from mlx_paged.core.retention import KEEP_ALL, Retention
from mlx_paged.core.sequence_states import SequenceState, SequenceStates

RequestId = Hashable


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

    Layers that keep different tokens have tables of their own, a *group* each, over the same pool:
    a block is a group's, and holds the rows of its layers. Most models are one group that keeps
    all. What left the window of a group goes back to the pool in ``allocate_slots``, and a prefix
    hit needs of each group only what the next token sees.

    Args:
        pool: the blocks.
        retentions: what each group of layers keeps.
        states: for what a model with recurrent layers keeps of each request; ``None`` for others.

    Attributes:
        groups: the block tables of each request, one per group of layers, the oldest request first.
            Change them only through the manager.
        tables: the first one of each.
        block_need: how many blocks requests need.
    """

    def __init__(
        self,
        pool: BlockPool,
        retentions: Sequence[Retention] = (KEEP_ALL,),
        states: SequenceStates | None = None,
    ) -> None:
        self.pool = pool
        self.retentions = tuple(retentions)
        self.keeps_all = self.retentions == (KEEP_ALL,)
        self.states = states
        self.block_need = BlockNeed(self.retentions, pool.block_size)
        self._groups: dict[RequestId, list[BlockTable]] = {}
        self.groups: Mapping[RequestId, Sequence[BlockTable]] = MappingProxyType(self._groups)
        self._tables: dict[RequestId, BlockTable] = {}
        self.tables: Mapping[RequestId, BlockTable] = MappingProxyType(self._tables)
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0
        self._num_stateless_tokens = 0
        self._loads: dict[RequestId, list[BlockLoad]] = {}

    def reset(self) -> None:
        """Forget all requests and their states. Nothing is given back to the pool, which is to be
        reset, too (:meth:`BlockPool.reset`).
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
        logits. Of a model with recurrent layers it ends where there is a checkpoint. No block is
        taken: the next ``allocate_slots`` of any request may take or evict these, so pass them to
        that of this request first.

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
        """What a request holds, and the ids of its blocks in each group of layers: those of its
        tokens, then the sinks as they were computed. With the contents of these blocks it goes on
        later, in other ones (:meth:`resumed`). Blocks that its next token does not see go back to
        the pool.

        Raises:
            KeyError: no such request.
        """
        num_tokens = self._table(request_id).num_tokens
        tables: list[TableState] = []
        block_ids: list[list[int]] = []
        for table in self._groups[request_id]:
            table.evict()
            tables.append(table.state())
            # Blocks that were reserved and are empty stand between the two.
            blocks = [*table.blocks[: tables[-1].num_blocks], *list(table)[len(table) :]]
            block_ids.append([block.block_id for block in blocks])
        state = None
        if self.states is not None:
            state = SequenceState(num_tokens, self.states.get(request_id, num_tokens))
        return SequenceTables(tables, state), block_ids

    def resumed(self, held: SequenceTables, hit: ComputedBlocks) -> ComputedBlocks:
        """What a request begins with that goes on after a preemption.

        Args:
            held: by :meth:`describe`.
            hit: what the pool has of it. Blocks of windows are loaded all the same: their keys may
                have other positions than when they were computed.
        """
        hits = itertools.chain(hit.groups, itertools.repeat(()))
        groups = [
            blocks[: table.num_blocks] if retention.num_recent_tokens is None else ()
            for retention, blocks, table in zip(self.retentions, hits, held.tables, strict=False)
        ]
        return ComputedBlocks(groups, held.num_tokens, hit.num_queried_tokens, resumed=held)

    def take_loads(self, request_id: RequestId) -> list[BlockLoad]:
        """The blocks of a resumed request that are to be filled before a step reads them. They are
        told once.
        """
        return self._loads.pop(request_id, [])

    def absent_blocks(
        self,
        block_hashes: Sequence[BlockHash],
        num_tokens: int,
        is_elsewhere: Callable[[BlockHash], bool],
    ) -> list[AbsentBlock]:
        """What a longer prefix of a request than :meth:`get_computed_blocks` finds has elsewhere:
        the state at its end and the blocks, first token first in each group of layers.

        Args:
            is_elsewhere: whether a block can be brought from another place, by the hash of its
                group. It is asked of a block or two beyond those that can.
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
        """Free blocks that ``allocate_slots`` takes, those of ``computed`` included, once what left
        the request's windows is given back.
        """
        tables = self._groups.get(request_id)
        if tables is not None:
            return sum(table.num_new_blocks(num_new_tokens) for table in tables)
        return self.block_need.num_blocks_to_begin(computed, num_new_tokens)

    def num_freed_blocks(
        self, request_ids: Iterable[RequestId], computed: ComputedBlocks = NOTHING_COMPUTED
    ) -> int:
        """Blocks that become free when all these requests are freed, without those of ``computed``.

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
        """How many tokens may be allocated at once: as many as see the same tokens before them."""
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
        """Of ``num_new_tokens`` tokens, how many fit in one step that leaves ``num_left_blocks``
        free blocks to others; 1 at least.

        All of them where all tokens are kept: they need the same blocks in one step or in many.
        Tokens that leave a window give their blocks back between two steps, so a shorter step needs
        fewer at a time.
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
        """How many tokens may follow those that were allocated last, in the same step: none where
        others would leave the window before.
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
            Copy-on-write pairs, ``[]`` almost always; None when there are not enough blocks, and
            nothing has changed but that blocks which left their window went back to the pool.
            Compare with None: ``[]`` is false, too.

        Raises:
            ValueError: for fewer than 1 new token.
            BlockTableError: for computed blocks of a request that has a table already.
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
                    f"KVCacheManager.allocate_slots: request {request_id!r} has "
                    f"{tables[0].num_tokens} tokens already, so its {computed.num_tokens} computed "
                    "ones have no place"
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
        # The computed blocks are taken first: new ones may be had by evicting free ones.
        self.pool.touch(computed.blocks)
        num_hit_tokens = computed.num_tokens
        if computed.resumed is None:
            for table, blocks in zip(tables, computed.groups, strict=False):
                table.adopt(blocks, computed.num_tokens)
        else:
            self._loads[request_id] = self._resume(tables, computed, computed.resumed)
            num_hit_tokens = min(map(len, computed.groups)) * self.pool.block_size
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
        """Count the tokens that were looked up, and those found, of a request that begins."""
        self._num_queried_tokens += num_queried_tokens
        self._num_hit_tokens += num_hit_tokens

    def take_key_shifts(self, request_id: RequestId) -> list[tuple[int, KeyShift]]:
        """What the slots allocated last make necessary before they are written, in order, by group
        of layers: sinks have to follow their window, or positions start over. Each is told once.
        """
        return [
            (group, shift)
            for group, table in enumerate(self._groups[request_id])
            for shift in table.positions.take_shifts()
        ]

    def cache_blocks(self, request_id: RequestId, block_hashes: Sequence[BlockHash]) -> int:
        """Let other requests hit the full blocks of this one; return how many are newly cached.

        Args:
            block_hashes: of the request's blocks (``hash_token_blocks``), as many as are to be
                cached; those beyond its full blocks are not used.
        """
        num_cached = self._table(request_id).cache_full_blocks(block_hashes)
        for group, table in enumerate(self._groups[request_id][1:], 1):
            # Those that are cached already are not named again, however many they are.
            begin = table.num_cached_blocks
            new_hashes = group_hashes(block_hashes[begin:], group)
            num_new = table.cache_full_blocks([*block_hashes[:begin], *new_hashes])
            num_cached = max(num_cached, num_new)
        return num_cached

    def free(self, request_id: RequestId) -> list[KVCacheBlock]:
        """Give back the blocks of a finished, aborted or preempted request, tail first; return
        those that became free. Cached ones can be hit until they are evicted.

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
            ValueError: the new one exists.
        """
        self._table(request_id)
        if new_request_id in self._groups:
            raise ValueError(f"KVCacheManager.fork: request {new_request_id!r} exists already")
        children = [parent.fork() for parent in self._groups[request_id]]
        self._groups[new_request_id], self._tables[new_request_id] = children, children[0]
        if self.states is not None:
            self.states.fork(request_id, new_request_id)

    def trim(self, request_id: RequestId, num_tokens: int) -> int:
        """Forget a request's tokens from ``num_tokens`` on, after rejected speculation or a failed
        step.

        Returns:
            How many tokens it has now: fewer where drafts were rejected of a model with recurrent
            layers, since the step with them is then forgotten as a whole.

        Raises:
            KeyError: no such request.
            BlockTableError: ``num_tokens`` is negative or more than it has, tokens that have left
                the window would be needed again, or a state can't be cut; nothing has changed.
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
        """Take blocks out of the prefix cache, whether free or held: a step that failed did not
        fill them.
        """
        if self.states is not None:
            block_ids = list(block_ids)
            hashes = (self.pool.get_block(block_id).block_hash for block_id in block_ids)
            self.states.checkpoints.remove(filter(None, hashes))
        self.pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forget everything cached, or return False and change nothing while a block is in use."""
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
        """Figures of this moment. Another thread may call it, and may then see a step half done."""
        of_requests = list(self._groups.values())
        return stats_of(
            self.pool,
            of_requests,
            self._num_queried_tokens,
            self._num_hit_tokens,
            0 if self.states is None else len(self.states.checkpoints),
            self._num_stateless_tokens,
        )

    def check_integrity(self) -> None:
        """Verify every invariant of pool and tables. O(blocks), for tests and for debugging.

        Raises:
            IntegrityError: with the sum that failed.
        """
        check_integrity(self.pool, self._groups)

    def _table(self, request_id: RequestId) -> BlockTable:
        if request_id not in self._tables:
            raise KeyError(
                f"KVCacheManager: no request {request_id!r}; there are {list(self._tables)}"
            )
        return self._tables[request_id]
