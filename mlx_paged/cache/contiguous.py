"""The contiguous KV cache: each sequence's K/V in arrays of its own, as in mlx-lm's ``KVCache``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from mlx_paged.cache.base import INITIAL_BLOCKS, KVCache
from mlx_paged.cache.config import KVCacheConfig
from mlx_paged.cache.layer import LayerKV, LayerSpec, compute_meanwhile
from mlx_paged.cache.rows import Rows, RowStore
from mlx_paged.core import BlockCopy, KVCacheManager
from mlx_paged.errors import ArgumentError
from mlx_paged.ops import (
    AttentionMetadata,
    AttentionParams,
    Parts,
    attend_densely,
    attend_to_latents,
)
from mlx_paged.request import SeqId


class ContiguousLayerKV(LayerKV):
    """One layer of the rows of all sequences."""

    def __init__(self, spec: LayerSpec, index: int):
        super().__init__(spec)
        self._index = index
        self.rows: Sequence[Rows] = ()  # of the open step's sequences

    def write(self, k: Parts, v: Parts) -> None:
        step = self.step
        new_keys, new_values = k[0].swapaxes(0, 1), v[0].swapaxes(0, 1)
        row = 0
        for rows, end, num_new in zip(self.rows, step.context_lens, step.query_lens, strict=True):
            keys, values = rows.layers[self._index]
            keys[:, end - num_new : end] = new_keys[:, row : row + num_new]
            values[:, end - num_new : end] = new_values[:, row : row + num_new]
            row += num_new

    def update_and_attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array:
        self.update(k, v)
        return self.attend(q, scale=scale, sinks=sinks)

    def attend(self, q: mx.array, *, scale: float, sinks: mx.array | None = None) -> mx.array:
        step, rows = self.step, self.rows
        if q.shape[0] < step.num_tokens:
            if step.num_logit_rows is not None:
                counts = zip(rows, step.num_logit_rows, strict=True)
                rows = [one for one, count in counts if count]
            step = step.logit_queries
        params = AttentionParams(scale, self.spec.window, sinks)
        return compute_meanwhile(attend_densely(q, self._dense(rows, step), step, params))

    def update_and_attend_latents(
        self, q: mx.array, latents: mx.array, rope_keys: mx.array
    ) -> mx.array:
        self.update(latents, rope_keys)
        dense = self._dense(self.rows, self.step)
        return compute_meanwhile(attend_to_latents(q, dense, self.step, self.spec.window))

    def _dense(
        self, rows: Sequence[Rows], step: AttentionMetadata
    ) -> list[tuple[mx.array, mx.array]]:
        """K and V of each sequence, ``[num_kv_heads, context_len, width]``."""
        layers = [one.layers[self._index] for one in rows]
        return [
            (keys[:, :context_len], values[:, :context_len])
            for (keys, values), context_len in zip(layers, step.context_lens, strict=True)
        ]


class ContiguousKVCacheManager(KVCacheManager):
    """A manager whose forks come with their rows, so that a scheduler needs to copy nothing."""

    def __init__(self, store: RowStore):
        super().__init__(store.pool, shares_blocks=False)
        self._store = store

    def fork(self, request_id: SeqId, new_request_id: SeqId) -> bool:
        """Fork as :meth:`KVCacheManager.fork` does, and copy the rows."""
        if not super().fork(request_id, new_request_id):
            return False
        tables = self.tables[request_id], self.tables[new_request_id]
        self._store.copy_blocks(list(zip(*(table.block_ids for table in tables), strict=True)))
        return True


class ContiguousKVCache(KVCache):
    """Contiguous K/V per sequence: the fastest for one short stream, and the yardstick for the
    paged cache.

    Blocks are accounting here: what the budget holds, and names under which a prefix is found
    again. A sequence adopts the rows that hold its first blocks, in order, unless what lies behind
    them is needed; otherwise its blocks are copied together into new rows. Rows of sequences that
    ended stay until their blocks are taken or room is needed. Once a step is open, all rows
    together are no longer than the budget.

    Raises:
        ArgumentError: a layer's rows are not stored as they are computed.
    """

    kind = "basic"
    _layers: Sequence[ContiguousLayerKV] = ()

    def __init__(self, config: KVCacheConfig, initial_blocks: int = INITIAL_BLOCKS):
        for spec in config.layers:
            if not spec.format.is_as_computed:
                raise ArgumentError(
                    f"[kv cache] kv_format: a basic cache stores K/V in the model's dtype and not "
                    f"as {spec.format}; use kv='paged' or leave kv_format out",
                    "kv_format",
                )
        super().__init__(config, initial_blocks)

    @property
    def layers(self) -> Sequence[ContiguousLayerKV]:
        return self._layers

    def _allocate_layers(self) -> None:
        self._store = RowStore(self.config, self.pool)
        self._step_rows: list[Rows] = []
        self._layers = [ContiguousLayerKV(spec, i) for i, spec in enumerate(self.config.layers)]

    def _new_manager(self) -> KVCacheManager:
        return ContiguousKVCacheManager(self._store)

    # Steps

    def _prepare(self, steps: Sequence[AttentionMetadata]) -> None:
        (step,) = steps
        mx.eval(self.arrays)  # what the last step left; most often nothing
        store, block_size = self._store, self.config.block_size
        tables = []  # of each sequence: blocks that hold tokens already, and new ones
        for table, end, num_new in zip(
            step.block_tables, step.context_lens, step.query_lens, strict=True
        ):
            num_held = -(-(end - num_new) // block_size)
            tables.append((table[:num_held], table[num_held:]))
        # New blocks first: what they held for sequences that ended is not needed any more.
        for _, new in tables:
            store.forget(new)
        step_rows = [store.rows_of(held) for held, _ in tables]
        for rows, (_, new) in zip(step_rows, tables, strict=True):
            store.place(new, rows)
        store.make_space(step_rows)
        self._step_rows = step_rows
        for layer in self.layers:
            layer.rows = step_rows

    def _finish(self) -> None:
        """Nothing is left to do."""

    def close_step(self) -> None:
        super().close_step()
        for layer in self.layers:
            layer.rows = ()

    def fill_blocks(
        self, block_ids: Sequence[Sequence[int]], rows: Iterable[tuple[Parts, Parts]]
    ) -> None:
        layers = [[part for parts in kv for part in parts] for kv in rows]
        mx.eval(layers)
        self._store.add(block_ids[0], layers)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self._store.copy_blocks(copies)

    @property
    def arrays(self) -> list[mx.array]:
        return [held for rows in self._step_rows for kv in rows.layers for held in kv]

    def _gather_parts(
        self, layer: int, block_ids: Sequence[int], num_tokens: int
    ) -> tuple[Parts, Parts]:
        keys, values = self._store.join(layer, list(self._store.pieces_of(block_ids)))
        return (keys[:, :num_tokens],), (values[:, :num_tokens],)

    # Memory

    @property
    def nbytes_held(self) -> int:
        # A copy: stats are asked for from any thread.
        return sum(rows.capacity for rows in list(self._store.rows)) * self.config.nbytes_per_block

    def free(self, seq: SeqId) -> None:
        super().free(seq)
        self._store.drop_unneeded()

    def _grow(self, num_new_blocks: int) -> bool:
        return True  # rows take memory when a step needs it

    def _fit(self) -> None:
        store, blocks = self._store, self.pool.blocks
        store.forget([block_id for block_id in store.places if block_id >= len(blocks)])
        self.pool.evict_blocks([b for b in store.places if not blocks[b].ref_cnt])
        store.compact()
        mx.clear_cache()
