"""The contiguous KV cache: separate arrays for each sequence, in mlx-lm's ``KVCache``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import KVCache as StockKVCache

from mlx_paged.cache.base import INITIAL_BLOCKS, KVCache
from mlx_paged.cache.config import KVCacheConfig
from mlx_paged.cache.layer import LayerKV, LayerSpec, compute_meanwhile
from mlx_paged.core import BlockCopy, BlockHash, BlockTable, KVCacheManager
from mlx_paged.errors import ArgumentError
from mlx_paged.ops import (
    AttentionMetadata,
    AttentionParams,
    Parts,
    attend_to_latents,
    attend_with_sdpa,
)
from mlx_paged.request import SeqId

GROWTH_STEP = 256  # tokens, as in mlx-lm's KVCache


class SequenceLayerKV(StockKVCache):
    """One layer of one sequence: mlx-lm's ``KVCache`` on arrays that are always large enough."""

    keys: mx.array  # [1, num_kv_heads, capacity * block_size, key_dim]
    values: mx.array  # the same, with value_dim

    def __init__(self, keys: mx.array, values: mx.array):
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values = keys, values

    def put(self, start: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write rows ``[1, num_kv_heads, num_new_tokens, width]`` after the first ``start``.

        Returns:
            All rows up to the last new one, ``[1, num_kv_heads, num_tokens, width]``.
        """
        # Later rows were trimmed or belong to a failed step.
        self.offset = start
        update_and_fetch = cast(Any, self.update_and_fetch)  # mlx-lm's types leave the arrays out
        fetched: tuple[mx.array, mx.array] = update_and_fetch(keys, values)
        return fetched


class SequenceKV:
    """The K/V of one sequence in all layers, whose capacity is in blocks."""

    __slots__ = ("block_size", "capacity", "layers")

    def __init__(self, specs: Sequence[LayerSpec], block_size: int):
        self.layers: list[SequenceLayerKV] = []
        self.block_size = block_size
        self.capacity = 0
        for spec in specs:
            (keys,), (values,) = spec.zeros(0)
            self.layers.append(SequenceLayerKV(keys[None], values[None]))

    @property
    def arrays(self) -> list[mx.array]:
        return [part for rows in self.layers for part in (rows.keys, rows.values)]

    def extend(self, specs: Sequence[LayerSpec], capacity: int) -> None:
        """Append unused rows."""
        num_new_tokens = (capacity - self.capacity) * self.block_size
        for rows, spec in zip(self.layers, specs, strict=True):
            (keys,), (values,) = spec.zeros(num_new_tokens)
            rows.keys = mx.concatenate([rows.keys, keys[None]], axis=2)
            rows.values = mx.concatenate([rows.values, values[None]], axis=2)
        self.capacity = capacity

    def cut(self, capacity: int) -> None:
        """Free the memory after the first ``capacity`` blocks."""
        end = capacity * self.block_size
        for rows in self.layers:
            # One layer after the other, so that at most one exists twice. The product is exact and
            # never shares memory.
            rows.keys, rows.values = rows.keys[:, :, :end] * 1, rows.values[:, :, :end] * 1
            mx.eval(rows.keys, rows.values)
        self.capacity = capacity

    def copy(self, capacity: int) -> SequenceKV:
        """A lazy copy of the first ``capacity`` blocks. ``copy.copy`` of mlx-lm's cache would share
        the arrays.
        """
        end, made = capacity * self.block_size, SequenceKV((), self.block_size)
        for rows in self.layers:
            made.layers.append(
                SequenceLayerKV(rows.keys[:, :, :end] * 1, rows.values[:, :, :end] * 1)
            )
        made.capacity = capacity
        return made


class ContiguousLayerKV(LayerKV):
    """One layer of all sequences.

    Args:
        index: of the layer.
        sequences: of the cache.
    """

    def __init__(self, spec: LayerSpec, index: int, sequences: Mapping[BlockTable, SequenceKV]):
        super().__init__(spec)
        self._index, self._sequences = index, sequences
        self.rows: Sequence[SequenceLayerKV] = ()  # of the open step's sequences
        # K and V of each after the writes of the step: [1, num_kv_heads, context_len, width]
        self._seq_kv: list[tuple[mx.array, mx.array]] = []

    def close(self) -> None:
        super().close()
        # A view that stays alive would make the next write copy the whole array.
        self.rows, self._seq_kv = (), []

    def update(self, k: mx.array, v: mx.array) -> None:
        (k,), (v,) = self.spec.format.encode(k, v)
        step = self.step
        new_keys, new_values = k.swapaxes(0, 1)[None], v.swapaxes(0, 1)[None]
        row, seq_kv = 0, []
        for rows, end, num_new in zip(self.rows, step.context_lens, step.query_lens, strict=True):
            chosen = slice(row, row + num_new)
            new = new_keys[:, :, chosen], new_values[:, :, chosen]
            seq_kv.append(rows.put(end - num_new, *new))
            row += num_new
        self._seq_kv = seq_kv

    def attend(self, q: mx.array, *, scale: float, sinks: mx.array | None = None) -> mx.array:
        step, seq_kv = self.step, self._seq_kv
        if q.shape[0] < step.num_tokens:
            if step.num_logit_rows is not None:
                counts = zip(seq_kv, step.num_logit_rows, strict=True)
                seq_kv = [one for one, count in counts if count]
            step = step.logit_queries
        params = AttentionParams(scale, self.spec.window, sinks, self.spec.softcap)
        return compute_meanwhile(attend_with_sdpa(q, seq_kv, step, params))

    def stored_rows(self, table: BlockTable) -> tuple[Parts, Parts]:
        rows, end = self._sequences[table].layers[self._index], table.num_tokens
        return (rows.keys[0, :, :end],), (rows.values[0, :, :end],)

    def update_and_attend_latents(
        self, q: mx.array, latents: mx.array, rope_keys: mx.array
    ) -> mx.array:
        self.update(latents, rope_keys)
        params = AttentionParams(1.0, self.spec.window, holds_latents=True)
        attended = attend_to_latents(q, self._seq_kv, self.step, params)
        return compute_meanwhile(attended)


class ContiguousKVCache(KVCache):
    """Contiguous K/V per sequence: the fastest for one short stream, and the baseline for the paged
    cache.

    Blocks only account for the budget here. Sequences don't share rows: a fork copies them.
    Capacity is rounded up as far as the budget allows, and while a step is open, the capacity of
    all sequences is within the budget. Instead of a prefix cache, the last finished sequence is
    kept until its memory is needed, for a new one with the same prefix (:meth:`keep_last`).

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
        self._sequences: dict[BlockTable, SequenceKV] = {}
        self._last: tuple[list[BlockHash], SequenceKV] | None = None
        self._unevaluated: list[SequenceKV] = []
        specs = enumerate(self.config.layers)
        self._layers = [ContiguousLayerKV(spec, index, self._sequences) for index, spec in specs]

    # Steps

    def _prepare(
        self, tables: Sequence[Sequence[BlockTable]], steps: Sequence[AttentionMetadata]
    ) -> None:
        mx.eval(self.arrays)  # of the last step; usually evaluated already
        self._unevaluated = []
        self.drop_ended()
        (step,) = steps
        sequences = []
        for (table,), end, num_new in zip(tables, step.context_lens, step.query_lens, strict=True):
            held = self._sequences.get(table)
            if held is None:
                if end > num_new:
                    raise RuntimeError(
                        f"[basic cache] the first {end - num_new} tokens of a sequence have blocks "
                        "but no rows: a basic cache can't share blocks"
                    )
                held = SequenceKV(self.config.layers, self.config.block_size)
                self._sequences[table] = held
            sequences.append(held)
        self._make_space(sequences, [len(table) for table in step.block_tables])
        self._unevaluated = sequences
        for index, layer in enumerate(self._layers):
            layer.rows = [held.layers[index] for held in sequences]

    def _make_space(self, sequences: Sequence[SequenceKV], counts: Sequence[int]) -> None:
        """Give these sequences the capacity that their blocks need, within the budget."""
        pairs = list(zip(sequences, counts, strict=True))
        num_missing = sum(max(0, count - held.capacity) for held, count in pairs)
        if self._num_spare_blocks < num_missing:
            self.forget_last()
        if self._num_spare_blocks < num_missing:
            self._compact()
        spare = self._num_spare_blocks - num_missing
        assert spare >= 0, "no sequence has more capacity than blocks"
        for held, count in pairs if num_missing else ():
            if count > held.capacity:
                # Rounded up as far as the budget allows.
                rounding = min(-count % (GROWTH_STEP // self.config.block_size), spare)
                spare -= rounding
                held.extend(self.config.layers, count + rounding)

    @property
    def _num_spare_blocks(self) -> int:
        return self._num_budget_blocks - sum(held.capacity for held in self._held())

    def _held(self) -> list[SequenceKV]:
        # Copies, because any thread may read stats.
        last = self._last
        return [*self._sequences.values(), *([] if last is None else [last[1]])]

    def drop_ended(self) -> None:
        """Free the rows of freed sequences now; otherwise the next step does."""
        for table in [table for table in self._sequences if table.is_freed]:
            self._drop(self._sequences.pop(table))

    def _drop(self, held: SequenceKV) -> None:
        """Remove the rows of a sequence from those to be evaluated."""
        self._unevaluated = [one for one in self._unevaluated if one is not held]

    def _compact(self) -> None:
        """Cut the capacity of all sequences to their blocks."""
        for table, held in self._sequences.items():
            if len(table) < held.capacity:
                held.cut(len(table))

    def _finish(self) -> None:
        """Nothing to do."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Nothing to do: rows don't depend on the ids of blocks."""

    @property
    def arrays(self) -> list[mx.array]:
        return list(itertools.chain.from_iterable(held.arrays for held in self._unevaluated))

    # Forks

    def fork(self, manager: KVCacheManager, seq: SeqId, new_seq: SeqId) -> bool:
        """Add a second sequence with the same tokens, with separate blocks and a copy of the rows,
        which :attr:`arrays` evaluate; return False and change nothing if it does not fit.

        Args:
            manager: of the first sequence; the second one is added to it.
        """
        table = manager.tables[seq]
        num_slots = max(1, table.num_tokens)  # a sequence begins with a slot
        num_blocks = manager.num_needed_blocks(new_seq, num_slots)
        self.make_room(num_blocks)
        if manager.allocate_slots(new_seq, num_slots) is None:
            return False
        manager.trim(new_seq, table.num_tokens)
        self.drop_ended()
        if self._num_spare_blocks < num_blocks:
            self.forget_last()  # the next step cuts excess capacity
        made = self._sequences[table].copy(num_blocks)
        self._sequences[manager.tables[new_seq]] = made
        self._unevaluated = [*self._unevaluated, made]
        return True

    # The last finished sequence

    def keep_last(self, table: BlockTable, block_hashes: Sequence[BlockHash]) -> None:
        """Keep the rows of a sequence that ends, instead of those kept before.

        Args:
            table: of the sequence, which is not freed yet.
            block_hashes: of its leading computed blocks; if empty, the rows kept before stay.
        """
        self.drop_ended()
        held = self._sequences.pop(table, None)
        if held is not None and block_hashes:
            self.forget_last()
            self._last = list(block_hashes), held

    def num_kept_blocks(self, block_hashes: Sequence[BlockHash]) -> int:
        """How many of these leading blocks the kept sequence has."""
        if self._last is None:
            return 0
        pairs = zip(self._last[0], block_hashes, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def take_last(self, table: BlockTable) -> None:
        """Give the kept rows to a new sequence whose slots are allocated."""
        assert self._last is not None, "num_kept_blocks found them"
        self._sequences[table], self._last = self._last[1], None

    def forget_last(self) -> None:
        """Drop the kept rows, if there are any."""
        if self._last is not None:
            self._drop(self._last[1])
            self._last = None

    # Memory

    @property
    def nbytes_held(self) -> int:
        return sum(held.capacity for held in self._held()) * self.config.nbytes_per_block

    def _grow(self, num_new_blocks: int) -> bool:
        return True  # memory is allocated when a step needs it

    def _fit(self) -> None:
        self.forget_last()
        self.drop_ended()
        self._compact()
        mx.clear_cache()
