"""The package's Metal backend without kernels: stand-ins that stay lazy, on any machine.

The emulator runs a kernel as soon as it is called, so no step is ever in flight there. These
stand-ins leave a step as lazy as Metal does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, ClassVar, TypeVar

import mlx.core as mx
from mlx.utils import tree_flatten
from pytest import MonkeyPatch

from mlx_paged.cache import paged
from mlx_paged.models import matmul_choice
from mlx_paged.ops import choose, device, kernels
from mlx_paged.ops.backend import Backend
from mlx_paged.ops.formats import Parts
from mlx_paged.ops.kv_handle import KVHandle
from mlx_paged.ops.metadata import AttentionMetadata, AttentionParams, Rows, SlotMapping, StoredRows
from mlx_paged.ops.metal import MetalBackend
from mlx_paged.ops.reference import ReferenceBackend
from mlx_paged.ops.tried_once import TrialResult, TriedOnce

T = TypeVar("T")


@contextmanager
def lazy_metal(computes: bool = False, call_seconds: float = 0.0) -> Iterator[None]:
    """Inside, ``"auto"`` and ``"metal"`` are a Metal backend whose operations are lazy and
    chained by fences.

    Args:
        computes: plain MLX computes the results, from what the slabs hold by the order of the
            calls, so that tokens mean something and a step that reads what was not written yet, or
            what was overwritten, shows in them. Otherwise the package's own Metal backend runs,
            and each kernel call is one primitive that depends on its inputs and returns zeros.
        call_seconds: what a kernel call keeps the calling thread busy for, beyond making the
            primitive; only without ``computes``.
    """
    metal_kernel = partial(_stand_in, call_seconds=call_seconds)
    backend = ChainedReferenceBackend if computes else MetalBackend
    with stand_in_metal(backend, metal_kernel), MonkeyPatch.context() as patch:
        if not computes:
            patch.setattr(device, "is_cpu", lambda: False)
        yield


@contextmanager
def stand_in_metal(
    backend: type[Backend], metal_kernel: Callable[..., kernels.MetalKernel]
) -> Iterator[None]:
    """Inside, ``"auto"`` and ``"metal"`` are ``backend``, and ``mx.fast.metal_kernel`` is
    ``metal_kernel``.
    """
    with MonkeyPatch.context() as patch:
        patch.setattr(choose, "is_metal_available", lambda: True)
        # Slabs that MLX's own operations write are copied while a reader is in flight.
        patch.setattr(paged, "NUM_WATCHED_STEPS", 0)
        # Stand-ins would not pass the check at start-up.
        patch.setattr(choose, "working_backend", lambda _: backend())
        works = TriedOnce(lambda *_: TrialResult(True))
        patch.setattr(matmul_choice, "try_rows_matmul", works)
        patch.setattr(matmul_choice, "known_choices", lambda modules, clock: {})
        patch.setattr(mx.fast, "metal_kernel", metal_kernel)
        kernels.kernel.cache_clear()
        try:
            yield
        finally:
            kernels.kernel.cache_clear()


@contextmanager
def fused_operations() -> Iterator[None]:
    """Inside, operations of ``mx.fast`` that are one kernel on Metal and many on a CPU are one
    primitive each, which returns numbers without a meaning.
    """

    def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
        return _after(x, [] if weight is None else [weight])

    def rope(
        x: mx.array, dims: int, *, offset: int | mx.array, freqs: mx.array | None = None, **_: Any
    ) -> mx.array:
        return _after(x, [array for array in (offset, freqs) if isinstance(array, mx.array)])

    def attention(
        q: mx.array, k: mx.array, v: mx.array, *, mask: str | mx.array | None = None, **_: Any
    ) -> mx.array:
        return _after(q, [k, v, mask] if isinstance(mask, mx.array) else [k, v])

    with MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "rms_norm", rms_norm)
        patch.setattr(mx.fast, "rope", rope)
        patch.setattr(mx.fast, "scaled_dot_product_attention", attention)
        yield


def _after(x: mx.array, others: list[mx.array]) -> mx.array:
    result: mx.array = mx.depends([x], others)[0]
    return result


class ChainedReferenceBackend(ReferenceBackend):
    """Plain MLX under the rules of kernels: nothing waits, and each operation binds the handle's
    fence and leaves the next one.

    To evaluate a fence is to evaluate all that was asked of the handle before.
    """

    name: ClassVar[str] = "metal"
    writes_in_place = True

    def reshape_and_cache(
        self, k: Parts, v: Parts, kv: KVHandle, slot_mapping: SlotMapping
    ) -> None:
        write = super().reshape_and_cache
        _chained(kv, lambda: write(k, v, kv, slot_mapping))

    def update(self, k: mx.array, v: mx.array, kv: KVHandle, slot_mapping: SlotMapping) -> None:
        write = super().update
        _chained(kv, lambda: write(k, v, kv, slot_mapping))

    def update_and_attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        kv: KVHandle,
        step: AttentionMetadata,
        params: AttentionParams,
    ) -> mx.array:
        run = super().update_and_attend
        return _chained(kv, lambda: run(q, k, v, kv, step, params))

    def attend(
        self, q: mx.array, kv: KVHandle, step: AttentionMetadata, params: AttentionParams
    ) -> mx.array:
        run = super().attend
        return _chained(kv, lambda: run(q, kv, step, params))

    def gather_blocks(self, kv: KVHandle, block_table: Sequence[int], num_tokens: int) -> Rows:
        run = super().gather_blocks
        return _chained(kv, lambda: run(kv, block_table, num_tokens))

    def gather_parts(self, kv: KVHandle, block_table: Sequence[int], num_tokens: int) -> StoredRows:
        run = super().gather_parts
        return _chained(kv, lambda: run(kv, block_table, num_tokens))

    def copy_blocks(self, kv: KVHandle, src_dst_pairs: Sequence[tuple[int, int]]) -> None:
        copy = super().copy_blocks
        _chained(kv, lambda: copy(kv, src_dst_pairs))

    def zero_blocks(self, kv: KVHandle, block_ids: Sequence[int]) -> None:
        zero = super().zero_blocks
        _chained(kv, lambda: zero(kv, block_ids))


def _chained(kv: KVHandle, run: Callable[[], T]) -> T:
    # Without a fence, plain MLX finds no kernels to wait for.
    fence, kv.fence = kv.fence, None
    result = run()
    before = list(kv.slabs)
    if isinstance(result, mx.array):
        before.append(result)
    elif isinstance(result, tuple):
        before += dict(tree_flatten(result)).values()
    if fence is not None:
        before.append(fence)
    (kv.fence,) = mx.depends([_zeros(*kernels.FENCE)], before)
    return result


def _stand_in(call_seconds: float = 0.0, **_: object) -> kernels.MetalKernel:
    """What ``mx.fast.metal_kernel`` returns here: one primitive per call, results of zeros."""

    def call(
        *,
        inputs: list[mx.array],
        template: kernels.Template,
        grid: kernels.Size,
        threadgroup: kernels.Size,
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
    ) -> list[mx.array]:
        end = time.perf_counter() + call_seconds
        zeros = [
            _zeros(tuple(shape), dtype)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        results: list[mx.array] = mx.depends(zeros, inputs)
        while call_seconds and time.perf_counter() < end:
            pass
        return results

    return call


@cache
def _zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    zeros = mx.zeros(shape, dtype)
    mx.eval(zeros)
    return zeros
