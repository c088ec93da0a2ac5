"""The package's Metal backend with kernels that are functions of MLX operations, on any machine.

The emulator needs the numbers of its inputs and so can't be traced, and the stand-ins of
``lazy_metal`` compute nothing. These kernels do both: they compute, from arrays only. A slab that
is written in place can't be a function's result, so here the *fence* holds the rows of a layer: a
kernel takes them from the fence before it and leaves them in the next. Where a link of the chain is
lost, what was written is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from pytest import MonkeyPatch

from mlx_paged.ops import attention_plan as plans
from mlx_paged.ops import choose, device, rows_matmul
from mlx_paged.ops.kv_handle import KVHandle
from mlx_paged.ops.metal import MetalBackend
from paged_testing.lazy_metal import stand_in_metal


@contextmanager
def pure_metal() -> Iterator[None]:
    """Inside, ``"auto"`` and ``"metal"`` are the Metal backend on such kernels."""
    with stand_in_metal(MetalBackend, _metal_kernel), MonkeyPatch.context() as patch:
        patch.setattr(device, "is_cpu", lambda: False)  # A step is not computed while it is built.
        patch.setattr(KVHandle, "leave_chain", _leave_chain)
        yield


def _metal_kernel(name: str, input_names: list[str], **_: object) -> Callable[..., list[mx.array]]:
    run = _KERNELS[name.removeprefix("mlx_paged_")]

    def call(
        *, inputs: list[mx.array], template: list[tuple[str, Any]], **launch: Any
    ) -> list[mx.array]:
        named = dict(zip(input_names, inputs, strict=True))
        return run(SimpleNamespace(**named, **launch, **dict(template)))

    return call


def _rows_of(fence: mx.array, key_slab: mx.array, value_slab: mx.array) -> list[mx.array]:
    """K and V, ``[num_slots + block_size, num_kv_heads, head_dim]`` each: rows by slot, and a block
    for what belongs nowhere.
    """
    if fence.ndim > 1:
        return [fence[0], fence[1]]
    rows = []
    for slab in (key_slab, value_slab):
        block = mx.zeros((slab.shape[2], slab.shape[1], slab.shape[3]), slab.dtype)
        flat = slab.swapaxes(1, 2).reshape(-1, *block.shape[1:])
        rows.append(mx.concatenate([flat, block]))
    return rows


def _leave_chain(kv: KVHandle) -> None:
    if kv.fence is not None:
        shape = (kv.num_blocks, kv.block_size, kv.num_kv_heads, kv.key_dim)
        k, v = (
            rows[: -kv.block_size].reshape(shape).swapaxes(1, 2)
            for rows in _rows_of(kv.fence, kv.k[0], kv.v[0])
        )
        kv.k, kv.v, kv.fence = (mx.contiguous(k),), (mx.contiguous(v),), None
        mx.eval(kv.arrays)


def _reshape_and_cache(call: SimpleNamespace) -> list[mx.array]:
    k, v = _rows_of(call.fence_in, call.key_slab, call.value_slab)
    slots = call.slot_mapping[: call.key_rows.shape[0]]
    slots = mx.where(slots < 0, k.shape[0] - 1, slots)
    k[slots], v[slots] = call.key_rows, call.value_rows
    return [mx.stack([k, v])]


def _copy_blocks(call: SimpleNamespace) -> list[mx.array]:
    pairs = call.src_dst_pairs[: 2 * call.grid[1]].reshape(-1, 2)
    offsets = mx.arange(call.key_slab.shape[2])
    source, destination = (
        (pairs[:, which, None] * call.key_slab.shape[2] + offsets).reshape(-1) for which in (0, 1)
    )
    state = mx.stack(_rows_of(call.fence_in, call.key_slab, call.value_slab))
    state[:, destination] = state[:, source]
    return [state]


def _gather_blocks(call: SimpleNamespace) -> list[mx.array]:
    plan, block_size = call.plan, call.key_slab.shape[2]
    num_blocks = call.grid[1] // block_size
    blocks = plan[: 2 * num_blocks].reshape(-1, 2).tolist()
    seqs = plan[2 * num_blocks :].tolist()
    state = mx.stack(_rows_of(call.fence_in, call.key_slab, call.value_slab))
    gathered = []
    for first_block, _, num_tokens in (seqs[i : i + 3] for i in range(0, len(seqs) // 3 * 3, 3)):
        ids = [blocks[first_block + t // block_size][0] for t in range(num_tokens)]
        slots = [i * block_size + t % block_size for t, i in enumerate(ids)]
        if slots:
            gathered.append(state[:, mx.array(slots)].swapaxes(1, 2).reshape(2, -1, state.shape[3]))
    keys, values = mx.concatenate(gathered, axis=1)
    assert keys.shape == call.output_shapes[0]
    return [keys, values, state]


def _paged_attention(call: SimpleNamespace) -> list[mx.array]:
    queries, plan, num_rows = call.queries, call.plan, call.output_shapes[0][0]
    # Per record and query token of its run.
    records = plan[plans.PLAN_WORK : plans.PLAN_WORK + plans.WORK_FIELDS * call.grid[2]]
    work = records.reshape(call.grid[2], plans.WORK_FIELDS)[:, None]
    begin, end, context_len, query_len, first_row, first_out_row, table = (
        work[..., field] for field in range(plans.WORK_FIELDS)
    )
    run = mx.arange(call.RUN)[None]
    is_present = (run < query_len) & (context_len > 0)
    query_position = context_len - query_len + run
    token = mx.minimum(first_row + run, queries.shape[0] - 1)

    def slot_of(position: mx.array, table: mx.array) -> mx.array:
        block_size = call.key_slab.shape[2]
        entry = mx.clip(table + position // block_size, 0, plan.size - 1)
        slots: mx.array = plan[entry] * block_size + position % block_size
        return slots

    k, v = _rows_of(call.fence_in, call.key_slab, call.value_slab)
    trash = k.shape[0] - 1
    if call.key_rows is not call.key_slab:  # Slabs stand for rows that don't come from inputs.
        is_new = is_present & (query_position >= begin) & (query_position < end)
        new = mx.where(is_new, slot_of(query_position, table), trash).reshape(-1)
        k[new], v[new] = (rows[token.reshape(-1)] for rows in (call.key_rows, call.value_rows))

    position = begin[..., None] + mx.arange(plans.MAX_PARTITION_SIZE)  # [records, 1, keys]
    visible = (position < mx.minimum(end, context_len)[..., None]) & is_present[..., None]
    visible = visible & (position <= query_position[..., None])
    # Not ``query_position - window``, which may be below the least integer.
    visible = visible & (query_position[..., None] - position < plan[1])
    slot = mx.where(visible.any(1), slot_of(position, table[..., None])[:, 0], trash)
    group = queries.shape[1] // k.shape[1]
    keys, values = (mx.repeat(rows[slot], group, 2).astype(mx.float32) for rows in (k, v))
    scaled = queries[token].astype(mx.float32) * call.softmax_scale
    scores = mx.einsum("prhd,pshd->prhs", scaled, keys)
    scores = mx.where(visible[:, :, None], scores, -mx.inf)
    top = mx.maximum(scores.max(-1), -1e30)
    weights = mx.exp(scores - top[..., None])
    total = weights.sum(-1)
    values = mx.where(visible.any(1)[..., None, None], values, 0)  # NaN beside a weight of 0
    out = mx.einsum("prhs,pshd->prhd", weights, values)
    if call.PARTIAL:
        nothing = mx.zeros_like(total)
        out = mx.concatenate([out, mx.stack([top, total, nothing, nothing], -1)], -1)
    else:
        out = _normed(out, top, total, call.sinks)
    result = mx.zeros((num_rows + 1, *call.output_shapes[0][1:]), call.output_dtypes[0])
    rows = mx.where(is_present, first_out_row + run, num_rows).reshape(-1)
    result[rows] = out.reshape(-1, *out.shape[2:]).astype(result.dtype)
    return [result[:num_rows], mx.stack([k, v])]


def _merge_partitions(call: SimpleNamespace) -> list[mx.array]:
    partials, plan, num_tokens = call.partials, call.plan, call.output_shapes[0][0]
    fields = plan[0] + mx.arange(3 * num_tokens)
    first, stride, count = (plan[fields].reshape(num_tokens, 3)[:, i, None] for i in range(3))
    number = mx.arange(partials.shape[0])[None]  # as many partitions as there can be
    is_present = number < count
    row = mx.where(is_present, first + number * stride, 0)
    mine = partials[row]  # [num_tokens, partitions, num_heads, head_dim + 4]
    head_dim = partials.shape[2] - 4
    tops = mx.where(is_present[..., None], mine[..., head_dim], -mx.inf)
    top = tops.max(1)
    share = mx.exp(tops - top[:, None])
    total = (share * mine[..., head_dim + 1]).sum(1)
    out = (share[..., None] * mine[..., :head_dim]).sum(1)
    return [_normed(out, top, total, call.sinks).astype(call.output_dtypes[0])]


def _normed(out: mx.array, top: mx.array, total: mx.array, sinks: mx.array) -> mx.array:
    """Divided by the sum of weights, the sink's among them; ``[..., num_heads, dim]``."""
    return out / (total + mx.exp(sinks[: out.shape[-2]] - top))[..., None]


def _rows_matmul(call: SimpleNamespace) -> list[mx.array]:
    """In the order of sums of the kernel."""
    modes = {number: mode for mode, (number, *_) in rows_matmul.MODES.items()}
    options = {"mode": modes[call.MODE], "bits": call.BITS, "group_size": 0}
    weights = [call.weight]
    if call.MODE != 0:
        options["group_size"] = call.x.shape[-1] // call.scales.shape[1]
        weights += [call.scales] if call.biases is call.scales else [call.scales, call.biases]
    with MonkeyPatch.context() as patch:
        patch.setattr(choose, "is_metal_available", lambda: False)
        return [rows_matmul.rows_matmul(call.x, *weights, **options)]


_KERNELS: dict[str, Callable[..., list[mx.array]]] = {
    "reshape_and_cache": _reshape_and_cache,
    "paged_attention": _paged_attention,
    "merge_partitions": _merge_partitions,
    "gather_blocks": _gather_blocks,
    "copy_blocks": _copy_blocks,
    "rows_matmul": _rows_matmul,
}
