"""What goes in at the door of the operations, checked once for every backend; errors name operation
and argument.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_paged.ops.kv_handle import KVHandle
from mlx_paged.ops.metadata import AttentionMetadata, SlotMapping


def check_slot_write(
    op: str, k: mx.array, v: mx.array, kv: KVHandle, slot_mapping: SlotMapping
) -> None:
    num_blocks, num_kv_heads, block_size, head_dim = kv.k.shape
    expected = (slot_mapping.num_tokens, num_kv_heads, head_dim)
    for name, rows in (("k", k), ("v", v)):
        if rows.shape != expected:
            raise ValueError(
                f"[{op}] {name}: expected [num_tokens, num_kv_heads, head_dim] = {list(expected)}, "
                f"got {list(rows.shape)}"
            )
        if rows.dtype != kv.k.dtype:
            raise ValueError(f"[{op}] {name}: {rows.dtype} rows don't fit {kv.dtype} slabs")
    if slot_mapping.block_size != block_size:
        raise ValueError(
            f"[{op}] slot_mapping: built for blocks of {slot_mapping.block_size}, the slabs hold {block_size}"
        )
    if slot_mapping.max_slot >= num_blocks * block_size:
        raise ValueError(
            f"[{op}] slot_mapping: slot {slot_mapping.max_slot} is out of range, the slabs have "
            f"{num_blocks * block_size} slots ({num_blocks} blocks of {block_size})"
        )


def check_attention(
    op: str,
    q: mx.array,
    kv: KVHandle,
    metadata: AttentionMetadata,
    window: int | None,
    sinks: mx.array | None,
) -> None:
    num_blocks, num_kv_heads, block_size, head_dim = kv.k.shape
    if q.ndim != 3 or q.shape[0] != metadata.num_tokens or q.shape[2] != head_dim:
        raise ValueError(
            f"[{op}] q: expected [num_tokens, num_heads, head_dim] = [{metadata.num_tokens}, *, {head_dim}], "
            f"got {list(q.shape)}"
        )
    if q.shape[1] == 0 or q.shape[1] % num_kv_heads:
        raise ValueError(
            f"[{op}] q: {q.shape[1]} query heads are not a multiple of {num_kv_heads} KV heads"
        )
    if not mx.issubdtype(q.dtype, mx.floating):
        raise ValueError(f"[{op}] q: must be floating, got {q.dtype}")
    if metadata.num_seqs == 0:
        raise ValueError(f"[{op}] metadata: the batch has no sequence")
    if metadata.block_size != block_size:
        raise ValueError(
            f"[{op}] metadata: built for blocks of {metadata.block_size}, the slabs hold {block_size}"
        )
    if metadata.max_block_id >= num_blocks:
        raise ValueError(
            f"[{op}] metadata: block {metadata.max_block_id} is out of range, the slabs have {num_blocks} blocks"
        )
    if window is not None and window < 1:
        raise ValueError(
            f"[{op}] window: must be at least 1 (it includes the current token), got {window}"
        )
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(
            f"[{op}] sinks: expected [num_heads] = [{q.shape[1]}], got {list(sinks.shape)}"
        )


def check_block_table(
    op: str, block_table: Sequence[int], num_tokens: int, kv: KVHandle
) -> list[int]:
    """The blocks of ``block_table`` that hold ``num_tokens`` tokens, ``[num_blocks]``."""
    table = list(block_table)
    if not table:
        raise ValueError(f"[{op}] block_table: must name at least one block")
    if not 0 < num_tokens <= len(table) * kv.block_size:
        raise ValueError(
            f"[{op}] num_tokens: must be within 1..{len(table) * kv.block_size} "
            f"({len(table)} blocks of {kv.block_size}), got {num_tokens}"
        )
    table = table[: -(-num_tokens // kv.block_size)]
    check_block_ids(op, "block_table", table, kv)
    return table


def check_copy_pairs(op: str, src_dst_pairs: Sequence[tuple[int, int]], kv: KVHandle) -> None:
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in src_dst_pairs):
        raise ValueError(
            f"[{op}] src_dst_pairs: expected pairs (source, destination), got {src_dst_pairs!r}"
        )
    sources = [src for src, _ in src_dst_pairs]
    destinations = [dst for _, dst in src_dst_pairs]
    check_block_ids(op, "src_dst_pairs", sources + destinations, kv)
    if len(set(destinations)) != len(destinations):
        raise ValueError(f"[{op}] src_dst_pairs: a destination is named twice")
    if set(sources) & set(destinations):
        raise ValueError(f"[{op}] src_dst_pairs: a block is both source and destination")


def check_block_ids(op: str, name: str, block_ids: Sequence[int], kv: KVHandle) -> None:
    for block_id in block_ids:
        if type(block_id) is not int:
            raise ValueError(f"[{op}] {name}: block ids must be integers, got {block_id!r}")
        if not 0 <= block_id < kv.num_blocks:
            raise ValueError(
                f"[{op}] {name}: block {block_id} is out of range, the slabs have {kv.num_blocks} blocks"
            )
