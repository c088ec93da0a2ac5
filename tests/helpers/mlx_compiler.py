"""MLX's compiler for CPUs, told to read its own header from a precompiled file, and to write whole
libraries only.

What ``mx.compile`` fuses, MLX on Linux writes as a small C++ file, which g++ compiles in a third of
a second. Most of it goes to a header of MLX that all of these files include, and the tests need
hundreds. A file includes it in quotes, so g++ looks beside the file first, and there for what is
precompiled before the header itself. What is precompiled for another g++ or other flags is left
aside.

All processes share the folder, and MLX loads whatever library it finds there. One that another
process's g++ is still writing ends the process (SIGBUS), so here g++ writes beside it and renames.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import mlx.core as mx

HEADER = "mlx/backend/cpu/compiled_preamble.h"

# MLX's command ends in -o and what is compiled; any other one is left alone. MLX's names are nearly
# as long as a file system allows. A second try is for a source that another process was just
# writing, the same one.
_RENAMING_COMPILER = """#!/bin/sh
for last; do before=$output; output=$last; done
[ "$before" = -o ] || exec "{compiler}" "$@"
part="$(dirname "$output")/part.$$"
"{compiler}" "$@" -o "$part" || {{ sleep 0.2 && "{compiler}" "$@" -o "$part"; }} || exit
mv "$part" "$output"
"""


def prepare_compiler() -> None:
    """For this process and all that it starts, where MLX keeps what it compiles."""
    folder = Path(tempfile.gettempdir()) / "mlx" / mx.__version__ / "cpu"
    compiler = shutil.which("g++")
    if platform.system() != "Linux" or compiler is None:
        return
    precompile_header(folder)
    programs = folder / "renaming"
    programs.mkdir(exist_ok=True)
    if Path(compiler).parent == programs:
        return
    part = programs / f"g++.{os.getpid()}"
    part.write_text(_RENAMING_COMPILER.format(compiler=compiler))
    part.chmod(0o755)
    part.rename(programs / "g++")
    os.environ["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"


def precompile_header(folder: Path) -> None:
    """Once per version of MLX and machine."""
    made = folder / f"{HEADER}.gch"
    include = Path(mx.__file__).parent / "include"
    if made.exists():
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
