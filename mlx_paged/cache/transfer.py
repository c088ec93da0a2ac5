"""Transfers of blocks between a cache and a :class:`Tier`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from mlx_paged.cache.paged import PagedKVCache
from mlx_paged.core import BlockHash, BlockPool, KVCacheBlock
from mlx_paged.core.tier import BlockHeader, LostBlockError, Tier
from mlx_paged.errors import CacheFullError

Blocks: TypeAlias = Sequence[tuple[BlockHeader, int]]
"""Headers and ids of blocks in a cache."""

# The most bytes of a transfer at a time, so that a prefix is never in memory twice.
MAX_NBYTES = 2**23


def store_blocks(cache: PagedKVCache, tier: Tier, blocks: Blocks) -> None:
    """Copy blocks of a cache into a tier. No step that writes them may be in flight."""
    cache.wait_for_writes()
    for group, part in _parts(cache, blocks):
        contents = cache.read_blocks(group, [block_id for _, block_id in part])
        for (header, _), content in zip(part, contents, strict=True):
            tier.store(header, content)


def load_blocks(cache: PagedKVCache, tier: Tier, blocks: Blocks) -> None:
    """Fill blocks of a cache from a tier. No step may read them yet.

    Raises:
        LostBlockError: a block is not in the tier.
    """
    for group, part in _parts(cache, blocks):
        contents = []
        for header, _ in part:
            content = tier.load(header.block_hash)
            if content is None:
                raise LostBlockError(f"[tier] no block {header.block_hash.hex()}")
            contents.append(content)
        cache.write_blocks(group, [block_id for _, block_id in part], contents)


def _parts(cache: PagedKVCache, blocks: Blocks) -> Iterator[tuple[int, Blocks]]:
    """The blocks by group of layers, up to ``MAX_NBYTES`` at a time."""
    for group in range(len(cache.config.groups)):
        of_group = [each for each in blocks if each[0].group == group]
        size = max(1, MAX_NBYTES // cache.config.block_nbytes(group))
        for begin in range(0, len(of_group), size):
            yield group, of_group[begin : begin + size]


def load_prefix(
    cache: PagedKVCache, tier: Tier, headers: Sequence[BlockHeader], is_foreign: bool = True
) -> int:
    """Load missing blocks of a prefix from a tier into the prefix cache. No step may be open.

    Args:
        headers: of full blocks, under their hashes.
        is_foreign: unless they are known to equal what would be computed here.

    Returns:
        How many blocks were loaded.

    Raises:
        CacheFullError: they don't fit next to the blocks in use. Nothing has changed, except that
            other cached blocks may have been evicted.
    """
    pool = cache.pool
    cached: list[KVCacheBlock] = []
    missing: list[BlockHeader] = []
    for header in headers:
        block = pool.get_cached_block(BlockHash(header.block_hash))
        if block is None:
            missing.append(header)
        else:
            cached.append(block)
    # Held, so that none is evicted for the others, and freed as the most recently used.
    pool.touch(cached)
    try:
        cache.make_room(len(missing))
        if len(missing) > pool.num_free_blocks:
            num_tokens = max(header.first_token for header in headers) + cache.config.block_size
            raise CacheFullError(
                f"[{cache.kind} cache] a snapshot of {num_tokens} tokens needs {len(missing)} more "
                f"blocks of {cache.config.block_size}, and {pool.num_free_blocks} of the budget's "
                f"{cache.config.num_blocks} are free; raise kv_cache_bytes"
            )
        _put_cached_blocks(
            pool,
            [BlockHash(header.block_hash) for header in missing],
            lambda ids: load_blocks(cache, tier, list(zip(missing, ids, strict=True))),
            is_foreign,
        )
    finally:
        pool.free_blocks(reversed(cached))
    return len(missing)


def load_absent(
    cache: PagedKVCache, group: int, contents: Mapping[BlockHash, bytes]
) -> list[BlockHash]:
    """Put blocks into the prefix cache, as many as fit; returns the hashes of those that it lacked.
    No step may be open.

    Args:
        contents: of blocks of a group of layers, by their hashes; empty for a model without K/V.
    """
    hashes = [each for each in contents if cache.pool.get_cached_block(each) is None]
    cache.make_room(len(hashes))
    hashes = hashes[: cache.pool.num_free_blocks]

    def fill(ids: list[int]) -> None:
        if cache.config.keeps_kv:
            cache.write_blocks(group, ids, [contents[each] for each in hashes])

    if hashes:
        _put_cached_blocks(cache.pool, hashes, fill, is_foreign=False)
    return hashes


def _put_cached_blocks(
    pool: BlockPool,
    block_hashes: Sequence[BlockHash],
    fill: Callable[[list[int]], None],
    is_foreign: bool,
) -> None:
    """Fill free blocks of the pool and enter them into the prefix index.

    Args:
        block_hashes: of the blocks; the pool must have this many free ones.
        fill: writes them, given their ids. If it raises, the index is unchanged.
        is_foreign: whether they hold foreign K/V.
    """
    blocks = pool.get_new_blocks(len(block_hashes)) or []
    try:
        fill([block.block_id for block in blocks])
        pool.cache_full_blocks(blocks, block_hashes, 0, len(blocks), is_foreign)
    finally:
        # Tail first, as a sequence frees its blocks.
        pool.free_blocks(reversed(blocks))
