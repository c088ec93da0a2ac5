"""Whether the kernels that a model needs work on this device: each is compiled and tried once, when
the first cache of a shape is made.

So no answer waits for a compiler later on, and a kernel that this device's compiler refuses or gets
wrong is not used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache

import mlx.core as mx
import numpy as np

from mlx_paged.ops.backend import Backend
from mlx_paged.ops.formats import HostParts, KVFormat, Parts, RowFormat
from mlx_paged.ops.in_place import writes_in_place
from mlx_paged.ops.kernels import why_no_attention
from mlx_paged.ops.kv_handle import KVHandle
from mlx_paged.ops.metadata import AttentionMetadata, AttentionParams, Rows, SlotMapping, StoredRows
from mlx_paged.ops.metal import DECODE_RUNS, MetalBackend
from mlx_paged.ops.prefill import attend_densely
from mlx_paged.ops.reference import ReferenceBackend

# Tokens that no threadgroup attends to alone, so that partitions are merged.
LONG = 300


@dataclass(frozen=True)
class AttentionShape:
    """What the kernels of a layer are made for."""

    num_kv_heads: int
    group: int  # query heads per KV head
    key_dim: int
    value_dim: int
    block_size: int
    format: KVFormat

    @property
    def dtype(self) -> mx.Dtype:
        """Of queries and of dense rows."""
        return self.format.dtype

    @property
    def why_no_attention(self) -> str | None:
        """What of it the attention kernel is not made for, or ``None``."""
        return why_no_attention(self.key_dim, self.value_dim, self.group)

    def __str__(self) -> str:
        width = f"head_dim {self.key_dim}"
        if self.key_dim != self.value_dim:
            width = f"key_dim {self.key_dim} beside value_dim {self.value_dim}"
        return (
            f"{self.format}, {width}, blocks of "
            f"{self.block_size}, {self.group} query heads for each of {self.num_kv_heads} KV heads"
        )


@dataclass(frozen=True)
class WorkingKernels:
    """What works for one shape."""

    writes: bool  # of rows and of whole blocks, in place
    gathers: bool
    decode_runs: tuple[int, ...]  # those of DECODE_RUNS


def working_backend(shapes: Iterable[AttentionShape]) -> Backend:
    """The Metal backend with the kernels that work for all ``shapes``; plain MLX where not even
    gathers do.

    Rows are written by donated scatter where a kernel can't, and runs that no kernel attends to are
    gathered for MLX's own SDPA. A warning says what failed, once per process and shape.
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
        runs = decode_runs.get(shape.group, DECODE_RUNS)
        decode_runs[shape.group] = tuple(run for run in runs if run in found.decode_runs)
    return MetalBackend(writes, decode_runs)


@cache
def try_kernels(shape: AttentionShape) -> WorkingKernels:
    """Try each kernel for ``shape``, and warn of those that fail."""
    failure = _failure_of(check_gather, shape)
    if failure is not None:
        _warn("gather_blocks", shape, failure, "plain MLX operations run instead")
        return WorkingKernels(writes=False, gathers=False, decode_runs=())

    writes = writes_in_place()
    failure = _failure_of(check_writes, shape) if writes else None
    if failure is not None:
        writes = False
        instead = "slots are written by donated scatter instead, which is slower"
        _warn("reshape_and_cache or copy_blocks", shape, failure, instead)

    runs = DECODE_RUNS if shape.why_no_attention is None else ()
    failures = {run: _failure_of(check_attention, shape, run, writes) for run in runs}
    failed = {run: failure for run, failure in failures.items() if failure is not None}
    if failed:
        name = f"paged_attention of {', '.join(map(str, failed))} query tokens"
        instead = "MLX's own attention on gathered K/V, or another kernel, runs instead"
        _warn(name, shape, next(iter(failed.values())), instead)
    return WorkingKernels(writes, True, tuple(run for run in runs if run not in failed))


def _failure_of(check: Callable[..., str | None], *args: object) -> str | None:
    try:
        return check(*args)
    except Exception as error:  # whatever a compiler or a driver raises
        return f"raised {type(error).__name__}: {error}"


def _warn(name: str, shape: AttentionShape, failure: str, instead: str) -> None:
    warnings.warn(f"[metal] {name} ({shape}) {failure}; {instead}", stacklevel=4)


