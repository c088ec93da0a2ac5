"""The paged KV cache: the K/V of all sequences in one pool of fixed-size blocks, one K and one V
slab per layer (PagedAttention, Kwon et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import mlx.core as mx
import numpy as np

from mlx_paged.cache.base import INITIAL_BLOCKS, KVCache
from mlx_paged.cache.config import KVCacheConfig
from mlx_paged.cache.layer import LayerKV, LayerSpec, compute_meanwhile
from mlx_paged.cache.open_decode import DecodeArrays, DecodeShape, OpenDecode, PlanShape
from mlx_paged.core import BlockCopy, BlockTable, KeyShift
from mlx_paged.ops import (
    AttentionMetadata,
    AttentionParams,
    Backend,
    CopyDetector,
    KVHandle,
    Parts,
    PlanKey,
    SlotMapping,
    attend_to_latents,
    choose_backend,
)
from mlx_paged.ops.kernels import first_fence
from mlx_paged.options.config import DEFAULT_BACKEND

NUM_WATCHED_STEPS = 3

# Rotates the keys of a layer by a number of positions: index of the layer, keys
# ``[num_tokens, num_kv_heads, key_dim]`` and distance.
RotateKeys: TypeAlias = Callable[[int, mx.array, int], mx.array]


class PagedLayerKV(LayerKV):
    """One layer on its slabs, ``[num_blocks, num_kv_heads, block_size, width]``, which layers of
    other groups may share.
    """

    def __init__(self, spec: LayerSpec, backend: Backend, kv: KVHandle):
        super().__init__(spec)
        self.kv = kv
        self._backend = backend

    def update(self, k: mx.array, v: mx.array) -> None:
        self._backend.update(k, v, self.kv, self.step.slot_mapping)

    def update_and_attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if q.shape[0] < self.step.num_tokens:
            return super().update_and_attend(q, k, v, scale=scale, sinks=sinks)
        params = AttentionParams(scale, self.spec.window, sinks, self.spec.softcap)
        return compute_meanwhile(
            self._backend.update_and_attend(q, k, v, self.kv, self.step, params)
        )

    def attend(self, q: mx.array, *, scale: float, sinks: mx.array | None = None) -> mx.array:
        params = AttentionParams(scale, self.spec.window, sinks, self.spec.softcap)
        step = self.step if q.shape[0] == self.step.num_tokens else self.step.logit_queries
        return compute_meanwhile(self._backend.attend(q, self.kv, step, params))

    def update_and_attend_latents(
        self, q: mx.array, latents: mx.array, rope_keys: mx.array
    ) -> mx.array:
        params = AttentionParams(1.0, self.spec.window, holds_latents=True)
        if not self.spec.format.rotates_keys:
            return compute_meanwhile(
                self._backend.update_and_attend(q, latents, rope_keys, self.kv, self.step, params)
            )
        self.update(latents, rope_keys)
        unrotated, gathered = self.spec.format.unrotated, self._backend.gather_step
        seq_kv = [
            (unrotated(stored)[None], keys[None]) for stored, keys in gathered(self.kv, self.step)
        ]
        return compute_meanwhile(attend_to_latents(q, seq_kv, self.step, params))

    def update_and_fetch(
        self, run: AttentionMetadata, k: mx.array, v: mx.array, num_before: int | None = None
    ) -> tuple[mx.array, mx.array]:
        form, (table,), (context_len,) = self.spec.format, run.block_tables, run.context_lens
        self._backend.update(k, v, self.kv, run.slot_mapping)
        first = 0
        if num_before is not None:
            first = max(0, context_len - run.num_tokens - num_before)
        first_block, num_skipped = divmod(first, run.block_size)
        num_rows = context_len - first_block * run.block_size
        parts = self._backend.gather_parts(self.kv, table[first_block:], num_rows)
        keys, values = form.decode(*parts)
        return form.unrotated(keys)[:, num_skipped:], values[:, num_skipped:]

    def stored_rows(self, table: BlockTable) -> tuple[Parts, Parts]:
        return self._backend.gather_parts(self.kv, table.block_ids, table.num_held_tokens)

    # The rows that a head needs of the last token of each block, in a layer for these

    def write_hidden_rows(self, block_ids: Sequence[int], rows: mx.array) -> None:
        """Keep the rows ``[num_blocks, hidden_size]`` of the last tokens of blocks."""
        kv = self.kv
        shape = (len(block_ids), 1, kv.block_size, 2 * kv.key_dim)
        missing = kv.block_size * shape[-1] - rows.shape[1]
        spread = mx.pad(rows, [(0, 0), (0, missing)]).reshape(shape).astype(kv.dtype)
        keys, values = mx.split(spread, 2, axis=-1)
        self._backend.write_blocks(kv, block_ids, (keys,), (values,))

    def read_hidden_row(self, block_id: int, hidden_size: int) -> mx.array:
        """The row ``[1, hidden_size]`` of a block's last token."""
        parts = self._backend.gather_parts(self.kv, [block_id], self.kv.block_size)
        row = mx.concatenate([part for (part,) in parts], axis=-1).reshape(1, -1)
        return row[:, :hidden_size]

    @property
    def arrays(self) -> Sequence[mx.array]:
        return self.kv.arrays

    @property
    def writes_in_place(self) -> bool:
        return self._backend.writes_in_place


