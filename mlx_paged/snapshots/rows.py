"""K/V as they come out of a cache and go into one, a layer at a time.

What is passed on are the parts of K and of V of one layer, ``[num_kv_heads, num_tokens, width]``
each, as the cache stores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np

from mlx_paged.cache import CacheFullError, KVCache, Sequences
from mlx_paged.core import BlockHash, ExtraKey, KVCacheBlock, KVCacheManager, hash_token_blocks
from mlx_paged.core.kv_cache_manager import group_hashes
from mlx_paged.errors import ArgumentError
from mlx_paged.ops import Parts
from mlx_paged.request import SeqId
from mlx_paged.snapshots.facts import (
    check_token_ids,
    has_evicted,
    num_kept_tokens,
    retention_of,
)

LayerParts: TypeAlias = tuple[Parts, Parts]


# One sequence of a cache


def check_sequence(sequences: Sequences, seq: SeqId) -> int:
    """How many tokens a sequence has, all of which are there.

    Raises:
        KeyError: there is no such sequence.
        ArgumentError: some of its tokens have left the window.
    """
    if seq not in sequences:
        raise KeyError(f"[snapshot] no sequence {seq!r}; the cache holds {list(sequences)}")
    num_tokens = sequences.seq_len(seq)
    if has_evicted(sequences.cache.config, num_tokens):
        raise ArgumentError(
            f"[snapshot] tokens of sequence {seq!r} have left the window: it has {num_tokens}",
            "seq",
        )
    return num_tokens


def read_sequence(sequences: Sequences, seq: SeqId) -> Iterator[LayerParts]:
    """Of each layer a copy of what is stored of a sequence."""
    for layer in range(len(sequences.cache.layers)):
        yield sequences.copy_parts(seq, layer)


def write_sequence(
    sequences: Sequences, seq: SeqId, num_tokens: int, layers: Iterable[LayerParts]
) -> None:
    """Make ``seq`` hold these rows, in place of what it held.

    Raises:
        CacheFullError: the budget can't hold them.
    """
    if seq in sequences:
        sequences.free(seq)
    rows = ((_tokens_first(k), _tokens_first(v)) for k, v in layers)
    sequences.append_parts(seq, num_tokens, rows)


def _tokens_first(parts: Parts) -> Parts:
    return tuple(part.swapaxes(0, 1) for part in parts)


def check_num_tokens(seq: SeqId, num_tokens: int, token_ids: Sequence[int]) -> None:
    """Raises ``ArgumentError`` unless there are as many token ids as a sequence has tokens."""
    if len(token_ids) != num_tokens:
        raise ArgumentError(
            f"[snapshot] sequence {seq!r} has {num_tokens} tokens in the cache, and token_ids are "
            f"{len(token_ids)}",
            "token_ids",
        )


# Blocks of the prefix cache


class PrefixRows(NamedTuple):
    """K/V of a prefix, of each layer the rows of all its tokens or of those that it keeps."""

    token_ids: list[int]
    layers: Iterator[LayerParts]


def find_prefix(
    cache: KVCache,
    manager: KVCacheManager,
    token_ids: Sequence[int],
    extra_keys: tuple[ExtraKey, ...],
) -> PrefixRows:
    """The longest prefix that is cached, in whole blocks.

    Args:
        extra_keys: of the blocks' hashes.

    Raises:
        ArgumentError: the token ids are none, or not even a block of them is cached.
    """
    token_ids, block_size = check_token_ids(token_ids), cache.config.block_size
    hashes = hash_token_blocks(token_ids, block_size, extra_keys)
    computed = manager.get_computed_blocks(hashes, len(hashes) * block_size + 1)
    if not computed.num_tokens:
        raise ArgumentError(
            f"[snapshot] no K/V of these {len(token_ids)} tokens are in the prefix cache, which "
            f"holds whole blocks of {block_size}",
            "token_ids",
        )
    return PrefixRows(token_ids[: computed.num_tokens], read_blocks(cache, computed.groups))


def read_blocks(cache: KVCache, groups: Sequence[Sequence[KVCacheBlock]]) -> Iterator[LayerParts]:
    """Of each layer what is stored in the blocks of its group; copy it before the next write."""
    for layer in range(len(cache.layers)):
        blocks = groups[cache.config.group_of(layer)]
        yield cache.gather_blocks(layer, [block.block_id for block in blocks])


def put_prefix(cache: KVCache, rows: PrefixRows, extra_keys: tuple[ExtraKey, ...]) -> int:
    """Put the whole blocks of a prefix into the prefix cache, as far as they are not there; no step
    may be open.

    Args:
        extra_keys: of the blocks' hashes.

    Returns:
        How many blocks were written.

    Raises:
        CacheFullError: they don't fit beside what requests hold; nothing was changed but that
            other cached blocks may have been evicted.
    """
    pool, block_size = cache.pool, cache.config.block_size
    block_hashes = hash_token_blocks(rows.token_ids, block_size, extra_keys)
    there: list[KVCacheBlock] = []
    missing: list[list[int]] = []  # of each group, indices of blocks
    names: list[list[BlockHash]] = []
    for group, retention in enumerate(r.retention for r in cache.config.groups):
        hashes = group_hashes(block_hashes, group)
        kept = retention.kept_blocks(len(block_hashes), block_size)
        found = {index: pool.get_cached_block(hashes[index]) for index in kept}
        there += [block for block in found.values() if block is not None]
        missing.append([index for index in kept if found[index] is None])
        names.append([hashes[index] for index in missing[-1]])
    num_missing = sum(map(len, missing))
    # Held, so that room is not made of them; and given back as the newest.
    pool.touch(there)
    new: list[list[KVCacheBlock]] = []
    try:
        cache.make_room(num_missing)
        if num_missing > pool.num_free_blocks:
            raise CacheFullError(
                f"[{cache.kind} cache] a snapshot of {len(block_hashes) * block_size} tokens needs "
                f"{num_missing} more blocks of {block_size}, and {pool.num_free_blocks} of the "
                f"budget's {cache.config.num_blocks} are free; raise kv_cache_bytes"
            )
        for indices in missing:
            new.append(pool.get_new_blocks(len(indices)) or [])
        if num_missing:
            ids = [[block.block_id for block in blocks] for blocks in new]
            cache.fill_blocks(ids, _cut(cache, len(block_hashes), missing, rows.layers))
            for blocks, hashes in zip(new, names, strict=True):
                pool.cache_full_blocks(blocks, hashes, 0, len(blocks))
    finally:
        for blocks in (*new, there):
            pool.free_blocks(reversed(blocks))
    return num_missing


def _cut(
    cache: KVCache, num_blocks: int, wanted: Sequence[Sequence[int]], layers: Iterable[LayerParts]
) -> Iterator[LayerParts]:
    """The rows of the wanted blocks, whose indices are given of each group."""
    block_size = cache.config.block_size
    for layer, kv in enumerate(layers):
        kept = retention_of(cache.config, layer).kept_blocks(num_blocks, block_size)
        num_kept = num_kept_tokens(cache.config, layer, num_blocks * block_size)
        has_all = kv[0][0].shape[1] >= num_blocks * block_size > num_kept
        place = {index: index if has_all else number for number, index in enumerate(kept)}
        indices = [place[index] for index in wanted[cache.config.group_of(layer)]]
        k, v = (tuple(_blocks_of(part, indices, block_size) for part in parts) for parts in kv)
        yield k, v


def _blocks_of(part: mx.array, indices: Sequence[int], block_size: int) -> mx.array:
    if list(indices) == list(range(len(indices))):
        return part[:, : len(indices) * block_size]
    rows = (np.array(indices)[:, None] * block_size + np.arange(block_size)).reshape(-1)
    return part[:, mx.array(rows)]
