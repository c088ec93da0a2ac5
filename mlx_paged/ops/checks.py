"""What goes in at the door of the operations, checked once for every backend; errors name operation and argument."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_paged.ops.kv_handle import KVHandle
from mlx_paged.ops.metadata import AttentionMetadata, SlotMapping

BLOCK_SIZES = (8, 16, 32, 64)
KV_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def check_handle(op: str, kv: KVHandle) -> None:
    if kv.k.ndim != 4 or kv.k.shape != kv.v.shape:
        raise ValueError(
            f"[{op}] kv: K and V slabs must both be [num_blocks, num_kv_heads, block_size, head_dim], "
            f"got {list(kv.k.shape)} and {list(kv.v.shape)}"
        )
    if kv.dtype not in KV_DTYPES or kv.v.dtype != kv.dtype:
        raise ValueError(f"[{op}] kv: slabs must be float32, float16 or bfloat16, got {kv.dtype} and {kv.v.dtype}")


def check_slot_write(op: str, k: mx.array, v: mx.array, kv: KVHandle, slot_mapping: SlotMapping) -> None:
    check_handle(op, kv)
    expected = (slot_mapping.num_tokens, kv.num_kv_heads, kv.head_dim)
    for name, rows in (("k", k), ("v", v)):
        if rows.shape != expected:
            raise ValueError(
                f"[{op}] {name}: expected [num_tokens, num_kv_heads, head_dim] = {list(expected)}, "
                f"got {list(rows.shape)}"
            )
        if rows.dtype != kv.dtype:
            raise ValueError(f"[{op}] {name}: {rows.dtype} rows don't fit {kv.dtype} slabs")
    if slot_mapping.block_size != kv.block_size:
        raise ValueError(
            f"[{op}] slot_mapping: built for blocks of {slot_mapping.block_size}, the slabs hold {kv.block_size}"
        )
    if slot_mapping.max_slot >= kv.num_slots:
        raise ValueError(
            f"[{op}] slot_mapping: slot {slot_mapping.max_slot} is out of range, the slabs have {kv.num_slots} slots "
            f"({kv.num_blocks} blocks of {kv.block_size})"
        )


def check_attention(
    op: str,
    q: mx.array,
    kv: KVHandle,
    metadata: AttentionMetadata,
    window: int | None,
    sinks: mx.array | None,
) -> None:
    check_handle(op, kv)
    if q.ndim != 3 or q.shape[0] != metadata.num_tokens or q.shape[2] != kv.head_dim:
        raise ValueError(
            f"[{op}] q: expected [num_tokens, num_heads, head_dim] = [{metadata.num_tokens}, *, {kv.head_dim}], "
            f"got {list(q.shape)}"
        )
    if q.shape[1] == 0 or q.shape[1] % kv.num_kv_heads:
        raise ValueError(f"[{op}] q: {q.shape[1]} query heads are not a multiple of {kv.num_kv_heads} KV heads")
    if not mx.issubdtype(q.dtype, mx.floating):
        raise ValueError(f"[{op}] q: must be floating, got {q.dtype}")
    if metadata.num_seqs == 0:
        raise ValueError(f"[{op}] metadata: the batch has no sequence")
    if metadata.block_size != kv.block_size:
        raise ValueError(f"[{op}] metadata: built for blocks of {metadata.block_size}, the slabs hold {kv.block_size}")
    if metadata.max_block_id >= kv.num_blocks:
        raise ValueError(
            f"[{op}] metadata: block {metadata.max_block_id} is out of range, the slabs have {kv.num_blocks} blocks"
        )
    if window is not None and window < 1:
        raise ValueError(f"[{op}] window: must be at least 1 (it includes the current token), got {window}")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"[{op}] sinks: expected [num_heads] = [{q.shape[1]}], got {list(sinks.shape)}")


def check_block_ids(op: str, name: str, block_ids: np.ndarray, kv: KVHandle) -> None:
    if block_ids.size and not (block_ids.min() >= 0 and block_ids.max() < kv.num_blocks):
        outside = block_ids[(block_ids < 0) | (block_ids >= kv.num_blocks)]
        raise ValueError(
            f"[{op}] {name}: block {outside.flat[0]} is out of range, the slabs have {kv.num_blocks} blocks"
        )


def check_block_table(op: str, block_table: Sequence[int] | np.ndarray, num_tokens: int, kv: KVHandle) -> np.ndarray:
    """The blocks of ``block_table`` that hold ``num_tokens`` tokens, ``[num_blocks] int32``."""
    check_handle(op, kv)
    table = np.asarray(block_table)
    if table.ndim != 1 or table.size == 0 or table.dtype.kind not in "iu":
        raise ValueError(f"[{op}] block_table: expected integers of shape [num_blocks], got {list(table.shape)}")
    if not 0 < num_tokens <= table.size * kv.block_size:
        raise ValueError(
            f"[{op}] num_tokens: must be within 1..{table.size * kv.block_size} "
            f"({table.size} blocks of {kv.block_size}), got {num_tokens}"
        )
    table = table[: -(-num_tokens // kv.block_size)].astype(np.int32)
    check_block_ids(op, "block_table", table, kv)
    return table


def check_copy_pairs(op: str, src_dst_pairs: Sequence[tuple[int, int]], kv: KVHandle) -> None:
    check_handle(op, kv)
    pairs = np.asarray(src_dst_pairs)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu":
        raise ValueError(f"[{op}] src_dst_pairs: expected integer pairs (source, destination), got {list(pairs.shape)}")
    check_block_ids(op, "src_dst_pairs", pairs, kv)
    destinations = set(pairs[:, 1].tolist())
    if len(destinations) != len(pairs):
        raise ValueError(f"[{op}] src_dst_pairs: a destination is named twice")
    if destinations & set(pairs[:, 0].tolist()):
        raise ValueError(f"[{op}] src_dst_pairs: a block is both source and destination")
