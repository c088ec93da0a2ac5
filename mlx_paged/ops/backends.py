"""Which implementation of the operations runs: the one place that names a backend."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import mlx.core as mx

from mlx_paged.errors import shown
from mlx_paged.ops.kv_handle import KVHandle
from mlx_paged.ops.metadata import AttentionMetadata, SlotMapping
from mlx_paged.ops.notices import say_once

BACKENDS = ("auto", "reference", "metal")


class BackendError(ValueError):
    """The backend is unknown, or is not there on this machine or for these slabs."""


class Backend(Protocol):
    """The operations of a backend, with checked inputs: a module has these functions."""

    def reshape_and_cache(
        self,
        k: mx.array,
        v: mx.array,
        kv: KVHandle,
        slot_mapping: SlotMapping,
    ) -> None: ...

    def paged_attention(
        self,
        q: mx.array,
        kv: KVHandle,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array: ...

    def paged_prefill_attention(
        self,
        q: mx.array,
        kv: KVHandle,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array: ...

    def attend(
        self,
        q: mx.array,
        kv: KVHandle,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array: ...

    def update_and_attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        kv: KVHandle,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array: ...

    def gather_blocks(
        self,
        kv: KVHandle,
        block_table: list[int],
        num_tokens: int,
    ) -> tuple[mx.array, mx.array]: ...

    def copy_blocks(self, kv: KVHandle, src_dst_pairs: Sequence[tuple[int, int]]) -> None: ...

    def zero_blocks(self, kv: KVHandle, block_ids: Sequence[int]) -> None: ...


def resolve_backend(
    backend: str = "auto", head_dim: int | None = None, block_size: int | None = None
) -> str:
    """The backend that ``backend`` stands for on this machine, for slabs of this shape.

    ``"metal"`` is the kernels of ``metal/``, ``"reference"`` plain MLX, on any device. ``"auto"``
    is Metal where MLX's default device is one and there are kernels for the shape; a warning says
    so when there are none.

    Raises:
        BackendError: the name is unknown, or ``"metal"`` was asked for and can't be had.
    """
    if backend not in BACKENDS:
        raise BackendError(
            f"[backend] unknown backend {shown(backend)}; choose one of {', '.join(BACKENDS)}"
        )
    if backend == "reference" or (backend == "auto" and not metal_is_there()):
        return "reference"
    if not metal_is_there():
        what = (
            "mx.gpu as MLX's default device"
            if mx.metal.is_available()
            else "a Mac with Apple Silicon"
        )
        raise BackendError(
            f"[backend] the Metal backend needs {what}; use --backend reference (or auto)"
        )
    lack = _why_no_kernel(head_dim, block_size)
    if lack is None:
        return "metal"
    if backend == "metal":
        raise BackendError(f"[backend] {lack}; use --backend reference (or auto)")
    say_once(f"[backend] {lack}; plain MLX operations run instead")
    return "reference"


def load_backend(backend: str, kv: KVHandle) -> Backend:
    """The module with the operations of ``backend`` for these slabs; raises as
    :func:`resolve_backend`.
    """
    name = resolve_backend(backend, kv.head_dim, kv.block_size)
    if name == "reference":
        kv.leave_chain()
    return _load(name)


def metal_is_there() -> bool:
    """Whether MLX computes on Metal here."""
    return mx.metal.is_available() and mx.default_device() == mx.gpu


@cache
def _load(name: str) -> Backend:
    if name == "metal":
        from mlx_paged.ops import metal

        return metal
    from mlx_paged.ops import reference

    return reference


@cache
def _why_no_kernel(head_dim: int | None, block_size: int | None) -> str | None:
    if head_dim is None or block_size is None:
        return None
    from mlx_paged.ops.metal import why_unsupported

    return why_unsupported(head_dim, block_size)
