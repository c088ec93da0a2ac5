"""Write the golden files again: the Metal source that the installed MLX prints for each case.

    python tools/metal-emulator/tests/make_golden.py            # all of them, into golden/
    python tools/metal-emulator/tests/make_golden.py --print NAME

Calling a Metal kernel needs a Mac. Exporting a function that calls one does not, and prints the
same source.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
from golden_cases import CASES, GoldenCase

GOLDEN = Path(__file__).parent / "golden"


def print_source(case: GoldenCase) -> None:
    kernel = mx.fast.metal_kernel(
        name=case.name,
        input_names=list(case.inputs),
        output_names=list(case.outputs),
        source=case.body,
        header=case.header,
        atomic_outputs=case.atomic_outputs,
    )

    def call(*inputs: mx.array) -> list[mx.array]:
        return kernel(
            inputs=list(inputs),
            template=case.template,
            grid=(8, 1, 1),
            threadgroup=(8, 1, 1),
            output_shapes=[(8,)] * len(case.outputs),
            output_dtypes=list(case.outputs.values()),
            verbose=True,
        )

    with tempfile.NamedTemporaryFile(suffix=".mlxfn") as scratch:
        mx.export_function(
            scratch.name, call, *(mx.zeros(shape, dtype) for shape, dtype in case.inputs.values())
        )


def mlx_sources() -> dict[str, str]:
    """The source of every case, as the installed MLX prints it (from C++, so it takes a process to
    catch it).
    """
    printed = subprocess.run(
        [sys.executable, __file__, "--print"], capture_output=True, text=True, check=True
    ).stdout
    sources = {}
    for part in printed.split("Generated source code for `")[1:]:
        name, _, rest = part.partition("`:\n```\n")
        sources[name] = rest.rpartition("\n```")[0]
    return sources


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--print", action="store_true", help="print what MLX prints, write nothing")
    if parser.parse_args().print:
        for case in CASES:
            print_source(case)
        return
    GOLDEN.mkdir(exist_ok=True)
    for name, source in mlx_sources().items():
        (GOLDEN / f"{name}.metal").write_text(source)
    print(f"{len(CASES)} sources from MLX {mx.__version__} in {GOLDEN}")


if __name__ == "__main__":
    main()
