"""``DiskTier``: writes full blocks of the prefix cache to a folder, and reads them back."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mlx_paged.block_store import BlockReader, BlockWriter
from mlx_paged.block_store.workers import SECONDS_AT_EXIT, ReadBlock
from mlx_paged.cache import PagedKVCache
from mlx_paged.cache.state_bytes import state_from_bytes, state_to_bytes
from mlx_paged.cache.transfer import put_cached_blocks
from mlx_paged.core import (
    AbsentBlock,
    BlockHash,
    Checkpoint,
    Checkpoints,
    KVCacheBlock,
    group_hashes,
    state_key,
)
from mlx_paged.core.block_hash import HASH_NBYTES
from mlx_paged.core.tier import STATES, BlockHeader, GuardedTier, Tier
from mlx_paged.engine.batch import Batch
from mlx_paged.engine.disk_states import DiskStates, num_tokens_per_state
from mlx_paged.engine.request import Completion
from mlx_paged.errors import reason
from mlx_paged.models.kv_cache import is_moving_cheaper
from mlx_paged.request import SeqId

# The most bytes that a step copies to or from the host in addition to its own work: some 30 ms.
MAX_STEP_NBYTES = 64 * 2**20
# Limits of the queued writes, and of the blocks that are read but not in the pool yet: a share of
# the K/V budget, and a number of bytes.
QUEUE_SHARE, MAX_QUEUED_NBYTES = 1 / 8, 512 * 2**20
MAX_READY_NBYTES = 256 * 2**20
# The most blocks that wait to be copied out; each takes some hundred bytes of bookkeeping.
MAX_UNSAVED_BLOCKS = 100_000
# Floating-point operations in the time in which a disk reads one byte: an M1 does 2.6 TFLOPS, and
# its disk reads some 2.6 GB/s.
OPERATIONS_PER_DISK_BYTE = 1_000


@dataclass(frozen=True)
class DiskTierStats:
    """The contents of the folder, by all processes that use it, and what this engine did with it.

    Attributes:
        num_blocks, nbytes: in the folder, as far as this process knows.
        num_read_blocks: found there and read; ``num_read_tokens`` are those that went into the
            pool.
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


# Makes a change between two steps; False if that was not possible within the given seconds.
BetweenSteps: TypeAlias = Callable[[Callable[[], None], float], bool]


def at_once(change: Callable[[], None], timeout: float) -> bool:
    """For callers that know that no step runs."""
    change()
    return True


def is_reading_cheaper(num_parameters: int, kv_nbytes_per_token: int) -> bool:
    """Whether reading K/V from disk takes less time than computing them."""
    return is_moving_cheaper(num_parameters, kv_nbytes_per_token, OPERATIONS_PER_DISK_BYTE)


