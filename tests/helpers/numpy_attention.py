"""The formula of attention in float64 numpy, and random paged problems to hold the operations
against.

Nothing here reads a slab the way ``mlx_paged.ops`` does: the dense K and V of each sequence are
drawn first and scattered into poisoned slabs with numpy, so what the formula sees never went
through a block table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np
from paged_testing.by_hand import dense_handle, step_of

from mlx_paged.ops import AttentionMetadata, AttentionParams, KVHandle

DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}
ORDERS = ("adjacent", "long_runs", "reversed", "shuffled", "shared")
RAGGED_LENGTHS = (1, 7, 15, 16, 17, 31, 255, 256, 257, 1000)


def attention(
    q: np.ndarray,  # [query_len, num_heads, key_dim] float64
    k: np.ndarray,  # [context_len, num_kv_heads, key_dim]
    v: np.ndarray,  # [context_len, num_kv_heads, value_dim]
    scale: float,
    window: int | None = None,
    sinks: np.ndarray | None = None,  # [num_heads]
    softcap: float | None = None,
) -> np.ndarray:
    """Causal attention of one sequence, whose queries are its last positions: ``softmax(scale * q
    k^T) v`` per head.

    A window of n sees the current token and the n - 1 before it. A sink is one more logit of its
    query head that enters the denominator of the softmax and brings no value. A soft cap c makes
    ``c * tanh(score / c)`` of a score.
    """
    visible = _visible(q.shape[0], k.shape[0], window)
    group = q.shape[1] // k.shape[1]
    out = np.empty((*q.shape[:2], v.shape[2]))
    for head in range(q.shape[1]):
        keys, values = k[:, head // group], v[:, head // group]
        # einsum, not @: numpy's threaded BLAS takes ten times as long on products this small.
        scores = scale * np.einsum("qd,kd->qk", q[:, head], keys)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        scores = np.where(visible, scores, -np.inf)
        highest = scores.max(axis=1, keepdims=True)
        if sinks is not None:
            highest = np.maximum(highest, sinks[head])
        weights = np.exp(scores - highest)
        denominator = weights.sum(axis=1, keepdims=True)
        if sinks is not None:
            denominator += np.exp(sinks[head] - highest)
        out[:, head] = np.einsum("qk,kd->qd", weights / denominator, values)
    return out


def attention_in_mlx(
    q: mx.array,  # [query_len, num_heads, key_dim]
    k: mx.array,  # [context_len, num_kv_heads, key_dim]
    v: mx.array,  # [context_len, num_kv_heads, value_dim]
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,  # [num_heads]
    softcap: float | None = None,
) -> mx.array:
    """The same formula, dense, in MLX and in the dtype of ``k``: its distance from float64 is what
    rounding costs.
    """
    group = q.shape[1] // k.shape[1]
    queries = q.astype(k.dtype).swapaxes(0, 1)
    keys, values = (mx.repeat(rows.swapaxes(0, 1), group, axis=0) for rows in (k, v))
    scores = (queries @ keys.swapaxes(1, 2)) * scale
    if softcap is not None:
        scores = mx.tanh(scores / softcap) * softcap
    scores = mx.where(mx.array(_visible(q.shape[0], k.shape[0], window)), scores, -mx.inf)
    if sinks is not None:
        sink_column = mx.broadcast_to(sinks.astype(k.dtype)[:, None, None], (*scores.shape[:2], 1))
        scores = mx.concatenate([scores, sink_column], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)[..., : k.shape[0]]
    return (weights @ values).swapaxes(0, 1)


def _visible(query_len: int, context_len: int, window: int | None) -> np.ndarray:
    query_positions = np.arange(context_len - query_len, context_len)[:, None]
    key_positions = np.arange(context_len)[None]
    visible = key_positions <= query_positions
    return visible if window is None else visible & (key_positions > query_positions - window)


def to_float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def raw(array: mx.array) -> np.ndarray:
    """The bytes of an array as integers, so that equal means equal to the bit."""
    return np.array(array.view(mx.uint32 if array.itemsize == 4 else mx.uint16))


def eps(dtype: mx.Dtype) -> float:
    """The distance from 1 to the next number of ``dtype``."""
    return {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}[dtype]


@dataclass(frozen=True)
class PagedProblem:
    """A ragged batch in poisoned slabs, and the dense rows that each sequence was made from."""

    q: mx.array  # [num_tokens, num_heads, head_dim]
    kv: KVHandle
    metadata: AttentionMetadata
    params: AttentionParams
    dense: tuple[tuple[mx.array, mx.array, mx.array], ...]  # q, k, v of each sequence
    tables: tuple[tuple[int, ...], ...]
    context_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    # K and V of the new tokens before they are encoded, packed; None where slabs hold numbers.
    new_rows: tuple[mx.array, mx.array] | None = None

    @property
    def args(self) -> tuple:
        """What the operations take: ``backend.attend(*problem.args)``."""
        return self.q, self.kv, self.metadata, self.params

    def alone(self, seq: int) -> tuple:
        """What the operations take for sequence ``seq`` by itself, in the same slabs."""
        tables, context_lens, query_lens = (
            [self.tables[seq]],
            [self.context_lens[seq]],
            [self.query_lens[seq]],
        )
        one = step_of(tables, context_lens, query_lens, self.kv.block_size)
        return self.q[self.rows(seq)], self.kv, one, self.params

    def rows(self, seq: int) -> slice:
        """Where sequence ``seq`` lies in the flat axis of queries."""
        start = sum(self.query_lens[:seq])
        return slice(start, start + self.query_lens[seq])

    @cached_property
    def exact(self) -> tuple[np.ndarray, ...]:
        """The formula's result for each sequence, ``[query_len, num_heads, value_dim]`` float64."""
        params = self.params
        sinks = None if params.sinks is None else to_float64(params.sinks)
        return tuple(
            attention(*map(to_float64, rows), params.scale, params.window, sinks, params.softcap)
            for rows in self.dense
        )

    @cached_property
    def allowed_errors(self) -> tuple[float, ...]:
        """For each sequence twice what the dense formula loses in this dtype, and one rounding of
        the result.
        """
        params = self.params
        dense = [
            to_float64(
                attention_in_mlx(
                    *(array.astype(self.kv.dtype) for array in rows),
                    params.scale,
                    params.window,
                    params.sinks,
                    params.softcap,
                )
            )
            for rows in self.dense
        ]
        return tuple(
            2 * float(np.abs(lossy - exact).max()) + eps(self.kv.dtype) * float(np.abs(exact).max())
            for lossy, exact in zip(dense, self.exact, strict=True)
        )


