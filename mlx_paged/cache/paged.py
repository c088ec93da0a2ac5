"""The paged KV cache: the K/V of all sequences in one pool of fixed-size blocks, one K and one V
slab per layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_paged.cache.base import KVCache, KVCacheStats, SeqId, Step
from mlx_paged.config import KVCacheConfig
from mlx_paged.core import BlockCopy, BlockPool, BlockTable, KVCacheManager
from mlx_paged.errors import CacheFullError
from mlx_paged.ops import (
    AttentionMetadata,
    AttentionParams,
    CopyDetector,
    KVHandle,
    SlotMapping,
    choose_backend,
)

INITIAL_BLOCKS = 64
NUM_WATCHED_STEPS = 3


@dataclass(frozen=True, eq=False)
class SwappedKV:
    """One sequence's K/V in host memory."""

    rows: list[
        tuple[np.ndarray, np.ndarray]
    ]  # per layer K and V, [num_kv_heads, num_tokens, head_dim]

    @property
    def num_tokens(self) -> int:
        num_tokens: int = self.rows[0][0].shape[1]
        return num_tokens


def _to_host(array: mx.array) -> np.ndarray:
    # numpy has no bfloat16.
    return np.array(array.view(mx.uint16) if array.itemsize == 2 else array)


def _to_device(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    return mx.array(array).view(dtype)


class PagedKVCache(KVCache):
    """Sequences as block tables over slabs ``[num_blocks, num_kv_heads, block_size, head_dim]``
    (PagedAttention).

    A token costs its own row: a sequence grows by single blocks, nothing is padded, and freed
    blocks go to whoever needs them next. The slabs start small and double, layer by layer, up to
    the budget.

    Args:
        config: shape and budget.
        backend: ``"auto"``, ``"reference"`` or ``"metal"``; raises ``BackendError`` if it can't be
            had.
        initial_blocks: blocks to allocate at once; the rest of the budget when it is needed.
    """

    kind = "paged"

    def __init__(
        self, config: KVCacheConfig, backend: str = "auto", initial_blocks: int = INITIAL_BLOCKS
    ):
        super().__init__(config)
        self._initial_blocks = min(initial_blocks, config.num_blocks)
        self.backend = choose_backend(
            backend, [(config.head_dim, config.head_dim, config.block_size)]
        )
        # Plain MLX gathers blocks, which may take as much as a slab; kernels allocate next to
        # nothing.
        self._copy_detector = CopyDetector(NUM_WATCHED_STEPS if self.backend.name == "metal" else 0)
        self.reset()

    def reset(self) -> None:
        """Forget everything: sequences, the prefix cache, an open step, and slabs that a cut growth
        left uneven.
        """
        config = self.config
        self.close_step()
        self._max_num_blocks = config.num_blocks
        self._layers: list[KVHandle] = []  # the old slabs go before new ones come
        # One block more than sequences can hold: block 0 is the null block.
        num_blocks = self._initial_blocks + 1
        self._layers = [
            KVHandle.allocate(
                num_blocks,
                config.num_kv_heads,
                config.block_size,
                config.head_dim,
                config.head_dim,
                self.dtype,
            )
            for _ in range(config.num_layers)
        ]
        self.pool = BlockPool(num_blocks, config.block_size)
        self.manager = KVCacheManager(self.pool)

    def close_step(self) -> None:
        """Forget the open step, if there is one, whatever became of its rows."""
        self._in_step = False
        self._metadata: AttentionMetadata | None = None
        self._lengths_before: Mapping[SeqId, int] = {}
        self._new_seqs: list[SeqId] = []

    # Steps

    def _begin_step(self, num_new_tokens: Mapping[SeqId, int]) -> None:
        num_needed = sum(
            self.manager.num_needed_blocks(seq, n) for seq, n in num_new_tokens.items()
        )
        if num_needed > self.pool.num_free_blocks + self.num_growable_blocks:
            raise CacheFullError(
                f"[paged cache] {sum(num_new_tokens.values())} new tokens need {num_needed} blocks of "
                f"{self.config.block_size}, the budget holds {self._max_num_blocks} and "
                f"{self.pool.num_used_blocks} are in use; raise kv_cache_bytes or free a sequence"
            )
        self.make_room(num_needed)
        self._lengths_before = {seq: self.seq_len(seq) for seq in num_new_tokens}
        self._new_seqs = [seq for seq in num_new_tokens if seq not in self.manager.tables]
        try:
            for seq, num_new in num_new_tokens.items():
                copies = self.manager.allocate_slots(seq, num_new)
                if copies is None:
                    raise CacheFullError(
                        "[paged cache] the device has no more memory, though the budget would allow it"
                    )
                # Copied sequence by sequence: a source may be handed out again by the next one's
                # allocation.
                self.copy_blocks(copies)
            self._open_step(num_new_tokens, False)
        except BaseException:  # Ctrl-C, too.
            self._abort_step()
            raise

    @contextmanager
    def scheduled_step(
        self, num_new_tokens: Mapping[SeqId, int], shares_new_blocks: bool = False
    ) -> Iterator[Step]:
        """A step whose slots were allocated through :attr:`manager` already, by a scheduler.

        As :meth:`step`, but if the body raises, taking the tokens back is the scheduler's.

        Args:
            shares_new_blocks: see :meth:`AttentionMetadata.build`.
        """
        self._in_step = True
        try:
            self._open_step(num_new_tokens, shares_new_blocks)
            context_lens, counts = self.metadata.context_lens, self.metadata.query_lens
            yield Step.build(
                [n - count for n, count in zip(context_lens, counts, strict=True)], counts
            )
            self._commit_step()
        finally:
            self.close_step()

    def _open_step(self, num_new_tokens: Mapping[SeqId, int], shares_new_blocks: bool) -> None:
        block_size = self.config.block_size
        all_tables = self.manager.tables
        tables = [all_tables[seq] for seq in num_new_tokens]
        context_lens = [table.num_tokens for table in tables]
        # Whatever another sequence left in a new block that is filled in part, a NaN even, must not
        # reach this one.
        partly_filled = [
            table.packed_block_ids[-1]
            for table, context_len, count in zip(
                tables, context_lens, num_new_tokens.values(), strict=True
            )
            if 0 < context_len % block_size <= count
        ]
        for handle in self._layers if partly_filled else ():
            self.backend.zero_blocks(handle, partly_filled)
        # Right by the manager's invariants: blocks of this pool, for exactly so many tokens. No
        # table changes before the step is over, so the live arrays will do.
        self._metadata = AttentionMetadata(
            [table.packed_block_ids for table in tables],
            context_lens,
            list(num_new_tokens.values()),
            block_size,
            shares_new_blocks,
            known_max_block_id=self.pool.num_blocks - 1,
        )
        self._copy_detector.begin_step(self._metadata.num_tokens, self._layers[0].k.nbytes)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy-on-write in all layers: ``(source, destination)`` block ids."""
        for handle in self._layers if copies else ():
            self.backend.copy_blocks(handle, copies)

    # Memory

    @property
    def num_growable_blocks(self) -> int:
        """Blocks that the budget allows beyond those allocated."""
        return self._max_num_blocks - self.pool.num_usable_blocks

    def make_room(self, num_blocks: int) -> None:
        """Grow until so many blocks can be taken without evicting any, as far as the budget and the
        device allow.
        """
        num_missing = min(num_blocks - self.pool.num_empty_blocks, self.num_growable_blocks)
        if num_missing <= 0:
            return
        num_usable = self.pool.num_usable_blocks
        # Doubling makes the copies of growth a constant per token. Where that can't be had, what is
        # needed may be.
        doubled = min(max(num_missing, num_usable), self.num_growable_blocks)
        for num_new_blocks in dict.fromkeys((doubled, num_missing)):
            if self._grow(num_new_blocks):
                return
        # What there is, is the budget from now on, until somebody gives memory back.
        self._max_num_blocks = num_usable
        warnings.warn(
            f"[paged cache] no memory for more than {num_usable} blocks, which are the budget now",
            stacklevel=2,
        )

    def _grow(self, num_new_blocks: int) -> bool:
        try:
            for handle in self._layers:
                handle.grow(num_new_blocks)
                # MLX would keep the old slab for reuse, and never find one.
                mx.clear_cache()
        except RuntimeError:
            for handle in self._layers:
                # The others' copies would need what there is none of.
                if handle.num_blocks > self.pool.num_blocks:
                    handle.shrink_to(self.pool.num_blocks)
            return False
        self.pool.grow(num_new_blocks)
        return True

    def swap_out(self, block_ids: list[int], num_tokens: int) -> SwappedKV:
        """Copy the first ``num_tokens`` tokens of a block table to host memory."""
        rows = []
        for handle in self._layers:
            k, v = self.backend.gather_blocks(handle, block_ids, num_tokens)
            rows.append((_to_host(k), _to_host(v)))
        return SwappedKV(rows)

    def swap_in(self, seq: SeqId, swapped: SwappedKV, start: int, end: int) -> None:
        """Copy the tokens ``start : end`` back into the slots that the manager gave the sequence
        for them.
        """
        table = self._table(seq)
        slots = SlotMapping.build(table.slot_mapping(start, end - start), self.config.block_size)
        for handle, rows in zip(self._layers, swapped.rows, strict=True):
            if table.num_unfilled_slots:
                self.backend.zero_blocks(handle, [table.packed_block_ids[-1]])
            k, v = (_to_device(array[:, start:end], self.dtype) for array in rows)
            self.backend.reshape_and_cache(k.swapaxes(0, 1), v.swapaxes(0, 1), handle, slots)
        mx.eval(self.arrays)

    def _commit_step(self) -> None:
        self._copy_detector.end_step(self._layers[0].k.nbytes)
        self.close_step()

    def _abort_step(self) -> None:
        for seq, length in self._lengths_before.items():
            if seq in self._new_seqs:
                if seq in self.manager.tables:
                    self.manager.free(seq)
            else:
                self.manager.trim(seq, length)
        self.close_step()

    def update(self, layer: int, k: mx.array, v: mx.array) -> None:
        handle, metadata = self._layers[layer], self.metadata
        slots = metadata.slot_mapping
        self.backend.reshape_and_cache(k.astype(self.dtype), v.astype(self.dtype), handle, slots)

    def update_and_attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scale: float
    ) -> mx.array:
        k, v = k.astype(self.dtype), v.astype(self.dtype)
        handle, metadata = self._layers[layer], self.metadata
        params = AttentionParams(scale)
        if q.shape[0] < metadata.num_tokens:
            self.backend.reshape_and_cache(k, v, handle, metadata.slot_mapping)
            return self.backend.attend(q, handle, metadata.logit_queries, params)
        return self.backend.update_and_attend(q, k, v, handle, metadata, params)

    @property
    def metadata(self) -> AttentionMetadata:
        """Of the open step; raises ``RuntimeError`` when there is none."""
        if self._metadata is None:
            raise RuntimeError("[paged cache] no step is open; use `with cache.step(...)`")
        return self._metadata

    # Sequences

    def seq_len(self, seq: SeqId) -> int:
        return self.manager.num_tokens(seq)

    @property
    def seqs(self) -> list[SeqId]:
        return list(self.manager.tables)

    def block_ids(self, seq: SeqId) -> tuple[int, ...]:
        """The block table of a sequence; ``KeyError`` when there is no such sequence."""
        return tuple(self._table(seq).block_ids)

    def trim(self, seq: SeqId, length: int) -> None:
        self._check_trim(seq, length)
        self.manager.trim(seq, length)

    def free(self, seq: SeqId) -> None:
        self._table(seq)
        self.manager.free(seq)

    def fork(self, seq: SeqId, new_seq: SeqId) -> None:
        self._check_fork(seq, new_seq)
        self.manager.fork(seq, new_seq)

    def materialize(self, seq: SeqId, layer: int) -> tuple[mx.array, mx.array]:
        table = self._table(seq)
        if table.num_tokens == 0:
            empty = mx.zeros((self.config.num_kv_heads, 0, self.config.head_dim), self.dtype)
            return empty, empty
        keys, values = self.backend.gather_blocks(
            self._layers[layer], table.block_ids, table.num_tokens
        )
        return self._detach(keys), self._detach(values)

    @property
    def arrays(self) -> list[mx.array]:
        return [array for handle in self._layers for array in handle.arrays]

    def shrink(self) -> int:
        super().shrink()
        self._max_num_blocks = self.config.num_blocks
        last_used = max(
            (max(table.packed_block_ids, default=0) for table in self.manager.tables.values()),
            default=0,
        )
        num_blocks = max(last_used, self._initial_blocks) + 1
        if num_blocks >= self.pool.num_blocks:
            return 0
        before = sum(handle.nbytes for handle in self._layers)
        is_shrunk = self.pool.shrink_to(num_blocks)
        assert is_shrunk, "no block behind the last used one is in use"
        # Layer by layer, so that what is copied meanwhile is one slab and not a second pool.
        for handle in self._layers:
            handle.shrink_to(num_blocks)
            mx.clear_cache()
        return before - sum(handle.nbytes for handle in self._layers)

    def stats(self) -> KVCacheStats:
        stats = self.manager.stats()
        return KVCacheStats(
            num_seqs=stats.num_requests,
            num_tokens=stats.num_tokens,
            nbytes_used=stats.num_used_blocks * self.config.nbytes_per_block,
            nbytes_held=sum(handle.nbytes for handle in self._layers),
            blocks_used=stats.num_used_blocks,
            num_blocks=self.config.num_blocks,
        )

    def max_seq_len(self, seq: SeqId) -> int:
        num_free = self._max_num_blocks - self.pool.num_used_blocks
        if seq not in self.manager.tables:
            return num_free * self.config.block_size
        table = self.manager.tables[seq]
        # A shared tail is copied before it is written, and the copy takes a block.
        num_copied = int(table.num_unfilled_slots > 0 and table.num_new_blocks(1) > 0)
        if num_copied > num_free:
            return table.num_tokens
        return table.capacity + (num_free - num_copied) * self.config.block_size

    def _table(self, seq: SeqId) -> BlockTable:
        if seq not in self.manager.tables:
            raise self._missing(seq)
        return self.manager.tables[seq]
