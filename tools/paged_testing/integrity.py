"""The invariants of the block bookkeeping and of the queues of requests, checked one by one.

Each failure prints the sum that does not add up. The checks read private state on purpose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NoReturn

from mlx_paged.core import BlockPool, BlockTable, KVCacheBlock, KVCacheManager
from mlx_paged.engine.request import CompletionStatus
from mlx_paged.engine.scheduling.request_queues import RequestQueues, _by_order, place_of
from mlx_paged.engine.scheduling.scheduler import Scheduler


class IntegrityError(AssertionError):
    """An invariant does not hold; the message has the sum."""


def check_scheduler(scheduler: Scheduler) -> None:
    """Check the queues of a scheduler against its tables and blocks.

    Raises:
        AssertionError: they don't match.
        IntegrityError: as :func:`check_manager`.
    """
    check_manager(scheduler.manager)
    _check_queues(scheduler._queues, scheduler.manager)


def check_manager(manager: KVCacheManager) -> None:
    """Verify every invariant of pool and tables. O(blocks).

    Raises:
        IntegrityError: with the sum that failed.
    """
    check_integrity(manager.pool, manager._groups)


def _check_queues(queues: RequestQueues, manager: KVCacheManager) -> None:
    running = {completion.seq_id for completion in queues.running}
    assert {
        seq
        for seq, completion in queues.completions.items()
        if completion.status is CompletionStatus.RUNNING
    } == running
    assert set(queues.completions) == running | {each.seq_id for each in queues.waiting}
    assert running <= set(manager.tables), "a running request has a table"
    assert queues.running == sorted(queues.running, key=place_of)
    assert queues.waiting == sorted(queues.waiting, key=_by_order)
    shares = {completion.request.share for completion in queues.completions.values()}
    assert len(shares) == queues.num_users
    for share in shares:
        assert share.waiting == [each for each in queues.waiting if each.request.share is share]
        assert share.num_running == sum(each.request.share is share for each in queues.running)
    for completion in queues.waiting:
        assert completion.seq_id not in manager.tables, "a waiting request holds nothing"
    for completion in queues.running:
        assert manager.num_tokens(completion.seq_id) == completion.num_computed_tokens
        assert completion.num_computed_tokens <= completion.num_tokens


def check_integrity(pool: BlockPool, requests: Mapping[Hashable, Sequence[BlockTable]]) -> None:
    """Verify every invariant of a pool and of the tables of all requests over it. O(blocks).

    Raises:
        IntegrityError: with the sum that failed.
    """
    tables = [table for groups in requests.values() for table in groups]
    for table in tables:
        check_table_integrity(table)
    check_pool_integrity(pool, tables)
    for request_id, groups in requests.items():
        lengths = [table.num_tokens for table in groups]
        if len(set(lengths)) > 1:
            _fail(f"request {request_id!r} has tables of {lengths} tokens")


def check_pool_integrity(
    pool: BlockPool, holders: Iterable[Iterable[KVCacheBlock]] | None = None
) -> None:
    """Verify every invariant of the pool. O(blocks).

    Args:
        holders: all live block tables (or other lists of blocks). If given, the ``ref_cnt`` of each
            block must be the number of times that they hold it.

    Raises:
        IntegrityError: with the sum that failed.
    """
    _check_blocks(pool)
    free = _check_free_queue(pool)
    _check_counts(pool, free)
    _check_prefix_index(pool)
    if holders is not None:
        _check_holders(pool, holders)


def check_table_integrity(table: BlockTable) -> None:
    """Verify the table against its blocks. O(blocks).

    Raises:
        IntegrityError: with the sum that failed.
    """
    block_size, num_tokens = table.block_size, table.num_tokens
    num_held_tokens = table.num_held_tokens
    ids = [block.block_id for block in table.blocks]
    if table.block_ids != ids:
        _fail(f"block table: block_ids {table.block_ids} != ids of its blocks {ids}")
    all_ids = [block.block_id for block in table]
    if len(set(all_ids)) != len(all_ids):
        _fail(f"block table: {len(all_ids)} blocks, {len(set(all_ids))} different ones: {all_ids}")
    if not 0 <= num_held_tokens <= table.capacity:
        _fail(
            f"block table: {num_held_tokens} tokens in {len(ids)} * {block_size} = "
            f"{table.capacity} slots"
        )
    num_evictable = table.retention.num_evicted(num_tokens)
    if table.num_evicted_tokens > num_evictable or table.num_evicted_tokens % block_size:
        _fail(
            f"block table: {table.num_evicted_tokens} of {num_tokens} tokens are evicted, "
            f"{num_evictable} in whole blocks may be"
        )
    if not 0 <= table.num_cached_blocks <= table.num_full_blocks:
        _fail(
            f"block table: {table.num_cached_blocks} blocks cached, "
            f"{num_tokens} // {block_size} = {table.num_full_blocks} are full"
        )
    if table.is_freed and (ids or num_tokens):
        _fail(f"block table: freed, and holds {len(ids)} blocks, {num_tokens} tokens")
    _check_blocks_of(table)


def _check_blocks_of(table: BlockTable) -> None:
    for index, block in enumerate(table.blocks):
        name = f"block {block.block_id}"
        if not _is_own(table.pool, block):
            _fail(f"block table: {name} is the null block or not of this pool")
        if block.ref_cnt < 1:
            _fail(f"block table: {name} is in the table, its ref_cnt is {block.ref_cnt}")
        is_reserved = index * table.block_size >= table.num_held_tokens
        if is_reserved and not block.is_writable:
            hashed = block.block_hash is not None
            _fail(f"block table: empty {name} has ref_cnt {block.ref_cnt}, hashed: {hashed}")


def _fail(message: str) -> NoReturn:
    raise IntegrityError(f"check_integrity: {message}")


def _is_own(pool: BlockPool, block: KVCacheBlock) -> bool:
    return 0 < block.block_id < len(pool.blocks) and pool.blocks[block.block_id] is block


def _check_blocks(pool: BlockPool) -> None:
    for index, block in enumerate(pool.blocks):
        if block.block_id != index:
            _fail(f"blocks[{index}] has block_id {block.block_id}")
        if block.ref_cnt < 0:
            _fail(f"block {index} has ref_cnt {block.ref_cnt} < 0")
        if block.is_null != (index == 0) or (block is pool.null_block) != (index == 0):
            _fail(
                f"block {index} has is_null {block.is_null}; "
                f"block 0, and only it, is the null block"
            )
        if block.is_foreign and block.block_hash is None:
            _fail(f"block {index} is foreign, and is not in the prefix index")
    null = pool.null_block
    if null.ref_cnt or null.block_hash is not None:
        _fail(f"the null block has ref_cnt {null.ref_cnt}, hashed: {null.block_hash is not None}")


def _check_free_queue(pool: BlockPool) -> set[int]:
    """Links in both directions, membership and order; returns the ids in the queue."""
    queue = pool.free_block_queue
    head, tail = queue._head, queue._tail
    if head.prev_free_block is not None or tail.next_free_block is not None:
        _fail("free queue: a block is linked outside its ends")
    free: set[int] = set()
    first_cached: int | None = None
    previous = head
    while True:
        block = previous.next_free_block
        if block is None:
            _fail(
                f"free queue: it ends after block {previous.block_id}, after {len(free)} blocks, "
                f"before its tail"
            )
        if block.prev_free_block is not previous:
            back = None if block.prev_free_block is None else block.prev_free_block.block_id
            _fail(f"free queue: {previous.block_id} -> {block.block_id} -> back to {back}")
        if block is tail:
            break
        if not _is_own(pool, block):
            _fail(f"free queue: block {block.block_id} is the null block or not of this pool")
        if block.block_hash is not None:
            first_cached = block.block_id if first_cached is None else first_cached
        elif first_cached is not None:
            _fail(
                f"free queue: uncached block {block.block_id} comes after "
                f"cached block {first_cached}"
            )
        free.add(block.block_id)  # Never twice: the link back was checked, and there is only one.
        previous = block
    if queue.num_free_blocks != len(free):
        _fail(f"num_free_blocks {queue.num_free_blocks} != {len(free)} blocks in the free queue")
    return free


def _check_counts(pool: BlockPool, free: set[int]) -> None:
    for block in pool.blocks:
        is_free = block.block_id in free
        if is_free != (block.ref_cnt == 0 and not block.is_null):
            _fail(
                f"block {block.block_id} has ref_cnt {block.ref_cnt}, in the free queue: {is_free}"
            )
        is_linked = block.prev_free_block is not None or block.next_free_block is not None
        if is_linked != is_free:
            _fail(
                f"block {block.block_id} has free-queue links: {is_linked}, "
                f"in the free queue: {is_free}"
            )
    num_empty = sum(pool.blocks[block_id].block_hash is None for block_id in free)
    if pool.num_empty_blocks != num_empty:
        _fail(
            f"num_empty_blocks {pool.num_empty_blocks} != {num_empty} free blocks "
            f"that hold nothing cached"
        )
    num_used = sum(block.ref_cnt > 0 for block in pool.blocks)
    sums = len(free) + num_used, pool.num_free_blocks + pool.num_used_blocks
    if not sums[0] == sums[1] == pool.num_usable_blocks:
        _fail(
            f"free + used = {len(free)} + {num_used} by counting, {pool.num_free_blocks} + "
            f"{pool.num_used_blocks} by the pool, num_usable_blocks {pool.num_usable_blocks}"
        )


def _check_prefix_index(pool: BlockPool) -> None:
    index = pool.prefix_index
    indexed: set[int] = set()
    for block_hash, block in index:
        name = f"prefix index: {block_hash.hex()[:8]} -> block {block.block_id}"
        if not _is_own(pool, block):
            _fail(f"{name}, the null block or not of this pool")
        if block.block_hash != block_hash:
            other = None if block.block_hash is None else block.block_hash.hex()[:8]
            _fail(f"{name}, whose hash is {other}")
        if block.block_id in indexed:
            _fail(f"{name}, twice")
        indexed.add(block.block_id)
    hashed = {block.block_id for block in pool.blocks if block.block_hash is not None}
    if indexed != hashed:
        _fail(
            f"prefix index: {len(hashed)} blocks have a hash, {len(indexed)} are found; "
            f"{sorted(hashed - indexed)}"
        )
    if index.num_blocks != len(indexed):
        _fail(f"num_cached_blocks {index.num_blocks} != {len(indexed)} blocks in the prefix index")
    stray = [
        key.hex()[:8]
        for key, others in index._others.items()
        if not others or key not in index._first
    ]
    if stray:
        _fail(
            f"prefix index: {len(stray)} entries for further blocks without any, "
            f"or without a first: {stray}"
        )


def _check_holders(pool: BlockPool, holders: Iterable[Iterable[KVCacheBlock]]) -> None:
    held = Counter(block for holder in holders for block in holder if not block.is_null)
    for block in held:
        if not _is_own(pool, block):
            _fail(f"block {block.block_id} is held and not of this pool")
    for block in pool.blocks[1:]:
        if block.ref_cnt != held[block]:
            _fail(
                f"block {block.block_id} has ref_cnt {block.ref_cnt}, "
                f"and is held {held[block]} times"
            )
