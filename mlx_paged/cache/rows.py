"""Where a contiguous cache has its rows, and which block lies where in them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import mlx.core as mx

from mlx_paged.cache.config import KVCacheConfig
from mlx_paged.core import BlockCopy, BlockPool

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


Piece: TypeAlias = tuple[Rows, int, int]  # the blocks at the indices start : end of some rows


class RowStore:
    """The rows of all sequences.

    Each block lies at one place: an index of some rows. Blocks that no sequence holds and that
    can't be found by their hash are not needed, and neither is the room that they take.

    Args:
        config: shape and budget.
        pool: the blocks.

    Attributes:
        rows: in the order of their making.
        places: of each block that lies somewhere.
    """

    def __init__(self, config: KVCacheConfig, pool: BlockPool):
        self.specs = config.layers
        self.block_size = config.block_size
        self.num_blocks = config.num_blocks
        self.pool = pool
        self.rows: dict[Rows, None] = {}
        self.places: dict[int, tuple[Rows, int]] = {}

    def place(self, block_ids: Sequence[int], rows: Rows) -> None:
        """Let these blocks lie at the end of ``rows``."""
        for block_id in block_ids:
            self.places[block_id] = rows, len(rows.block_ids)
            rows.block_ids.append(block_id)

    def forget(self, block_ids: Sequence[int]) -> None:
        """Let these blocks, wherever they lie, lie nowhere."""
        for block_id in block_ids:
            place = self.places.pop(block_id, None)
            if place is not None:
                rows, index = place
                rows.block_ids[index] = 0

    def rows_of(self, block_ids: array[int]) -> Rows:
        """The rows that hold these blocks from their beginning, with nothing behind them: rows that
        are there, or a copy.
        """
        if block_ids:
            rows, index = self.places[block_ids[0]]
            num_blocks = len(block_ids)
            behind = rows.block_ids[num_blocks:]
            if (
                index == 0
                and rows.block_ids[:num_blocks] == block_ids
                and not any(map(self._is_needed, behind))
            ):
                self.forget(behind)
                del rows.block_ids[num_blocks:]
                return rows
        rows = self._joined(list(self.pieces_of(block_ids)))
        self.forget(block_ids)
        self.place(block_ids, rows)
        return rows

    def make_space(self, step_rows: list[Rows]) -> None:
        """Give the rows of a step the capacity that their blocks need, within the budget."""
        num_missing = sum(max(0, len(rows.block_ids) - rows.capacity) for rows in step_rows)
        if num_missing:
            self.drop_unneeded()
        spare = self._num_spare_blocks - num_missing
        if spare < 0:
            self.compact()
            spare = self._num_spare_blocks - num_missing
            assert spare >= 0, "each block lies at one place, and no other room is left"
        for rows in step_rows if num_missing else ():
            num_blocks = len(rows.block_ids)
            if num_blocks > rows.capacity:
                # Rounded up as far as the budget allows.
                rounding = min(-num_blocks % (GROWTH_STEP // self.block_size), spare)
                spare -= rounding
                self._extend(rows, num_blocks + rounding)

    @property
    def _num_spare_blocks(self) -> int:
        return self.num_blocks - sum(rows.capacity for rows in self.rows)

    def _extend(self, rows: Rows, capacity: int) -> None:
        num_new_tokens = (capacity - rows.capacity) * self.block_size
        for kv, spec in zip(rows.layers, self.specs, strict=True):
            extra = spec.zeros(num_new_tokens)
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
            rows = self._joined(list(self.pieces_of(sources)))
            mx.eval(rows.layers)
            self.forget(destinations)
            self.place(destinations, rows)

    def add(self, block_ids: Sequence[int], layers: list[list[mx.array]]) -> None:
        """Let these blocks lie in new rows, which these arrays are: per layer K and V,
        ``[num_kv_heads, num_blocks * block_size, width]``, evaluated and nobody else's.
        """
        self.forget(block_ids)
        rows = Rows(layers, len(block_ids))
        self.rows[rows] = None
        self.place(block_ids, rows)
        self.drop_unneeded()

    def _joined(self, pieces: list[Piece]) -> Rows:
        """New rows that hold these pieces in this order: a view if there is one piece."""
        layers = [list(self.join(index, pieces)) for index in range(len(self.specs))]
        rows = Rows(layers, sum(end - start for _, start, end in pieces))
        self.rows[rows] = None
        return rows

    def drop_unneeded(self) -> None:
        """Drop the rows that hold no block that is needed."""
        for rows in list(self.rows):
            if not any(map(self._is_needed, rows.block_ids)):
                self.forget([block_id for block_id in rows.block_ids if block_id])
                del self.rows[rows]

    def compact(self) -> None:
        """Cut unused capacity, and blocks that are not needed, out of all rows."""
        self.drop_unneeded()
        for rows in list(self.rows):
            kept = array("i", filter(self._is_needed, rows.block_ids))
            if len(kept) >= rows.capacity:
                continue
            pieces = list(self.pieces_of(kept))
            for index in range(len(self.specs)):
                # Layer by layer, so that what is copied meanwhile is one layer. The product is
                # exact and never shares memory.
                rows.layers[index] = [held * 1 for held in self.join(index, pieces)]
                mx.eval(rows.layers[index])
            self.forget([block_id for block_id in rows.block_ids if block_id])
            rows.block_ids = array("i")
            self.place(kept, rows)
            rows.capacity = len(kept)

    def pieces_of(self, block_ids: Sequence[int]) -> Iterator[Piece]:
        """The runs of rows that hold these blocks in this order."""
        piece: Piece | None = None
        for block_id in block_ids:
            rows, index = self.places[block_id]
            if piece is not None and piece[0] is rows and piece[2] == index:
                piece = rows, piece[1], index + 1
            else:
                if piece is not None:
                    yield piece
                piece = rows, index, index + 1
        if piece is not None:
            yield piece

    def join(self, layer: int, pieces: list[Piece]) -> Iterator[mx.array]:
        """K, then V of these pieces of one layer, one piece after the other: a view if there is
        one.
        """
        block_size = self.block_size
        if not pieces:
            yield from (zeros[0] for zeros in self.specs[layer].zeros(0))
            return
        for part in (0, 1):
            slices = [
                rows.layers[layer][part][:, start * block_size : end * block_size]
                for rows, start, end in pieces
            ]
            yield slices[0] if len(slices) == 1 else mx.concatenate(slices, axis=1)

    def _is_needed(self, block_id: int) -> bool:
        """Whether a sequence holds this block, or one may find it by its hash."""
        block = self.pool.blocks[block_id]
        return block_id != 0 and (block.ref_cnt > 0 or block.block_hash is not None)
