"""Finds a C++ compiler for kernels and keeps what it builds, by content, in a cache folder.

A compiler fits if it is clang with ``_Float16``, ``__bf16`` arithmetic and C++23's explicit object
parameters: version 18 or later. The system's own is preferred; else the ``ziglang`` package from
PyPI brings one along.

A kernel is a few hundred lines behind a shim of more than a thousand, so the shim is read once and
precompiled: what is left of a small kernel is a twentieth of a second.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from metal_emulator.errors import CompileError

HERE = Path(__file__).resolve().parent

SHIM = "emulator/metal.h"

COMMON_FLAGS = [
    *("-std=c++23", "-O2", "-fPIC", "-fvisibility=hidden"),
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
    # A frame larger than the stack touches the guard page below it, rather than the next thread's
    # stack.
    *(["-fstack-clash-protection"] if sys.platform == "linux" else []),
]
# For builds whose line table code_lines.py reads; it takes a quarter of the time of a build.
LINE_FLAGS = ("-gline-directives-only", "-gdwarf-4")
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


@dataclass(frozen=True)
class Compiler:
    """Commands, without their arguments."""

    name: str
    compile: tuple[str, ...]  # Clang, without C's headers: from a source to an object or a dump.
    link: tuple[str, ...]  # From an object to a library.
    build: tuple[str, ...]  # With C's headers and its library: from a source to a library.


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
def find_compiler() -> Compiler:
    """
    Raises:
        NoCompiler: there is no clang 18 or later, nor the ``ziglang`` package.
    """
    names = ["clang", *(f"clang-{version}" for version in range(30, 17, -1))]
    candidates = [_system_clang(path) for name in names if (path := shutil.which(name))]
    if package := find_spec("ziglang"):
        assert package.origin
        candidates.append(_zig(Path(package.origin).parent))
    for compiler in candidates:
        try:
            _build_kernel(compiler, PROBE, ())
        except CompileError:
            continue
        return compiler
    raise NoCompiler(
        "[metal emulator] needs clang 18 or later; install one, or: pip install ziglang"
    )


def _system_clang(path: str) -> Compiler:
    return Compiler(Path(path).name, (path,), (path, "-shared", "-lm"), (path, "-shared", "-lm"))


def _zig(folder: Path) -> Compiler:
    """``zig cc`` has the headers and libraries of C, and takes longer to find them than a small
    kernel takes to compile. So kernels are compiled by the clang and linked by the lld in it;
    libm, the one library that they call, is in every process with Python. (Not on macOS, where a
    linker needs to know more.)
    """
    zig, machine = str(folder / "zig"), platform.machine()
    build = (zig, "cc", "-shared", "-lm")
    is_mac = sys.platform == "darwin"
    target = f"--target={machine}-{'apple-macos11' if is_mac else 'linux-gnu'}"
    return Compiler(
        "ziglang",
        compile=(zig, "clang", target, "-isystem", str(folder / "lib" / "include")),
        # The first call of a function of libm may be on a fiber's stack, too small for what looks
        # it up.
        link=build if is_mac else (zig, "ld.lld", "-shared", "-z", "now"),
        build=build,
    )


@cache
def has_compiler() -> bool:
    try:
        find_compiler()
    except NoCompiler:
        return False
    return True


def syntax_tree(source: str) -> tuple[str, str]:
    """Clang's dump of it, without any code and without the shim, and its errors."""
    compiler = find_compiler()
    flags = (
        *("-x", "c++", "-w", "-fdeclspec", "-ffreestanding"),
        *("-Xclang", "-cl-single-precision-constant", *COMMON_FLAGS, *_target_flags()),
    )
    command = [*compiler.compile, *flags, *_shim(compiler, flags)]
    done = subprocess.run(
        [*command, "-fsyntax-only", "-Xclang", "-ast-dump", "-"],
        input=source,
        capture_output=True,
        text=True,
    )
    return done.stdout, done.stderr.strip() if done.returncode else ""


def is_built(source: str, extra_flags: tuple[str, ...] = ()) -> bool:
    compiler = find_compiler()
    return _built(compiler.compile, _kernel_flags(extra_flags), source, ".so").exists()


