"""Qwen3 token by token, as StreamingLLM defines it: keys are kept without positions, and each query
gives the tokens that it sees the positions 0, 1, 2 and so on, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import mlx.core as mx
import numpy as np

from helpers.engine_runs import known_of
from mlx_paged.models.qwen3 import Model

# Of a query's position: the positions that it sees, itself last.
Visible = Callable[[int], Sequence[int]]


@cache
def streaming(window: int, num_sinks: int, stride: int) -> Visible:
    """The first ``num_sinks`` tokens and the last ``window`` ones at least, where others leave
    ``stride`` at a time.
    """

    def visible(position: int) -> Sequence[int]:
        begin = num_sinks
        while position - begin >= window + stride:
            begin += stride
        return [*range(min(num_sinks, position + 1)), *range(begin, position + 1)]

    return visible


@cache
def sliding(window: int) -> Visible:
    return lambda position: range(max(0, position - window + 1), position + 1)


def everything(position: int) -> Sequence[int]:
    return range(position + 1)


def streamed_logits(
    model: Model,
    tokens: Sequence[int],
    visible: Visible | Sequence[Visible],
    restarts_positions: bool = True,
) -> np.ndarray:
    """Logits ``[num_tokens, vocab_size]``, computed once for a model, which must not be changed.

    Args:
        visible: for all layers, or one for each.
        restarts_positions: whether positions are counted among what is seen; otherwise among all
            tokens, as sliding-window layers have them.
    """
    of_layer = (visible,) * len(model.layers) if callable(visible) else tuple(visible)
    known, key = known_of(model), ("streamed", tuple(tokens), of_layer, restarts_positions)
    if key not in known:
        known[key] = _streamed_logits(model, tokens, of_layer, restarts_positions)
    return known[key]


def _streamed_logits(
    model: Model, tokens: Sequence[int], of_layer: tuple[Visible, ...], restarts_positions: bool
) -> np.ndarray:
    kept: list[tuple[list[mx.array], list[mx.array]]] = [([], []) for _ in model.layers]
    logits = []
    for position, token in enumerate(tokens):
        h = model.model.embed_tokens(mx.array([token]))
        for block, (keys, values), sees in zip(model.layers, kept, of_layer, strict=True):
            attention = block.self_attn
            x = block.input_layernorm(h)
            q, k, v = (
                project(x).reshape(1, -1, 1, attention.head_dim)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = attention.q_norm(q), attention.k_norm(k)
            keys.append(k)
            values.append(v)
            seen = list(sees(position))
            offset = 0 if restarts_positions else seen[0]
            # In one piece where they are, as positions follow one another.
            rotated = attention.rope(mx.concatenate([keys[i] for i in seen], axis=2), offset=offset)
            out = mx.fast.scaled_dot_product_attention(
                attention.rope(q, offset=offset + len(seen) - 1),
                rotated,
                mx.concatenate([values[i] for i in seen], axis=2),
                scale=attention.scale,
            )
            h = h + attention.o_proj(out.reshape(1, -1))
            h = h + block.mlp(block.post_attention_layernorm(h))
        h = model.model.norm(h)
        head = model.model.embed_tokens.as_linear if model.tie_word_embeddings else model.lm_head
        logits.append(np.array(head(h)[0]))
    return np.stack(logits)