class DiskTier:
    """Copies new full blocks out between steps, and loads the blocks that waiting requests need.

    Loaded blocks are put into free blocks of the pool and entered into the prefix index, like any
    other cached block. So this class does not depend on block tables, and the scheduler only needs
    to know which requests have to wait (:class:`ReadAhead`).

    All methods but ``stats`` and those for answers are called by the stepping thread. A failure of
    the disk fails no request: the engine continues without it until it can be used again, and warns
    of both.

    Args:
        cache: the cache of the blocks.
        tier: stores the blocks: a folder, or a tier of the caller's.
        num_parameters: of the model.
        checkpoints: the states of a model with recurrent layers; ``None`` for others.

    Attributes:
        pays_for_preempted: whether loading a block takes less time than computing it.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        tier: Tier,
        num_parameters: int,
        checkpoints: Checkpoints | None = None,
    ):
        config = cache.config
        self.pays_for_preempted = is_reading_cheaper(num_parameters, config.nbytes_per_token)
        self.store = tier
        share = min(int(config.nbytes * QUEUE_SHARE), MAX_QUEUED_NBYTES)
        self._writer = BlockWriter(self.store, share)
        self._reader = BlockReader(self.store, min(share, MAX_READY_NBYTES))
        # Their threads hold references to them, and must end even if the engine can't be built.
        for end in (self._reader.close, self._writer.finish):
            weakref.finalize(self, end).atexit = False
        self._cache = cache
        self._block_size = config.block_size
        # Blocks without K/V have no files. They are restored with the state after them.
        self._groups = range(len(config.groups) if config.keeps_kv else 0)
        self._block_nbytes = {group: config.block_nbytes(group) for group in self._groups}
        self._block_nbytes[STATES] = config.state_nbytes
        self._states: DiskStates | None = None
        if checkpoints is not None:
            kv_nbytes = config.nbytes_per_token if config.keeps_kv else 0
            worth = num_tokens_per_state(config.state_nbytes, kv_nbytes)
            self._states = DiskStates(checkpoints, config.block_size, worth, config.keeps_kv)
            checkpoints.on_eviction = self._save_evicted
        # Computed but not copied out yet, in the order of computation.
        self._unsaved: dict[BlockHash, BlockHeader] = {}
        self._wanted: dict[SeqId, dict[bytes, AbsentBlock]] = {}  # blocks that are being read
        self._num_brought: dict[SeqId, int] = {}
        self._num_read_tokens = self._num_unsaved_dropped = 0
        self._num_read_states = self._num_saved_states = 0
        self._is_closed = self._has_said_why = False
        # Whether a step may still use the cache at the end of Python.
        self.is_in_use: Callable[[], bool] = lambda: False
        _open_tiers.add(self)
        # Before the writers' handler, after which they accept no blocks; finalizers may run later.
        atexit.unregister(_close_all)
        atexit.register(_close_all)

    # For the scheduler

    def has(self, block_hash: BlockHash) -> bool:
        """Whether the tier has a block now. It may be gone when it is read."""
        if self._is_closed or self.store.failure is not None:
            return False
        if not self._groups and len(block_hash) == HASH_NBYTES:
            return True  # It is empty. Whether it is useful depends on the state after it.
        try:
            return self.store.has(block_hash)
        except Exception as error:  # raised by a tier of the caller's
            self.store.fail(f"a block could not be looked up: {reason(error)}")
            return False

    def read(self, seq_id: SeqId, blocks: Sequence[AbsentBlock]) -> None:
        """Begin to load blocks into the pool, where the request will find them cached."""
        self._wanted[seq_id] = {block.block_hash: block for block in blocks}
        with_bytes = [block.block_hash for block in blocks if block.group in self._block_nbytes]
        self._reader.read(seq_id, with_bytes)
        if not with_bytes:  # The model has no K/V, and the state is in memory.
            self._put_empty(seq_id)
        # Grow once for all of them, during the reads: growing copies the slabs.
        self._cache.make_room(sum(map(len, self._wanted.values())))

    def is_reading(self, seq_id: SeqId) -> bool:
        """Whether some of the requested blocks are still being read."""
        return seq_id in self._wanted and self._reader.is_reading(seq_id)

    def forget(self, seq_id: SeqId) -> int:
        """Cancel the reads of a request; returns how many tokens were loaded for it."""
        if self._wanted.pop(seq_id, None) is None:
            return 0
        self._reader.cancel(seq_id)
        return self._num_brought.pop(seq_id, 0) * self._block_size

    def keep(self, completion: Completion) -> None:
        """Copy out the blocks of a preempted request that are not on disk yet."""
        hashes = [
            block_hash
            for group in self._groups
            for block_hash in group_hashes(completion.block_hashes, group)
        ]
        self._save([each for each in hashes if each in self._unsaved], frozenset())

    def clear(self) -> None:
        """Cancel the reads of all requests, and save nothing that is not saved yet."""
        for seq_id in list(self._wanted):
            self.forget(seq_id)
        self._unsaved.clear()

    # For steps

    def bring_back(self, is_busy: bool) -> None:
        """Put blocks that were read into the pool.

        Args:
            is_busy: whether other requests wait for the step.
        """
        if not self._wanted:
            return
        self._report_failure()
        taken = self._reader.take(MAX_STEP_NBYTES if is_busy else MAX_READY_NBYTES)
        of_groups: dict[int, list[ReadBlock]] = {}
        for read in taken:
            wanted = self._wanted.get(read.key, {}).get(read.block_hash)
            if wanted is None:
                continue  # No request is waiting for it any more.
            if wanted.group == STATES:
                self._put_state(wanted, read)
            elif len(read.payload) == self._block_nbytes[wanted.group]:
                of_groups.setdefault(wanted.group, []).append(read)
        for group, reads in of_groups.items():
            read_blocks = self._put(group, reads)
            if group == 0:
                self._count(read_blocks)

    def wait(self, timeout: float) -> None:
        """Wait until blocks were read, if the step has nothing else to do."""
        if self._wanted:
            # Not for each block, since each step has an overhead.
            self._reader.wait(timeout, MAX_STEP_NBYTES // 2)

    def note(self, batch: Batch, in_flight: Iterable[Batch]) -> None:
        """Save the full blocks of a step that was computed and read.

        Args:
            in_flight: later steps, whose blocks are not computed yet.
        """
        if self._is_off():
            return
        for part in batch.scheduled:
            completion = part.completion
            if not completion.request.no_store:
                end = min(part.start + part.num_new_tokens, completion.num_computed_tokens)
                self._note(completion, min(end // self._block_size, len(completion.block_hashes)))
        if self._unsaved:
            unready = frozenset().union(*(later.new_block_ids for later in in_flight))
            self._save(list(self._unsaved), unready, MAX_STEP_NBYTES)

    def save_more(self) -> bool:
        """Copy out blocks that did not fit into the writer's queue, while no step runs; whether
        some are left.
        """
        if self._unsaved and not self._is_off():
            self._save(list(self._unsaved), frozenset(), MAX_STEP_NBYTES)
        return bool(self._unsaved)

    def close(self, timeout: float, between_steps: BetweenSteps = at_once) -> bool:
        """Write all blocks to be saved, for at most ``timeout`` seconds; whether all were written.
        May be called again. Ctrl-C ends the wait, which is in the caller's thread.
        """
        deadline = time.monotonic() + timeout
        if self._is_closed:
            return True
        if not between_steps(self._stop_reading, timeout):
            return False
        try:
            # The queue may be smaller than what is left.
            while self._unsaved and self.store.failure is None:
                if not self._writer.flush(max(0.0, deadline - time.monotonic())):
                    break
                num_left = len(self._unsaved)
                if not between_steps(self._save_all, max(0.0, deadline - time.monotonic())):
                    break
                if len(self._unsaved) == num_left:
                    break
            is_at_rest = self._writer.close(max(0.0, deadline - time.monotonic()))
        except BaseException:
            self._writer.close(0.0)
            raise
        if is_at_rest:  # Otherwise its thread still uses the store.
            self.store.close()
        return is_at_rest and not self._unsaved

    def let_go(self) -> None:
        """Close without waiting for the disk, for an engine that is garbage collected, perhaps in
        the thread of an event loop. Blocks that fit into the writer's queue are still written.
        """
        if not self._is_closed:
            self._stop_reading()
            if self.store.failure is None:
                self._save_all()
            self._writer.finish()

    # For kept answers. Any thread may call these.

    def has_answer(self, key: bytes) -> bool:
        """Whether an answer is on disk or about to be written."""
        return self._writer.is_queued(key) or self.has(BlockHash(key))

    def load_answer(self, key: bytes) -> bytes | None:
        """An answer that :meth:`keep_answer` has stored, in this process or another."""
        if not self.has(BlockHash(key)):
            return None
        try:
            return self.store.load(key)
        except Exception as error:  # raised by a tier of the caller's
            self.store.fail(f"an answer could not be read: {reason(error)}")
            return None

    def keep_answer(self, header: BlockHeader, content: bytes) -> None:
        """Queue an answer to be written; it is dropped if the queue is full."""
        self._writer.offer(header, content)

    def note_answers_used(self, keys: Sequence[bytes]) -> None:
        """Record the use of answers of one conversation, in order."""
        self.store.note_used(keys)

    def _save_evicted(self, checkpoint: Checkpoint) -> None:
        """Save a state that is about to be evicted, if it is worth it."""
        assert self._states is not None, "it is called by states"
        key = state_key(checkpoint.block_hash)
        due = self._unsaved.pop(key, None)
        if checkpoint.is_foreign:
            return
        evicted = self._states.evicted(checkpoint.block_hash, self._is_kept)
        if self._is_closed or self.store.failure is not None:
            return
        for header in [due] if due is not None else evicted:
            has_room = self._writer.has_room(self._block_nbytes[STATES])
            try:
                if has_room:
                    self._offer(header, checkpoint)
            except RuntimeError:  # The step that computes it failed, and reports that itself.
                has_room = False
            self._num_unsaved_dropped += not has_room

    def _is_kept(self, block_hash: BlockHash) -> bool:
        """Whether a block or a state is on disk or about to be written."""
        is_queued = block_hash in self._unsaved or self._writer.is_queued(block_hash)
        return is_queued or self.has(block_hash)

    def _save_all(self) -> None:
        self._save(list(self._unsaved), frozenset())

    def stats(self) -> DiskTierStats:
        """The current figures. Any thread may call it."""
        store = self.store.stats()
        return DiskTierStats(
            num_blocks=store.num_blocks,
            nbytes=store.nbytes,
            num_read_blocks=store.num_hits,
            num_read_tokens=self._num_read_tokens,
            num_written_blocks=store.num_written,
            num_dropped_blocks=store.num_dropped + self._num_unsaved_dropped,
            num_corrupt_blocks=store.num_corrupt,
            num_evicted_blocks=store.num_evicted,
            num_read_states=self._num_read_states,
            num_saved_states=self._num_saved_states,
            nbytes_written=store.nbytes_written,
            failure=None if self._is_closed else self.store.failure,
        )

    # Internals

    def _stop_reading(self) -> None:
        if self._states is not None and not self._is_off():
            left = list(self._states.left(self._is_kept))
            self._unsaved |= {BlockHash(header.block_hash): header for header in left}
        if self._states is not None:
            self._states.checkpoints.on_eviction = None
        self._is_closed = True
        self._reader.close()

    def _note(self, completion: Completion, num_full_blocks: int) -> None:
        begin, completion.num_saved_blocks = (
            completion.num_saved_blocks,
            max(completion.num_saved_blocks, num_full_blocks),
        )
        hashes, block_size = completion.block_hashes, self._block_size
        num_hit_blocks, min_uses = (
            completion.request.num_cached_tokens // block_size,
            self.store.min_uses,
        )
        # The blocks that may be saved: all, or those that another request has left in memory.
        end = num_full_blocks if min_uses == 1 else num_hit_blocks if min_uses == 2 else 0
        if num_full_blocks > begin:
            for group in self._groups:
                self._note_blocks(completion, group, range(begin, num_full_blocks), end)
        if self._states is not None:
            end = min(end, num_full_blocks)
            for header in self._states.note(completion, begin, end, self._is_kept):
                self._unsaved.setdefault(BlockHash(header.block_hash), header)
            if not begin and num_hit_blocks and self._states.is_written(hashes[num_hit_blocks - 1]):
                self.store.note_used([state_key(hashes[num_hit_blocks - 1])])

    def _note_blocks(self, completion: Completion, group: int, blocks: range, end: int) -> None:
        """Mark full blocks as used if they are on disk, or those before ``end`` to be saved."""
        hashes, block_size = completion.block_hashes, self._block_size
        used: list[BlockHash] = []
        begin = blocks.start
        parent = group_hashes(hashes[begin - 1 : begin], group)[0] if begin else None
        new_hashes = group_hashes(hashes[begin : blocks.stop], group)
        for index, block_hash in enumerate(new_hashes, begin):
            if self._writer.is_queued(block_hash) or self.has(block_hash):
                used.append(block_hash)
            elif index >= end:
                pass
            elif len(self._unsaved) < MAX_UNSAVED_BLOCKS:
                start = index * block_size
                tokens = tuple(completion.token_ids[start : start + block_size])
                header = BlockHeader(block_hash, parent, tokens, start, group)
                self._unsaved.setdefault(block_hash, header)
            else:
                self._num_unsaved_dropped += 1
            parent = block_hash
        if used:
            self.store.note_used(used)

    def _save(
        self,
        block_hashes: Iterable[BlockHash],
        unready: frozenset[int],
        max_nbytes: int = MAX_QUEUED_NBYTES,
    ) -> None:
        """Copy blocks out and queue them to be written, in order, until the queue is full.

        Args:
            unready: ids of blocks that a step in flight fills, which are saved later.
        """
        num_left = max_nbytes
        for block_hash in block_hashes:
            header = self._unsaved[block_hash]
            found = self._find(header)
            if found is None:
                del self._unsaved[block_hash]
                self._num_unsaved_dropped += not self._is_foreign(header)
                continue
            if isinstance(found, KVCacheBlock) and found.block_id in unready:
                continue
            nbytes = self._block_nbytes[header.group]
            # One is always copied, whatever its size.
            is_beyond = nbytes > num_left < max_nbytes
            if is_beyond or not self._writer.has_room(nbytes):
                return
            num_left -= nbytes
            del self._unsaved[block_hash]
            self._offer(header, found)

    def _find(self, header: BlockHeader) -> KVCacheBlock | Checkpoint | None:
        """The block or state of a header, unless it was evicted or is foreign."""
        if header.group != STATES:
            return self._cache.pool.get_storable_block(BlockHash(header.block_hash))
        assert self._states is not None, "states are saved only if there are some"
        return self._states.in_memory(header)

    def _is_foreign(self, header: BlockHeader) -> bool:
        """Whether all that memory has of a header is foreign. It never goes to the tier."""
        if header.group != STATES:
            return self._cache.pool.get_cached_block(BlockHash(header.block_hash)) is not None
        assert self._states is not None, "states are saved only if there are some"
        return BlockHash(header.block_hash[:HASH_NBYTES]) in self._states.checkpoints

    def _offer(self, header: BlockHeader, found: KVCacheBlock | Checkpoint) -> None:
        """Copy a block or a state out, and queue it."""
        if isinstance(found, KVCacheBlock):
            (content,) = self._cache.read_blocks(header.group, [found.block_id])
        else:
            content = state_to_bytes(found.content)
            self._num_saved_states += 1
        self._writer.offer(header, content)

    def _put_state(self, wanted: AbsentBlock, read: ReadBlock) -> None:
        """Put a state that was read into memory. Without K/V, it restores the blocks before it."""
        assert self._states is not None, "states are read only if the model has some"
        try:
            state = state_from_bytes(read.payload, self._cache.config.state_layout)
        except ValueError:  # From a tier of the caller's: the folder verifies what it reads.
            self.store.count("num_corrupt")
            return
        except RuntimeError as error:  # MLX's, when memory runs out
            self._fail_to_use(error)
            return
        block_hash = BlockHash(read.block_hash[:HASH_NBYTES])
        self._states.checkpoints.put(Checkpoint(block_hash, state), wanted.num_tokens)
        self._num_read_states += 1
        if not self._groups:
            self._count(self._put_empty(read.key))

    def _put_empty(self, seq_id: SeqId) -> Sequence[ReadBlock]:
        """Put the wanted blocks of a model without K/V into the pool."""
        wanted = [each for each in self._wanted[seq_id].values() if each.group != STATES]
        return self._put(0, [ReadBlock(seq_id, each.block_hash, b"") for each in wanted])

    def _count(self, reads: Sequence[ReadBlock]) -> None:
        """Count the tokens of blocks that were put into the pool."""
        self._num_read_tokens += len(reads) * self._block_size
        for read in reads:
            key: SeqId = read.key
            self._num_brought[key] = self._num_brought.get(key, 0) + 1

    def _put(self, group: int, reads: Sequence[ReadBlock]) -> Sequence[ReadBlock]:
        """Put blocks into the pool; returns those that were absent and fitted."""
        pool = self._cache.pool
        absent = {
            BlockHash(read.block_hash): read
            for read in reads
            if pool.get_cached_block(BlockHash(read.block_hash)) is None
        }
        self._cache.make_room(len(absent))
        num_blocks = min(len(absent), pool.num_free_blocks)
        hashes, contents = list(absent)[:num_blocks], list(absent.values())[:num_blocks]
        if not hashes:
            return []
        payloads = [content.payload for content in contents]

        def fill(ids: list[int]) -> None:
            if group in self._groups:
                self._cache.write_blocks(group, ids, payloads)

        try:
            put_cached_blocks(pool, hashes, fill, is_foreign=False)
        except RuntimeError as error:  # MLX's, when memory runs out
            self._fail_to_use(error)
            return []
        return contents

    def _fail_to_use(self, error: RuntimeError) -> None:
        self.store.fail(f"what was read can't be used: {reason(error)}")
        self._report_failure()

    def _is_off(self) -> bool:
        self._report_failure()
        return self._is_closed or self.store.failure is not None

    def _report_failure(self) -> None:
        """Warn when the disk fails, and when it can be used again."""
        failure = self.store.failure
        if self._is_closed or (failure is not None) == self._has_said_why:
            return
        self._has_said_why = failure is not None
        text = "[engine] the disk works again, and K/V are kept there"
        if failure is not None:
            self._unsaved.clear()
            # A tier of the caller's is not tried again.
            until = "" if isinstance(self.store, GuardedTier) else ", until it works again"
            text = f"[engine] {failure}; from now on K/V are kept in memory only{until}"
        # If warnings are errors, this one would fail the step.
        with contextlib.suppress(Warning):
            warnings.warn(text, stacklevel=2)


_open_tiers: weakref.WeakSet[DiskTier] = weakref.WeakSet()


def _close_all() -> None:
    deadline = time.monotonic() + SECONDS_AT_EXIT
    for tier in list(_open_tiers):
        if not tier.is_in_use():
            tier.close(max(0.0, deadline - time.monotonic()))


def _close_in_child() -> None:
    """After a fork, the threads that read and write are in the other process."""
    for tier in list(_open_tiers):
        tier._is_closed = True
    _open_tiers.clear()


os.register_at_fork(after_in_child=_close_in_child)