def build_kernel(source: str, extra_flags: tuple[str, ...] = ()) -> Path:
    """The library with the compiled kernel. ``source`` includes the shim by itself."""
    return _build_kernel(find_compiler(), source, extra_flags)


def _kernel_flags(extra_flags: tuple[str, ...]) -> tuple[str, ...]:
    return ("-x", "c++", *COMMON_FLAGS, *_target_flags(), *KERNEL_FLAGS, *extra_flags)


def _build_kernel(compiler: Compiler, source: str, extra_flags: tuple[str, ...]) -> Path:
    flags = _kernel_flags(extra_flags)

    def steps(source_file: Path, library: Path) -> Iterator[list[str]]:
        made = library.with_suffix(".o")
        shim = _shim(compiler, flags) if SHIM in source else ()
        yield [*compiler.compile, *flags, *shim, "-c", str(source_file), "-o", str(made)]
        yield [*compiler.link, str(made), "-o", str(library)]

    return _build(_built(compiler.compile, flags, source, ".so"), source, steps)


@cache
def _shim(compiler: Compiler, flags: tuple[str, ...]) -> tuple[str, ...]:
    """Flags that make the shim known to a source that is compiled with these ones: where it is, and
    what it is precompiled.
    """
    folder = HERE / "shim"
    # The time of a header does not count: the key has what is in it.
    flags = ("-I", str(folder), *flags, "-Xclang", "-fno-pch-timestamp")
    command = [*compiler.compile, *flags, "-x", "c++-header", str(folder / "metal_stdlib")]

    def steps(_: Path, header: Path) -> Iterator[list[str]]:
        yield [*command, "-o", str(header)]

    precompiled = _build(_built(compiler.compile, command, "", ".pch"), "", steps)
    return ("-I", str(folder), "-include-pch", str(precompiled))


@cache
def build_runtime() -> Path:
    """The library with the runtime; its source files are included into one."""
    command = find_compiler().build
    flags = ("-x", "c++", "-w", *COMMON_FLAGS, "-lpthread")
    source = "".join(
        f'#include "{name}.cpp"\n' for name in ("memory", "shadow", "threadgroup", "launch")
    )

    def steps(source_file: Path, library: Path) -> Iterator[list[str]]:
        folder = str(HERE / "runtime")
        yield [*command, "-I", folder, *flags, str(source_file), "-o", str(library)]

    return _build(_built(command, flags, source, ".so"), source, steps)


def _target_flags() -> tuple[str, ...]:
    """A fixed instruction set with hardware half conversions, so that results don't depend on the
    machine.
    """
    return ("-march=x86-64-v3",) if platform.machine() in ("x86_64", "AMD64") else ()


@cache
def _version(command: tuple[str, ...]) -> str:
    """What the compiler says of itself, without the folder that it is installed in: what one
    virtual environment has built, another one uses.
    """
    said = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
    return "\n".join(line for line in said.splitlines() if not line.startswith("InstalledDir:"))


@cache
def _tool_hash() -> str:
    """Of all C++ files of this tool, and of the rules that are held against a kernel before it is
    built: whatever is built depends on them.
    """
    digest = hashlib.sha256()
    rules = [HERE / "metal_rules.py", HERE / "bare_pointers.py"]
    for path in sorted([*HERE.glob("shim/**/*"), *HERE.glob("runtime/*"), *rules]):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _built(command: tuple[str, ...], flags: Sequence[str], source: str, suffix: str) -> Path:
    """Where it lies once it is built."""
    key = hashlib.sha256(
        "\0".join([_version(command), *flags, _tool_hash(), source]).encode()
    ).hexdigest()[:32]
    return cache_folder() / f"{key}{suffix}"


def _build(built: Path, source: str, steps: Callable[[Path, Path], Iterable[list[str]]]) -> Path:
    """``built``, unless it is there by the commands from the file of the source to what they
    make.
    """
    if built.exists():
        return built
    with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
        source_file, made = Path(scratch) / "kernel.cpp", Path(scratch) / built.name
        source_file.write_text(source)
        for command in steps(source_file, made):
            done = subprocess.run(command, capture_output=True, text=True, cwd=scratch)
            if done.returncode:
                message = (done.stderr or done.stdout).replace(scratch, "").strip()
                raise CompileError(message)
        # Renamed into place whole: another process may look for it at this moment.
        made.rename(built)
    return built
