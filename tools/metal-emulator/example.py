"""A kernel with a mistake that a Mac may let pass: it reads one element past its input."""

import mlx.core as mx
from metal_emulator import Checks, MemoryFault, patched


def double(row: mx.array, offset: int = 0) -> mx.array:
    kernel = mx.fast.metal_kernel(
        name="double",
        input_names=["row"],
        output_names=["out"],
        source=f"uint i = thread_position_in_grid.x; out[i] = row[i + {offset}] * 2;",
    )
    (out,) = kernel(
        inputs=[row],
        grid=(row.size, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[row.shape],
        output_dtypes=[row.dtype],
    )
    return out


with patched(Checks()) as trace:
    assert mx.array_equal(double(mx.ones(100)), mx.full(100, 2.0))
    print(trace[0].kernel, trace[0].grid, list(trace[0].inputs))
    try:
        double(mx.ones(100), offset=1)
    except MemoryFault as fault:
        print(fault)
