"""Which backend a name stands for on this machine; asked once, when a cache is made."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import mlx.core as mx

from mlx_paged.errors import shown
from mlx_paged.ops.backend import Backend, BackendError
from mlx_paged.ops.in_place import writes_in_place
from mlx_paged.ops.kernels import why_unsupported
from mlx_paged.ops.metal import MetalBackend
from mlx_paged.ops.reference import ReferenceBackend

BACKENDS = ("auto", "reference", "metal")


def choose_backend(name: str, shapes: Iterable[tuple[int, int, int]]) -> Backend:
    """The backend that ``name`` stands for on this machine, for slabs of these shapes.

    ``"metal"`` is the kernels of ``metal/``, ``"reference"`` plain MLX on any device. ``"auto"`` is
    Metal where MLX's default device is one and there are kernels for all shapes; a warning says
    where a shape has none.

    Args:
        shapes: ``(key_dim, value_dim, block_size)`` of each layer's slabs.

    Raises:
        BackendError: the name is unknown, or ``"metal"`` was asked for and can't be had.
    """
    check_backend_name(name)
    if name == "reference" or (name == "auto" and not metal_is_there()):
        return ReferenceBackend()
    if not metal_is_there():
        what = "a Mac with Apple Silicon"
        if mx.metal.is_available():
            what = "mx.gpu as MLX's default device"
        raise BackendError(
            f"[backend] the Metal backend needs {what}; choose the backend 'reference' or 'auto'"
        )
    lack = next(filter(None, (why_unsupported(*shape) for shape in shapes)), None)
    if lack is None:
        return MetalBackend(writes_in_place())
    if name == "metal":
        raise BackendError(f"[backend] {lack}; choose the backend 'reference' or 'auto'")
    warnings.warn(f"[backend] {lack}; plain MLX operations run instead", stacklevel=2)
    return ReferenceBackend()


def check_backend_name(name: str) -> None:
    """Raise ``BackendError`` unless there is a backend of this name."""
    if name not in BACKENDS:
        raise BackendError(
            f"[backend] unknown backend {shown(name)}; choose one of {', '.join(BACKENDS)}"
        )


def metal_is_there() -> bool:
    """Whether MLX computes on Metal here."""
    return mx.metal.is_available() and mx.default_device() == mx.gpu
