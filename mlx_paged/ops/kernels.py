"""The Metal kernels of ``metal/``: one function each that returns a launch, to be called once.

Kernels write slabs in place, which MLX does not see. So a launch that reads or writes the slabs of
a handle binds the handle's fence, and its last result is the next fence, which the caller leaves in
the handle::

    *results, kv.fence = launch()

The fences make one chain per handle, in the order of the calls. To MLX they are plain data
dependencies, and so barriers for a read after a write and a write after a read alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Protocol, TypeAlias, cast

import mlx.core as mx

from mlx_paged.ops.attention_plan import MERGE_STREAMS, SIMD_SIZE, AttentionPlan, cut_rows
from mlx_paged.ops.formats import KVFormat, Parts
from mlx_paged.ops.gather_plan import GatherPlan
from mlx_paged.ops.kv_handle import KVHandle
from mlx_paged.ops.metadata import MIN_ELEMENTS, StoredRows, padded
from mlx_paged.ops.metal_sources import read_source

HEAD_DIMS = (32, 64, 80, 96, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64)

SLABS = ("key_slab", "value_slab")
ROWS = ("key_rows", "value_rows")
# Inputs and outputs of each kernel, in the order of the contract at the top of its source.
KERNELS = {
    "reshape_and_cache": ((*ROWS, *SLABS, "slot_mapping", "fence_in"), ("fence_out",)),
    "paged_attention": (
        ("queries", *SLABS, *ROWS, "plan", "sinks", "softmax_scale", "fence_in"),
        ("out", "fence_out"),
    ),
    "merge_partitions": (("partials", "plan", "sinks"), ("out",)),
    "gather_blocks": ((*SLABS, "plan", "fence_in"), ("keys", "values", "fence_out")),
    "copy_blocks": ((*SLABS, "src_dst_pairs", "fence_in"), ("fence_out",)),
}

MAX_THREADS = 256

Launch: TypeAlias = Callable[[], list[mx.array]]
Output: TypeAlias = tuple[tuple[int, ...], mx.Dtype]
Size: TypeAlias = tuple[int, int, int]
Template: TypeAlias = list[tuple[str, mx.Dtype | int | bool]]
FENCE: Output = ((MIN_ELEMENTS,), mx.int32)


class MetalKernel(Protocol):
    """What ``mx.fast.metal_kernel`` returns, as far as it is used here."""

    def __call__(
        self,
        *,
        inputs: list[mx.array],
        template: Template,
        grid: Size,
        threadgroup: Size,
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
    ) -> list[mx.array]: ...


@cache
def why_unsupported(key_dim: int, value_dim: int, block_size: int, format: KVFormat) -> str | None:
    """What of a slab's shape or format no kernel is made for, or ``None``."""
    if not format.is_dense:
        return f"K/V of {format} have no Metal kernel"
    if key_dim != value_dim:
        return f"key_dim {key_dim} beside value_dim {value_dim} has no Metal kernel"
    for name, value, known in (
        ("head_dim", key_dim, HEAD_DIMS),
        ("block_size", block_size, BLOCK_SIZES),
    ):
        if value not in known:
            return (
                f"{name} {value} has no Metal kernel; "
                f"there are kernels for {', '.join(map(str, known))}"
            )
    return None


