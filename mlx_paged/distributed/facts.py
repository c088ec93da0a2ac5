"""What has to be the same on all ranks: packages, and the files of a model."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from mlx_paged import __version__

# Those whose versions could change a token, a text or a message between ranks.
_PACKAGES = ("mlx", "mlx-lm", "transformers", "tokenizers")
_PATTERNS = ("*.json", "*.jinja", "tokenizer.model", "*.txt", "model*.safetensors", "*.gguf")
# Of a file of weights: the beginning, which has names, shapes and types, and some of the numbers.
_SAMPLE_BYTES = 64 * 1024
_NUM_SAMPLES = 16


def package_facts() -> dict[str, str]:
    """The versions of this package and of those that it computes with."""
    facts = {"the version of mlx-paged": __version__}
    for name in _PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "missing"
        facts[f"the version of {name}"] = version
    return facts


def files_facts(path: Path, whose: str) -> dict[str, str]:
    """What identifies a file, or the files of a folder.

    Of files of weights it reads a sample only, a megabyte of each: other weights under the same
    names differ in many places.

    Args:
        whose: for the names of the facts, such as "the model".
    """
    return {
        f"the file {file.name} of {whose}": f"{file.stat().st_size} bytes ({_digest(file)})"
        for file in _files_of(path)
    }


def _files_of(folder: Path) -> Iterable[Path]:
    if folder.is_file():
        return [folder]
    found = {file for pattern in _PATTERNS for file in folder.glob(pattern) if file.is_file()}
    return sorted(found)


def _digest(file: Path) -> str:
    size = file.stat().st_size
    digest = blake2b(digest_size=8)
    with file.open("rb") as stream:
        if size <= _SAMPLE_BYTES * _NUM_SAMPLES:
            digest.update(stream.read())
        else:
            for number in range(_NUM_SAMPLES):
                stream.seek((size - _SAMPLE_BYTES) * number // (_NUM_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
