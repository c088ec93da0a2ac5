"""Blocks on their way between a cache and a :class:`Tier`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from mlx_paged.cache.paged import PagedKVCache
from mlx_paged.core import BlockHash, BlockPool, KVCacheBlock
from mlx_paged.core.tier import BlockHeader, Tier
from mlx_paged.errors import CacheFullError

Blocks: TypeAlias = Sequence[tuple[BlockHeader, int]]
"""Blocks of a cache: what each is, and its id."""

# What is on its way at a time, so that a prefix is never twice in memory.
MAX_NBYTES = 2**23


def store_blocks(cache: PagedKVCache, tier: Tier, blocks: Blocks) -> None:
    """Copy blocks of a cache, whose steps have been read, into a tier."""
    cache.wait_for_writes()
    for group, part in _parts(cache, blocks):
        contents = cache.read_blocks(group, [block_id for _, block_id in part])
        for (header, _), content in zip(part, contents, strict=True):
            tier.store(header, content)


def load_blocks(cache: PagedKVCache, tier: Tier, blocks: Blocks) -> None:
    """Fill blocks of a cache, which no step reads yet, with what a tier has of them.

    Raises:
        KeyError: the tier lacks one.
    """
    for group, part in _parts(cache, blocks):
        contents = [loaded(tier, header) for header, _ in part]
        cache.write_blocks(group, [block_id for _, block_id in part], contents)


def _parts(cache: PagedKVCache, blocks: Blocks) -> Iterator[tuple[int, Blocks]]:
    """The blocks by group of layers, as many at a time as may be on their way."""
    for group in range(len(cache.config.groups)):
        of_group = [each for each in blocks if each[0].group == group]
        size = max(1, MAX_NBYTES // cache.config.block_nbytes(group))
        for begin in range(0, len(of_group), size):
            yield group, of_group[begin : begin + size]


def loaded(tier: Tier, header: BlockHeader) -> bytes:
    """The bytes of a block that a tier has; raises ``KeyError`` if it lacks it."""
    content = tier.load(header.block_hash)
    if content is None:
        raise KeyError(f"[tier] there is no block {header.block_hash.hex()}")
    return content


def load_prefix(cache: PagedKVCache, tier: Tier, headers: Sequence[BlockHeader]) -> int:
    """Put blocks of a tier into the prefix cache, as far as they are not there; no step may be
    open.

    Args:
        headers: of full blocks, under their hashes.

    Returns:
        How many blocks were loaded.

    Raises:
        CacheFullError: they don't fit beside what requests hold; nothing was changed but that
            other cached blocks may have been evicted.
    """
    pool = cache.pool
    there: list[KVCacheBlock] = []
    missing: list[BlockHeader] = []
    for header in headers:
        block = pool.get_cached_block(BlockHash(header.block_hash))
        if block is None:
            missing.append(header)
        else:
            there.append(block)
    # Held, so that none of them is evicted for the others; and given back as the newest.
    pool.touch(there)
    try:
        cache.make_room(len(missing))
        if len(missing) > pool.num_free_blocks:
            num_tokens = max(header.first_token for header in headers) + cache.config.block_size
            raise CacheFullError(
                f"[{cache.kind} cache] a snapshot of {num_tokens} tokens needs {len(missing)} more "
                f"blocks of {cache.config.block_size}, and {pool.num_free_blocks} of the budget's "
                f"{cache.config.num_blocks} are free; raise kv_cache_bytes"
            )
        put_cached_blocks(
            pool,
            [BlockHash(header.block_hash) for header in missing],
            lambda ids: load_blocks(cache, tier, list(zip(missing, ids, strict=True))),
        )
    finally:
        pool.free_blocks(reversed(there))
    return len(missing)


def put_cached_blocks(
    pool: BlockPool, block_hashes: Sequence[BlockHash], fill: Callable[[list[int]], None]
) -> None:
    """Take free blocks of the pool and put them into the prefix index, where requests find them.

    Args:
        block_hashes: of the blocks, for which the pool has as many free ones.
        fill: writes them, given their ids. What it raises leaves the index as it was.
    """
    blocks = pool.get_new_blocks(len(block_hashes)) or []
    try:
        fill([block.block_id for block in blocks])
        pool.cache_full_blocks(blocks, block_hashes, 0, len(blocks))
    finally:
        # The tail first, as a sequence gives back its own.
        pool.free_blocks(reversed(blocks))
