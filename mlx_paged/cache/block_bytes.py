"""Serialisation of blocks: the contents of a block of one group of layers as bytes, and back.

The bytes of a block are those of its layers' slabs in turn: for each layer the parts of K, then
those of V, ``[num_kv_heads, block_size, width]`` each, as stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np

from mlx_paged.ops import Backend, KVHandle


def read_blocks(slabs: Sequence[KVHandle], block_ids: Sequence[int]) -> list[bytes]:
    """Copies of blocks, whose rows have been written: kernels in flight are not waited for."""
    # Views of the slabs, without a copy. None may outlive this call: a write would then copy its
    # slab.
    windows = [
        np.frombuffer(cast(Any, slab), dtype=np.uint8).reshape(slab.shape[0], -1)
        for kv in slabs
        for slab in kv.slabs
    ]
    return [b"".join([window[block_id].data for window in windows]) for block_id in block_ids]


def write_blocks(
    backend: Backend, slabs: Sequence[KVHandle], block_ids: Sequence[int], contents: Sequence[bytes]
) -> None:
    """Fill blocks with what :func:`read_blocks` returned.

    Raises:
        ValueError: contents of the wrong size.
    """
    expected = sum(slab.nbytes // slab.shape[0] for kv in slabs for slab in kv.slabs)
    for content in contents:
        if len(content) != expected:
            raise ValueError(
                f"[paged cache] a block of these layers has {expected} bytes, got {len(content)}"
            )
    offset = 0
    for kv in slabs:
        parts = []
        for slab in kv.slabs:
            shape, nbytes = slab.shape[1:], slab.nbytes // slab.shape[0]
            # Unsigned integers: numpy has no bfloat16.
            dtype, count = f"u{slab.itemsize}", nbytes // slab.itemsize
            rows = [np.frombuffer(each, dtype, count, offset) for each in contents]
            parts.append(mx.array(np.stack(rows)).view(slab.dtype).reshape(-1, *shape))
            offset += nbytes
        num_key_parts = len(kv.k)
        backend.write_blocks(
            kv, block_ids, tuple(parts[:num_key_parts]), tuple(parts[num_key_parts:])
        )
