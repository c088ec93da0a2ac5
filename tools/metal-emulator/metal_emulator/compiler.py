"""Finds a C++ compiler for kernels and keeps what it builds, by content, in a cache folder.

A compiler fits if it is clang with ``_Float16``, ``__bf16`` arithmetic and C++23's explicit object
parameters: version 18 or later. The system's own is preferred, for its speed; else the ``ziglang``
package from PyPI brings one along.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from metal_emulator.errors import CompileError

HERE = Path(__file__).resolve().parent

COMMON_FLAGS = [
    *("-x", "c++", "-std=c++23", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"),
    # No C++ library: zig would have to build its own first, for minutes.
    *("-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics", "-nostdinc++"),
    *("-fno-sanitize=all", "-fno-stack-protector"),
]
KERNEL_FLAGS = [
    *("-Wno-everything", "-Werror=uninitialized"),
    *("-fdeclspec", "-fsigned-char", "-fno-strict-aliasing"),
    # Half and bfloat are rounded after every operation and no products are fused: the same bits on
    # every machine.
    *("-ffp-contract=off", "-Xclang", "-ffloat16-excess-precision=none"),
    *("-Xclang", "-fbfloat16-excess-precision=none"),
    # Local variables that nobody set are NaN.
    "-ftrivial-auto-var-init=pattern",
    # A literal such as 0.5 is a float in Metal.
    *("-Xclang", "-cl-single-precision-constant"),
    # What undefined.h reports.
    *("-fsanitize=array-bounds,float-cast-overflow", "-fno-sanitize-recover=all"),
    # What code_lines.py reads.
    *("-gline-tables-only", "-gdwarf-4"),
    # A frame larger than the stack touches the guard page below it, rather than the next thread's
    # stack.
    *(["-fstack-clash-protection"] if sys.platform == "linux" else []),
]
# For builds that report their loads and stores.
WATCHING_FLAGS = (
    *("-DEMULATOR_WATCHES_ACCESSES", "-fsanitize-coverage=func,trace-loads,trace-stores"),
    # No access may be wider than in the source, nor hidden in a copy.
    *("-fno-vectorize", "-fno-slp-vectorize", "-fno-builtin-memcpy", "-fno-builtin-memset"),
    # The mark of ThreadSanitizer keeps the compiler from reading where the source might not. What
    # it would add to the code is left out.
    *("-Xclang", "-fsanitize=thread"),
    *(
        word
        for part in ("memory-accesses", "func-entry-exit", "memintrinsics", "atomics")
        for word in ("-mllvm", f"-tsan-instrument-{part}=0")
    ),
    # Thread arrays that are reached through pointers; traps.
    "-fsanitize=local-bounds",
)
PROBE = """
struct V {
  float x;
  void set(this __attribute__((address_space(1))) V& self, float v) { self.x = v; }
};
_Float16 half_product(_Float16 a, _Float16 b) { return a * b; }
__bf16 bfloat_product(__bf16 a, __bf16 b) { return a * b; }
"""


class NoCompiler(RuntimeError):
    """No compiler that fits can be had."""


@cache
def cache_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for folder in (
        base / "metal_emulator",
        Path(tempfile.gettempdir()) / f"metal_emulator_{os.getuid()}",
    ):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    raise NoCompiler(
        "[metal emulator] no folder to keep compiled kernels in: neither the cache folder nor tmp"
    )


@cache
def find_compiler() -> tuple[str, ...]:
    """The command that compiles, without its arguments.

    Raises:
        NoCompiler: there is no clang 18 or later, nor the ``ziglang`` package.
    """
    names = ["clang", *(f"clang-{version}" for version in range(30, 17, -1))]
    candidates: list[tuple[str, ...]] = [(path,) for name in names if (path := shutil.which(name))]
    if find_spec("ziglang"):
        candidates.append((sys.executable, "-m", "ziglang", "cc"))
    for command in candidates:
        try:
            _build(command, [*COMMON_FLAGS, *_target_flags(command), *KERNEL_FLAGS], PROBE)
        except CompileError:
            continue
        return command
    raise NoCompiler(
        "[metal emulator] needs clang 18 or later; install one, or: pip install ziglang"
    )


@cache
def has_compiler() -> bool:
    try:
        find_compiler()
    except NoCompiler:
        return False
    return True


def syntax_tree(source: str) -> tuple[str, str]:
    """Clang's dump of it, without any code, and its errors."""
    command = find_compiler()
    flags = [*COMMON_FLAGS, *_target_flags(command), "-Xclang", "-cl-single-precision-constant"]
    includes = ["-I", str(HERE / "shim")]
    if "ziglang" in command:
        # As itself: what builds for zig expects a file.
        package = find_spec("ziglang")
        assert package and package.origin
        includes += ["-isystem", str(Path(package.origin).parent / "lib" / "include")]
        command = (sys.executable, "-m", "ziglang", "clang")
        flags = [flag.replace("x86_64_v3", "x86-64-v3") for flag in flags]
    flags += ["-w", "-fdeclspec", "-fsyntax-only", "-Xclang", "-ast-dump", "-ffreestanding"]
    done = subprocess.run(
        [*command, *flags, *includes, "-"], input=source, capture_output=True, text=True
    )
    return done.stdout, done.stderr.strip() if done.returncode else ""


