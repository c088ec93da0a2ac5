"""MLX's compiler for CPUs, told to read its own header from a precompiled file.

What ``mx.compile`` fuses, MLX on Linux writes as a small C++ file, which g++ compiles in a third of
a second. Most of it goes to a header of MLX that all of these files include, and the tests need
hundreds. A file includes it in quotes, so g++ looks beside the file first, and there for what is
precompiled before the header itself. What is precompiled for another g++ or other flags is left
aside.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import mlx.core as mx

HEADER = "mlx/backend/cpu/compiled_preamble.h"


def precompile_header() -> None:
    """Once per version of MLX and machine, in the folder in which MLX keeps what it compiles."""
    folder = Path(tempfile.gettempdir()) / "mlx" / mx.__version__ / "cpu"
    made = folder / f"{HEADER}.gch"
    include = Path(mx.__file__).parent / "include"
    if platform.system() != "Linux" or made.exists() or not shutil.which("g++"):
        return
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        part = Path(scratch) / "header.gch"
        # The flags are those of MLX's own command: one for other flags would not fit.
        command = ["g++", "-std=c++17", "-O3", "-w", "-fPIC", "-x", "c++-header"]
        done = subprocess.run(
            [*command, f"-I{include}", str(include / HEADER), "-o", str(part)], capture_output=True
        )
        if not done.returncode:
            part.rename(made)