def check_gather(shape: AttentionShape) -> str | None:
    """Gather two sequences, as they are stored and as numbers; what went wrong, or ``None``."""
    problem = _Problem(shape, [shape.block_size + 3, 5], [1, 1])
    kv, backend, step = problem.slabs(problem.step.context_lens), MetalBackend(), problem.step
    eps = float(mx.finfo(shape.dtype).eps)
    for seq, (table, num_tokens) in enumerate(
        zip(step.block_tables, step.context_lens, strict=True)
    ):
        for ours, theirs in zip(
            backend.gather_parts(kv, table, num_tokens), problem.stored[seq], strict=True
        ):
            if not all(mx.array_equal(*pair).item() for pair in zip(ours, theirs, strict=True)):
                return "gives other rows than the slabs hold"
        for rows, exact in zip(
            backend.gather_blocks(kv, table, num_tokens), problem.exact[seq], strict=True
        ):
            # Numbers within -1..1, rounded to float and then to the dtype of the queries.
            if not mx.all(mx.abs(rows - exact) <= eps).item():
                return "gives other numbers than the slabs hold"
    return None


def check_writes(shape: AttentionShape) -> str | None:
    """Write the rows of two sequences and copy a block; what went wrong, or ``None``."""
    problem = _Problem(shape, [shape.block_size + 3, 5], [9, 5])
    kv, backend = problem.slabs(problem.num_old_tokens), MetalBackend()
    slots = problem.step.slot_mapping.slots
    k, v = (tuple(mx.concatenate([part[:1], part]) for part in parts) for parts in problem.rows)
    backend.reshape_and_cache(k, v, kv, SlotMapping([-1, *slots], shape.block_size))
    source = problem.step.block_tables[0][0]
    backend.copy_blocks(kv, [(source, problem.spare_block)])
    expected = problem.slabs(problem.step.context_lens)
    for slab in expected.slabs:
        slab[problem.spare_block] = slab[source]
    return None if _same_slabs(kv, expected) else "leave other slabs than they should"


