"""Write the golden files anew: the head that the installed MLX puts in front of each kernel's body.

    python tests/kernels/make_kernel_golden.py            # all of them, into tests/kernels/golden/
    python tests/kernels/make_kernel_golden.py --print    # the whole sources, as MLX prints them

Calling a Metal kernel needs a Mac. Exporting a function that calls one does not, and prints the
same source.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
from paged_testing.by_hand import slots_of, step_of
from pytest import MonkeyPatch

from mlx_paged.ops import (
    AffineFormat,
    AttentionParams,
    KVFormat,
    KVHandle,
    choose,
    kernels,
)
from mlx_paged.ops.metal import MetalBackend
from mlx_paged.ops.rows_matmul import rows_matmul

GOLDEN = Path(__file__).parent / "golden"


def call_every_kernel() -> mx.array:
    """Each kernel: decodes whose partitions are merged, and the operations on blocks."""
    metal = MetalBackend()
    kv = KVHandle.allocate(20, 2, 16, 64, 64, KVFormat.dense("bfloat16"))
    rows, queries = mx.zeros((1, 2, 64), mx.bfloat16), mx.zeros((1, 8, 64), mx.bfloat16)
    metadata = step_of([list(range(1, 20))], [300], [1], 16)
    metal.reshape_and_cache((rows,), (rows,), kv, slots_of([5], 16))
    out = metal.update_and_attend(queries, rows, rows, kv, metadata, AttentionParams(0.125))
    metal.copy_blocks(kv, [(3, 4)])
    metal.gather_blocks(kv, [4, 5], 20)
    rows = AffineFormat("bfloat16", 8), AffineFormat("bfloat16", 4)
    quantised = KVHandle.allocate(20, 2, 16, 64, 64, KVFormat(*rows))
    new = mx.zeros((1, 2, 64), mx.bfloat16)
    out += metal.update_and_attend(queries, new, new, quantised, metadata, AttentionParams(0.125))
    metal.gather_blocks(quantised, [4, 5], 20)
    latents = KVHandle.allocate(20, 1, 16, 512, 64, KVFormat.dense("bfloat16"))
    params = AttentionParams(0.125, holds_latents=True)
    q = mx.zeros((1, 8, 576), mx.bfloat16)
    out = out.sum() + metal.attend(q, latents, metadata, params).sum() + latents.fence.sum()
    weights = mx.quantize(mx.zeros((8, 64), mx.bfloat16), 64, 4)
    with MonkeyPatch.context() as patch:
        patch.setattr(choose, "is_metal_available", lambda: True)
        product = rows_matmul(
            mx.zeros((1, 64), mx.bfloat16), *weights, bits=4, group_size=64, mode="affine"
        )
    out += product.sum()
    return out + kv.fence.sum() + quantised.fence.sum()


def print_sources() -> None:
    made = kernels.kernel

    def verbose(name: str) -> Callable:
        return lambda **call: made(name)(**call, verbose=True)

    kernels.kernel = verbose
    with tempfile.NamedTemporaryFile(suffix=".mlxfn") as scratch:
        mx.export_function(scratch.name, lambda: [call_every_kernel()])


def mlx_sources() -> dict[str, str]:
    """The source of every kernel, as the installed MLX prints it (from C++, so it takes a process
    to catch it).
    """
    command = [sys.executable, __file__, "--print"]
    printed = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    ).stdout
    sources = {}
    for part in printed.split("Generated source code for `mlx_paged_")[1:]:
        name, _, rest = part.partition("`:\n```\n")
        sources[name] = rest.rpartition("\n```")[0]
    return sources


def head(source: str) -> str:
    """From the template parameters of the kernel to the brace that opens it, and the instantiation
    at the end.
    """
    start = source.rindex("template <", 0, source.index("[[kernel]]"))
    end = source.index(") {\n", start) + 4
    return (
        source[start:end]
        + "// the body of the kernel\n}\n"
        + source[source.rindex("\ntemplate [[host_name") :]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--print", action="store_true", help="print what MLX prints, write nothing")
    if parser.parse_args().print:
        print_sources()
        return
    GOLDEN.mkdir(exist_ok=True)
    for name, source in mlx_sources().items():
        (GOLDEN / f"{name}.metal").write_text(head(source))
    print(f"{len(kernels.KERNELS)} heads from MLX {mx.__version__} in {GOLDEN}")


if __name__ == "__main__":
    main()