def before_the_step(problem: PagedProblem) -> tuple[KVHandle, mx.array, mx.array]:
    """Slabs in which every bit is set where the new tokens go (a float is NaN), and the packed K
    and V of these, as a model computes them.
    """
    kv = problem.kv
    blocks, offsets = np.divmod(problem.metadata.slot_mapping.slots, kv.block_size)
    slabs, rows = [], []
    for slab in kv.slabs:
        bits = raw(slab).copy()
        rows.append(mx.array(bits[blocks, :, offsets]).view(slab.dtype))
        bits[blocks, :, offsets] = np.iinfo(bits.dtype).max
        slabs.append(mx.array(bits).view(slab.dtype))
    mx.eval(*slabs, *rows)
    num_parts = len(kv.k)
    k, v = problem.new_rows or (rows[0], rows[num_parts])
    return KVHandle(tuple(slabs[:num_parts]), tuple(slabs[num_parts:]), kv.format), k, v


def assert_matches_formula(out: mx.array, problem: PagedProblem) -> None:
    """Each sequence by its own measure, so that a long context can't hide behind the rounding of a
    short one.
    """
    assert out.shape == (*problem.q.shape[:2], problem.kv.value_dim)
    result = to_float64(out)
    for seq in range(len(problem.context_lens)):
        error = float(np.abs(result[problem.rows(seq)] - problem.exact[seq]).max())
        allowed = problem.allowed_errors[seq]
        assert error <= allowed, (
            f"sequence {seq} (context {problem.context_lens[seq]}, run {problem.query_lens[seq]}): "
            f"error {error:.3g}, allowed {allowed:.3g}"
        )


