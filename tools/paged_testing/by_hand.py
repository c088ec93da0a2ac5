"""Steps and slabs made by hand, for operations without a cache around them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import mlx.core as mx

from mlx_paged.ops import AttentionMetadata, KVFormat, KVHandle


def step_of(
    block_tables: Sequence[Sequence[int]],
    context_lens: Sequence[int],
    query_lens: Sequence[int],
    block_size: int,
    shares_new_blocks: bool = False,
    num_logit_rows: Sequence[int] | None = None,
) -> AttentionMetadata:
    """A step of these sequences. Blocks behind their contexts are left out of their tables."""
    tables = [
        array("i", table[: -(-context_len // block_size)])
        for table, context_len in zip(block_tables, context_lens, strict=True)
    ]
    counts = None if num_logit_rows is None else list(num_logit_rows)
    return AttentionMetadata(
        tables, list(context_lens), list(query_lens), block_size, shares_new_blocks, counts
    )


def dense_handle(k: mx.array, v: mx.array) -> KVHandle:
    """Of dense slabs, ``[num_blocks, num_kv_heads, block_size, key_dim]`` and
    ``[..., value_dim]``.
    """
    return KVHandle((k,), (v,), KVFormat.dense(k.dtype))
