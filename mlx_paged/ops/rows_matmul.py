"""Matmuls of a few rows with the weights of a linear layer, in one order of sums whatever the
number of rows: a Metal kernel (``metal/rows_matmul.metal``), and plain MLX with the same bits.

The order depends on the weight alone. K is cut into chunks of neighbouring weights. In one step,
each of the 32 lanes of ``splits`` simdgroups takes the next chunk and adds its products to a float
of its own, one fma after another. Then lanes are added in pairs 16, 8, 4, 2 and 1 apart, and
simdgroups one after another.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import mlx.core as mx

from mlx_paged.ops.attention_plan import SIMDGROUP_LANES

# Up to this many rows the kernel is meant to be fast. It computes any number, with the same bits.
MAX_ROWS = 16
COLUMNS = 8  # columns of the result that a simdgroup computes
MAX_SPLITS = 8
# Simdgroups of a launch that are aimed at, so that a small weight occupies a large GPU, too.
MIN_SIMDGROUPS = 1024

MIN_ELEMENTS = 8  # of each array that a kernel reads
FLOATS = (mx.float16, mx.bfloat16, mx.float32)
# The bits and group sizes of each way to quantise, as in mx.quantize.
MODES = {
    "affine": ((2, 3, 4, 5, 6, 8), (32, 64, 128)),
    "mxfp4": ((4,), (32,)),
    "nvfp4": ((4,), (16,)),
    "mxfp8": ((8,), (32,)),
}


class _Cut(NamedTuple):
    """How the sums over K are cut."""

    chunk: int  # neighbouring weights that a lane takes at a time
    splits: int  # simdgroups that share K


def rows_matmul(
    x: mx.array,  # [..., K]
    weight: mx.array,  # [N, K], or packed in words: [N, K * bits / 32] uint32
    scales: mx.array | None = None,  # [N, K / group_size]
    biases: mx.array | None = None,  # the same
    *,
    bits: int = 16,
    group_size: int = 0,
    mode: str = "dense",
) -> mx.array:
    """``x`` times the transposed weight, ``[..., N]`` in the dtype of ``x``. Sums are floats, whose
    order depends on the weight's shape and format: a row has the same bits among any others.

    Args:
        weight: dense in the dtype of ``x``, or quantised by ``mx.quantize``.
        scales: affine ones in the dtype of ``x``, as ``biases``; ``None`` if dense.
        mode: ``"dense"``, which ignores ``bits`` and ``group_size``, or one of ``mx.quantize``.

    Raises:
        ValueError: :func:`refusal` names a reason, or shapes or dtypes do not fit together.
    """
    why = refusal(weight, x.dtype, bits=bits, group_size=group_size, mode=mode)
    if why is not None:
        raise ValueError(f"[rows_matmul] {why}")
    return _reference(x, weight, scales, biases, bits, group_size, mode)


def refusal(
    weight: mx.array, dtype: mx.Dtype, *, bits: int = 16, group_size: int = 0, mode: str = "dense"
) -> str | None:
    """Why :func:`rows_matmul` can't multiply rows of ``dtype`` by this weight, or ``None``."""
    if dtype not in FLOATS:
        return f"rows are {dtype}; float16, bfloat16 or float32 is needed"
    if weight.ndim != 2:
        return f"the weight has {weight.ndim} dimensions; 2 are needed"
    if weight.shape[0] < MIN_ELEMENTS:
        return f"the weight has {weight.shape[0]} rows; {MIN_ELEMENTS} or more are needed"
    if weight.size >= 2**31:
        return f"the weight has {weight.size} elements; fewer than 2^31 are needed"
    if mode == "dense":
        if weight.dtype != dtype:
            return f"the weight is {weight.dtype}, rows are {dtype}"
        width, multiple = weight.shape[1], COLUMNS
    elif mode not in MODES:
        return f"mode {mode!r} is unknown; known are dense, {', '.join(MODES)}"
    elif bits not in MODES[mode][0] or group_size not in MODES[mode][1]:
        return f"{mode} weights of {bits} bits in groups of {group_size} have no kernel"
    elif weight.dtype != mx.uint32:
        return f"the weight is {weight.dtype}; quantised weights are packed in uint32"
    else:
        width, multiple = weight.shape[1] * 32 // bits, 32
    if width % multiple or width == 0:
        return f"K is {width}; a multiple of {multiple} is needed"
    return None


def _cut(num_columns: int, width: int, bits: int, mode: str) -> _Cut:
    """The cut of K = ``width``. It must not depend on anything else, such as rows or a device."""
    chunk = 8 if mode == "dense" else 32 if bits in (3, 5) else 16
    num_steps = width // (SIMDGROUP_LANES * chunk)
    splits = 1
    while (
        splits < MAX_SPLITS
        and math.ceil(num_columns / COLUMNS) * splits < MIN_SIMDGROUPS
        and num_steps >= 4 * splits
    ):
        splits *= 2
    return _Cut(chunk, splits)


def _reference(
    x: mx.array,
    weight: mx.array,
    scales: mx.array | None,
    biases: mx.array | None,
    bits: int,
    group_size: int,
    mode: str,
) -> mx.array:
    """The matmul in plain MLX, on the CPU, which alone computes in float64."""
    *leading, width = x.shape
    chunk, splits = _cut(weight.shape[0], width, bits, mode)
    num_chunks, num_lanes = width // chunk, SIMDGROUP_LANES * splits
    with mx.stream(mx.cpu):
        weights = _dequantised(weight, scales, biases, bits, group_size, mode)
        weights = weights.reshape(1, -1, num_chunks, chunk)
        rows = x.astype(mx.float64).reshape(-1, 1, num_chunks, chunk)
        sums = mx.zeros((rows.shape[0], weights.shape[1], num_lanes), mx.float64)
        for first in range(0, num_chunks, num_lanes):
            last = min(first + num_lanes, num_chunks)
            part = sums[..., : last - first]
            for i in range(chunk):
                part = _fma(weights[:, :, first:last, i], rows[:, :, first:last, i], part)
            sums = mx.concatenate([part, sums[..., last - first :]], axis=-1)
        lanes = sums.astype(mx.float32).reshape(*sums.shape[:2], splits, SIMDGROUP_LANES)
        while lanes.shape[-1] > 1:
            half = lanes.shape[-1] // 2
            lanes = lanes[..., :half] + lanes[..., half:]
        total = lanes[:, :, 0, 0]
        for split in range(1, splits):
            total = total + lanes[:, :, split, 0]
        return total.astype(x.dtype).reshape(*leading, -1)


def _dequantised(
    weight: mx.array,
    scales: mx.array | None,
    biases: mx.array | None,
    bits: int,
    group_size: int,
    mode: str,
) -> mx.array:
    """The weights as floats, ``[N, K]``, in float64: ``scale * number + bias`` rounded once."""
    if scales is None:
        return weight.astype(mx.float64)
    if biases is None:
        floats = mx.dequantize(weight, scales, None, group_size, bits, mode=mode, dtype=mx.float32)
        return floats.astype(mx.float64)
    ones = mx.ones(scales.shape, mx.float32)
    numbers = mx.dequantize(weight, ones, mx.zeros_like(ones), group_size, bits)
    by_group = numbers.astype(mx.float64).reshape(*scales.shape, group_size)
    wide = (part.astype(mx.float64)[..., None] for part in (scales, biases))
    return _fma(by_group, *wide).reshape(weight.shape[0], -1)


def _fma(a: mx.array, b: mx.array, c: mx.array) -> mx.array:
    """``a * b + c`` rounded once to a float, of floats; all of them in float64.

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
