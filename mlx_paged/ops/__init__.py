"""The operations on paged K/V slabs: one door in front of every backend, where all inputs are
checked once.

Shapes: a slab is ``[num_blocks, num_kv_heads, block_size, head_dim]``; rows and queries are packed,
``[num_tokens, heads, head_dim]``, the tokens of all sequences behind one another. The method is
PagedAttention (Kwon et al., 2023); names follow vLLM's ``reshape_and_cache`` / ``paged_attention``
/ ``copy_blocks``."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_paged.ops import checks
from mlx_paged.ops.backends import BACKENDS, BackendError, load_backend, resolve_backend
from mlx_paged.ops.copy_detector import CopyDetector
from mlx_paged.ops.kv_handle import KVHandle
from mlx_paged.ops.metadata import AttentionMetadata, AttentionParams, SlotMapping

__all__ = [
    "BACKENDS",
    "AttentionMetadata",
    "AttentionParams",
    "BackendError",
    "CopyDetector",
    "KVHandle",
    "SlotMapping",
    "attend",
    "copy_blocks",
    "gather_blocks",
    "paged_attention",
    "paged_prefill_attention",
    "reshape_and_cache",
    "resolve_backend",
    "update_and_attend",
    "zero_blocks",
]


def reshape_and_cache(
    k: mx.array,  # [num_tokens, num_kv_heads, head_dim]
    v: mx.array,  # [num_tokens, num_kv_heads, head_dim]
    kv: KVHandle,
    slot_mapping: SlotMapping | Sequence[int] | mx.array,  # [num_tokens]
    backend: str = "auto",
) -> None:
    """Write each row into its slot of the slabs, in place; rows whose slot is below 0 are padding
    and are skipped.

    ``write_slot`` and ``push_row`` elsewhere. Costs O(rows), whatever the size of the slab, as long
    as nobody but ``kv`` holds the slabs.

    Raises:
        ValueError: shapes or dtypes that don't fit the slabs, a slot out of range or named twice.
    """
    if not isinstance(slot_mapping, SlotMapping):
        slot_mapping = SlotMapping.build(slot_mapping, kv.block_size)
    checks.check_slot_write("reshape_and_cache", k, v, kv, slot_mapping)
    load_backend(backend, kv).reshape_and_cache(k, v, kv, slot_mapping)


def paged_attention(
    q: mx.array,  # [num_tokens, num_heads, head_dim]
    kv: KVHandle,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,  # [num_heads]
    backend: str = "auto",
) -> mx.array:
    """Attention over block tables for decodes and short query runs; ragged, causal within a run,
    nothing padded.

    Args:
        window: each query sees this many last tokens, itself included; ``None`` is no limit.
        sinks: learned attention-sink logits, one per query head, as
            ``mx.fast.scaled_dot_product_attention`` takes them.

    Returns:
        ``[num_tokens, num_heads, head_dim]`` in the dtype of ``q``.

    Raises:
        ValueError: shapes, dtypes or block ids that don't fit the slabs.
    """
    checks.check_attention("paged_attention", q, kv, metadata, window, sinks)
    return load_backend(backend, kv).paged_attention(q, kv, metadata, scale, window, sinks)


def paged_prefill_attention(
    q: mx.array,  # [num_tokens, num_heads, head_dim]
    kv: KVHandle,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,  # [num_heads]
    backend: str = "auto",
) -> mx.array:
    """The same result as :func:`paged_attention`, made for long query runs: gather the blocks, then
    MLX's own SDPA.
    """
    checks.check_attention("paged_prefill_attention", q, kv, metadata, window, sinks)
    return load_backend(backend, kv).paged_prefill_attention(q, kv, metadata, scale, window, sinks)


def attend(
    q: mx.array,  # [num_tokens, num_heads, head_dim]
    kv: KVHandle,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,  # [num_heads]
    backend: str = "auto",
) -> mx.array:
    """Attention for any step: query runs that are short enough for the backend are decoded, longer
    ones prefilled.
    """
    checks.check_attention("attend", q, kv, metadata, window, sinks)
    return load_backend(backend, kv).attend(q, kv, metadata, scale, window, sinks)


def update_and_attend(
    q: mx.array,  # [num_tokens, num_heads, head_dim]
    k: mx.array,  # [num_tokens, num_kv_heads, head_dim]
    v: mx.array,  # [num_tokens, num_kv_heads, head_dim]
    kv: KVHandle,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,  # [num_heads]
    backend: str = "auto",
) -> mx.array:
    """Write the step's rows into the slots of ``metadata.slot_mapping``, then :func:`attend`: one
    layer of one step.

    The same result as the two operations one after the other; a kernel does both in one dispatch.
    Where a sequence reads what another one writes in this step, ``metadata`` has to say so
    (``shares_new_blocks``)."""
    checks.check_slot_write("update_and_attend", k, v, kv, metadata.slot_mapping)
    checks.check_attention("update_and_attend", q, kv, metadata, window, sinks)
    return load_backend(backend, kv).update_and_attend(q, k, v, kv, metadata, scale, window, sinks)


def gather_blocks(
    kv: KVHandle, block_table: Sequence[int], num_tokens: int | None = None, backend: str = "auto"
) -> tuple[mx.array, mx.array]:
    """The dense K and V, ``[num_kv_heads, num_tokens, head_dim]`` each, of the first ``num_tokens``
    tokens of a table.

    ``materialize`` elsewhere. ``num_tokens`` defaults to all slots of the table. The result may be
    a view of the slabs: while it is held, the next write copies them whole.

    Raises:
        ValueError: a block id out of range, an empty table, more tokens than the table holds.
    """
    num_tokens = len(block_table) * kv.block_size if num_tokens is None else num_tokens
    table = checks.check_block_table("gather_blocks", block_table, num_tokens, kv)
    return load_backend(backend, kv).gather_blocks(kv, table, num_tokens)


def copy_blocks(
    kv: KVHandle, src_dst_pairs: Sequence[tuple[int, int]], backend: str = "auto"
) -> None:
    """Copy whole blocks within the slabs, in place: ``(source, destination)`` pairs, for
    copy-on-write.

    Raises:
        ValueError: a block id out of range, a destination named twice or that is also a source.
    """
    if len(src_dst_pairs) == 0:
        return
    checks.check_copy_pairs("copy_blocks", src_dst_pairs, kv)
    load_backend(backend, kv).copy_blocks(kv, src_dst_pairs)


def zero_blocks(kv: KVHandle, block_ids: Sequence[int], backend: str = "auto") -> None:
    """Fill whole blocks with zeros, in place.

    For a block that a sequence will fill only in part: what another sequence left in the other
    slots is hidden from attention by a weight of 0, but 0 * NaN is NaN.

    Raises:
        ValueError: a block id out of range.
    """
    if len(block_ids) == 0:
        return
    checks.check_block_ids("zero_blocks", "block_ids", block_ids, kv)
    load_backend(backend, kv).zero_blocks(kv, block_ids)


class Backend:
    def __init__(self, name: str) -> None:
        self.name = name

    def reshape_and_cache(self, k, v, kv, slot_mapping):  # type: ignore
        reshape_and_cache(k, v, kv, slot_mapping, self.name)

    def update_and_attend(self, q, k, v, kv, step, params):  # type: ignore
        p = params
        return update_and_attend(q, k, v, kv, step, p.scale, p.window, p.sinks, self.name)

    def attend(self, q, kv, step, params):  # type: ignore
        return attend(q, kv, step, params.scale, params.window, params.sinks, self.name)

    def gather_blocks(self, kv, block_table, num_tokens):  # type: ignore
        return gather_blocks(kv, block_table, num_tokens, self.name)

    def copy_blocks(self, kv, pairs):  # type: ignore
        copy_blocks(kv, pairs, self.name)

    def zero_blocks(self, kv, block_ids):  # type: ignore
        zero_blocks(kv, block_ids, self.name)


def choose_backend(name, shapes):  # type: ignore
    for key_dim, _, block_size in shapes:
        name = resolve_backend(name, key_dim, block_size)
    return Backend(name)
