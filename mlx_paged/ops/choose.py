"""The choice of a backend by name, made once per cache."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial

import mlx.core as mx

from mlx_paged.errors import shown
from mlx_paged.ops.attention_shape import AttentionShape
from mlx_paged.ops.backend import Backend, BackendError
from mlx_paged.ops.reference import ReferenceBackend
from mlx_paged.ops.self_check import try_beforehand, working_backend
from mlx_paged.ops.tried_once import GoOn

BACKENDS = ("auto", "reference", "metal")


def choose_backend(name: str, shapes: Iterable[AttentionShape]) -> Backend:
    """The backend called ``name`` on this machine, for layers of these shapes.

    ``"metal"`` runs the kernels of ``metal/``, ``"reference"`` plain MLX on any device. ``"auto"``
    is Metal if MLX's default device is a Metal GPU and there are kernels that write and read all
    shapes. A warning is issued for a shape without kernels, or without one for attention, which
    MLX then computes. Each kernel is tried before it is used, and a failing one is replaced
    (``self_check``).

    Raises:
        BackendError: the name is unknown, or ``"metal"`` was requested and is not available.
    """
    check_backend_name(name)
    if name == "reference" or (name == "auto" and not is_metal_available()):
        return ReferenceBackend()
    if not is_metal_available():
        what = "a Mac with Apple Silicon"
        if mx.metal.is_available():
            what = "mx.gpu as MLX's default device"
        raise BackendError(
            f"[backend] the Metal backend needs {what}; choose the backend 'reference' or 'auto'"
        )
    shapes = list(dict.fromkeys(shapes))
    lack = next(filter(None, (shape.why_unsupported for shape in shapes)), None)
    if lack is None:
        for reason in dict.fromkeys(filter(None, (s.why_no_attention for s in shapes))):
            warnings.warn(
                f"[backend] {reason}; K/V are gathered for MLX's own attention instead",
                stacklevel=2,
            )
        return working_backend(shapes)
    if name == "metal":
        raise BackendError(f"[backend] {lack}; choose the backend 'reference' or 'auto'")
    warnings.warn(f"[backend] {lack}; plain MLX operations run instead", stacklevel=2)
    return ReferenceBackend()


def try_kernels_of(name: str, shapes: Iterable[AttentionShape]) -> Callable[[GoOn], None] | None:
    """A function that tries the kernels for :func:`choose_backend` in advance, in any thread;
    ``None`` if no kernel has to be tried.
    """
    shapes = list(dict.fromkeys(shapes))
    if name not in ("auto", "metal") or not is_metal_available():
        return None
    if any(shape.why_unsupported is not None for shape in shapes):
        return None
    return partial(try_beforehand, shapes)


def check_backend_name(name: str) -> None:
    """Raise ``BackendError`` unless there is a backend of this name."""
    if name not in BACKENDS:
        raise BackendError(
            f"[backend] unknown backend {shown(name)}; choose one of {', '.join(BACKENDS)}"
        )


def is_metal_available() -> bool:
    """Whether MLX computes on Metal here."""
    return mx.metal.is_available() and mx.default_device() == mx.gpu
