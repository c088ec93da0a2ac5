"""Models from GGUF files, the format of ggml and llama.cpp: weights, configuration, tokenizer.

Their reader (``loader``) is imported only for such a file: it needs the gguf package, which takes
as long to import as most of this one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_paged.loading.folder import GGUF_SUFFIX, LoadError


def is_gguf(path: Path) -> bool:
    """Whether a path has the suffix of a GGUF file."""
    return path.suffix.lower() == GGUF_SUFFIX


def dtype_config(path: Path, dtype: str | None) -> dict[str, Any] | None:
    """The ``model_config`` that loads a GGUF file in a dtype; ``None`` for the default dtype.

    Raises:
        LoadError: a dtype is given, and the model is not a GGUF file.
    """
    if dtype is None:
        return None
    if not is_gguf(path):
        raise LoadError(
            f"[load] dtype is for GGUF files; {path} is a folder, whose weights set it", "dtype"
        )
    return {"dtype": dtype}


__all__ = ["dtype_config", "is_gguf"]