def write_slots(
    k: Parts,  # [num_tokens, num_kv_heads, head_dim]
    v: Parts,  # the same
    kv: KVHandle,
    slots: mx.array,  # [max(num_tokens, 8)] int32, below 0 for padding
) -> Launch:
    """Returns the fence."""
    return _chained(
        "reshape_and_cache",
        kv,
        [*k, *v, *kv.slabs, slots],
        [("T", kv.dtype), ("BLOCK_SIZE", kv.block_size), ("HEAD_DIM", kv.key_dim)],
        grid=(kv.key_dim // 4, k[0].shape[0], kv.num_kv_heads),
        threadgroup=_rows_per_threadgroup(kv.key_dim // 4),
    )


def gather(kv: KVHandle, plan: GatherPlan) -> Launch:
    """Returns keys and values, ``[num_tokens * num_kv_heads, head_dim]`` each, for
    :meth:`GatherPlan.split`; and the fence.
    """
    dense = ((sum(plan.num_tokens) * kv.num_kv_heads, kv.key_dim), kv.dtype)
    return _chained(
        "gather_blocks",
        kv,
        [*kv.slabs, plan.array],
        [("T", kv.dtype), ("BLOCK_SIZE", kv.block_size), ("HEAD_DIM", kv.key_dim)],
        grid=(kv.key_dim // 4, plan.num_blocks * kv.block_size, kv.num_kv_heads),
        threadgroup=_rows_per_threadgroup(kv.key_dim // 4),
        outputs=[dense, dense],
    )


def copy_blocks(kv: KVHandle, src_dst_pairs: Sequence[tuple[int, int]]) -> Launch:
    """Returns the fence."""
    ids = [block_id for pair in src_dst_pairs for block_id in pair]
    return _chained(
        "copy_blocks",
        kv,
        [*kv.slabs, padded(ids)],
        [("T", kv.dtype)],
        grid=(kv.num_kv_heads * kv.block_size * kv.key_dim // 4, len(src_dst_pairs), 1),
        threadgroup=(MAX_THREADS, 1, 1),
    )


def attention(
    queries: mx.array,  # [num_tokens, num_heads, head_dim]
    rows: StoredRows | None,  # [num_tokens, num_kv_heads, head_dim] each
    kv: KVHandle,
    plan: AttentionPlan,
    run: int,  # query tokens per sequence, at most
    scale: float,
    sinks: mx.array,  # of sink_logits
) -> Launch:
    """Returns the result, ``[num_tokens, num_heads, head_dim]``, or the partials that
    :func:`merge` takes where the plan has any; and the fence.

    All in the dtype of the slabs, but partials in float32. ``rows`` are written where they are
    given.
    """
    head_dim = kv.key_dim
    group = queries.shape[1] // kv.num_kv_heads
    cut = cut_rows(run * group)
    is_partial = plan.num_partial_rows > 0
    out = (queries.shape, kv.dtype)
    if is_partial:
        out = ((plan.num_partial_rows, queries.shape[1], head_dim + 4), mx.float32)
    # Where no row comes from the inputs, the queries stand in for arrays that no thread reads.
    key_rows, value_rows = rows or ((queries,), (queries,))
    return _chained(
        "paged_attention",
        kv,
        [queries, *kv.slabs, *key_rows, *value_rows, plan.array, sinks, _scalar(scale)],
        [
            ("T", kv.dtype),
            ("Out", out[1]),
            ("HEAD_DIM", head_dim),
            ("BLOCK_SIZE", kv.block_size),
            ("GROUP", group),
            ("RUN", run),
            ("STREAMS", cut.streams),
            ("ROW_SPLITS", cut.row_splits),
            ("ROW_PARTS", cut.row_parts),
            ("PARTIAL", is_partial),
        ],
        grid=(cut.num_threads, kv.num_kv_heads * cut.row_parts, plan.num_partitions),
        threadgroup=(cut.num_threads, 1, 1),
        outputs=[out],
    )


def merge(partials: mx.array, queries: mx.array, plan: AttentionPlan, sinks: mx.array) -> Launch:
    """Returns what :func:`attention` of these queries left in parts."""
    num_tokens, num_heads, head_dim = queries.shape
    return _launch(
        "merge_partitions",
        [partials, plan.array, sinks],
        [("T", queries.dtype), ("HEAD_DIM", head_dim)],
        grid=(SIMD_SIZE * MERGE_STREAMS, num_heads, num_tokens),
        threadgroup=(SIMD_SIZE * MERGE_STREAMS, 1, 1),
        outputs=[(queries.shape, queries.dtype)],
    )


def sink_logits(sinks: mx.array | None, num_heads: int) -> mx.array:
    """``[max(num_heads, 8)] float32``; the lowest number stands for no sink."""
    if sinks is None:
        return _no_sinks(num_heads)
    sinks = sinks.astype(mx.float32)
    return sinks if num_heads >= MIN_ELEMENTS else mx.pad(sinks, (0, MIN_ELEMENTS - num_heads))


def _chained(
    name: str,
    kv: KVHandle,
    inputs: list[mx.array],
    template: Template,
    grid: Size,
    threadgroup: Size,
    outputs: Sequence[Output] = (),
) -> Launch:
    """A launch that touches the slabs of ``kv``: behind all earlier ones, before all later ones.

    Raises:
        ValueError: no kernel is made for the shape of the slabs.
    """
    lack = why_unsupported(kv.key_dim, kv.value_dim, kv.block_size, kv.format)
    if lack is not None:
        raise ValueError(f"[{name}] {lack}")
    fence = _first_fence() if kv.fence is None else kv.fence
    return _launch(name, [*inputs, fence], template, grid, threadgroup, [*outputs, FENCE])


def _launch(
    name: str,
    inputs: list[mx.array],
    template: Template,
    grid: Size,
    threadgroup: Size,
    outputs: Sequence[Output],
) -> Launch:
    return partial(
        kernel(name),
        inputs=inputs,
        template=template,
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
    )


def _rows_per_threadgroup(width: int) -> Size:
    return (width, max(1, MAX_THREADS // width), 1)


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
def _first_fence() -> mx.array:
    return _evaluated(mx.zeros(*FENCE))


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
