"""Matmuls of a few rows with the weight of a linear layer, in one order of sums for any number of
rows: a Metal kernel (``metal/rows_matmul.metal``), and plain MLX with the same bits.

K is cut into chunks of neighbouring weights. In each turn, every lane of the simdgroups that share
K takes one chunk, in order, and adds its products to a float of its own, one fma after another.
Then lanes are added in pairs 16, 8, 4, 2 and 1 apart, and simdgroups one after another. The cut
depends on the weight's shape and format alone.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np

from mlx_paged.ops import choose, kernels
from mlx_paged.ops.attention_plan import SIMDGROUP_LANES
from mlx_paged.ops.kv_handle import evaluated
from mlx_paged.ops.metadata import MIN_ELEMENTS
from mlx_paged.ops.tried_once import GoOn, TrialResult, TrialStoppedError, TriedOnce

# Up to this many rows the kernel is meant to be fast. It computes any number, with the same bits.
MAX_ROWS = 16
COLUMNS = 8  # of the result, which a simdgroup computes at once
MAX_SPLITS = 8  # simdgroups that share K: MAX_SIMDGROUPS in metal/rows_matmul.metal
MIN_THREADGROUP = 2  # simdgroups of a threadgroup
# Simdgroups that a pass over the weight aims at, so that a small weight occupies a large GPU, too.
MIN_SIMDGROUPS = 1024
MAX_ELEMENTS = 2**31  # of a weight, whose indices are 32-bit integers

FLOATS = (mx.float16, mx.bfloat16, mx.float32)
# Of each mode its number in metal/weight_formats.h, bits, and group sizes, as in mx.quantize.
DENSE = "dense"
MODES = {
    DENSE: (0, (16,), (0,)),
    "affine": (1, (2, 3, 4, 5, 6, 8), (32, 64, 128)),
    "mxfp4": (2, (4,), (32,)),
    "mxfp8": (2, (8,), (32,)),
    "nvfp4": (3, (4,), (16,)),
}

Weights: TypeAlias = tuple[mx.array, mx.array | None, mx.array | None]  # as by mx.quantize


def rows_matmul(
    x: mx.array,  # [..., K]
    weight: mx.array,  # [N, K], or packed in words: [N, K * bits / 32] uint32
    scales: mx.array | None = None,  # [N, K / group_size]
    biases: mx.array | None = None,  # the same
    *,
    bits: int = 16,
    group_size: int = 0,
    mode: str = DENSE,
) -> mx.array:
    """``x`` times the transposed weight, ``[..., N]`` in the dtype of ``x``. Sums are floats, whose
    order depends on the weight's shape and format alone: a row has the same bits among any others,
    on Metal and in plain MLX.

    Args:
        weight: dense in the dtype of ``x``, or quantised by ``mx.quantize``.
        scales: ``None`` if dense; affine ones, as ``biases``, in the dtype of ``x``.
        mode: ``"dense"``, which has the default ``bits`` and ``group_size`` in float32, too, or a
            mode of ``mx.quantize``.

    Raises:
        ValueError: :func:`refusal` names a reason, or ``x`` or scales do not fit the weight.
    """
    scale_dtype = None if scales is None else scales.dtype
    dtypes = x.dtype, weight.dtype, scale_dtype
    shape = _checked(weight.shape, dtypes, x.shape[-1], bits, group_size, mode)
    if (biases is not None) != (mode == "affine"):
        raise ValueError("[rows_matmul] affine weights have biases, and no others")
    if x.size == 0:
        return mx.zeros((*x.shape[:-1], shape.num_columns), x.dtype)
    run = _on_metal if choose.is_metal_available() else _in_plain_mlx
    return run(x, (weight, scales, biases), shape)


def refusal(
    weight: mx.array, dtype: mx.Dtype, *, bits: int = 16, group_size: int = 0, mode: str = DENSE
) -> str | None:
    """Why :func:`rows_matmul` can't multiply rows of ``dtype`` by this weight, or ``None``."""
    return _refusal(weight.shape, weight.dtype, dtype, bits, group_size, mode)


class WeightShape(NamedTuple):
    """What the order of a weight's sums depends on."""

    num_columns: int  # N
    width: int  # K
    bits: int
    group_size: int
    mode: str

    @property
    def chunk(self) -> int:
        """Neighbouring weights that a lane takes at a time."""
        return 8 if self.mode == DENSE else 32 if self.bits in (3, 5) else 16

    @property
    def splits(self) -> int:
        """Simdgroups that share K. The number must not depend on rows or on a device."""
        num_turns = self.width // (SIMDGROUP_LANES * self.chunk)
        num_blocks = math.ceil(self.num_columns / COLUMNS)
        splits = 1
        while splits < MAX_SPLITS and num_blocks * splits < MIN_SIMDGROUPS:
            if num_turns < 4 * splits:  # two turns for each of twice as many
                break
            splits *= 2
        return splits

    @property
    def max_pass_rows(self) -> int:
        """Rows that a simdgroup computes at once, at most; more take several passes. They are as
        many as registers allow.
        """
        return 4 if self.bits == 5 else 5


