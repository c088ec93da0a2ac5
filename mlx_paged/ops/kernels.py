"""The Metal kernels of ``metal/``, one function each: grid, template and the token that orders
them.

Kernels write slabs in place, which MLX does not see. So every dispatch that reads or writes a
handle's slabs binds the handle's token and leaves the next one there: one chain per handle, in the
order of the calls. To MLX that is a plain data dependency, and so a barrier for a read after a
write and for a write after a read alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol, cast

import mlx.core as mx

from mlx_paged.ops.attention_plan import MERGE_STREAMS, SIMD_SIZE, AttentionPlan, cut_threadgroup
from mlx_paged.ops.kv_handle import KVHandle
from mlx_paged.ops.metadata import MIN_ELEMENTS, padded
from mlx_paged.ops.metal_sources import read_source

SLABS = ("key_slab", "value_slab")
ROWS = ("key_rows", "value_rows")
# Inputs and outputs of each kernel, in the order of the contract at the top of its source.
KERNELS = {
    "reshape_and_cache": ((*ROWS, *SLABS, "slot_mapping", "token_in"), ("token_out",)),
    "paged_attention": (
        ("queries", *SLABS, *ROWS, "plan", "sinks", "softmax_scale", "token_in"),
        ("out", "token_out"),
    ),
    "merge_partitions": (("partials", "plan", "sinks"), ("out",)),
    "gather_blocks": ((*SLABS, "block_table", "token_in"), ("keys", "values", "token_out")),
    "copy_blocks": ((*SLABS, "src_dst_pairs", "token_in"), ("token_out",)),
    "zero_blocks": ((*SLABS, "block_ids", "token_in"), ("token_out",)),
}

MAX_THREADS = 256

Output = tuple[tuple[int, ...], mx.Dtype]
Template = list[tuple[str, mx.Dtype | int | bool]]
TOKEN: Output = ((MIN_ELEMENTS,), mx.int32)


class MetalKernel(Protocol):
    """What ``mx.fast.metal_kernel`` returns, as far as it is used here."""

    def __call__(
        self,
        *,
        inputs: list[mx.array],
        template: Template,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
    ) -> list[mx.array]: ...


def write_slots(
    k: mx.array,  # [num_tokens, num_kv_heads, head_dim]
    v: mx.array,  # the same
    kv: KVHandle,
    slots: mx.array,  # [max(num_tokens, 8)] int32, below 0 for padding
) -> None:
    _chain(
        "reshape_and_cache",
        kv,
        [k, v, kv.k, kv.v, slots],
        [("T", kv.dtype), ("BLOCK_SIZE", kv.block_size), ("HEAD_DIM", kv.head_dim)],
        grid=(kv.head_dim // 4, k.shape[0], kv.num_kv_heads),
        threadgroup=_rows_per_threadgroup(kv.head_dim // 4),
    )


def gather(
    kv: KVHandle,
    block_table: mx.array,  # [max(num_blocks, 8)] int32
    num_tokens: int,
) -> tuple[mx.array, mx.array]:
    """``[num_kv_heads, num_tokens, head_dim]`` each."""
    dense = ((kv.num_kv_heads, num_tokens, kv.head_dim), kv.dtype)
    keys, values = _chain(
        "gather_blocks",
        kv,
        [kv.k, kv.v, block_table],
        [("T", kv.dtype), ("BLOCK_SIZE", kv.block_size), ("HEAD_DIM", kv.head_dim)],
        grid=(kv.head_dim // 4, num_tokens, kv.num_kv_heads),
        threadgroup=_rows_per_threadgroup(kv.head_dim // 4),
        outputs=[dense, dense],
    )
    return keys, values


def copy_blocks(kv: KVHandle, src_dst_pairs: Sequence[tuple[int, int]]) -> None:
    _write_blocks(
        "copy_blocks",
        kv,
        padded([block_id for pair in src_dst_pairs for block_id in pair]),
        src_dst_pairs,
    )


def zero_blocks(kv: KVHandle, block_ids: Sequence[int]) -> None:
    _write_blocks("zero_blocks", kv, padded(block_ids), block_ids)


def attention(
    queries: mx.array,  # [num_tokens, num_heads, head_dim]
    rows: tuple[mx.array, mx.array]
    | None,  # [num_tokens, num_kv_heads, head_dim], written where they are given
    kv: KVHandle,
    plan: AttentionPlan,
    run: int,  # query tokens per sequence, at most
    scale: float,
    sinks: mx.array | None,  # [num_heads]
) -> mx.array:
    """``[num_tokens, num_heads, head_dim]``, all in the dtype of the slabs."""
    num_tokens, num_heads, head_dim = queries.shape
    group = num_heads // kv.num_kv_heads
    cut = cut_threadgroup(run * group, head_dim, kv.dtype.size)
    is_merged = plan.num_partial_rows > 0
    out = (queries.shape, kv.dtype)
    partials = ((plan.num_partial_rows, num_heads, head_dim + 4), mx.float32)
    first_out = partials if is_merged else out
    sink_logits = _sink_logits(sinks, num_heads)
    # Where no row comes from the inputs, the queries stand in for arrays that no thread reads.
    key_rows, value_rows = rows or (queries, queries)
    (result,) = _chain(
        "paged_attention",
        kv,
        [queries, kv.k, kv.v, key_rows, value_rows, plan.array, sink_logits, _scalar(scale)],
        [
            ("T", kv.dtype),
            ("Out", first_out[1]),
            ("HEAD_DIM", head_dim),
            ("BLOCK_SIZE", kv.block_size),
            ("GROUP", group),
            ("RUN", run),
            ("STREAMS", cut.streams),
            ("ROW_SPLITS", cut.row_splits),
            ("PARTIAL", is_merged),
        ],
        grid=(cut.num_threads, kv.num_kv_heads, plan.num_partitions),
        threadgroup=(cut.num_threads, 1, 1),
        outputs=[first_out],
    )
    if is_merged:
        (result,) = _dispatch(
            "merge_partitions",
            [result, plan.array, sink_logits],
            [("T", kv.dtype), ("HEAD_DIM", head_dim)],
            grid=(SIMD_SIZE * MERGE_STREAMS, num_heads, num_tokens),
            threadgroup=(SIMD_SIZE * MERGE_STREAMS, 1, 1),
            outputs=[out],
        )
    return result


def _write_blocks(name: str, kv: KVHandle, ids: mx.array, blocks: Sequence[object]) -> None:
    _chain(
        name,
        kv,
        [kv.k, kv.v, ids],
        [("T", kv.dtype)],
        grid=(kv.num_kv_heads * kv.block_size * kv.head_dim // 4, len(blocks), 1),
        threadgroup=(MAX_THREADS, 1, 1),
    )


def _chain(
    name: str,
    kv: KVHandle,
    inputs: list[mx.array],
    template: Template,
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    outputs: Sequence[Output] = (),
) -> list[mx.array]:
    """A dispatch that touches the slabs of ``kv``: behind all earlier ones, before all later ones."""
    token = _first_token() if kv.token is None else kv.token
    *results, kv.token = _dispatch(
        name, [*inputs, token], template, grid, threadgroup, [*outputs, TOKEN]
    )
    return results


def _dispatch(
    name: str,
    inputs: list[mx.array],
    template: Template,
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    outputs: Sequence[Output],
) -> list[mx.array]:
    return kernel(name)(
        inputs=inputs,
        template=template,
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
    )


@cache
def kernel(name: str) -> MetalKernel:
    """What ``mx.fast.metal_kernel`` makes of ``metal/<name>.metal``."""
    input_names, output_names = KERNELS[name]
    made = mx.fast.metal_kernel(
        name=f"mlx_paged_{name}",
        input_names=list(input_names),
        output_names=list(output_names),
        source=read_source(f"{name}.metal"),
        header=read_source("paged_kv.h"),
    )
    return cast(MetalKernel, made)  # MLX's stub says object


# What follows is kept for the whole process and used by every thread. MLX's streams belong to
# threads, so an array that one thread leaves lazy is one that no other thread can evaluate.


@cache
def _first_token() -> mx.array:
    return _evaluated(mx.zeros(*TOKEN))


@cache
def _scalar(value: float) -> mx.array:
    return _evaluated(mx.array(value, dtype=mx.float32))


@cache
def _no_sinks(num_heads: int) -> mx.array:
    lowest = mx.finfo(mx.float32).min
    return _evaluated(mx.full((max(num_heads, MIN_ELEMENTS),), lowest, dtype=mx.float32))


def _evaluated(array: mx.array) -> mx.array:
    mx.eval(array)
    return array


def _sink_logits(sinks: mx.array | None, num_heads: int) -> mx.array:
    if sinks is None:
        return _no_sinks(num_heads)
    sinks = sinks.astype(mx.float32)
    return sinks if num_heads >= MIN_ELEMENTS else mx.pad(sinks, (0, MIN_ELEMENTS - num_heads))


def _rows_per_threadgroup(width: int) -> tuple[int, int, int]:
    return (width, max(1, MAX_THREADS // width), 1)
