"""The contiguous KV cache: each sequence's K/V in arrays of its own, as in mlx-lm's ``KVCache``."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import mlx.core as mx

from mlx_paged.cache.base import KVCache
from mlx_paged.cache.layer import LayerKV, LayerSpec
from mlx_paged.core import BlockCopy
from mlx_paged.ops import AttentionMetadata, AttentionParams
from mlx_paged.ops.reference import attend_densely
from mlx_paged.request import SeqId

GROWTH_STEP = 256  # tokens, as in mlx-lm's KVCache


class Rows:
    """The K/V of one sequence. They are counted in blocks: block ``i`` is the rows
    ``i * block_size : (i + 1) * block_size``.
    """

    __slots__ = ("block_ids", "capacity", "layers")

    def __init__(self, layers: list[list[mx.array]], capacity: int):
        self.layers = layers  # per layer K and V, [num_kv_heads, capacity, width]
        self.capacity = capacity  # in blocks
        self.block_ids = array("i")  # the block that lies at each index; 0 where none does any more


class ContiguousLayerKV(LayerKV):
    """One layer of the rows of all sequences."""

    def __init__(self, spec: LayerSpec, index: int):
        super().__init__(spec)
        self._index = index
        self.rows: Sequence[Rows] = ()  # of the open step's sequences

    def update(self, k: mx.array, v: mx.array) -> None:
        step, encode = self.step, self.spec.format.encode
        k, v = encode(k).swapaxes(0, 1), encode(v).swapaxes(0, 1)
        row = 0
        for rows, end, num_new in zip(self.rows, step.context_lens, step.query_lens, strict=True):
            keys, values = rows.layers[self._index]
            keys[:, end - num_new : end] = k[:, row : row + num_new]
            values[:, end - num_new : end] = v[:, row : row + num_new]
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
        step, rows = self.step, self.rows
        if q.shape[0] < step.num_tokens:
            if step.num_logit_rows is not None:
                counts = zip(rows, step.num_logit_rows, strict=True)
                rows = [one for one, count in counts if count]
            step = step.logit_queries
        dense = []
        for one, context_len in zip(rows, step.context_lens, strict=True):
            keys, values = one.layers[self._index]
            dense.append((keys[:, :context_len], values[:, :context_len]))
        return attend_densely(q, dense, step, AttentionParams(scale, self.spec.window, sinks))


class ContiguousKVCache(KVCache):
    """Contiguous K/V per sequence: the fastest for one short stream, and the yardstick for the
    paged cache.

    Blocks are accounting here: what the budget holds, and names under which a prefix is found
    again. The cache remembers for each block which rows hold it, and at which index. A sequence
    adopts the rows that hold its first blocks, in order, unless somebody needs what lies behind
    them; otherwise its blocks are copied together into new rows. Rows of sequences that ended stay
    until their blocks are taken or room is needed. All rows together are never longer than the
    budget once a step is open.
    """

    kind = "basic"
    _shares_blocks = False
    layers: Sequence[ContiguousLayerKV]

    def _allocate_layers(self, num_blocks: int) -> Sequence[ContiguousLayerKV]:
        self._rows: dict[Rows, None] = {}  # in the order of their making
        self._places: dict[int, tuple[Rows, int]] = {}  # of each block: its rows, its index there
        self._step_rows: list[Rows] = []
        return [ContiguousLayerKV(spec, i) for i, spec in enumerate(self.config.layers)]

    # Steps

    def _prepare(self, step: AttentionMetadata) -> None:
        mx.eval(self.arrays)  # what the last step left; most often nothing
        block_size = self.config.block_size
        num_held = [
            -(-(context_len - query_len) // block_size)
            for context_len, query_len in zip(step.context_lens, step.query_lens, strict=True)
        ]
        # New blocks first: whatever they held for a sequence that ended is needed by none.
        for table, held in zip(step.block_tables, num_held, strict=True):
            self._forget(table[held:])
        step_rows = [
            self._rows_of(table[:held])
            for table, held in zip(step.block_tables, num_held, strict=True)
        ]
        for rows, table, held in zip(step_rows, step.block_tables, num_held, strict=True):
            self._place(table[held:], rows)
        self._make_space(step_rows)
        self._step_rows = step_rows
        for layer in self.layers:
            layer.rows = step_rows

    def _finish(self) -> None:
        """Nothing is left to do."""

    def close_step(self) -> None:
        super().close_step()
        for layer in self.layers:
            layer.rows = ()

    def _rows_of(self, block_ids: array[int]) -> Rows:
        """The rows that hold these blocks from their beginning, with nothing behind them."""
        if block_ids:
            rows, index = self._places[block_ids[0]]
            num_blocks = len(block_ids)
            behind = rows.block_ids[num_blocks:]
            if (
                index == 0
                and rows.block_ids[:num_blocks] == block_ids
                and not any(map(self._is_needed, behind))
            ):
                self._forget(behind)
                del rows.block_ids[num_blocks:]
                return rows
        rows = self._joined(list(self._pieces(block_ids)))
        self._forget(block_ids)
        self._place(block_ids, rows)
        return rows

    def _make_space(self, step_rows: list[Rows]) -> None:
        """Give the rows of a step the capacity that their blocks need, within the budget."""
        num_missing = sum(max(0, len(rows.block_ids) - rows.capacity) for rows in step_rows)
        if num_missing:
            self._drop_rows()
        spare = self._num_spare_blocks - num_missing
        if spare < 0:
            self._compact()
            spare = self._num_spare_blocks - num_missing
            assert spare >= 0, "every block is at one place, and no row without a block is left"
        for rows in step_rows if num_missing else ():
            num_blocks = len(rows.block_ids)
            if num_blocks > rows.capacity:
                # Rounded up as far as the budget allows.
                rounding = min(-num_blocks % (GROWTH_STEP // self.config.block_size), spare)
                spare -= rounding
                self._extend(rows, num_blocks + rounding)

    @property
    def _num_spare_blocks(self) -> int:
        return self.config.num_blocks - sum(rows.capacity for rows in self._rows)

    def _extend(self, rows: Rows, capacity: int) -> None:
        num_new_tokens = (capacity - rows.capacity) * self.config.block_size
        for kv, layer in zip(rows.layers, self.layers, strict=True):
            extra = layer.spec.zeros(1, num_new_tokens)
            kv[:] = [
                mx.concatenate([held, zeros[0]], axis=1)
                for held, zeros in zip(kv, extra, strict=True)
            ]
        rows.capacity = capacity

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks: ``(source, destination)`` ids. Blocks that lie side by side stay views of
        the same memory until one side writes.
        """
        if copies:
            sources, destinations = zip(*copies, strict=True)
            rows = self._joined(list(self._pieces(sources)))
            mx.eval(rows.layers)
            self._forget(destinations)
            self._place(destinations, rows)

    def free(self, seq: SeqId) -> None:
        super().free(seq)
        self._drop_rows()

    # Where blocks lie

    def _is_needed(self, block_id: int) -> bool:
        """Whether a sequence holds this block, or one may find it by its hash."""
        block = self.pool.blocks[block_id]
        return block_id != 0 and (block.ref_cnt > 0 or block.block_hash is not None)

    def _place(self, block_ids: Sequence[int], rows: Rows) -> None:
        for block_id in block_ids:
            self._places[block_id] = rows, len(rows.block_ids)
            rows.block_ids.append(block_id)

    def _forget(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            place = self._places.pop(block_id, None)
            if place is not None:
                rows, index = place
                rows.block_ids[index] = 0

    def _pieces(self, block_ids: Sequence[int]) -> Iterator[tuple[Rows, int, int]]:
        """The runs of rows, ``start : end`` in blocks, that hold these blocks in this order."""
        piece: tuple[Rows, int, int] | None = None
        for block_id in block_ids:
            rows, index = self._places[block_id]
            if piece is not None and piece[0] is rows and piece[2] == index:
                piece = rows, piece[1], index + 1
            else:
                if piece is not None:
                    yield piece
                piece = rows, index, index + 1
        if piece is not None:
            yield piece

    def _joined(self, pieces: list[tuple[Rows, int, int]]) -> Rows:
        """New rows that hold these pieces in this order: a view if there is one piece."""
        layers = [list(self._join(index, pieces)) for index in range(len(self.layers))]
        rows = Rows(layers, sum(end - start for _, start, end in pieces))
        self._rows[rows] = None
        return rows

    def _join(self, layer: int, pieces: list[tuple[Rows, int, int]]) -> Iterator[mx.array]:
        block_size = self.config.block_size
        if not pieces:
            yield from (zeros[0] for zeros in self.layers[layer].spec.zeros(1, 0))
            return
        for part in (0, 1):
            slices = [
                rows.layers[layer][part][:, start * block_size : end * block_size]
                for rows, start, end in pieces
            ]
            yield slices[0] if len(slices) == 1 else mx.concatenate(slices, axis=1)

    def _gather(
        self, layer: int, block_ids: Sequence[int], num_tokens: int
    ) -> tuple[mx.array, mx.array]:
        keys, values = self._join(layer, list(self._pieces(block_ids)))
        return keys[:, :num_tokens], values[:, :num_tokens]

    # Memory

    @property
    def arrays(self) -> list[mx.array]:
        return [held for rows in self._step_rows for kv in rows.layers for held in kv]

    @property
    def nbytes_held(self) -> int:
        # A copy: stats are asked for from any thread.
        return sum(rows.capacity for rows in list(self._rows)) * self.config.nbytes_per_block

    def _grow(self, num_new_blocks: int) -> bool:
        return True  # rows take memory when a step needs it

    def _fit(self) -> None:
        self._forget([block_id for block_id in self._places if block_id >= self.pool.num_blocks])
        self.pool.evict_blocks(
            [block_id for block_id in self._places if not self.pool.blocks[block_id].ref_cnt]
        )
        self._compact()
        mx.clear_cache()

    def _drop_rows(self) -> None:
        """Drop the rows that hold no block that is needed."""
        for rows in list(self._rows):
            if not any(map(self._is_needed, rows.block_ids)):
                self._forget([block_id for block_id in rows.block_ids if block_id])
                del self._rows[rows]

    def _compact(self) -> None:
        """Cut unused capacity, and blocks that are not needed, out of all rows."""
        self._drop_rows()
        for rows in list(self._rows):
            kept = array("i", filter(self._is_needed, rows.block_ids))
            if len(kept) >= rows.capacity:
                continue
            pieces = list(self._pieces(kept))
            for index in range(len(self.layers)):
                # Layer by layer, so that what is copied meanwhile is one layer. The product is
                # exact and never shares memory.
                rows.layers[index] = [held * 1 for held in self._join(index, pieces)]
                mx.eval(rows.layers[index])
            self._forget([block_id for block_id in rows.block_ids if block_id])
            rows.block_ids = array("i")
            self._place(kept, rows)
            rows.capacity = len(kept)
