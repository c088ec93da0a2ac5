"""The paged KV cache: the K/V of all sequences in one pool of fixed-size blocks, one K and one V
slab per layer (PagedAttention, Kwon et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_paged.cache.base import INITIAL_BLOCKS, KVCache, SwappedKV
from mlx_paged.cache.config import KVCacheConfig
from mlx_paged.cache.layer import LayerKV, LayerSpec, compute_meanwhile
from mlx_paged.cache.open_decode import DecodeArrays, DecodeShape, PlanShape
from mlx_paged.config import DEFAULT_BACKEND
from mlx_paged.core import BlockCopy
from mlx_paged.ops import (
    AttentionMetadata,
    AttentionParams,
    AttentionPlan,
    Backend,
    CopyDetector,
    KVHandle,
    PlanKey,
    SlotMapping,
    choose_backend,
    traced_decode,
)
from mlx_paged.request import SeqId

NUM_WATCHED_STEPS = 3


class PagedLayerKV(LayerKV):
    """One layer's slabs ``[num_blocks, num_kv_heads, block_size, width]``."""

    def __init__(self, spec: LayerSpec, backend: Backend, kv: KVHandle):
        super().__init__(spec)
        self.kv = kv
        self._backend = backend

    @classmethod
    def allocate(
        cls, spec: LayerSpec, backend: Backend, num_blocks: int, block_size: int
    ) -> PagedLayerKV:
        """A layer with slabs of zeros, evaluated."""
        layer = cls(spec, backend, KVHandle(*spec.zeros(num_blocks, block_size)))
        mx.eval(layer.kv.arrays)
        return layer

    def update(self, k: mx.array, v: mx.array) -> None:
        encode = self.spec.format.encode
        self._backend.reshape_and_cache(encode(k), encode(v), self.kv, self.step.slot_mapping)

    def update_and_attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array:
        step, params = self.step, AttentionParams(scale, self.spec.window, sinks)
        if q.shape[0] < step.num_tokens:
            self.update(k, v)
            out = self._backend.attend(q, self.kv, step.logit_queries, params)
        else:
            k, v = self.spec.format.encode(k), self.spec.format.encode(v)
            out = self._backend.update_and_attend(q, k, v, self.kv, step, params)
        return compute_meanwhile(out)


