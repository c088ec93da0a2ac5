"""A device whose work takes time and no core: what the host does beside it can be measured."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import mlx.core as mx

SOURCE = Path(__file__).with_suffix(".c")


class SimulatedDevice:
    """Keeps MLX's stream busy for a time, in its place among the other operations.

    Plain MLX and Python can't do so: what sleeps has to be a primitive. The one that calls a
    library from the thread of its stream is ``mx.distributed.all_sum``, so the library is made
    here, with the machine's C compiler.

    Raises:
        RuntimeError: there is no C compiler, or MLX has loaded a real Open MPI.
    """

    def __init__(self) -> None:
        self._library, self._group = _load()

    def set_busy_time(self, seconds: float) -> None:
        """Set what each later run of a :meth:`run` takes."""
        self._library.set_busy_ns(ctypes.c_longlong(round(seconds * 1e9)))

    def run(self, x: mx.array) -> mx.array:
        """``x`` of 32 bits, after the busy time: one primitive, which begins when ``x`` is there
        and the stream is free.
        """
        return mx.distributed.all_sum(x, group=self._group)


@cache
def _load() -> tuple[ctypes.CDLL, mx.distributed.Group]:
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError("[simulated device] needs a C compiler, and there is no cc")
    with tempfile.TemporaryDirectory() as folder:
        # MLX opens a library of this name, and gets the one that is loaded already.
        library_path = str(Path(folder) / "libmpi.so")
        command = [compiler, "-O1", "-shared", "-fPIC", "-Wl,-soname,libmpi.so"]
        subprocess.run([*command, "-o", library_path, str(SOURCE)], check=True)
        library = ctypes.CDLL(library_path, mode=ctypes.RTLD_GLOBAL)
        group = mx.distributed.init(strict=True, backend="mpi")
    if group.size() != 2:
        raise RuntimeError("[simulated device] MLX has loaded another Open MPI")
    return library, group
