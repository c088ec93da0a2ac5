"""Which implementation of the operations runs: the one place that names a backend."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import mlx.core as mx

BACKENDS = ("auto", "reference", "metal")


class BackendError(ValueError):
    """The backend is unknown, or is not there on this machine."""


@cache
def resolve_backend(backend: str = "auto") -> str:
    """The backend that ``backend`` stands for on this machine: ``"reference"`` (plain MLX, any device).

    Raises:
        BackendError: the name is unknown, or ``"metal"`` was asked for and can't be had.
    """
    if backend not in BACKENDS:
        raise BackendError(f"[backend] unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    if backend == "metal":
        where = "is not part of this version" if mx.metal.is_available() else "needs a Mac with Apple Silicon"
        raise BackendError(f"[backend] the Metal backend {where}; use --backend reference (or auto)")
    return "reference"


@cache
def load_backend(backend: str = "auto") -> ModuleType:
    """The module with the operations of ``backend``; raises :class:`BackendError` as :func:`resolve_backend`."""
    resolve_backend(backend)
    from mlx_paged.ops import reference

    return reference
