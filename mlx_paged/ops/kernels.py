"""The Metal kernels of ``metal/``: one function each that returns a launch, to be called once.

Kernels write slabs in place without MLX's knowledge. So a launch that reads or writes the slabs of
a handle binds the handle's fence, and its last result is the next fence, which the caller stores in
the handle::

    *results, kv.fence = _launch()

The fences make one chain per handle, in the order of the calls. To MLX they are plain data
dependencies, and so barriers for a read after a write and a write after a read alike.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Protocol, TypeAlias, cast

import mlx.core as mx

from mlx_paged.ops.attention_plan import MERGE_STREAMS, SIMDGROUP_LANES, AttentionPlan, cut_rows
from mlx_paged.ops.formats import KVFormat, Parts
from mlx_paged.ops.gather_plan import GatherPlan
from mlx_paged.ops.kv_handle import KVHandle, evaluated
from mlx_paged.ops.metadata import MIN_ELEMENTS, AttentionParams, Rows, padded
from mlx_paged.ops.metal_sources import read_source

HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256, 512)  # of K and of V
BLOCK_SIZES = (8, 16, 32, 64)
# The most query rows per KV head of a query run in the attention kernel: eight threadgroups share
# 128 of them. For more rows a matmul is better.
MAX_QUERY_ROWS = 128
# Widths of latents and of their rotated keys. By Mesa's compiler a query row of bfloat16 issues 81
# slots per key: on an M1 Max 32 rows take 0.92 of the time in which a key is gathered, joined and
# multiplied (6,784 bytes), and 40 would take longer (docs/internals/kernels.md, "Latents").
LATENT_WIDTHS = ((512, 64), (256, 64))
MAX_LATENT_ROWS = 32

# Inputs and outputs of each kernel, in the order of the contracts at the top of its sources.
SLABS = ("key_slab", "value_slab")
ROWS = ("key_rows", "value_rows")
AFFINE_SLABS = tuple(
    f"{which}_{part}" for which in ("key", "value") for part in ("slab", "scales", "biases")
)
_ATTENTION = ("queries", "plan", "sinks", "softmax_scale", "fence_in")
KERNELS = {
    "reshape_and_cache": ((*ROWS, *SLABS, "slot_mapping", "fence_in"), ("fence_out",)),
    "encode_and_cache": (
        (
            *AFFINE_SLABS,
            *ROWS,
            *("queries", "slot_mapping", "num_tokens", "rotation_scale", "fence_in"),
        ),
        ("rotated", "fence_out"),
    ),
    "paged_attention": ((*SLABS, *ROWS, *_ATTENTION), ("out", "fence_out")),
    "paged_attention_affine": ((*AFFINE_SLABS, *_ATTENTION), ("out", "fence_out")),
    "merge_partitions": (("partials", "plan", "sinks"), ("out",)),
    "gather_blocks": ((*SLABS, "plan", "fence_in"), ("keys", "values", "fence_out")),
    "dequantize_blocks": ((*AFFINE_SLABS, "plan", "fence_in"), ("keys", "values", "fence_out")),
    "copy_blocks": ((*SLABS, "src_dst_pairs", "fence_in"), ("fence_out",)),
    "rows_matmul": (
        ("x", "weight", "scales", "biases", "num_rows", "log2_group_size"),
        ("out",),
    ),
}
# The files of a kernel's body, if it is not a single file with its name. The format of K and V
# comes first.
BODIES = {
    "paged_attention": ("dense_rows", "paged_attention"),
    "paged_attention_affine": ("affine_slabs", "paged_attention"),
    "encode_and_cache": ("affine_slabs", "encode_and_cache"),
    "dequantize_blocks": ("affine_slabs", "dequantize_blocks"),
}
HEADERS = ("paged_kv.h", "row_formats.h", "encoded_rows.h", "affine_rows.h", "latent_rows.h")
MATMUL_HEADERS = ("paged_kv.h", "row_formats.h", "weight_formats.h")

MAX_THREADS = 256
MAX_PIECE = 16  # bytes that a thread copies at a time
# Below this size all loads have 32-bit indices: the smallest one, eight 4-bit numbers, has 4 bytes.
LARGE_SLAB_BYTES = 4 * 2**32

Launch: TypeAlias = Callable[[], list[mx.array]]
Output: TypeAlias = tuple[tuple[int, ...], mx.Dtype]
Size: TypeAlias = tuple[int, int, int]
Template: TypeAlias = list[tuple[str, mx.Dtype | int | bool]]
FENCE: Output = ((MIN_ELEMENTS,), mx.int32)


class MetalKernel(Protocol):
    """The type of what ``mx.fast.metal_kernel`` returns, as far as it is used here."""

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
    """Why no kernel can write and read slabs of this shape and format, or ``None``. Dense rows are
    copied, so their widths don't matter.
    """
    if block_size not in BLOCK_SIZES:
        return _no_kernel("block_size", block_size, BLOCK_SIZES)
    try:
        found = format.kernels
    except ValueError as error:
        return f"{format} has no Metal kernel: {error}"
    return None if found.dequantize is None else _why_no_width(key_dim, value_dim)


@cache
def why_no_attention(
    key_dim: int, value_dim: int, group: int, holds_latents: bool, rotates_keys: bool
) -> str | None:
    """Why the attention kernel does not support a layer, or ``None``. Without it, K and V are
    gathered for MLX's own attention.

    Args:
        group: query heads per KV head.
        holds_latents: whether K holds latents and V their rotated keys.
        rotates_keys: of the layer's :class:`KVFormat`.
    """
    if holds_latents:
        return _why_no_latents(key_dim, value_dim, group, rotates_keys)
    lack = _why_no_width(key_dim, value_dim)
    if lack is None and group > MAX_QUERY_ROWS:
        lack = (
            f"the attention kernel supports up to {MAX_QUERY_ROWS} query heads per KV head, "
            f"got {group}"
        )
    return lack


def _why_no_latents(
    latent_dim: int, rope_dim: int, num_heads: int, rotates_keys: bool
) -> str | None:
    if (latent_dim, rope_dim) not in LATENT_WIDTHS:
        return f"latents of width {latent_dim} with rotated keys of {rope_dim} have no Metal kernel"
    if rotates_keys:
        return "4-bit latents are rotated, and rotating the output back would take another launch"
    if num_heads > MAX_LATENT_ROWS:
        return (
            f"{num_heads} heads on shared latents are slower in the attention kernel, which takes "
            f"up to {MAX_LATENT_ROWS}"
        )
    return None


def _why_no_width(key_dim: int, value_dim: int) -> str | None:
    names = ("head_dim",) if key_dim == value_dim else ("key_dim", "value_dim")
    widths = zip(names, (key_dim, value_dim), strict=False)
    unknown = ((name, width) for name, width in widths if width not in HEAD_DIMS)
    return next((_no_kernel(*one, HEAD_DIMS) for one in unknown), None)


def _no_kernel(name: str, size: int, known: tuple[int, ...]) -> str:
    return f"{name} {size} has no Metal kernel; there are kernels for {', '.join(map(str, known))}"


def write_slots(
    k: Parts,  # [num_tokens, num_kv_heads, width] each
    v: Parts,
    kv: KVHandle,
    slots: mx.array,  # [max(num_tokens, 8)] int32, below 0 for padding
    part: int = 0,
) -> Launch:
    """Write one part of stored rows into their slots. Returns the fence."""
    _, key_pieces, value_pieces = pieces = _pieces(kv, part)
    width = max(key_pieces, value_pieces, MIN_ELEMENTS)
    return _chained(
        "reshape_and_cache",
        kv,
        [_in_device_memory(k[part]), _in_device_memory(v[part]), kv.k[part], kv.v[part], slots],
        [*_named(pieces), ("BLOCK_SIZE", kv.block_size)],
        grid=(width, k[part].shape[0], kv.num_kv_heads),
        threadgroup=_rows_per_threadgroup(width),
    )


def encode(
    rows: Rows | None,  # [num_tokens, num_kv_heads, width] each
    queries: mx.array | None,  # [num_queries, num_heads, width]
    kv: KVHandle,
    slots: mx.array | None,  # [max(num_tokens, 8)] int32, below 0 for padding
) -> Launch:
    """Write ``rows`` into the slots as the format of ``kv`` stores them, and rotate ``queries``;
    either may be ``None``. All are in the dtype of ``kv``. Returns the rotated queries (eight zeros
    if there are none), and the fence.
    """
    num_kv_heads = kv.num_kv_heads
    num_tokens = 0 if rows is None else rows[0].shape[0]
    num_slices = 2 * num_tokens
    out: Output = ((MIN_ELEMENTS,), kv.dtype)
    if queries is not None:
        num_slices += queries.shape[0] * queries.shape[1] // num_kv_heads
        out = (queries.shape, kv.dtype)
    # Missing inputs are replaced by arrays that no thread reads.
    given = queries if rows is None else rows[0]
    assert given is not None, "there are rows, queries or both"
    k, v = (given, given) if rows is None else rows
    num_lanes = max(_lanes_of(kv.key_dim), _lanes_of(kv.value_dim), MIN_ELEMENTS)
    name = kv.format.kernels.encode
    assert name is not None, "dense rows are not encoded"
    return _chained(
        name,
        kv,
        [
            *kv.slabs,
            *(k, v, given if queries is None else queries),
            *(first_fence() if slots is None else slots, scalar(num_tokens, mx.int32)),
            scalar(kv.key_dim**-0.5),
        ],
        [
            *_format(kv),
            ("BLOCK_SIZE", kv.block_size),
            ("ROTATES", kv.format.rotates_keys),
        ],
        grid=(num_lanes, num_kv_heads, num_slices),
        threadgroup=_rows_per_threadgroup(num_lanes),
        outputs=[out],
    )


def gather(kv: KVHandle, plan: GatherPlan, part: int = 0) -> Launch:
    """Gather one part of the slabs. Returns keys and values, ``[num_out_tokens * num_kv_heads,
    width]`` each, for :meth:`GatherPlan.split`; and the fence.
    """
    _, key_pieces, value_pieces = pieces = _pieces(kv, part)
    width = max(key_pieces, value_pieces, MIN_ELEMENTS)
    num_rows = plan.num_out_tokens * kv.num_kv_heads
    slabs = kv.k[part], kv.v[part]
    return _chained(
        "gather_blocks",
        kv,
        [*slabs, plan.array],
        [*_named(pieces), ("BLOCK_SIZE", kv.block_size)],
        grid=(width, plan.num_blocks * kv.block_size, kv.num_kv_heads),
        threadgroup=_rows_per_threadgroup(width),
        outputs=[((num_rows, slab.shape[3]), slab.dtype) for slab in slabs],
    )


def gather_numbers(kv: KVHandle, plan: GatherPlan) -> Launch:
    """:func:`gather` with decoded rows: ``[num_out_tokens * num_kv_heads, key_dim or value_dim]``,
    in the dtype of ``kv``.
    """
    name = kv.format.kernels.dequantize
    if name is None:
        return gather(kv, plan)
    width = max(kv.key_dim // 8, kv.value_dim // 8, MIN_ELEMENTS)
    num_rows = plan.num_out_tokens * kv.num_kv_heads
    return _chained(
        name,
        kv,
        [*kv.slabs, plan.array],
        [*_format(kv), ("BLOCK_SIZE", kv.block_size)],
        grid=(width, plan.num_blocks * kv.block_size, kv.num_kv_heads),
        threadgroup=_rows_per_threadgroup(width),
        outputs=[((num_rows, dim), kv.dtype) for dim in (kv.key_dim, kv.value_dim)],
    )


def copy_blocks(kv: KVHandle, src_dst_pairs: Sequence[tuple[int, int]], part: int = 0) -> Launch:
    """Copy blocks in one part of the slabs. Returns the fence."""
    ids = [block_id for pair in src_dst_pairs for block_id in pair]
    _, key_pieces, value_pieces = pieces = _pieces(kv, part)
    num_pieces = kv.num_kv_heads * kv.block_size * max(key_pieces, value_pieces)
    return _chained(
        "copy_blocks",
        kv,
        [kv.k[part], kv.v[part], padded(ids)],
        _named(pieces),
        grid=(num_pieces, len(src_dst_pairs), 1),
        threadgroup=(MAX_THREADS, 1, 1),
    )


def attention(
    queries: mx.array,  # [num_tokens, num_heads, key_dim]
    rows: Rows | None,  # [num_tokens, num_kv_heads, width] each
    kv: KVHandle,
    plan: AttentionPlan,
    run: int,  # query tokens per sequence, at most
    params: AttentionParams,
    sinks: mx.array,  # of sink_logits
) -> Launch:
    """Attention. Returns the result, ``[num_tokens, num_heads, value_dim]``, or the partials for
    :func:`merge` if the plan has any; and the fence.

    If K holds latents and V their rotated keys, queries have parts for both, and the values are the
    latents.

    All arrays are in the dtype of ``kv``, except partials in float32. ``rows``, for dense slabs
    only, are written into their slots.
    """
    num_tokens, num_heads, key_dim = queries.shape
    num_kv_heads, slabs = kv.num_kv_heads, kv.slabs
    value_dim = kv.key_dim if params.holds_latents else kv.value_dim
    group = num_heads // num_kv_heads
    cut = cut_rows(run * group, max(key_dim, value_dim) * kv.dtype.size)
    is_partial = plan.num_partial_rows > 0
    out: Output = ((num_tokens, num_heads, value_dim), queries.dtype)
    if is_partial:
        out = ((plan.num_partial_rows, num_heads, value_dim + 4), mx.float32)
    new_rows: tuple[mx.array, ...] = ()
    plan_array = plan.array
    if kv.format.kernels.encode is None:
        new_rows = rows or slabs  # without rows, arrays that no thread reads
        plan_array = plan.array if rows else plan.array_without_rows
    return _chained(
        kv.format.kernels.attention,
        kv,
        [*slabs, *new_rows, queries, plan_array, sinks, scalar(params.scale)],
        [
            *_format(kv),
            ("Out", out[1]),
            ("BLOCK_SIZE", kv.block_size),
            ("HOLDS_LATENTS", params.holds_latents),
            ("GROUP", group),
            ("RUN", run),
            ("STREAMS", cut.streams),
            ("ROW_SPLITS", cut.row_splits),
            ("ROW_PARTS", cut.row_parts),
            ("PARTIAL", is_partial),
            ("SOFTCAP", _bits(params.softcap)),
        ],
        grid=(cut.num_threads, num_kv_heads * cut.row_parts, plan.num_partitions),
        threadgroup=(cut.num_threads, 1, 1),
        outputs=[out],
    )


def merge(partials: mx.array, queries: mx.array, plan: AttentionPlan, sinks: mx.array) -> Launch:
    """Merge the partials that :func:`attention` returned for these queries."""
    num_tokens, num_heads, _ = queries.shape
    value_dim = partials.shape[2] - 4
    return _launch(
        "merge_partitions",
        [partials, plan.array, sinks],
        [("T", queries.dtype), ("HEAD_DIM", value_dim)],
        grid=(SIMDGROUP_LANES * MERGE_STREAMS, num_heads, num_tokens),
        threadgroup=(SIMDGROUP_LANES * MERGE_STREAMS, 1, 1),
        outputs=[((num_tokens, num_heads, value_dim), queries.dtype)],
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
    """A launch on the slabs of ``kv``, ordered after all earlier ones and before all later ones.

    Raises:
        ValueError: no kernel is made for the shape of the slabs.
    """
    lack = why_unsupported(kv.key_dim, kv.value_dim, kv.block_size, kv.format)
    if lack is not None:
        raise ValueError(f"[{name}] {lack}")
    fence = first_fence() if kv.fence is None else kv.fence
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


@cache
def _bits(number: float | None) -> int:
    """The bits of a 32-bit float, as a template parameter; 0 for none."""
    return 0 if number is None else struct.unpack("i", struct.pack("f", number))[0]


@cache
def _format_of(format: KVFormat, key_dim: int, value_dim: int, is_large: bool) -> Template:
    widths = ("KEY_DIM", key_dim), ("VALUE_DIM", value_dim)
    index = mx.uint64 if is_large else mx.uint32
    return [("T", format.dtype), ("Index", index), *widths, *format.kernels.template]


def _format(kv: KVHandle) -> Template:
    """The template parameters of a format in ``metal/row_formats.h``, and the row index type."""
    is_large = max(kv.k[0].nbytes, kv.v[0].nbytes) >= LARGE_SLAB_BYTES
    return _format_of(kv.format, kv.key_dim, kv.value_dim, is_large)


def _pieces(kv: KVHandle, part: int) -> tuple[int, int, int]:
    """The size in bytes of the largest piece that a thread can copy, and how many pieces a row has
    in this part of K and of V.
    """
    key_bytes, value_bytes = (slab.shape[3] * slab.dtype.size for slab in (kv.k[part], kv.v[part]))
    piece = math.gcd(key_bytes, value_bytes, MAX_PIECE)
    return piece, key_bytes // piece, value_bytes // piece


def _named(pieces: tuple[int, int, int]) -> Template:
    return [*zip(("PIECE", "KEY_PIECES", "VALUE_PIECES"), pieces, strict=True)]


def _in_device_memory(array: mx.array) -> mx.array:
    """The array, padded with zeros to the size from which on MLX passes it in device memory."""
    if array.size >= MIN_ELEMENTS:
        return array
    return mx.pad(array.reshape(-1), (0, MIN_ELEMENTS - array.size))


def _lanes_of(width: int) -> int:
    """Threads that encode a row of ``width``, ``RowLoads::LANES`` in ``metal/row_formats.h``."""
    return min(max(1 << (width // 8 - 1).bit_length(), 4), SIMDGROUP_LANES)


def _rows_per_threadgroup(width: int) -> Size:
    return (width, max(1, MAX_THREADS // width), 1)


@cache
def kernel(name: str) -> MetalKernel:
    """The kernel that ``mx.fast.metal_kernel`` makes of the sources of this name."""
    input_names, output_names = KERNELS[name]
    made = mx.fast.metal_kernel(
        name=f"mlx_paged_{name}",
        input_names=list(input_names),
        output_names=list(output_names),
        source=body(name),
        header=header(name),
    )
    return cast(MetalKernel, made)  # MLX's stub declares an object


def body(name: str) -> str:
    return "\n".join(read_source(f"{part}.metal") for part in parts_of(name))


def parts_of(name: str) -> tuple[str, ...]:
    """The files of ``metal/`` that a kernel's body is made of, in order."""
    return BODIES.get(name, (name,))


def header(name: str) -> str:
    return "\n".join(map(read_source, headers_of(name)))


def headers_of(name: str) -> tuple[str, ...]:
    return MATMUL_HEADERS if name == "rows_matmul" else HEADERS


# The following arrays are shared by all threads for the whole process. They are evaluated, because
# MLX's streams belong to threads: no thread can evaluate an array that another one left lazy.


@cache
def first_fence() -> mx.array:
    return evaluated(mx.zeros(*FENCE))


@cache
def scalar(value: float, dtype: mx.Dtype = mx.float32) -> mx.array:
    return evaluated(mx.array(value, dtype=dtype))


@cache
def _no_sinks(num_heads: int) -> mx.array:
    lowest = mx.finfo(mx.float32).min
    return evaluated(mx.full((max(num_heads, MIN_ELEMENTS),), lowest, dtype=mx.float32))