def is_built(source: str, extra_flags: tuple[str, ...] = ()) -> bool:
    return _library(find_compiler(), _kernel_flags(extra_flags), source).exists()


def _kernel_flags(extra_flags: tuple[str, ...]) -> list[str]:
    return [*COMMON_FLAGS, *_target_flags(find_compiler()), *KERNEL_FLAGS, *extra_flags]


def build_kernel(source: str, extra_flags: tuple[str, ...] = ()) -> Path:
    """The library with the compiled kernel. ``source`` includes the shim by itself."""
    return _build(
        find_compiler(),
        _kernel_flags(extra_flags),
        source,
        includes=HERE / "shim",
        libraries=["-lm"],
    )


@cache
def build_runtime() -> Path:
    """The library with the runtime; its source files are included into one."""
    command = find_compiler()
    source = "".join(
        f'#include "{name}.cpp"\n' for name in ("memory", "shadow", "threadgroup", "launch")
    )
    return _build(
        command, [*COMMON_FLAGS, "-w"], source, includes=HERE / "runtime", libraries=["-lpthread"]
    )


def _target_flags(command: tuple[str, ...]) -> list[str]:
    """A fixed instruction set with hardware half conversions, so that results don't depend on the
    machine.
    """
    if platform.machine() in ("x86_64", "AMD64"):
        return ["-march=x86_64_v3" if "ziglang" in command else "-march=x86-64-v3"]
    return []


@cache
def _version(command: tuple[str, ...]) -> str:
    return subprocess.run([*command, "--version"], capture_output=True, text=True).stdout


@cache
def _tool_hash() -> str:
    """Of all C++ files of this tool, and of the rules that are held against a kernel before it is
    built: whatever is built depends on them.
    """
    digest = hashlib.sha256()
    for path in sorted([*HERE.glob("shim/**/*"), *HERE.glob("runtime/*"), HERE / "metal_rules.py"]):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _library(command: tuple[str, ...], flags: list[str], source: str) -> Path:
    """Where it lies once it is built."""
    key = hashlib.sha256(
        "\0".join([_version(command), *flags, _tool_hash(), source]).encode()
    ).hexdigest()[:32]
    return cache_folder() / f"{key}.so"


def _build(
    command: tuple[str, ...],
    flags: list[str],
    source: str,
    includes: Path | None = None,
    libraries: Sequence[str] = (),
) -> Path:
    built = _library(command, flags, source)
    if built.exists():
        return built
    with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
        source_file, library = Path(scratch) / "kernel.cpp", Path(scratch) / "kernel.so"
        source_file.write_text(source)
        include_flags = ["-I", str(includes)] if includes else []
        done = subprocess.run(
            [*command, *flags, *include_flags, str(source_file), "-o", str(library), *libraries],
            capture_output=True,
            text=True,
            cwd=scratch,
        )
        if done.returncode or not library.exists():
            message = (done.stderr or done.stdout).replace(scratch, "").strip()
            raise CompileError(message)
        # Renamed into place whole: another process may look for it at this moment.
        library.rename(built)
    return built
