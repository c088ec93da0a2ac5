"""``TierCache``: writes full blocks of the prefix cache to a tier, and reads them back."""

from __future__ import annotations

import atexit
import contextlib
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from mlx_paged.block_store.worker import SECONDS_AT_EXIT, BlockWorker, Read, seconds_left
from mlx_paged.cache import PagedKVCache
from mlx_paged.cache.state_bytes import state_from_bytes, state_to_bytes
from mlx_paged.cache.transfer import load_absent
from mlx_paged.core import (
    AbsentBlock,
    BlockHash,
    Checkpoint,
    Checkpoints,
    KVCacheBlock,
    group_hashes,
)
from mlx_paged.core.block_hash import HASH_NBYTES
from mlx_paged.core.tier import STATES, BlockHeader, GuardedTier, Tier
from mlx_paged.engine.request import Completion, CompletionStatus
from mlx_paged.engine.scheduling.batch import Batch
from mlx_paged.engine.storing.unsaved import Unsaved, num_tokens_per_state
from mlx_paged.errors import reason
from mlx_paged.models.kv_cache import is_reading_cheaper
from mlx_paged.request import SeqId

if TYPE_CHECKING:
    from mlx_paged.engine.scheduling.prefix_cache import PrefixCache
    from mlx_paged.engine.scheduling.request_queues import RequestQueues

# The most bytes that a step copies to or from the host in addition to its own work: some 30 ms.
MAX_STEP_NBYTES = 64 * 2**20
# Limits of the queued writes, and of the blocks that are read but not in the pool yet: a share of
# the K/V budget, and a number of bytes.
QUEUE_SHARE, MAX_QUEUED_NBYTES = 1 / 8, 512 * 2**20
MAX_READY_NBYTES = 256 * 2**20
# The number of requests at the front of the queue whose blocks are read ahead.
MAX_READ_AHEAD = 4


@dataclass(frozen=True)
class TierCacheStats:
    """The contents of the folder, by all processes that use it, and what this engine did with it.

    Attributes:
        num_blocks, nbytes: in the folder, as far as this process knows.
        num_read_blocks: found there and read.
        num_read_tokens: of the blocks of these that were put into the pool.
        num_dropped_blocks: not written, because the writer was too slow or everything is pinned.
        num_corrupt_blocks: damaged files, which were removed.
        num_evicted_blocks: removed to keep the limits.
        nbytes_written: size of what this engine has written.
        num_read_states, num_saved_states: blocks of the above that are recurrent states.
        failure: why the folder is no longer used; ``None`` if there is no failure.
    """

    num_blocks: int = 0
    nbytes: int = 0
    num_read_blocks: int = 0
    num_read_tokens: int = 0
    num_written_blocks: int = 0
    num_dropped_blocks: int = 0
    num_corrupt_blocks: int = 0
    num_evicted_blocks: int = 0
    num_read_states: int = 0
    num_saved_states: int = 0
    nbytes_written: int = 0
    failure: str | None = None


# Blocks that were read, by their hash, each with the request that has asked for it.
ReadBlocks: TypeAlias = "dict[BlockHash, tuple[Prefetch, bytes]]"
# Makes a change between two steps; False if that was not possible within the given seconds.
BetweenSteps: TypeAlias = Callable[[Callable[[], None], float], bool]


def at_once(change: Callable[[], None], timeout: float) -> bool:
    """For callers that know that no step runs."""
    change()
    return True


class Prefetch(Read):
    """What a waiting request needs from the tier, during one stay in the queue. It is to be looked
    up, reading, or complete. After a read it is looked up again: a block or a state may have been
    lost, and a shorter prefix may end with another state. It is complete when nothing new is found.

    Attributes:
        wanted: the blocks that are read, by their keys in the tier.
        requested: the keys of all blocks that were looked for so far.
        num_blocks: how many blocks were put into the pool.
    """

    def __init__(self, completion: Completion, is_complete: bool):
        super().__init__()
        self.completion, self.is_complete = completion, is_complete
        self.wanted: dict[bytes, AbsentBlock] = {}
        self.requested: set[bytes] = set()
        self.num_blocks = 0


