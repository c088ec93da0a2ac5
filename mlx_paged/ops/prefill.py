"""Attention of long query runs, for all backends: dense K and V per sequence, then MLX's SDPA."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_paged.ops.kv_handle import KVHandle
from mlx_paged.ops.metadata import AttentionMetadata, AttentionParams, Rows

# Capped scores are materialised for this many queries at a time: 256 MiB at 32,768 tokens of
# context and 16 heads.
CAPPED_QUERIES = 128


def prefill(
    q: mx.array,  # [num_tokens, num_heads, key_dim]
    rows: Rows | None,  # [num_tokens, num_kv_heads, key_dim or value_dim] each
    kv: KVHandle,
    step: AttentionMetadata,
    params: AttentionParams,
    gather: Callable[[KVHandle, AttentionMetadata], list[Rows]],
) -> mx.array:
    """``[num_tokens, num_heads, value_dim]``. A sequence without earlier tokens uses its new rows
    directly; for the others, K and V are gathered.

    Args:
        rows: K and V of the step's tokens, also in the slabs; ``None`` to gather them as well.
        gather: returns the dense K and V of each sequence of a step from the slabs,
            ``[num_kv_heads, context_len, key_dim or value_dim]``.
    """
    stored = step if rows is None else step.with_history
    gathered = iter(gather(kv, stored) if stored.num_seqs else ())
    seq_kv = []
    for seq, (context_len, query_len) in enumerate(
        zip(step.context_lens, step.query_lens, strict=True)
    ):
        if rows is None or context_len > query_len:
            keys, values = next(gathered)
        else:
            run = slice(step.cu_seqlens_q[seq], step.cu_seqlens_q[seq + 1])
            keys, values = rows[0][run].swapaxes(0, 1), rows[1][run].swapaxes(0, 1)
        seq_kv.append((keys[None], values[None]))
    if params.holds_latents:
        out = attend_to_latents(q, seq_kv, step, params)
    else:
        out = attend_with_sdpa(q, seq_kv, step, params)
    return out if stored.num_seqs else kv.after_writes(out)


def attend_with_sdpa(
    q: mx.array,  # [num_tokens, num_heads, key_dim]
    seq_kv: Sequence[Rows],  # per sequence, [1, num_kv_heads, context_len, key_dim or value_dim]
    step: AttentionMetadata,
    params: AttentionParams,
) -> mx.array:
    """MLX's SDPA of each sequence, causal within its query run; ``[num_tokens, num_heads,
    value_dim]``. SDPA does not support capped scores, which take matmuls and a softmax instead.
    """
    outputs = []
    starts = step.cu_seqlens_q
    attend = _sdpa if params.softcap is None else _attend_capped
    for seq, (keys, values) in enumerate(seq_kv):
        queries = q[starts[seq] : starts[seq + 1]].swapaxes(0, 1)[None]
        out = attend(queries.astype(keys.dtype), keys, values, params)
        # Indexing would be a gather, which is a launch.
        outputs.append(out.squeeze(0).swapaxes(0, 1))
    return (outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)).astype(q.dtype)


def attend_to_latents(
    q: mx.array,  # [num_tokens, num_heads, key_dim + value_dim]
    seq_kv: Sequence[Rows],  # per sequence latents and rotated keys, [1, 1, context_len, width]
    step: AttentionMetadata,
    params: AttentionParams,
) -> mx.array:
    """:func:`attend_with_sdpa` with latents as the first part of K and as V (MLA); ``[num_tokens,
    num_heads, key_dim]``.
    """
    rows = [(mx.concatenate([latents, keys], axis=-1), latents) for latents, keys in seq_kv]
    return attend_with_sdpa(q, rows, step, params)


def capped(scores: mx.array, softcap: float | None) -> mx.array:
    """``softcap * tanh(scores / softcap)``, or the unchanged scores without a cap."""
    return scores if softcap is None else mx.tanh(scores / softcap) * softcap


def _sdpa(
    queries: mx.array,  # [1, num_heads, query_len, key_dim]
    keys: mx.array,  # [1, num_kv_heads, context_len, key_dim]
    values: mx.array,
    params: AttentionParams,
) -> mx.array:
    query_len, context_len = queries.shape[2], keys.shape[2]
    mask: mx.array | str | None = None if query_len == 1 else "causal"  # a single query sees all
    if params.window is not None and context_len > params.window:
        mask = _visible(query_len, context_len, params.window)
    return mx.fast.scaled_dot_product_attention(
        queries,
        keys,
        values,
        scale=params.scale,
        mask=mask,
        sinks=None if params.sinks is None else params.sinks.astype(keys.dtype),
    )


def _attend_capped(
    queries: mx.array, keys: mx.array, values: mx.array, params: AttentionParams
) -> mx.array:
    """:func:`_sdpa` with capped scores, in float32: half precision rounds a score of 50 by 0.02."""
    _, num_heads, query_len, _ = queries.shape
    context_len, dtype = keys.shape[2], values.dtype
    heads = (keys.shape[1], num_heads // keys.shape[1])
    rows = mx.unflatten(queries.astype(mx.float32) * params.scale, 1, heads)
    keys, values = (array.astype(mx.float32)[:, :, None] for array in (keys, values))
    keys = keys.swapaxes(-1, -2)
    outputs = []
    for begin in range(0, query_len, CAPPED_QUERIES):
        some = rows[..., begin : begin + CAPPED_QUERIES, :]
        num_keys = context_len - query_len + begin + some.shape[3]  # that some of them see
        scores = capped(some @ keys[..., :num_keys], params.softcap)
        visible = _visible(some.shape[3], num_keys, params.window)
        scores = mx.where(visible, scores, -mx.inf)
        if params.sinks is not None:
            sinks = params.sinks.astype(mx.float32).reshape(*heads, 1, 1)
            sinks = mx.broadcast_to(sinks, (*scores.shape[:-1], 1))
            scores = mx.concatenate([scores, sinks], axis=-1)
        weights = mx.softmax(scores, axis=-1)[..., :num_keys]
        outputs.append(weights @ values[..., :num_keys, :])
    return mx.concatenate(outputs, axis=3).flatten(1, 2).astype(dtype)


def _visible(query_len: int, context_len: int, window: int | None) -> mx.array:
    """``[query_len, context_len] bool``: which keys each query sees."""
    query_positions = mx.arange(context_len - query_len, context_len)[:, None]
    key_positions = mx.arange(context_len)[None]
    visible = key_positions <= query_positions
    return visible if window is None else visible & (key_positions > query_positions - window)