class PagedKVCache(KVCache):
    """Sequences as block tables over slabs.

    A token costs its own row: a sequence grows by single blocks, nothing is padded, and freed
    blocks go to the next sequence that needs some. The slabs start small and double, layer by
    layer, up to the budget.

    Args:
        config: shape and budget.
        backend: ``"auto"``, ``"reference"`` or ``"metal"``; raises ``BackendError`` if it can't be
            had.
        initial_blocks: blocks to allocate at once; the rest of the budget when it is needed.
    """

    kind = "paged"
    can_swap = True
    _layers: Sequence[PagedLayerKV] = ()

    def __init__(
        self,
        config: KVCacheConfig,
        backend: str = DEFAULT_BACKEND,
        initial_blocks: int = INITIAL_BLOCKS,
    ):
        shapes = [spec.attention_shape(config.block_size) for spec in config.layers]
        self._backend = choose_backend(backend, shapes)
        # Plain MLX gathers blocks, which may take as much as a slab; kernels allocate next to
        # nothing.
        self._copy_detector = CopyDetector(NUM_WATCHED_STEPS if self.backend.name == "metal" else 0)
        keys = (PlanKey(spec.window, True, spec.num_kv_heads) for spec in config.layers)
        self._plan_keys = tuple(dict.fromkeys(keys))
        super().__init__(config, initial_blocks)

    @property
    def layers(self) -> Sequence[PagedLayerKV]:
        return self._layers

    @property
    def backend(self) -> Backend:
        return self._backend

    @property
    def can_run_ahead(self) -> bool:
        return self._backend.writes_in_place

    def _allocate_layers(self) -> None:
        self._layers = ()
        shape = self._backend, self.pool.num_blocks, self.config.block_size
        self._layers = [PagedLayerKV.allocate(spec, *shape) for spec in self.config.layers]

    # Steps

    def _prepare(self, step: AttentionMetadata) -> None:
        if self.backend.reads_unused_slots:
            self._zero_new_blocks(step)
        self._copy_detector.begin_step(step.num_tokens, self._first_slab_nbytes)

    def _zero_new_blocks(self, step: AttentionMetadata) -> None:
        """Whatever another sequence left in a new block that is filled in part, a NaN even, must
        not reach this one.
        """
        partly_filled = [
            table[-1]
            for table, context_len, query_len in zip(
                step.block_tables, step.context_lens, step.query_lens, strict=True
            )
            if 0 < context_len % step.block_size <= query_len
        ]
        if partly_filled:
            for layer in self.layers[self._open_layers]:
                self.backend.zero_blocks(layer.kv, partly_filled)

    def _finish(self) -> None:
        if self._copy_detector.is_watching:
            mx.eval(self.arrays)  # What the step takes shows when it has run.
        self._copy_detector.end_step(self._first_slab_nbytes)

    @property
    def _first_slab_nbytes(self) -> int:
        return self.layers[0].kv.k.nbytes

    # Decodes as functions of arrays, for tracing

    def open_decode(self) -> tuple[DecodeShape, DecodeArrays] | None:
        """The open step, if it is a decode whose graph depends on nothing but its shape: all query
        runs are single tokens, the logits of all are wanted, and kernels write in place.
        """
        step = self._step
        if step is None or step.max_query_len > 1 or step.logit_rows is not None:
            return None
        plans = self._backend.decode_plans(step, self._plan_keys)
        handles = [layer.kv for layer in self.layers[self._open_layers]]
        fences = [kv.fence for kv in handles if kv.fence is not None]
        if plans is None or len(fences) < len(handles):
            return None
        shapes = [
            PlanShape(key, plan.array.size, plan.num_partitions, plan.num_partial_rows)
            for key, plan in zip(self._plan_keys, plans, strict=True)
        ]
        return DecodeShape(step.num_tokens, handles[0].num_blocks, tuple(shapes)), DecodeArrays(
            step.positions,
            [plan.array for plan in plans],
            [kv.k for kv in handles],
            [kv.v for kv in handles],
            fences,
        )

    def traced_layers(self, shape: DecodeShape, arrays: DecodeArrays) -> list[PagedLayerKV]:
        """Layers of a decode of this shape on ``arrays``, in the place of the first of
        :attr:`layers`; these and
        the open step are not touched. When a model has run, the handles hold the next fences.
        """
        plans = {
            plan.key: AttentionPlan(array, plan.num_partitions, plan.num_partial_rows)
            for plan, array in zip(shape.plans, arrays.plans, strict=True)
        }
        step = traced_decode(self.config.block_size, arrays.positions, plans)
        layers = []
        specs = self.config.layers[: len(arrays.keys)]
        for spec, *kv in zip(specs, arrays.keys, arrays.values, arrays.fences, strict=True):
            layers.append(PagedLayerKV(spec, self._backend, KVHandle(*kv)))
            layers[-1].open(step)
        return layers

    def set_fences(self, fences: Sequence[mx.array]) -> None:
        """What a decode left, in the order of the layers: an interrupt in the middle leaves the
        chains of the first ones longer, as in a step that is built layer by layer.
        """
        for layer, fence in zip(self.layers[: len(fences)], fences, strict=True):
            layer.kv.fence = fence

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        if copies:
            for layer in self.layers:
                self.backend.copy_blocks(layer.kv, copies)

    @property
    def arrays(self) -> list[mx.array]:
        return [array for layer in self.layers for array in layer.kv.arrays]

    # Memory

    @property
    def nbytes_held(self) -> int:
        return sum(layer.kv.nbytes for layer in self.layers)

    def _grow(self, num_new_blocks: int) -> bool:
        try:
            for layer in self.layers:
                layer.kv.grow(num_new_blocks)
                # MLX would keep the old slab for reuse, and never find one.
                mx.clear_cache()
        except RuntimeError:
            self._fit()  # the layers that have grown; the others' copies would need memory
            return False
        return True

    def _fit(self) -> None:
        # Layer by layer, so that what is copied meanwhile is one slab and not a second pool.
        for layer in self.layers:
            if layer.kv.num_blocks > self.pool.num_blocks:
                layer.kv.shrink_to(self.pool.num_blocks)
                mx.clear_cache()

    def swap_out(self, block_ids: Sequence[int], num_tokens: int) -> SwappedKV:
        rows = []
        for index, layer in enumerate(self.layers):
            k, v = self._gather(index, block_ids, num_tokens)
            to_host = layer.spec.format.to_host
            rows.append((to_host(k), to_host(v)))
        return SwappedKV(rows)

    def swap_in(self, seq: SeqId, swapped: SwappedKV, start: int, end: int) -> None:
        table = self._table(seq)
        slots = SlotMapping.build(table.slot_mapping(start, end - start), self.config.block_size)
        for layer, rows in zip(self.layers, swapped.rows, strict=True):
            if table.num_unfilled_slots and self.backend.reads_unused_slots:
                self.backend.zero_blocks(layer.kv, [table.packed_block_ids[-1]])
            from_host = layer.spec.format.from_host
            k, v = (from_host(array[:, start:end]).swapaxes(0, 1) for array in rows)
            self.backend.reshape_and_cache(k, v, layer.kv, slots)
        mx.eval(self.arrays)

    def _gather(
        self, layer: int, block_ids: Sequence[int], num_tokens: int
    ) -> tuple[mx.array, mx.array]:
        return self.backend.gather_blocks(self.layers[layer].kv, block_ids, num_tokens)
