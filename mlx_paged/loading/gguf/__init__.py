"""Models from GGUF files, the format of ggml and llama.cpp: weights, configuration, tokenizer.

What reads them (``loader``) is imported where there is such a file: it needs the package gguf,
which takes as long to import as most of this one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_paged.loading.folder import GGUF_SUFFIX, LoadError


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file, by its name."""
    return path.suffix.lower() == GGUF_SUFFIX


def dtype_config(path: Path, dtype: str | None) -> dict[str, Any] | None:
    """``model_config`` that loads a GGUF file in a dtype; ``None`` for the file's own.

    Raises:
        LoadError: a dtype is given, and the model is not a GGUF file.
    """
    if dtype is None:
        return None
    if not is_gguf(path):
        raise LoadError(
            f"[load] dtype is for GGUF files, and {path} is a folder, whose weights say it", "dtype"
        )
    return {"dtype": dtype}


__all__ = ["dtype_config", "is_gguf"]