def make_problem(
    context_lens: Sequence[int],
    query_lens: Sequence[int] | int = 1,
    *,
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    value_dim: int | None = None,
    block_size: int = 16,
    dtype: mx.Dtype = mx.float32,
    order: str = "shuffled",
    window: int | None = None,
    sinks: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    poison: str = "large",
    score_offsets: Callable[[int], np.ndarray] | None = None,
    seed: int = 0,
) -> PagedProblem:
    """A random ragged batch in slabs whose unused slots are poisoned.

    Args:
        query_lens: one number means runs of that length, or of the whole context where that is
            shorter.
        value_dim: the width of V where it is not that of K.
        order: of the block ids: ``adjacent``; ``long_runs`` of 11 adjacent ids in random order;
            ``reversed``; ``shuffled``; ``shared``: shuffled, and full blocks before the new tokens
            are those of the longest context.
        poison: ``large``: unused slots hold +-10,000; ``nan_keys``: those of K hold NaN and
            infinities instead; ``nan_values``: those of V do.
        score_offsets: from a context length to what is added to the score of each position, in
            steps of 10: channel 0 of the queries holds 16 and that of the keys brings the rest.
    """
    rng = np.random.default_rng(seed)
    if isinstance(query_lens, int):
        query_lens = [min(query_lens, context_len) for context_len in context_lens]

    def draw(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)

    primary = int(np.argmax(context_lens))
    num_shared = [0] * len(context_lens)
    if order == "shared":
        num_shared = [
            min(c - q, context_lens[primary] - query_lens[primary]) // block_size
            for c, q in zip(context_lens, query_lens, strict=True)
        ]
    scale = head_dim**-0.5 if scale is None else scale
    keys, values = (
        [draw(n, num_kv_heads, dim) for n in context_lens]
        for dim in (head_dim, value_dim or head_dim)
    )
    if score_offsets is not None:
        for rows in keys:
            offsets = score_offsets(rows.shape[0]) / (16 * scale)
            rows[:, :, 0] = mx.array(offsets.astype(np.float32)).astype(dtype)[:, None]
    for rows in (keys, values):
        for seq, num_blocks in enumerate(num_shared):
            n = num_blocks * block_size
            rows[seq] = mx.concatenate([rows[primary][:n], rows[seq][n:]])

    # Block tables; each has one reserved block at its end that nothing was written to.
    num_shared[primary] = 0
    num_owned = [-(-c // block_size) + 1 - n for c, n in zip(context_lens, num_shared, strict=True)]
    num_blocks = sum(num_owned) + 3
    ids = iter(_block_ids(num_blocks, order, rng).tolist())
    owned = [[next(ids) for _ in range(n)] for n in num_owned]
    tables = [owned[primary][:n] + blocks for n, blocks in zip(num_shared, owned, strict=True)]

    slabs = []
    for name, rows in (("keys", keys), ("values", values)):
        shape = (num_blocks, num_kv_heads, block_size, rows[0].shape[2])
        slab = rng.choice([-1e4, 1e4], size=shape).astype(np.float32)
        if poison == f"nan_{name}":
            slab = rng.choice([np.nan, np.inf, -np.inf], size=shape).astype(np.float32)
        for table, dense in zip(tables, rows, strict=True):
            positions = np.arange(dense.shape[0])
            blocks = np.asarray(table)[positions // block_size]
            slab[blocks, :, positions % block_size] = np.array(dense.astype(mx.float32))
        slabs.append(mx.array(slab).astype(dtype))

    queries = [draw(n, num_kv_heads * group, head_dim) for n in query_lens]
    if score_offsets is not None:
        for rows in queries:
            rows[:, :, 0] = 16
    problem = PagedProblem(
        q=mx.concatenate(queries),
        kv=dense_handle(*slabs),
        metadata=step_of(tables, context_lens, query_lens, block_size),
        params=AttentionParams(
            scale, window, draw(num_kv_heads * group) * 2 if sinks else None, softcap
        ),
        dense=tuple(zip(queries, keys, values, strict=True)),
        tables=tuple(tuple(table) for table in tables),
        context_lens=tuple(context_lens),
        query_lens=tuple(query_lens),
    )
    mx.eval(problem.q, *problem.kv.arrays)
    return problem


def _block_ids(num_blocks: int, order: str, rng: np.random.Generator) -> np.ndarray:
    ids = np.arange(num_blocks)
    if order == "adjacent":
        return ids
    if order == "reversed":
        return ids[::-1]
    if order == "long_runs":
        runs = [ids[start : start + 11] for start in range(0, num_blocks, 11)]
        return np.concatenate([runs[i] for i in rng.permutation(len(runs))])
    if order in ("shuffled", "shared"):
        return rng.permutation(num_blocks)
    raise ValueError(f"unknown order {order!r}; choose one of {', '.join(ORDERS)}")
