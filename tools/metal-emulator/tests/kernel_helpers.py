"""Calls of small kernels in one line."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
from metal_emulator import Checks, metal_kernel

INDEX = "uint i = thread_position_in_grid.x;"


def run(
    body: str,
    inputs: dict[str, Any] | None = None,
    outputs: dict[str, tuple[tuple[int, ...], mx.Dtype]] | None = None,
    grid: tuple[int, ...] | None = None,
    threadgroup: tuple[int, ...] = (32,),
    template: list[tuple[str, Any]] | None = None,
    checks: Checks | None = None,
    init_value: float | None = None,
    name: str = "kernel",
    **kernel_options: Any,
) -> list[mx.array]:
    """Runs ``body``; by default one output ``out`` of float32, and one thread for each of its
    elements.
    """
    inputs = inputs or {}
    outputs = outputs or {"out": ((32,), mx.float32)}
    kernel = metal_kernel(name, list(inputs), list(outputs), body, checks=checks, **kernel_options)
    grid = grid or (math.prod(next(iter(outputs.values()))[0]),)
    return kernel(
        inputs=list(inputs.values()),
        output_shapes=[shape for shape, _ in outputs.values()],
        output_dtypes=[dtype for _, dtype in outputs.values()],
        grid=(*grid, 1, 1)[:3],
        threadgroup=(*threadgroup, 1, 1)[:3],
        template=template,
        init_value=init_value,
    )


def to_numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)) if array.dtype == mx.bfloat16 else np.array(array)
