"""The Metal backend: which kernel runs for which query run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import TypeVar

import mlx.core as mx

from mlx_paged.ops import checks, kernels
from mlx_paged.ops.attention_plan import AttentionPlan, PlanKey
from mlx_paged.ops.backend import Backend
from mlx_paged.ops.formats import Parts
from mlx_paged.ops.gather_plan import GatherPlan
from mlx_paged.ops.kv_handle import KVHandle
from mlx_paged.ops.metadata import (
    AttentionMetadata,
    AttentionParams,
    Rows,
    SlotMapping,
    StoredRows,
)
from mlx_paged.ops.prefill import prefill
from mlx_paged.ops.reference import ReferenceBackend

Queries = TypeVar("Queries", mx.array, None)

# Query tokens per sequence for which the attention kernel is compiled: a decode, and speculation.
DECODE_RUNS = (1, 2, 4, 8)


@cache
def decode_runs_of(group: int, holds_latents: bool = False) -> tuple[int, ...]:
    """The :data:`DECODE_RUNS` whose query rows fit the attention kernel.

    Args:
        group: query heads per KV head.
    """
    max_rows = kernels.MAX_LATENT_ROWS if holds_latents else kernels.MAX_QUERY_ROWS
    return tuple(run for run in DECODE_RUNS if run * group <= max_rows)


class MetalBackend(Backend):
    """Only kernels on the chain of a handle touch its slabs.

    Args:
        writes_in_place: the result of the device's check (``in_place``). If it failed, rows are
            written by donated scatter, which MLX tracks, and kernels only read.
        decode_runs: per group size, the :func:`decode_runs_of` for which the attention kernel works
            on this device (``self_check``); all of them by default.
    """

    name = "metal"
    reads_unused_slots = False  # kernels never use what lies past the end of a sequence

    def __init__(
        self,
        writes_in_place: bool = True,
        decode_runs: Mapping[int, tuple[int, ...]] | None = None,
    ):
        self.writes_in_place = writes_in_place
        self._scatter = None if writes_in_place else ReferenceBackend()
        self._checked_runs = decode_runs or {}

    def reshape_and_cache(
        self, k: Parts, v: Parts, kv: KVHandle, slot_mapping: SlotMapping
    ) -> None:
        if self._scatter:
            return self._scatter.reshape_and_cache(k, v, kv, slot_mapping)
        checks.check_slot_write("reshape_and_cache", k, v, kv, slot_mapping)
        if k[0].shape[0] > 0:
            for part in range(len(k)):
                (kv.fence,) = kernels.write_slots(k, v, kv, slot_mapping.packed, part)()

    def update(self, k: mx.array, v: mx.array, kv: KVHandle, slot_mapping: SlotMapping) -> None:
        checks.check_rows("update", k, v, kv, slot_mapping)
        if k.shape[0] > 0:
            rows = k.astype(kv.dtype), v.astype(kv.dtype)
            self._store(None, rows, kv, slot_mapping)

    def update_and_attend(
        self,
        q: mx.array,
        k: mx.array | None,
        v: mx.array | None,
        kv: KVHandle,
        step: AttentionMetadata,
        params: AttentionParams,
    ) -> mx.array:
        """A decode writes its rows and attends in one dispatch, or encodes in one and attends in
        the next; a prefill writes its rows, then gathers all sequences with a history in one
        dispatch.

        Without ``k`` and ``v`` the rows are in the slabs already. A single function launches the
        kernels to save Python calls in a decode.
        """
        num_heads, dtype = q.shape[1], q.dtype
        rows, is_written = None, True
        if k is not None and v is not None:
            checks.check_rows("update_and_attend", k, v, kv, step.slot_mapping)
            checks.check_attention("update_and_attend", q, kv, step, params)
            rows = k.astype(kv.dtype), v.astype(kv.dtype)
            is_encoded = kv.format.kernels.encode is not None
            is_written = is_encoded or step.shares_new_blocks or self._scatter is not None
            if is_written:
                q = self._store(q, rows, kv, step.slot_mapping)
            if is_encoded:
                # Gather them with the rest, so that a row has the same bits however its prompt is
                # chunked.
                rows = None
        else:
            q = self._store(q, None, kv, None)
        parts, row_order = step.parts(self._decode_runs(kv, num_heads // kv.num_kv_heads, params))
        sinks = kernels.sink_logits(params.sinks, num_heads)
        outputs = []
        for step_part in parts:
            run, part, _ = step_part
            part_q, part_rows = step_part.take(q, rows)
            if run == 0:
                if part_rows is not None and not is_written:
                    self.update(*part_rows, kv, part.slot_mapping)
                out = prefill(part_q, part_rows, kv, part, params, _gather_all)
                outputs.append(out.astype(dtype))
                continue
            queries = part_q.astype(kv.dtype)
            new_rows = None if is_written else part_rows
            plan = AttentionPlan.of(part, PlanKey.of(params.window, kv))
            out, kv.fence = kernels.attention(queries, new_rows, kv, plan, run, params, sinks)()
            if plan.num_partial_rows:
                (out,) = kernels.merge(out, queries, plan, sinks)()
            outputs.append(out.astype(dtype))
        return outputs[0] if row_order is None else mx.concatenate(outputs)[row_order]

    def attend(
        self, q: mx.array, kv: KVHandle, step: AttentionMetadata, params: AttentionParams
    ) -> mx.array:
        checks.check_attention("attend", q, kv, step, params)
        return self.update_and_attend(q, None, None, kv, step, params)

    def _store(
        self, q: Queries, rows: Rows | None, kv: KVHandle, slot_mapping: SlotMapping | None
    ) -> Queries:
        """Write ``rows`` into their slots as the format stores them, and return ``q`` as the
        attention kernel expects it, in at most one dispatch.
        """
        if kv.format.kernels.encode is None or self._scatter:
            if rows is not None and slot_mapping is not None:
                self.reshape_and_cache(*kv.format.encode(*rows), kv, slot_mapping)
            return q if q is None else kv.format.rotated(q)
        slots = None if slot_mapping is None else slot_mapping.packed
        if q is not None and kv.format.rotates_keys:
            rotated, kv.fence = kernels.encode(rows, q.astype(kv.dtype), kv, slots)()
            return rotated
        if rows is not None:
            _, kv.fence = kernels.encode(rows, None, kv, slots)()
        return q

    def gather_blocks(self, kv: KVHandle, block_table: Sequence[int], num_tokens: int) -> Rows:
        table = checks.check_block_table("gather_blocks", block_table, num_tokens, kv)
        (rows,) = _gather(kv, GatherPlan.pack([table], [num_tokens], kv.block_size))
        return rows

    def gather_step(self, kv: KVHandle, step: AttentionMetadata) -> list[Rows]:
        checks.check_step("gather_step", kv, step)
        return _gather_all(kv, step)

    def gather_parts(self, kv: KVHandle, block_table: Sequence[int], num_tokens: int) -> StoredRows:
        table = checks.check_block_table("gather_parts", block_table, num_tokens, kv)
        plan = GatherPlan.pack([table], [num_tokens], kv.block_size)
        parts = []
        for part in range(kv.format.key.num_parts):
            keys, values, kv.fence = kernels.gather(kv, plan, part)()
            parts += plan.split(keys, values, kv.num_kv_heads)
        k, v = zip(*parts, strict=True)
        return k, v

    def copy_blocks(self, kv: KVHandle, src_dst_pairs: Sequence[tuple[int, int]]) -> None:
        if self._scatter:
            return self._scatter.copy_blocks(kv, src_dst_pairs)
        checks.check_copy_pairs("copy_blocks", src_dst_pairs, kv)
        if src_dst_pairs:
            for part in range(kv.format.key.num_parts):
                (kv.fence,) = kernels.copy_blocks(kv, src_dst_pairs, part)()

    def write_blocks(self, kv: KVHandle, block_ids: Sequence[int], k: Parts, v: Parts) -> None:
        if self._scatter:
            return self._scatter.write_blocks(kv, block_ids, k, v)
        checks.check_block_write("write_blocks", block_ids, k, v, kv)
        size = kv.block_size
        slots = [block_id * size + offset for block_id in block_ids for offset in range(size)]
        k_rows, v_rows = (
            tuple(part.swapaxes(1, 2).reshape(-1, part.shape[1], part.shape[3]) for part in parts)
            for parts in (k, v)
        )
        self.reshape_and_cache(k_rows, v_rows, kv, SlotMapping(slots, size))

    def zero_blocks(self, kv: KVHandle, block_ids: Sequence[int]) -> None:
        # There is no kernel: no cache on this backend needs it.
        ReferenceBackend().zero_blocks(kv, block_ids)

    def decode_plans(
        self, step: AttentionMetadata, keys: Collection[PlanKey]
    ) -> list[AttentionPlan] | None:
        if step.shares_new_blocks or not self.writes_in_place:
            return None
        return [AttentionPlan.of(step, key) for key in keys]

    def _decode_runs(self, kv: KVHandle, group: int, params: AttentionParams) -> tuple[int, ...]:
        holds_latents, rotates_keys = params.holds_latents, kv.format.rotates_keys
        if kernels.why_no_attention(kv.key_dim, kv.value_dim, group, holds_latents, rotates_keys):
            return ()
        return self._checked_runs.get(group, decode_runs_of(group, holds_latents))


def _gather_all(kv: KVHandle, step: AttentionMetadata) -> list[Rows]:
    return _gather(kv, GatherPlan.of(step))


def _gather(kv: KVHandle, plan: GatherPlan) -> list[Rows]:
    keys, values, kv.fence = kernels.gather_numbers(kv, plan)()
    return plan.split(keys, values, kv.num_kv_heads)
