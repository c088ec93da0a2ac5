"""Models from GGUF files, the format of ggml and llama.cpp: weights, configuration, tokenizer."""

from __future__ import annotations

from pathlib import Path

from mlx_paged.loading.gguf.loader import load_gguf
from mlx_paged.loading.gguf.sampling import read_gguf_sampling

SUFFIX = ".gguf"


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file, by its name."""
    return path.suffix.lower() == SUFFIX


__all__ = ["is_gguf", "load_gguf", "read_gguf_sampling"]
