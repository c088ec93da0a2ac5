"""The operations on Metal kernels, with the signatures of ``reference``: which kernel runs for
which query run.

Nothing but a kernel of the token chain (``kernels``) touches a slab here, unless the device failed
the check for writes in place: then rows are written by donated scatter, which MLX sees, and kernels
only read."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_paged.ops import kernels, reference
from mlx_paged.ops.attention_plan import AttentionPlan
from mlx_paged.ops.in_place import writes_in_place
from mlx_paged.ops.kv_handle import KVHandle
from mlx_paged.ops.metadata import AttentionMetadata, SlotMapping, padded
from mlx_paged.ops.notices import say_once

HEAD_DIMS = (32, 64, 80, 96, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64)
MAX_GROUP_SIZE = 16
# Query tokens per sequence that the decode kernel is made for: a decode, and speculation.
DECODE_RUNS = (1, 2, 4, 8)

Rows = tuple[
    mx.array, mx.array
]  # K and V of the step's tokens, [num_tokens, num_kv_heads, head_dim] each


def why_unsupported(head_dim: int, block_size: int) -> str | None:
    """What of a slab's shape no kernel is made for, or ``None``."""
    for name, value, known in (
        ("head_dim", head_dim, HEAD_DIMS),
        ("block_size", block_size, BLOCK_SIZES),
    ):
        if value not in known:
            return f"{name} {value} has no Metal kernel; there are kernels for {', '.join(map(str, known))}"
    return None


def reshape_and_cache(k: mx.array, v: mx.array, kv: KVHandle, slot_mapping: SlotMapping) -> None:
    if not writes_in_place():
        reference.reshape_and_cache(k, v, kv, slot_mapping)
    elif k.shape[0] > 0:
        kernels.write_slots(k, v, kv, slot_mapping.packed)


def paged_prefill_attention(
    q: mx.array,
    kv: KVHandle,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    return _prefill(q, None, kv, metadata, scale, window, sinks)


def attend(
    q: mx.array,
    kv: KVHandle,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    def attend_part(part: AttentionMetadata, part_q: mx.array) -> mx.array:
        operation = _decode if _run(part, part_q, kv) else _prefill
        return operation(part_q, None, kv, part, scale, window, sinks)

    return metadata.map_parts(decode_run, attend_part, q)


# The rule by query run is the same for a caller who expects decodes.
paged_attention = attend


def update_and_attend(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    kv: KVHandle,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """A decode writes its rows and attends in one dispatch; a prefill writes them, then gathers
    what lies before.
    """
    if metadata.shares_new_blocks or not writes_in_place():
        reshape_and_cache(k, v, kv, metadata.slot_mapping)
        return attend(q, kv, metadata, scale, window, sinks)

    def attend_part(
        part: AttentionMetadata,
        part_q: mx.array,
        part_k: mx.array,
        part_v: mx.array,
    ) -> mx.array:
        operation = _decode if _run(part, part_q, kv) else _prefill
        return operation(part_q, (part_k, part_v), kv, part, scale, window, sinks)

    return metadata.map_parts(decode_run, attend_part, q, k, v)


def gather_blocks(kv: KVHandle, block_table: list[int], num_tokens: int) -> Rows:
    return kernels.gather(kv, padded(block_table), num_tokens)


def copy_blocks(kv: KVHandle, src_dst_pairs: Sequence[tuple[int, int]]) -> None:
    write = kernels.copy_blocks if writes_in_place() else reference.copy_blocks
    write(kv, src_dst_pairs)


def zero_blocks(kv: KVHandle, block_ids: Sequence[int]) -> None:
    write = kernels.zero_blocks if writes_in_place() else reference.zero_blocks
    write(kv, block_ids)


def decode_run(query_len: int) -> int:
    """The query tokens per sequence of the decode kernel that a run gets; 0 for a run that is
    prefilled.

    It depends on nothing but the sequence itself, so that its bits don't depend on what else is in
    the batch."""
    return next((run for run in DECODE_RUNS if query_len <= run), 0)


def _run(part: AttentionMetadata, q: mx.array, kv: KVHandle) -> int:
    group = q.shape[1] // kv.num_kv_heads
    if group > MAX_GROUP_SIZE:
        say_once(
            f"[metal] {group} query heads per KV head are more than the decode kernel is made for ({MAX_GROUP_SIZE}); "
            "K/V are gathered for MLX's own attention instead"
        )
        return 0
    return decode_run(part.max_query_len)


def _decode(
    q: mx.array,
    rows: Rows | None,
    kv: KVHandle,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
) -> mx.array:
    has_rows = rows is not None
    plan = metadata.plan(
        ("attention", window, has_rows), lambda: AttentionPlan.pack(metadata, window, has_rows)
    )
    run = decode_run(metadata.max_query_len)
    return kernels.attention(q.astype(kv.dtype), rows, kv, plan, run, scale, sinks).astype(q.dtype)


def _prefill(
    q: mx.array,
    rows: Rows | None,
    kv: KVHandle,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
) -> mx.array:
    if rows is not None:
        kernels.write_slots(*rows, kv, metadata.slot_mapping.packed)
    # Nothing but new tokens: their rows are all there is to see.
    new_rows = rows if metadata.context_lens == metadata.query_lens else None
    starts = metadata.cu_seqlens_q

    def dense(seq: int) -> Rows:
        if new_rows is not None:
            k, v = (part[starts[seq] : starts[seq + 1]].swapaxes(0, 1) for part in new_rows)
            return k, v
        return kernels.gather(kv, metadata.packed_block_table(seq), metadata.context_lens[seq])

    return reference.attend_densely(q, dense, kv.dtype, metadata, scale, window, sinks)
