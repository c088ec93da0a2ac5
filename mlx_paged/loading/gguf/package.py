"""The ``gguf`` package, imported when a GGUF file is read and not before."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from mlx_paged.loading.folder import LoadError


@cache
def gguf() -> Any:
    """The package, with its modules ``constants``, ``quants`` and ``tensor_mapping``.

    Raises:
        LoadError: it is not installed.
    """
    try:
        # Not by an import statement: type checkers need not have the package.
        for module in ("constants", "quants", "tensor_mapping"):
            importlib.import_module(f"gguf.{module}")
        return importlib.import_module("gguf")
    except ImportError as error:
        raise LoadError(
            f"[load] GGUF files are read with the gguf package ({error}); pip install gguf"
        ) from error
