"""The start-up check of kernels: before the first cache of a shape is made, each kernel is compiled
and compared with plain MLX on a random step. This may run in another thread while the model's
weights are read.

So no request waits for compilation later, and a kernel that this device's compiler rejects or
miscompiles is not used.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_paged.ops.attention_shape import AttentionShape
from mlx_paged.ops.backend import Backend
from mlx_paged.ops.formats import KVFormat, Parts
from mlx_paged.ops.in_place import writes_in_place
from mlx_paged.ops.kv_handle import KVHandle
from mlx_paged.ops.metadata import AttentionMetadata, AttentionParams, Rows, SlotMapping
from mlx_paged.ops.metal import MetalBackend, decode_runs_of
from mlx_paged.ops.reference import ReferenceBackend
from mlx_paged.ops.tried_once import GoOn, TrialResult, TriedOnce

# Lengths of more than one partition, so that partitions are merged.
LONG, LONG_WINDOW = 280, 260


@dataclass(frozen=True)
class WorkingKernels:
    """The kernels that work for one shape."""

    writes: bool  # rows and whole blocks, in place
    gathers: bool
    decode_runs: tuple[int, ...]  # of :func:`decode_runs_of`


def working_backend(shapes: Iterable[AttentionShape]) -> Backend:
    """The Metal backend with the kernels that work for all ``shapes``; plain MLX if gathers fail.

    If the writing kernels fail, rows are written by donated scatter, and runs without a working
    attention kernel are gathered for MLX's own SDPA. A warning says what failed, once per process
    and shape.
    """
    decode_runs: dict[int, tuple[int, ...]] = {}
    writes = writes_in_place()
    for shape in shapes:
        found = try_kernels(shape)
        if not found.gathers:
            return ReferenceBackend()
        writes = writes and found.writes
        if shape.why_no_attention is not None:
            continue
        runs = decode_runs.get(shape.group, decode_runs_of(shape.group, shape.holds_latents))
        decode_runs[shape.group] = tuple(run for run in runs if run in found.decode_runs)
    return MetalBackend(writes, decode_runs)


def try_beforehand(shapes: Iterable[AttentionShape], go_on: GoOn) -> None:
    """Run the trials of :func:`working_backend` in advance, without warnings.

    Raises:
        TrialStoppedError: raised by ``go_on``.
    """
    for shape in shapes:
        try_kernels.quietly(shape, go_on=go_on)


def _try_kernels(shape: AttentionShape, go_on: GoOn) -> TrialResult[WorkingKernels]:
    messages: list[str] = []

    def warn(name: str, failure: str, instead: str) -> None:
        messages.append(f"[metal] {name} ({shape}) {failure}; {instead}")

    def failure_of_moves(writes: bool) -> str | None:
        go_on()
        return _failure_of(_move, MetalBackend(writes), shape, [shape.block_size + 3, 5], [9, 5])

    writes = writes_in_place.quietly(go_on=go_on)
    failure = failure_of_moves(writes)
    if failure is not None:
        if not writes or failure_of_moves(False) is not None:
            warn("gather_blocks", failure, "plain MLX operations run instead")
            return TrialResult(
                WorkingKernels(writes=False, gathers=False, decode_runs=()), tuple(messages)
            )
        writes = False
        instead = "slots are written by donated scatter instead, which is slower"
        names = "reshape_and_cache", shape.format.kernels.encode, "copy_blocks"
        warn(" or ".join(filter(None, names)), failure, instead)

    runs: tuple[int, ...] = ()
    if shape.why_no_attention is None:
        runs = decode_runs_of(shape.group, shape.holds_latents)
    failures = {run: _failure_of_attention(shape, run, writes, go_on) for run in runs}
    failed = {run: failure for run, failure in failures.items() if failure is not None}
    if failed:
        name = f"paged_attention of {', '.join(map(str, failed))} query tokens"
        instead = "MLX's own attention on gathered K/V, or another kernel, runs instead"
        warn(name, next(iter(failed.values())), instead)
    working = tuple(run for run in runs if run not in failed)
    return TrialResult(WorkingKernels(writes, True, working), tuple(messages))


try_kernels = TriedOnce(_try_kernels)
"""Tries each kernel of a shape; warnings say which ones fail."""


def _failure_of_attention(shape: AttentionShape, run: int, writes: bool, go_on: GoOn) -> str | None:
    """Try runs of up to ``run`` tokens, in one partition and in several that are merged."""
    metal, query_lens = MetalBackend(writes, {shape.group: (run,)}), [run, run // 2 + 1]
    scale, sinks = shape.key_dim**-0.5, mx.linspace(-1, 2, shape.num_kv_heads * shape.group)
    for context_lens, params in (
        ([run + 1, run], AttentionParams(scale, None, None, shape.softcap, shape.holds_latents)),
        (
            [LONG, run + 6],
            AttentionParams(scale, LONG_WINDOW, sinks, shape.softcap, shape.holds_latents),
        ),
    ):
        go_on()
        failure = _failure_of(partial(_attend, params), metal, shape, context_lens, query_lens)
        if failure is not None:
            return failure
    return None


class _Layer(NamedTuple):
    """Queries and rows of a step, and the slabs before it, whose last block is unused."""

    step: AttentionMetadata
    q: mx.array
    k: mx.array
    v: mx.array
    kv: KVHandle


def _move(backend: Backend, layer: _Layer) -> list[mx.array]:
    """Write a row of padding and those of the step, copy a block, gather the sequences stored and
    decoded, and write a stored block.
    """
    step, _, k, v, kv = layer
    k, v = (mx.concatenate([rows[:1], rows]) for rows in (k, v))
    backend.update(k, v, kv, SlotMapping([-1, *step.slot_mapping.slots], step.block_size))
    backend.copy_blocks(kv, [(step.block_tables[0][0], kv.num_blocks - 1)])
    # Plain MLX would round between scale * n and the bias.
    numbers = kv if backend.name == "metal" else _in_float32(kv)
    gathered: list[mx.array] = []
    for table, num_tokens in zip(step.block_tables, step.context_lens, strict=True):
        parts = backend.gather_parts(kv, table, num_tokens)
        gathered += [*parts[0], *parts[1], *backend.gather_blocks(numbers, table, num_tokens)]
    last = [
        tuple(part[:, : kv.block_size][None] for part in rows)
        for rows in backend.gather_parts(kv, step.block_tables[0], step.context_lens[0])
    ]
    backend.write_blocks(kv, [step.block_tables[1][0]], *last)
    return gathered


def _attend(params: AttentionParams, backend: Backend, layer: _Layer) -> list[mx.array]:
    """Write and attend; plain MLX attends in float32 to the rows that it has written."""
    step, q, k, v, kv = layer
    if backend.name == "metal":
        return [backend.update_and_attend(q, k, v, kv, step, params)]
    backend.update(k, v, kv, step.slot_mapping)
    wide = kv.format.unrotated(kv.format.rotated(q).astype(mx.float32))
    return [backend.attend(wide, _in_float32(kv), step, params)]


def _failure_of(
    operate: Callable[[Backend, _Layer], list[mx.array]],
    metal: Backend,
    shape: AttentionShape,
    context_lens: list[int],
    query_lens: list[int],
) -> str | None:
    """Why the result of ``metal`` for a random layer is wrong, or ``None``: slabs must have the
    bits that plain MLX writes on a CPU, results must be within the bound of rounding.
    """
    try:
        layer = _random_layer(shape, context_lens, query_lens)
        kv = layer.kv
        with mx.stream(mx.cpu):
            k, v = (tuple(part * 1 for part in parts) for parts in (kv.k, kv.v))
            twin = KVHandle(k, v, kv.format)
            # Decodes would read unused slots, which are NaN.
            expected = operate(ReferenceBackend(decode_runs=()), layer._replace(kv=twin))
            mx.eval(expected, twin.arrays)
        found = operate(metal, layer)
        mx.eval(found, kv.arrays)
    except Exception as error:  # any error of a compiler or a driver
        return f"raised {type(error).__name__}: {error}"
    # With numbers within -1..1 the terms of a score add up to at most sqrt(head_dim), so a float
    # sum of them has an error of at most head_dim^1.5 roundings, and a sum over the context one
    # rounding per token. The two terms of scale * n + bias are at most 3 together.
    num_roundings = (shape.key_dim**1.5 + max(context_lens)) * shape.format.num_terms
    with mx.stream(mx.cpu):
        slabs = zip(_widened(kv.slabs), _widened(twin.slabs), strict=True)
        if not all(mx.array_equal(*pair, equal_nan=True).item() for pair in slabs):
            return "writes wrong bits into the slabs"
        for pair in zip(found, expected, strict=True):
            excess = _error(*pair, num_roundings)
            if not excess <= 1:  # NaN, too
                return f"has {excess:.3g} times the error that rounding allows"
    return None


def _random_layer(shape: AttentionShape, context_lens: list[int], query_lens: list[int]) -> _Layer:
    """Two sequences in shuffled blocks, with numbers within -1..1. All bits of unused slots are
    set, so that floats are NaN.
    """
    rng, size, heads = np.random.default_rng(0), shape.block_size, shape.num_kv_heads
    first, num_blocks = np.cumsum([-(-length // size) for length in context_lens]).tolist()
    blocks = rng.permutation(num_blocks).tolist()
    tables = [array("i", blocks[:first]), array("i", blocks[first:])]
    step = AttentionMetadata(tables, context_lens, query_lens, size)
    tokens = AttentionMetadata(tables, context_lens, context_lens, size).slot_mapping
    has_token = np.zeros((num_blocks + 1) * size, dtype=bool)
    has_token[tokens.slots] = True
    mask = mx.array(has_token.reshape(-1, 1, size, 1))

    def draw(*dims: int) -> mx.array:
        return mx.array(2 * rng.random(dims, np.float32) - 1, dtype=shape.dtype)

    def draw_rows(*leading: int) -> Rows:
        return draw(*leading, shape.key_dim), draw(*leading, shape.value_dim)

    def slabs(parts: Parts) -> Parts:
        unset = (mx.full(part.itemsize, 0xFF, mx.uint8).view(part.dtype) for part in parts)
        return tuple(mx.where(mask, *pair) for pair in zip(parts, unset, strict=True))

    width = shape.key_dim + shape.value_dim if shape.holds_latents else shape.key_dim
    q = draw(step.num_tokens, heads * shape.group, width)
    k, v = shape.format.encode(*draw_rows(num_blocks + 1, heads, size))
    kv = KVHandle(slabs(k), slabs(v), shape.format)
    return _Layer(step, q, *draw_rows(step.num_tokens, heads), kv)


def _in_float32(kv: KVHandle) -> KVHandle:
    key, value = (replace(rows, dtype="float32") for rows in (kv.format.key, kv.format.value))
    return KVHandle(_widened(kv.k), _widened(kv.v), KVFormat(key, value))


def _widened(parts: Parts) -> Parts:
    """Copies, with floats widened to float32."""
    wide = (part if part.dtype == mx.uint32 else part.astype(mx.float32) for part in parts)
    return tuple(part * 1 for part in wide)


def _error(found: mx.array, exact: mx.array, num_roundings: float) -> float:
    """The largest error as a multiple of the allowed one: ``num_roundings`` of floats up to 1, then
    one to the dtype of ``found``. Integers must be equal.
    """
    if not mx.issubdtype(found.dtype, mx.floating):
        return 0.0 if mx.array_equal(found, exact).item() else math.inf
    float_eps, eps = (float(mx.finfo(dtype).eps) for dtype in (mx.float32, found.dtype))
    allowed = num_roundings * float_eps + mx.abs(exact) * eps
    return float((mx.abs(found.astype(mx.float32) - exact) / allowed).max())
