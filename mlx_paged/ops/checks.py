"""Checks of an operation's inputs, shared by all backends.

Errors name the operation and the argument. Nothing is read from the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx

from mlx_paged.ops.formats import Parts
from mlx_paged.ops.kv_handle import KVHandle
from mlx_paged.ops.metadata import AttentionMetadata, AttentionParams, SlotMapping


def check_slot_write(op: str, k: Parts, v: Parts, kv: KVHandle, slot_mapping: SlotMapping) -> None:
    num_kv_heads = kv.num_kv_heads
    for name, parts, slabs in (("k", k, kv.k), ("v", v, kv.v)):
        if len(parts) != len(slabs):
            raise ValueError(
                f"[{op}] {name}: expected the {len(slabs)} parts of {kv.format}, got {len(parts)}"
            )
        for part, slab in zip(parts, slabs, strict=True):
            expected = (slot_mapping.num_tokens, num_kv_heads, slab.shape[3])
            if part.shape != expected:
                raise ValueError(
                    f"[{op}] {name}: expected [num_tokens, num_kv_heads, dim] = {list(expected)}, "
                    f"got {list(part.shape)}"
                )
            if part.dtype != slab.dtype:
                raise ValueError(f"[{op}] {name}: {part.dtype} rows don't fit {slab.dtype} slabs")
    _check_slots(op, kv, slot_mapping)


def _check_slots(op: str, kv: KVHandle, slot_mapping: SlotMapping) -> None:
    num_blocks, block_size = kv.num_blocks, kv.block_size
    if slot_mapping.block_size != block_size:
        raise ValueError(
            f"[{op}] slot_mapping: built for blocks of {slot_mapping.block_size}, "
            f"the slabs hold {block_size}"
        )
    if slot_mapping.max_slot >= num_blocks * block_size:
        raise ValueError(
            f"[{op}] slot_mapping: slot {slot_mapping.max_slot} is out of range, the slabs have "
            f"{num_blocks * block_size} slots ({num_blocks} blocks of {block_size})"
        )


def check_rows(op: str, k: mx.array, v: mx.array, kv: KVHandle, slot_mapping: SlotMapping) -> None:
    """Check rows that are not encoded."""
    for name, rows, width in (("k", k, kv.key_dim), ("v", v, kv.value_dim)):
        expected = (slot_mapping.num_tokens, kv.num_kv_heads, width)
        if rows.shape != expected:
            raise ValueError(
                f"[{op}] {name}: expected [num_tokens, num_kv_heads, dim] = {list(expected)}, "
                f"got {list(rows.shape)}"
            )
        if not mx.issubdtype(rows.dtype, mx.floating):
            raise ValueError(f"[{op}] {name}: must be floating, got {rows.dtype}")
    _check_slots(op, kv, slot_mapping)


def check_attention(
    op: str, q: mx.array, kv: KVHandle, step: AttentionMetadata, params: AttentionParams
) -> None:
    num_kv_heads = kv.num_kv_heads
    key_dim = kv.key_dim + kv.value_dim if params.holds_latents else kv.key_dim
    if q.ndim != 3 or q.shape[0] != step.num_tokens or q.shape[2] != key_dim:
        raise ValueError(
            f"[{op}] q: expected [num_tokens, num_heads, key_dim] = [{step.num_tokens}, *, "
            f"{key_dim}], got {list(q.shape)}"
        )
    num_heads = q.shape[1]
    if num_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"[{op}] q: {num_heads} query heads are not a multiple of {num_kv_heads} KV heads"
        )
    if not mx.issubdtype(q.dtype, mx.floating):
        raise ValueError(f"[{op}] q: must be floating, got {q.dtype}")
    check_step(op, kv, step)
    if params.window is not None and params.window < 1:
        raise ValueError(
            f"[{op}] window: must be at least 1 (it includes the current token), "
            f"got {params.window}"
        )
    if params.softcap is not None and not 0 < params.softcap < math.inf:
        raise ValueError(f"[{op}] softcap: must be positive and finite, got {params.softcap}")
    if params.sinks is not None and params.sinks.shape != (num_heads,):
        raise ValueError(
            f"[{op}] sinks: expected [num_heads] = [{num_heads}], got {list(params.sinks.shape)}"
        )


def check_step(op: str, kv: KVHandle, step: AttentionMetadata) -> None:
    num_blocks, _, block_size, _ = kv.k[0].shape
    if step.num_seqs == 0:
        raise ValueError(f"[{op}] step: the batch has no sequence")
    if step.block_size != block_size:
        raise ValueError(
            f"[{op}] step: built for blocks of {step.block_size}, the slabs hold {block_size}"
        )
    if step.max_block_id >= num_blocks:
        raise ValueError(
            f"[{op}] step: block {step.max_block_id} is out of range, "
            f"the slabs have {num_blocks} blocks"
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


def check_block_write(op: str, block_ids: Sequence[int], k: Parts, v: Parts, kv: KVHandle) -> None:
    check_block_ids(op, "block_ids", block_ids, kv)
    if len(set(block_ids)) != len(block_ids):
        raise ValueError(f"[{op}] block_ids: a block is named twice")
    for name, parts, slabs in (("k", k, kv.k), ("v", v, kv.v)):
        expected = [((len(block_ids), *slab.shape[1:]), slab.dtype) for slab in slabs]
        found = [(part.shape, part.dtype) for part in parts]
        if found != expected:
            raise ValueError(f"[{op}] {name}: expected {expected}, got {found}")


def check_block_ids(op: str, name: str, block_ids: Sequence[int], kv: KVHandle) -> None:
    for block_id in block_ids:
        if type(block_id) is not int:
            raise ValueError(f"[{op}] {name}: block ids must be integers, got {block_id!r}")
        if not 0 <= block_id < kv.num_blocks:
            raise ValueError(
                f"[{op}] {name}: block {block_id} is out of range, "
                f"the slabs have {kv.num_blocks} blocks"
            )
