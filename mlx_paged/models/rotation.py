"""Keys at other positions: rotary positions add up, so what is rotated is rotated on."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx


def rotate_on(rope: Callable[..., mx.array], keys: mx.array, distance: int) -> mx.array:
    """Keys as ``rope`` would have rotated them ``distance`` positions further on.

    Args:
        rope: a module of mlx-lm's or MLX's, called with an ``offset``.
        keys: ``[num_tokens, num_kv_heads, key_dim]``, in any floating dtype.
    """
    # Some kinds of scaling make keys longer, too, which these are already.
    length = rope(mx.ones((1, 1, 1, keys.shape[-1])), offset=0)
    rotated = rope(keys.astype(mx.float32)[:, :, None] / length, offset=distance)
    return rotated.squeeze(2).astype(keys.dtype)
