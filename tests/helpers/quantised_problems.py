"""Paged problems whose K and V are quantised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from helpers.numpy_attention import PagedProblem
from mlx_paged.ops import AffineFormat, KVFormat, KVHandle, Parts, RowFormat

BITS_OF_K_AND_V = ((8, 8), (8, 4), (4, 4), (4, 8))


def affine(
    width: int,
    key_bits: int,
    value_bits: int,
    dtype: mx.Dtype | str,
    value_width: int | None = None,  # that of keys by default
) -> KVFormat:
    """In the largest groups that there are for these widths."""
    name = str(dtype).removeprefix("mlx.core.")
    return KVFormat(
        AffineFormat.for_width(width, key_bits, name),
        AffineFormat.for_width(value_width or width, value_bits, name),
    )


def quantised(problem: PagedProblem, key_bits: int, value_bits: int) -> PagedProblem:
    """``problem`` with its K and V quantised: what the slabs stand for is now the dense rows that
    the formula sees, and queries are rotated where keys are. In unused slots all bits are set, so
    scales and biases are NaN.
    """
    kv = problem.kv
    format = affine(kv.key_dim, key_bits, value_bits, kv.dtype, kv.value_dim)
    k, v = zip(*(format.encode(k, v) for _, k, v in problem.dense), strict=True)
    dense = tuple(
        (format.rotated(q), numbers(format.key, k_parts), numbers(format.value, v_parts))
        for (q, *_), k_parts, v_parts in zip(problem.dense, k, v, strict=True)
    )
    new_k, new_v = (
        mx.concatenate([rows[which][-len(rows[0]) :] for rows in problem.dense]) for which in (1, 2)
    )
    handle = KVHandle(_slabs(problem, format.key, k), _slabs(problem, format.value, v), format)
    mx.eval(handle.arrays)
    return replace(problem, kv=handle, dense=dense, new_rows=(new_k, new_v))


def numbers(rows: AffineFormat, parts: Parts) -> mx.array:
    """What quantised rows stand for, computed in float64 by the definition; float32."""
    packed, scales, biases = (
        np.array(part if part.dtype == mx.uint32 else part.astype(mx.float32)) for part in parts
    )
    shifts = np.arange(0, 32, rows.bits, dtype=np.uint32)
    integers = (packed[..., None] >> shifts & (2**rows.bits - 1)).astype(np.float64)
    scales, biases = (
        np.repeat(array.astype(np.float64), rows.group_size, -1) for array in (scales, biases)
    )
    return mx.array((integers.reshape(scales.shape) * scales + biases).astype(np.float32))


def _slabs(problem: PagedProblem, rows: RowFormat, sequences: Sequence[Parts]) -> Parts:
    kv = problem.kv
    shape = kv.num_blocks, kv.num_kv_heads, kv.block_size
    slabs = []
    for part in zip(*sequences, strict=True):
        slab = np.full((*shape, part[0].shape[-1] * part[0].itemsize), 0xFF, np.uint8)
        for table, row in zip(problem.tables, part, strict=True):
            blocks, offsets = np.divmod(np.arange(len(row)), kv.block_size)
            # Bytes: numpy has no bfloat16.
            slab[np.array(table)[blocks], :, offsets] = np.array(row.view(mx.uint8))
        slabs.append(mx.array(slab).view(part[0].dtype))
    return tuple(slabs)