@cache
def _refusal(
    shape: tuple[int, ...],
    weight_dtype: mx.Dtype,
    dtype: mx.Dtype,
    bits: int,
    group_size: int,
    mode: str,
) -> str | None:
    if dtype not in FLOATS:
        return f"rows are {dtype}; float16, bfloat16 or float32 is needed"
    if len(shape) != 2 or shape[0] < MIN_ELEMENTS or math.prod(shape) >= MAX_ELEMENTS:
        return (
            f"the weight has the shape {shape}; two dimensions are needed, {MIN_ELEMENTS} rows or "
            f"more, and less than 2^31 elements"
        )
    if mode not in MODES or bits not in MODES[mode][1] or group_size not in MODES[mode][2]:
        return f"{mode} weights of {bits} bits in groups of {group_size} are not known"
    is_plain = mode == DENSE
    needed = dtype if is_plain else mx.uint32
    if weight_dtype != needed:
        return f"the weight is {weight_dtype}; {needed} is needed"
    width, multiple = (shape[1], 8) if is_plain else (shape[1] * 32 // bits, 32)
    if width == 0 or width % multiple != 0:
        return f"rows have {width} elements; a multiple of {multiple} is needed"
    return None


@cache
def _checked(
    shape: tuple[int, ...],
    dtypes: tuple[mx.Dtype, mx.Dtype, mx.Dtype | None],  # of rows, the weight and its scales
    width: int,
    bits: int,
    group_size: int,
    mode: str,
) -> WeightShape:
    dtype, weight_dtype, scale_dtype = dtypes
    why = _refusal(shape, weight_dtype, dtype, bits, group_size, mode)
    needed = None if mode == DENSE else dtype if mode == "affine" else mx.uint8
    if why is None and str(scale_dtype) != str(needed):  # a dtype can't be compared with None
        why = f"scales are {scale_dtype}; {needed} is needed"
    weight_width = shape[-1] if mode == DENSE else shape[-1] * 32 // bits
    if why is None and weight_width != width:
        why = f"rows have {width} elements, those of the weight {weight_width}"
    if why is not None:
        raise ValueError(f"[rows_matmul] {why}")
    return WeightShape(shape[0], width, bits, group_size, mode)


# The kernel


class _Launch(NamedTuple):
    template: kernels.Template
    grid: kernels.Size
    threadgroup: kernels.Size
    scalars: tuple[mx.array, mx.array]


@cache
def _launch_of(shape: WeightShape, num_rows: int, dtype: mx.Dtype) -> _Launch:
    num_passes = math.ceil(num_rows / shape.max_pass_rows)
    splits = shape.splits
    blocks = max(1, MIN_THREADGROUP // splits)
    num_blocks = math.ceil(shape.num_columns / (COLUMNS * blocks)) * blocks
    return _Launch(
        template=[
            ("T", dtype),
            ("MODE", MODES[shape.mode][0]),
            ("BITS", shape.bits),
            ("ROWS", math.ceil(num_rows / num_passes)),
            ("COLUMNS", COLUMNS),
        ],
        grid=(SIMDGROUP_LANES * num_passes, splits, num_blocks),
        threadgroup=(SIMDGROUP_LANES, splits, blocks),
        scalars=(
            kernels.scalar(num_rows, mx.int32),
            kernels.scalar(max(shape.group_size, 1).bit_length() - 1, mx.int32),
        ),
    )


def _on_metal(x: mx.array, weights: Weights, shape: WeightShape) -> mx.array:
    weight, scales, biases = weights
    launch = _launch_of(shape, x.size // shape.width, x.dtype)
    # Missing inputs are replaced by arrays that no thread reads.
    scales = x if scales is None else scales
    biases = scales if biases is None else biases
    (out,) = kernels.kernel("rows_matmul")(
        inputs=[x, weight, scales, biases, *launch.scalars],
        template=launch.template,
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        output_shapes=[(*x.shape[:-1], shape.num_columns)],
        output_dtypes=[x.dtype],
    )
    return out


# The same in plain MLX, on the CPU, which alone computes in float64


def _in_plain_mlx(x: mx.array, weights: Weights, shape: WeightShape) -> mx.array:
    chunk, splits, num_columns = shape.chunk, shape.splits, shape.num_columns
    num_chunks, num_lanes = shape.width // chunk, SIMDGROUP_LANES * splits
    with mx.stream(mx.cpu):
        weight = _dequantised(weights, shape).reshape(1, num_columns, num_chunks, chunk)
        rows = x.astype(mx.float64).reshape(-1, 1, num_chunks, chunk)
        sums = mx.zeros((rows.shape[0], num_columns, num_lanes), mx.float64)
        for first in range(0, num_chunks, num_lanes):
            last = min(first + num_lanes, num_chunks)
            part = sums[..., : last - first]
            for i in range(chunk):
                part = _fma(weight[:, :, first:last, i], rows[:, :, first:last, i], part)
            sums = mx.concatenate([part, sums[..., last - first :]], axis=-1)
        lanes = sums.astype(mx.float32).reshape(-1, num_columns, splits, SIMDGROUP_LANES)
        while lanes.shape[-1] > 1:
            half = lanes.shape[-1] // 2
            lanes = lanes[..., :half] + lanes[..., half:]
        total = lanes[:, :, 0, 0]
        for split in range(1, splits):
            total = total + lanes[:, :, split, 0]
        return total.astype(x.dtype).reshape(*x.shape[:-1], num_columns)


def _dequantised(weights: Weights, shape: WeightShape) -> mx.array:
    """Floats, ``[N, K]`` in float64: ``scale * number + bias`` is rounded once."""
    weight, scales, biases = weights
    if scales is None:
        return weight.astype(mx.float64)
    as_floats = partial(
        mx.dequantize, weight, group_size=shape.group_size, bits=shape.bits, dtype=mx.float32
    )
    if biases is None:  # products that a float holds
        return as_floats(scales, mode=shape.mode).astype(mx.float64)
    ones = mx.ones(scales.shape, mx.float32)
    numbers = as_floats(ones, mx.zeros_like(ones)).astype(mx.float64)
    steps, firsts = (part.astype(mx.float64)[..., None] for part in (scales, biases))
    groups = numbers.reshape(*scales.shape, shape.group_size)
    return _fma(groups, steps, firsts).reshape(numbers.shape)


def _fma(a: mx.array, b: mx.array, c: mx.array) -> mx.array:
    """``a * b + c`` of floats, rounded once to a float; all in float64.

    The product is exact, and the sum is rounded to 53 bits and then to 24. The second rounding
    errs only if the first one ends midway between two floats: then its error says on which side
    the exact sum lies.
    """
    product = a * b
    total = product + c
    added = total - product
    error = (product - (total - added)) + (c - added)  # of the first rounding, exactly
    rounded = _to_float(total)
    rest = total - rounded
    other = rounded + (rest + rest)  # the other of the two floats, if total is midway
    is_midway = other == _to_float(other)
    return mx.where(is_midway & (rest * error > 0), other, rounded)


def _to_float(wide: mx.array) -> mx.array:
    return wide.astype(mx.float32).astype(mx.float64)


# The check of the kernel on this device


def _try_rows_matmul(
    dtype: str, bits: int, group_size: int, mode: str, go_on: GoOn
) -> TrialResult[bool]:
    kind = mode if mode == DENSE else f"{mode}, {bits} bits"
    try:
        failure = _failure_of(getattr(mx, dtype), bits, group_size, mode, go_on)
    except TrialStoppedError:
        raise
    except Exception as error:  # any error of a compiler or a driver
        failure = f"raised {type(error).__name__}: {error}"
    if failure is None:
        return TrialResult(True)
    text = f"[metal] rows_matmul ({dtype}, {kind}) {failure}; MLX's own matmul runs instead"
    return TrialResult(False, (text,))


try_rows_matmul = TriedOnce(_try_rows_matmul)
"""Whether the kernel for this ``(dtype, bits, group_size, mode)``, where ``dtype`` is a name, has
the bits of plain MLX on this device, which has to be Metal; a warning says what failed. This
compiles all libraries that such weights need, in any thread by :meth:`TriedOnce.quietly`.
"""


def _failure_of(dtype: mx.Dtype, bits: int, group_size: int, mode: str, go_on: GoOn) -> str | None:
    """Multiply 1 to 5 rows, and 7 in two passes, with simdgroups that share K, lanes that have no
    chunk in the last turn, and columns that are left over.
    """
    num_chunks = 4 * SIMDGROUP_LANES + 8
    chunk = WeightShape(1, 1, bits, group_size, mode).chunk
    shape = WeightShape(37, num_chunks * chunk, bits, group_size, mode)
    rng = np.random.default_rng(0)
    with mx.stream(mx.cpu):
        x, dense = (
            mx.array(rng.standard_normal((num_rows, shape.width), np.float32)).astype(dtype)
            for num_rows in (7, shape.num_columns)
        )
        weights: Weights = (dense, None, None)
        if mode == "affine":
            weights = mx.quantize(dense, group_size, bits)
        elif mode != DENSE:
            weight, scales = mx.quantize(dense.astype(mx.float32), group_size, bits, mode)[:2]
            weights = weight, scales, None
        expected = _in_plain_mlx(x, weights, shape)
        mx.eval(x, *(part for part in weights if part is not None), expected)
    for num_rows in (*range(1, shape.max_pass_rows + 1), 7):
        go_on()
        found = evaluated(_on_metal(x[:num_rows], weights, shape))
        with mx.stream(mx.cpu):
            if not mx.array_equal(found, expected[:num_rows]).item():
                return f"of {num_rows} rows has other bits than plain MLX"
    return None