class TierCache:
    """Copies new full blocks out between steps, and loads the blocks that waiting requests need.

    A full block is unsaved (:class:`Unsaved`), queued, and in the tier, or it was dropped. A block
    that a request needs is read, then put into a free block of the pool and entered into the prefix
    index, like any other cached block, so the scheduler only needs to know which requests have to
    wait (:meth:`first_ready`). The states of recurrent layers are blocks of the group ``STATES``.

    All methods but ``stats`` and those for answers are called by the stepping thread. A failure of
    the tier fails no request: the engine continues without it until it can be used again, and warns
    of both.

    Args:
        cache: the cache of the blocks.
        tier: stores the blocks: a folder, or a tier of the caller's.
        num_parameters: of the model.
        checkpoints: the states of a model with recurrent layers; ``None`` for others.

    Attributes:
        store: the tier.
        saves_preempted: whether reading a block takes less time than computing it.
        is_in_use: returns whether a step may still use the cache at the end of Python.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        tier: Tier,
        num_parameters: int,
        checkpoints: Checkpoints | None = None,
    ):
        config = cache.config
        self.saves_preempted = is_reading_cheaper(num_parameters, config.nbytes_per_token)
        self.is_in_use: Callable[[], bool] = lambda: False
        self.store = tier
        share = min(int(config.nbytes * QUEUE_SHARE), MAX_QUEUED_NBYTES)
        self._worker = BlockWorker(tier, share, min(share, MAX_READY_NBYTES))
        # Its threads hold references to it, and must end even if the engine can't be built.
        weakref.finalize(self, self._worker.finish).atexit = False
        self._cache = cache
        self._block_size = config.block_size
        # Blocks without K/V have no files. They are restored with the state after them.
        self._groups = range(len(config.groups) if config.keeps_kv else 0)
        self._block_nbytes = {group: config.block_nbytes(group) for group in self._groups}
        self._block_nbytes[STATES] = config.state_nbytes
        kv_nbytes = config.nbytes_per_token if config.keeps_kv else 0
        worth = num_tokens_per_state(config.state_nbytes, kv_nbytes)
        self._unsaved = Unsaved(cache.pool, self._groups, self._worker.has, checkpoints, worth)
        self._checkpoints = checkpoints
        if checkpoints is not None:
            checkpoints.on_eviction = self._save_evicted
        self._prefetches: dict[SeqId, Prefetch] = {}  # of waiting requests
        self._num_read_tokens = self._num_read_states = self._num_saved_states = 0
        self._is_closed = self._has_warned = False
        _open.add(self)
        # Before the workers' handler, after which they accept no blocks; finalizers may run later.
        atexit.unregister(_close_all)
        atexit.register(_close_all)

    # For the scheduler

    def has(self, block_hash: BlockHash) -> bool:
        """Whether the tier has a block now. It may be gone when it is read."""
        if self._is_closed or self.store.failure is not None:
            return False
        if not self._groups and len(block_hash) == HASH_NBYTES:
            return True  # It is empty. Whether it is useful depends on the state after it.
        return self.store.has(block_hash)

    def prefetch(
        self, waiting: Iterable[Completion], queues: RequestQueues, prefix_cache: PrefixCache
    ) -> None:
        """Begin to read the blocks of the first waiting requests, long before they are admitted."""
        for completion in islice(waiting, MAX_READ_AHEAD):
            if not self._may_read(completion, queues):
                return
            self._is_ready(completion, prefix_cache)

    def first_ready(
        self, waiting: Iterable[Completion], queues: RequestQueues, prefix_cache: PrefixCache
    ) -> Completion | None:
        """The first waiting request that does not have to wait for its blocks; begins to read those
        of the others before it.
        """
        for completion in waiting:
            if not self._may_read(completion, queues):
                # Space for the reads of others is reserved for them. Without such reads, the
                # request may still fit: blocks that it shares with running requests take no space.
                return None if self._reading() else completion
            if self._is_ready(completion, prefix_cache):
                return completion
        return None

    def end_prefetch(self, completion: Completion) -> int:
        """A request leaves the queue; returns how many tokens were loaded for it."""
        prefetch = self._prefetches.pop(completion.seq_id, None)
        if prefetch is None:
            return 0
        if prefetch.is_reading:
            self._worker.cancel(prefetch)
        return prefetch.num_blocks * self._block_size

    def save_preempted(self, completion: Completion) -> None:
        """Copy out the blocks of a preempted request that the tier lacks, if it takes less time to
        read than to compute them.
        """
        if self.saves_preempted:
            for group in self._groups:
                self._save(group_hashes(completion.block_hashes, group))

    def clear(self) -> None:
        """Cancel the reads of all requests, and save nothing that is not saved yet."""
        for completion in [each.completion for each in self._prefetches.values()]:
            self.end_prefetch(completion)
        self._unsaved.clear()

    # For steps

    def poll(self, is_busy: bool) -> None:
        """Put blocks that were read into the pool.

        Args:
            is_busy: whether other requests wait for the step.
        """
        if not self._prefetches:
            return
        self._report_failure()
        num_left = MAX_STEP_NBYTES if is_busy else MAX_READY_NBYTES
        of_groups: dict[int, ReadBlocks] = {}
        try:
            for prefetch in self._prefetches.values():
                for key, content in self._worker.take(prefetch, num_left):
                    num_left -= len(content)
                    block = prefetch.wanted[key]
                    if block.group == STATES:
                        self._put_state(prefetch, block, content)
                    elif len(content) == self._block_nbytes[block.group]:
                        of_groups.setdefault(block.group, {})[block.block_hash] = prefetch, content
            for group, found in of_groups.items():
                self._put(group, found, is_counted=group == 0)
        except RuntimeError as error:  # MLX's, when memory runs out
            self.store.fail(f"what was read can't be used: {reason(error)}")

    def wait(self, timeout: float) -> None:
        """Wait until blocks were read, if the step has nothing else to do."""
        if self._prefetches:
            # Not for each block, since each step has an overhead.
            self._worker.wait(timeout, MAX_STEP_NBYTES // 2)

    def save(self, batch: Batch, in_flight: Iterable[Batch]) -> None:
        """Save the full blocks of a step that was computed and read.

        Args:
            in_flight: later steps, whose blocks are not computed yet.
        """
        if self._is_off():
            return
        min_uses = self.store.min_uses
        for part in batch.scheduled:
            completion = part.completion
            if not completion.request.no_store:
                end = min(part.start + part.num_new_tokens, completion.num_computed_tokens)
                num_full = min(end // self._block_size, len(completion.block_hashes))
                for stored in self._unsaved.note(completion, num_full, min_uses):
                    self.store.note_used(stored)
        if self._unsaved:
            unready = frozenset().union(*(later.new_block_ids for later in in_flight))
            self._save(unready=unready, max_nbytes=MAX_STEP_NBYTES)

    def save_more(self) -> bool:
        """Copy out blocks that did not fit into the queue, while no step runs; whether some are
        left.
        """
        if self._unsaved and not self._is_off():
            self._save(max_nbytes=MAX_STEP_NBYTES)
        return bool(self._unsaved)

    def save_all(self, timeout: float) -> None:
        """Copy out all unsaved blocks while no step runs, as far as the tier takes them within
        ``timeout`` seconds.
        """
        left, num_unsaved = seconds_left(timeout), len(self._unsaved) + 1
        while self.save_more() and len(self._unsaved) < num_unsaved:
            num_unsaved = len(self._unsaved)
            self._worker.flush(left())

    def close(self, timeout: float, between_steps: BetweenSteps = at_once) -> bool:
        """Write all blocks to be saved, for at most ``timeout`` seconds; whether all were written.
        May be called again. Ctrl-C ends the wait, which is in the caller's thread.
        """
        left = seconds_left(timeout)
        if self._is_closed:
            return True
        if not between_steps(self._stop, timeout):
            return False
        try:
            # The queue may be smaller than what is unsaved.
            while self._unsaved and self.store.failure is None and self._worker.flush(left()):
                num_unsaved = len(self._unsaved)
                if not between_steps(self._save, left()) or len(self._unsaved) == num_unsaved:
                    break
            is_written = self._worker.close(left())
        except BaseException:
            self._worker.close(0.0)
            raise
        return is_written and not self._unsaved

    def finish(self) -> None:
        """Close without waiting for the tier, for an engine that is garbage collected, perhaps in
        the thread of an event loop. Blocks that fit into the queue are still written.
        """
        if not self._is_closed:
            self._stop()
            if self.store.failure is None:
                self._save()
            self._worker.finish()

    # For kept answers. Any thread may call these.

    def has_answer(self, key: bytes) -> bool:
        """Whether an answer is in the tier or about to be written."""
        return self._worker.has(key)

    def load_answer(self, key: bytes) -> bytes | None:
        """An answer that :meth:`keep_answer` has stored, in this process or another."""
        return self.store.load(key) if self.has(BlockHash(key)) else None

    def keep_answer(self, header: BlockHeader, content: bytes) -> None:
        """Queue an answer to be written; it is dropped if the queue is full."""
        self._worker.offer(header, content)

    def note_answers_used(self, keys: Sequence[bytes]) -> None:
        """Record the use of answers of one conversation, in order."""
        self.store.note_used(keys)

    def stats(self) -> TierCacheStats:
        """The current figures. Any thread may call it."""
        store = self.store.stats()
        return TierCacheStats(
            num_blocks=store.num_blocks,
            nbytes=store.nbytes,
            num_read_blocks=store.num_hits,
            num_read_tokens=self._num_read_tokens,
            num_written_blocks=store.num_written,
            num_dropped_blocks=store.num_dropped + self._unsaved.num_dropped,
            num_corrupt_blocks=store.num_corrupt,
            num_evicted_blocks=store.num_evicted,
            num_read_states=self._num_read_states,
            num_saved_states=self._num_saved_states,
            nbytes_written=store.nbytes_written,
            failure=None if self._is_closed else self.store.failure,
        )

    # Reads

    def _reading(self) -> list[Completion]:
        return [each.completion for each in self._prefetches.values() if each.is_reading]

    def _may_read(self, completion: Completion, queues: RequestQueues) -> bool:
        """Whether a request is known, or the pool has room for it beside those that are read."""
        is_known = completion.seq_id in self._prefetches
        return is_known or queues.fits([*self._reading(), completion])

    def _is_ready(self, completion: Completion, prefix_cache: PrefixCache) -> bool:
        """Whether no block of a request is being read, and nothing else is there to be read."""
        prefetch = self._prefetches.get(completion.seq_id)
        if prefetch is None:
            is_preempted = completion.status is CompletionStatus.PREEMPTED
            prefetch = Prefetch(completion, is_preempted and not self.saves_preempted)
            self._prefetches[completion.seq_id] = prefetch
        while not (prefetch.is_complete or prefetch.is_reading):
            absent = prefix_cache.absent_blocks(completion, self.has)
            blocks: dict[bytes, AbsentBlock] = {each.block_hash: each for each in absent}
            prefetch.is_complete = blocks.keys() <= prefetch.requested
            if not prefetch.is_complete:
                prefetch.requested |= blocks.keys()
                prefetch.wanted = blocks
                self._read(prefetch)
        return not prefetch.is_reading

    def _read(self, prefetch: Prefetch) -> None:
        wanted = prefetch.wanted.values()
        with_bytes = [each.block_hash for each in wanted if each.group in self._block_nbytes]
        if with_bytes:
            self._worker.read(prefetch, with_bytes)
        else:  # The model has no K/V, and the state is in memory.
            self._put(0, _empty_blocks(prefetch), is_counted=False)
        # Grow once for all of them, during the reads: growing copies the slabs.
        self._cache.make_room(sum(len(each.wanted) for each in self._prefetches.values()))

    def _put_state(self, prefetch: Prefetch, block: AbsentBlock, content: bytes) -> None:
        """Put a state that was read into memory. Without K/V, it restores the blocks before it."""
        assert self._checkpoints is not None, "states are read only if the model has some"
        try:
            state = state_from_bytes(content, self._cache.config.state_layout)
        except ValueError:  # From a tier of the caller's: the folder verifies what it reads.
            self.store.count("num_corrupt")
            return
        block_hash = BlockHash(block.block_hash[:HASH_NBYTES])
        self._checkpoints.put(Checkpoint(block_hash, state), block.num_tokens)
        self._num_read_states += 1
        if not self._groups:
            self._put(0, _empty_blocks(prefetch), is_counted=True)

    def _put(self, group: int, found: ReadBlocks, is_counted: bool) -> None:
        """Put blocks that were read into the pool, and count their tokens."""
        contents = {key: content for key, (_, content) in found.items()}
        hashes = load_absent(self._cache, group, contents)
        if is_counted:
            self._num_read_tokens += len(hashes) * self._block_size
            for key in hashes:
                found[key][0].num_blocks += 1

    # Writes

    def _save(
        self,
        keys: Iterable[BlockHash] | None = None,
        unready: Set[int] = frozenset(),
        max_nbytes: int = MAX_QUEUED_NBYTES,
    ) -> None:
        """Copy unsaved blocks out and queue them to be written, in order, until the queue is full.

        Args:
            keys: of the blocks; by default all that are unsaved.
            unready: ids of blocks that a step in flight fills, which are saved later.
        """
        num_left = max_nbytes
        for header in self._unsaved.headers(keys):
            found = self._unsaved.find(header)
            if found is None or found.is_foreign:
                self._unsaved.remove(header.block_hash)
                self._unsaved.num_dropped += found is None
                continue
            if isinstance(found, KVCacheBlock) and found.block_id in unready:
                continue
            nbytes = self._block_nbytes[header.group]
            # One is always copied, whatever its size.
            is_beyond = nbytes > num_left < max_nbytes
            if is_beyond or not self._worker.has_room(nbytes):
                return
            num_left -= nbytes
            self._unsaved.remove(header.block_hash)
            self._offer(header, found)

    def _save_evicted(self, checkpoint: Checkpoint) -> None:
        """Save a state that is about to be evicted, if it is worth it."""
        if self._is_closed or self.store.failure is not None:
            return
        header = self._unsaved.take_evicted(checkpoint)
        if header is None:
            return
        has_room = self._worker.has_room(self._block_nbytes[STATES])
        try:
            if has_room:
                self._offer(header, checkpoint)
        except RuntimeError:  # The step that computes it failed, and reports that itself.
            has_room = False
        self._unsaved.num_dropped += not has_room

    def _offer(self, header: BlockHeader, found: KVCacheBlock | Checkpoint) -> None:
        """Copy a block or a state out, and queue it."""
        if isinstance(found, KVCacheBlock):
            (content,) = self._cache.read_blocks(header.group, [found.block_id])
        else:
            content = state_to_bytes(found.content)
            self._num_saved_states += 1
        self._worker.offer(header, content)

    def _stop(self) -> None:
        """Read no more, and save what was not worth it before."""
        if self._checkpoints is not None:
            if not self._is_off():
                self._unsaved.add_last()
            self._checkpoints.on_eviction = None
        self._is_closed = True
        for prefetch in self._prefetches.values():
            self._worker.cancel(prefetch)

    def _is_off(self) -> bool:
        self._report_failure()
        return self._is_closed or self.store.failure is not None

    def _report_failure(self) -> None:
        """Warn when the tier fails, and when it can be used again."""
        failure = self.store.failure
        if self._is_closed or (failure is not None) == self._has_warned:
            return
        self._has_warned = failure is not None
        text = "[engine] the disk works again, and K/V are kept there"
        if failure is not None:
            self._unsaved.clear()
            # A tier of the caller's is not tried again.
            until = "" if isinstance(self.store, GuardedTier) else ", until it works again"
            text = f"[engine] {failure}; from now on K/V are kept in memory only{until}"
        # If warnings are errors, this one would fail the step.
        with contextlib.suppress(Warning):
            warnings.warn(text, stacklevel=2)


def _empty_blocks(prefetch: Prefetch) -> ReadBlocks:
    """The wanted blocks of a model without K/V."""
    keys = [key for key, block in prefetch.wanted.items() if block.group != STATES]
    return {BlockHash(key): (prefetch, b"") for key in keys}


_open: weakref.WeakSet[TierCache] = weakref.WeakSet()


def _close_all() -> None:
    left = seconds_left(SECONDS_AT_EXIT)
    for cache in list(_open):
        if not cache.is_in_use():
            cache.close(left())


def _close_in_child() -> None:
    """After a fork, the threads that read and write are in the other process."""
    for cache in list(_open):
        cache._is_closed = True
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)