class _OpenPart(NamedTuple):
    """The layers that a step runs: all, or those of one of two models that share a cache."""

    layers: range
    slabs: list[KVHandle]  # of these layers
    plan_keys: list[list[PlanKey]]  # of the layers of each group


class PagedKVCache(KVCache):
    """Sequences as block tables over slabs.

    A sequence grows by single blocks, nothing is padded, and freed blocks are reused by other
    sequences. The slabs start small and double, layer by layer, up to the budget.

    Args:
        config: shape and budget.
        backend: ``"auto"``, ``"reference"`` or ``"metal"``.
        initial_blocks: blocks to allocate at once; more are added when they are needed.
        rotate_keys: :meth:`LanguageModel.rotate_keys` of the model, for streaming windows.

    Raises:
        BackendError: the backend is not available.
        ValueError: ``rotate_keys`` is missing for a streaming window.
    """

    kind = "paged"
    _layers: Sequence[PagedLayerKV] = ()
    _slabs: Sequence[KVHandle] = ()

    def __init__(
        self,
        config: KVCacheConfig,
        backend: str = DEFAULT_BACKEND,
        initial_blocks: int = INITIAL_BLOCKS,
        rotate_keys: RotateKeys | None = None,
    ):
        if rotate_keys is None and any(group.retention.cuts_runs for group in config.groups):
            raise ValueError("[paged cache] a streaming window needs the model's rotate_keys")
        self._rotate_keys = rotate_keys
        attended = [spec for spec in config.layers if not spec.holds_hidden_rows]
        shapes = [spec.attention_shape(config.block_size) for spec in attended]
        self._backend = choose_backend(backend, shapes)
        self._can_trace = not any(shape.why_no_attention for shape in shapes)
        self._copy_detector = CopyDetector(NUM_WATCHED_STEPS if self.backend.name == "metal" else 0)
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
        self._layers = self._slabs = ()
        self._parts: dict[range, _OpenPart] = {}
        slabs = []
        for users in self.config.slabs:
            spec = self.config.layers[users[0]]
            shape = self.config.block_size, spec.key_dim, spec.value_dim
            slabs.append(
                KVHandle.allocate(self.pool.num_blocks, spec.num_kv_heads, *shape, spec.format)
            )
        slab_of = {
            index: kv for users, kv in zip(self.config.slabs, slabs, strict=True) for index in users
        }
        self._slabs = slabs
        self._layers = [
            PagedLayerKV(spec, self._backend, slab_of[index])
            for index, spec in enumerate(self.config.layers)
        ]

    # Steps

    def _prepare(
        self, tables: Sequence[Sequence[BlockTable]], steps: Sequence[AttentionMetadata]
    ) -> None:
        if self.backend.reads_unused_slots:
            for step in steps:
                self._zero_new_blocks(step)
        self._copy_detector.begin_step(steps[0].num_tokens, self._slabs)

    def _zero_new_blocks(self, step: AttentionMetadata) -> None:
        """Zero new, partly filled blocks, which may hold NaN of an earlier sequence."""
        partly_filled = [
            table[-1]
            for table, context_len, query_len in zip(
                step.block_tables, step.context_lens, step.query_lens, strict=True
            )
            if 0 < context_len % step.block_size <= query_len
        ]
        if partly_filled:
            for kv in self._open_part.slabs:
                self.backend.zero_blocks(kv, partly_filled)

    def _finish(self) -> None:
        self._copy_detector.end_step(self._slabs)

    # Decodes as functions of arrays, for tracing

    def open_decode(self) -> OpenDecode | None:
        """The open step, if it is a decode whose graph depends only on its shape: all query runs
        are single tokens that need logits, and kernels write in place.
        """
        if not self._steps or not self._can_trace:
            return None
        step, (opened, slabs, keys_of_group) = self._steps[0], self._open_part
        if step.max_query_len > 1 or step.logit_rows is not None:
            return None
        shapes, arrays = [], []
        for group, (group_step, keys) in enumerate(zip(self._steps, keys_of_group, strict=True)):
            plans = self._backend.decode_plans(group_step, keys)
            if plans is None:
                return None
            for key, plan in zip(keys, plans, strict=True):
                sizes = plan.array.size, plan.num_partitions, plan.num_partial_rows
                shapes.append(PlanShape(group, key, *sizes))
                arrays.append(plan.array)
        shape = DecodeShape(step.num_tokens, slabs[0].num_blocks, opened, tuple(shapes))
        encodes = any(kv.format.kernels.encode is not None for kv in slabs)
        slots = [each.slot_mapping.packed for each in self._steps] if encodes else []
        inputs = DecodeArrays(
            step.positions,
            arrays,
            slots,
            [kv.k for kv in slabs],
            [kv.v for kv in slabs],
            [first_fence() if kv.fence is None else kv.fence for kv in slabs],
        )
        return OpenDecode(shape, inputs, slabs, step.states)

    @property
    def _open_part(self) -> _OpenPart:
        opened = range(len(self._layers))[self._open_layers]
        if opened not in self._parts:
            slabs = list(dict.fromkeys(self._layers[index].kv for index in opened))
            keys: list[dict[PlanKey, None]] = [{} for _ in self.config.groups]
            for index in opened:
                layer = self._layers[index]
                key = PlanKey.of(layer.spec.window, layer.kv)
                keys[self.config.group_of(index)][key] = None
            self._parts[opened] = _OpenPart(opened, slabs, list(map(list, keys)))
        return self._parts[opened]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        if copies:
            for kv in self._slabs:
                self.backend.copy_blocks(kv, copies)

    def shift_keys(self, group: int, shift: KeyShift) -> None:
        """Copy blocks in the layers of a group, with K rotated by ``shift.distance`` positions."""
        block_size, rotate_keys = self.config.block_size, self._rotate_keys
        assert rotate_keys is not None, "checked when the cache was made"
        num_tokens = len(shift.sources) * block_size
        slots = [
            block_id * block_size + offset
            for block_id in shift.destinations
            for offset in range(block_size)
        ]
        slot_mapping = SlotMapping(slots, block_size)
        for index in self.config.groups[group].layers:
            kv = self.layers[index].kv
            form = kv.format
            k, v = self.backend.gather_parts(kv, shift.sources, num_tokens)
            keys = form.unrotated(form.key.decode(k)).swapaxes(0, 1)
            k = form.key.encode(form.rotated(rotate_keys(index, keys, shift.distance)))
            # A view that stays alive would make the write copy the slab.
            v = tuple(part.swapaxes(0, 1) * 1 for part in v)
            if not self.backend.writes_in_place:
                mx.eval(k, v)
            self.backend.reshape_and_cache(k, v, kv, slot_mapping)

    @property
    def arrays(self) -> list[mx.array]:
        return [array for kv in self._slabs for array in kv.arrays]

    # Memory

    @property
    def nbytes_held(self) -> int:
        return sum(kv.nbytes for kv in self._slabs)

    def _grow(self, num_new_blocks: int) -> bool:
        try:
            for kv in self._slabs:
                kv.grow(num_new_blocks)
                # MLX would cache the old slab, which is never reused.
                mx.clear_cache()
        except RuntimeError:
            self._fit()  # shrinks the layers that have grown
            return False
        return True

    def _fit(self) -> None:
        # One slab after the other, so that at most one exists twice.
        for kv in self._slabs:
            if kv.num_blocks > self.pool.num_blocks:
                kv.shrink_to(self.pool.num_blocks)
                mx.clear_cache()

    def wait_for_writes(self) -> None:
        """Wait for the writes so far, before the host reads them."""
        for kv in self._slabs:
            kv.leave_chain()

    def read_blocks(self, group: int, block_ids: Sequence[int]) -> list[bytes]:
        """Copies of blocks of a group of layers, as bytes: those of its layers' slabs in turn, for
        each layer the parts of K, then those of V, ``[num_kv_heads, block_size, width]`` each, as
        stored. No step that writes them may be in flight: kernels are not waited for.
        """
        # Views of the slabs, without a copy. None may outlive this call: a write would then copy
        # its slab.
        windows = [
            np.frombuffer(cast(Any, slab), dtype=np.uint8).reshape(slab.shape[0], -1)
            for kv in self._slabs_of(group)
            for slab in kv.slabs
        ]
        return [b"".join([window[block_id].data for window in windows]) for block_id in block_ids]

    def write_blocks(self, group: int, block_ids: Sequence[int], contents: Sequence[bytes]) -> None:
        """Fill blocks of a group of layers with the result of :meth:`read_blocks`, from a cache
        with the same layers and block size.

        Raises:
            ValueError: contents of the wrong size.
        """
        slabs = self._slabs_of(group)
        expected = sum(slab.nbytes // slab.shape[0] for kv in slabs for slab in kv.slabs)
        for content in contents:
            if len(content) != expected:
                raise ValueError(
                    f"[paged cache] a block of these layers has {expected} bytes, got "
                    f"{len(content)}"
                )
        offset = 0
        for kv in slabs:
            parts = []
            for slab in kv.slabs:
                shape, nbytes = slab.shape[1:], slab.nbytes // slab.shape[0]
                # Unsigned integers: numpy has no bfloat16.
                dtype, count = f"u{slab.itemsize}", nbytes // slab.itemsize
                rows = [np.frombuffer(each, dtype, count, offset) for each in contents]
                parts.append(mx.array(np.stack(rows)).view(slab.dtype).reshape(-1, *shape))
                offset += nbytes
            k, v = tuple(parts[: len(kv.k)]), tuple(parts[len(kv.k) :])
            self.backend.write_blocks(kv, block_ids, k, v)
        if not self.backend.writes_in_place:
            mx.eval(self.arrays)

    def _slabs_of(self, group: int) -> Sequence[KVHandle]:
        return self._slabs[: len(self.config.groups[group].layers)]