def check_attention(shape: AttentionShape, run: int, writes: bool) -> str | None:
    """Attend to runs of up to ``run`` tokens, at once and in partitions that are merged; what went
    wrong, or ``None``.

    Args:
        writes: whether the kernel also writes the rows of the new tokens.
    """
    query_lens = [run, run // 2 + 1]
    scale, sinks = shape.key_dim**-0.5, mx.linspace(-1, 2, shape.num_kv_heads * shape.group)
    for context_lens, params in (
        ([run + 1, run], AttentionParams(scale)),
        ([LONG, run + 6], AttentionParams(scale, window=LONG - 20, sinks=sinks)),
    ):
        problem = _Problem(shape, context_lens, query_lens)
        kv = problem.slabs(problem.num_old_tokens)
        backend = MetalBackend(writes, {shape.group: (run,)})
        k, v = problem.rows
        out = backend.update_and_attend(problem.q, k, v, kv, problem.step, params)
        error = problem.error(out, params)
        if not error <= 1:  # NaN, too
            return f"is wrong by {error:.3g} times what rounding may cost"
        if not _same_slabs(kv, problem.slabs(context_lens)):
            return "leaves other slabs than it should"
    return None


class _Problem:
    """Random sequences of numbers within -1..1, in shuffled blocks.

    Attributes:
        q: ``[num_tokens, num_heads, head_dim]``.
        stored: K and V of each sequence as slabs hold them, ``[num_kv_heads, context_len, width]``
            each part.
        exact: what these stand for, ``[num_kv_heads, context_len, head_dim]`` each, float32.
        rows: K and V of the step's tokens as slabs hold them, ``[num_tokens, num_kv_heads, width]``
            each part.
        spare_block: a block that no sequence has.
    """

    def __init__(self, shape: AttentionShape, context_lens: list[int], query_lens: list[int]):
        rng = np.random.default_rng(0)

        def draw(*size: int) -> mx.array:
            return mx.array(rng.uniform(-1, 1, size).astype(np.float32)).astype(shape.dtype)

        self.shape = shape
        heads, dims = shape.num_kv_heads, (shape.key_dim, shape.value_dim)
        num_blocks = [-(-length // shape.block_size) for length in context_lens]
        self.num_blocks = sum(num_blocks) + 1
        ids = rng.permutation(self.num_blocks)
        *tables, spare = np.split(ids, np.cumsum(num_blocks))
        self.spare_block = int(spare[0])
        self.step = AttentionMetadata.build(
            [table.tolist() for table in tables], context_lens, query_lens, shape.block_size
        )
        self.num_old_tokens = [
            context_len - query_len
            for context_len, query_len in zip(context_lens, query_lens, strict=True)
        ]
        self.q = draw(sum(query_lens), heads * shape.group, shape.key_dim)
        formats = shape.format.key, shape.format.value
        self.stored: list[StoredRows] = []
        self.exact: list[Rows] = []
        for length in context_lens:
            k, v = (
                rows.encode(draw(heads, length, dim))
                for rows, dim in zip(formats, dims, strict=True)
            )
            self.stored.append((k, v))
            self.exact.append((_exact(formats[0], k), _exact(formats[1], v)))
        self.rows: StoredRows = (self._new_rows(0), self._new_rows(1))

    def _new_rows(self, which: int) -> Parts:
        """Of K or V."""
        parts_of_sequences = zip(*(stored[which] for stored in self.stored), strict=True)
        return tuple(
            mx.concatenate(
                [rows[:, old:] for rows, old in zip(part, self.num_old_tokens, strict=True)], axis=1
            ).swapaxes(0, 1)
            for part in parts_of_sequences
        )

    def slabs(self, num_tokens: list[int]) -> KVHandle:
        """The first tokens of each sequence; in all other slots every bit is set, so that floats
        are NaN.
        """
        format = self.shape.format
        k, v = (
            rows.from_host(
                self._host_slabs([rows.to_host(s[which]) for s in self.stored], num_tokens)
            )
            for which, rows in enumerate((format.key, format.value))
        )
        kv = KVHandle(k, v, format)
        mx.eval(kv.arrays)
        return kv

    def _host_slabs(self, stored: list[HostParts], num_tokens: list[int]) -> HostParts:
        slabs = []
        for part in zip(*stored, strict=True):
            num_kv_heads, _, width = part[0].shape
            shape = (self.num_blocks, num_kv_heads, self.step.block_size, width * part[0].itemsize)
            slab = np.full(shape, 0xFF, dtype=np.uint8).view(part[0].dtype)
            for table, rows, length in zip(self.step.block_tables, part, num_tokens, strict=True):
                blocks, offsets = np.divmod(np.arange(length), self.step.block_size)
                slab[np.array(table)[blocks], :, offsets] = rows[:, :length].swapaxes(0, 1)
            slabs.append(slab)
        return tuple(slabs)

    def error(self, out: mx.array, params: AttentionParams) -> float:
        """The largest error of attention, as a multiple of what is allowed there.

        With numbers within -1..1 the terms of a score add up to sqrt(head_dim) at most, so a float
        sum of them is wrong by head_dim^1.5 roundings at most, and a sum over the context by one
        per token. Where a number is scale * n + bias, its two terms are 3 at most together. Then
        the result is rounded to its dtype.
        """
        num_roundings = out.shape[2] ** 1.5 + max(self.step.context_lens)
        num_roundings *= self.shape.format.num_terms
        float_eps, eps = (float(mx.finfo(dtype).eps) for dtype in (mx.float32, out.dtype))
        with mx.stream(mx.cpu):  # plain MLX, in float32 throughout
            exact = attend_densely(self.q.astype(mx.float32), self.exact, self.step, params)
            allowed = num_roundings * float_eps + mx.abs(exact) * eps
            return float((mx.abs(out.astype(mx.float32) - exact) / allowed).max())


def _exact(rows: RowFormat, parts: Parts) -> mx.array:
    """What stored rows stand for, in float32."""
    wide = (part.astype(mx.float32) if part.dtype == rows.mx_dtype else part for part in parts)
    with mx.stream(mx.cpu):
        return replace(rows, dtype="float32").decode(tuple(wide))


def _same_slabs(one: KVHandle, other: KVHandle) -> bool:
    mx.eval(one.arrays)
    return all(
        mx.array_equal(a, b, equal_nan=True).item()
        for a, b in zip(one.slabs, other.slabs, strict=True)
    )
