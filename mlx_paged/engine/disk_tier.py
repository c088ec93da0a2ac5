"""``DiskTier``: full blocks of the prefix cache in a folder, where a restart and other processes
find them.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from typing import TypeAlias

import mlx.core as mx

from mlx_paged.block_store import BlockReader, BlockWriter, Fingerprint
from mlx_paged.block_store.reader import ReadBlock
from mlx_paged.block_store.writer import SECONDS_AT_EXIT
from mlx_paged.cache import KVCache, LayerSpec, PagedKVCache
from mlx_paged.cache.transfer import put_cached_blocks
from mlx_paged.core import KEEP_ALL, AbsentBlock, BlockHash, Retention, group_hashes
from mlx_paged.core.tier import BlockHeader, Tier
from mlx_paged.engine.batch import Batch
from mlx_paged.engine.disk_tier_options import DiskTierOptions
from mlx_paged.engine.stats import DiskTierStats
from mlx_paged.engine.swap_space import is_moving_cheaper
from mlx_paged.errors import reason
from mlx_paged.models.identity import KV_VERSION, ModelIdentity
from mlx_paged.request import Request, SeqId

# What a step may copy to or from the host beside its own work: some 30 ms.
MAX_STEP_NBYTES = 64 * 2**20
# What waits to be written, and what is read and not in the pool yet, as shares of the K/V budget,
# and at most this many bytes.
QUEUE_SHARE, MAX_QUEUED_NBYTES = 1 / 8, 512 * 2**20
MAX_READY_NBYTES = 256 * 2**20
# Blocks that are to be saved and not copied yet; each is some hundred bytes of bookkeeping.
MAX_UNSAVED_BLOCKS = 100_000
# Floating-point operations that a chip does in the time in which a disk gives one byte: an M1 does
# 2.6 TFLOPS, and its disk gives some 2.6 GB/s.
OPERATIONS_PER_DISK_BYTE = 1_000


# Makes a change when no step runs; False if that is not done within the given seconds.
BetweenSteps: TypeAlias = Callable[[Callable[[], None], float], bool]


def at_once(change: Callable[[], None], timeout: float) -> bool:
    """Where no step can run."""
    change()
    return True


def is_reading_cheaper(num_parameters: int, kv_nbytes_per_token: int) -> bool:
    """Whether K/V are read from disk in less time than they are computed."""
    return is_moving_cheaper(num_parameters, kv_nbytes_per_token, OPERATIONS_PER_DISK_BYTE)


class DiskTier:
    """Copies new full blocks out while the loop goes on, and brings back those that waiting
    requests need.

    Blocks that come back go into free blocks of the pool and under their hashes into the prefix
    index; then they are like any other cached block. So this knows nothing of tables, and the
    scheduler knows of it only whom to let wait (:class:`BlockTier`).

    All methods are the stepping thread's, but ``stats``. A failure of the disk fails no request:
    the engine goes on without, and a warning says so once.

    Args:
        cache: whose blocks these are.
        tier: where the blocks lie, a folder or a place of the caller's.
        num_parameters: of the model.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        tier: Tier,
        num_parameters: int,
    ):
        config = cache.config
        self.pays_for_preempted = is_reading_cheaper(num_parameters, config.nbytes_per_token)
        self.store = tier
        share = min(int(config.nbytes * QUEUE_SHARE), MAX_QUEUED_NBYTES)
        self._writer = BlockWriter(self.store, share)
        self._reader = BlockReader(self.store, min(share, MAX_READY_NBYTES))
        self._cache = cache
        self._block_size = config.block_size
        self._groups = range(len(config.groups))
        self._block_nbytes = [config.block_nbytes(group) for group in self._groups]
        # Computed and not copied out yet, in the order in which they were computed.
        self._unsaved: dict[BlockHash, BlockHeader] = {}
        self._group_of: dict[SeqId, dict[bytes, int]] = {}  # of the blocks being read
        self._num_brought: dict[SeqId, int] = {}
        self._num_read_tokens = self._num_unsaved_dropped = 0
        self._is_closed = self._has_said_why = False
        _open_tiers.add(self)

    # What the scheduler asks

    def has(self, block_hash: BlockHash) -> bool:
        if self._is_closed or self.store.failure is not None:
            return False
        try:
            return self.store.has(block_hash)
        except Exception as error:  # of a tier that is the caller's
            self.store.fail(f"a block could not be looked up: {reason(error)}")
            return False

    def read(self, seq_id: SeqId, blocks: Sequence[AbsentBlock]) -> None:
        self._group_of[seq_id] = {block.block_hash: block.group for block in blocks}
        self._reader.read(seq_id, [block.block_hash for block in blocks])
        # Once for all of them, and while they are read: each growth copies the slabs.
        self._cache.make_room(sum(map(len, self._group_of.values())))

    def is_reading(self, seq_id: SeqId) -> bool:
        return seq_id in self._group_of and self._reader.is_reading(seq_id)

    def forget(self, seq_id: SeqId) -> int:
        if self._group_of.pop(seq_id, None) is None:
            return 0
        self._reader.cancel(seq_id)
        return self._num_brought.pop(seq_id, 0) * self._block_size

    def keep(self, request: Request) -> None:
        """Copy out at once what is not on disk of a request that is preempted."""
        hashes = [
            block_hash
            for group in self._groups
            for block_hash in group_hashes(request.block_hashes, group)
        ]
        self._save([each for each in hashes if each in self._unsaved], frozenset())

    def clear(self) -> None:
        for seq_id in list(self._group_of):
            self.forget(seq_id)
        self._unsaved.clear()

    # What steps ask

    def bring_back(self, is_busy: bool) -> None:
        """Put blocks that were read into the pool.

        Args:
            is_busy: others wait for the step.
        """
        if not self._group_of:
            return
        self._report_failure()
        taken = self._reader.take(MAX_STEP_NBYTES if is_busy else MAX_READY_NBYTES)
        of_groups: dict[int, list[ReadBlock]] = {}
        for read in taken:
            group = self._group_of.get(read.key, {}).get(read.block_hash)
            # Otherwise no request waits for it any more, or it is not of this cache.
            if group is not None and len(read.payload) == self._block_nbytes[group]:
                of_groups.setdefault(group, []).append(read)
        for group, reads in of_groups.items():
            self._put(group, reads)

    def wait(self, timeout: float) -> None:
        """Wait until something was read, for a step that has nothing else to do."""
        if self._group_of:
            # Not for each block: a step has costs of its own.
            self._reader.wait(timeout, MAX_STEP_NBYTES // 2)

    def note(self, batch: Batch, in_flight: Iterable[Batch]) -> None:
        """A step was computed and read: its full blocks are to be kept.

        Args:
            in_flight: later steps, whose blocks are not.
        """
        if self._is_off():
            return
        for part in batch.scheduled:
            request = part.request
            if not request.no_store:
                end = min(part.start + part.num_new_tokens, request.num_computed_tokens)
                self._note(request, min(end // self._block_size, len(request.block_hashes)))
        if self._unsaved:
            unready = frozenset().union(*(later.new_block_ids for later in in_flight))
            self._save(list(self._unsaved), unready, MAX_STEP_NBYTES)

    def save_more(self) -> bool:
        """Copy out blocks that had no room in the writer's queue, while no step runs; whether some
        are left.
        """
        if self._unsaved and not self._is_off():
            self._save(list(self._unsaved), frozenset(), MAX_STEP_NBYTES)
        return bool(self._unsaved)

    def close(self, timeout: float, between_steps: BetweenSteps = at_once) -> bool:
        """Write what is to be kept, for ``timeout`` seconds at most; whether all was written. May
        be called again. Ctrl-C ends the wait, which is the caller's and not the engine's.
        """
        deadline = time.monotonic() + timeout
        if self._is_closed:
            return True
        if not between_steps(self._stop_reading, timeout):
            return False
        try:
            # The queue may hold less than what is left.
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
        if is_at_rest:  # Otherwise its thread has the store, and may have it for long.
            self.store.close()
        return is_at_rest and not self._unsaved

    def let_go(self) -> None:
        """Close without a wait for the disk, for an engine that is dropped, perhaps in the thread
        of an event loop. What finds room in the writer's queue is written by its thread.
        """
        if not self._is_closed:
            self._stop_reading()
            if self.store.failure is None:
                self._save_all()
            self._writer.finish()

    def _save_all(self) -> None:
        self._save(list(self._unsaved), frozenset())

    def stats(self) -> DiskTierStats:
        """From any thread."""
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
            failure=None if self._is_closed else self.store.failure,
        )

    # Inside

    def _stop_reading(self) -> None:
        self._is_closed = True
        self._reader.close()

    def _note(self, request: Request, num_full_blocks: int) -> None:
        begin, request.num_saved_blocks = (
            request.num_saved_blocks,
            max(request.num_saved_blocks, num_full_blocks),
        )
        if num_full_blocks <= begin:
            return
        used: list[BlockHash] = []
        hashes, block_size = request.block_hashes, self._block_size
        for group in self._groups:
            parent = group_hashes(hashes[begin - 1 : begin], group)[0] if begin else None
            new_hashes = group_hashes(hashes[begin:num_full_blocks], group)
            for index, block_hash in enumerate(new_hashes, begin):
                if self._writer.is_queued(block_hash) or self.has(block_hash):
                    used.append(block_hash)
                elif len(self._unsaved) < MAX_UNSAVED_BLOCKS:
                    start = index * block_size
                    tokens = tuple(request.token_ids[start : start + block_size])
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
        """Copy blocks out and queue them to be written, in order, as long as the queue has room.

        Args:
            unready: blocks that a step in flight fills; they are left for later.
        """
        pool = self._cache.pool
        for block_hash in block_hashes:
            header = self._unsaved[block_hash]
            block = pool.get_cached_block(block_hash)
            if block is None:  # Evicted since.
                del self._unsaved[block_hash]
                self._num_unsaved_dropped += 1
                continue
            if block.block_id in unready:
                continue
            nbytes = self._block_nbytes[header.group]
            max_nbytes -= nbytes
            if max_nbytes < 0 or not self._writer.has_room(nbytes):
                return
            (content,) = self._cache.read_blocks(header.group, [block.block_id])
            del self._unsaved[block_hash]
            self._writer.offer(header, content)

    def _put(self, group: int, reads: Sequence[ReadBlock]) -> None:
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
            return
        payloads = [content.payload for content in contents]
        try:
            put_cached_blocks(
                pool, hashes, lambda ids: self._cache.write_blocks(group, ids, payloads)
            )
        except RuntimeError as error:  # MLX's, when memory runs out
            self.store.fail(f"what was read can't be used: {reason(error)}")
            self._report_failure()
            return
        if group == 0:
            self._num_read_tokens += num_blocks * self._block_size
            for content in contents:
                key: SeqId = content.key
                self._num_brought[key] = self._num_brought.get(key, 0) + 1

    def _is_off(self) -> bool:
        self._report_failure()
        return self._is_closed or self.store.failure is not None

    def _report_failure(self) -> None:
        """Say once why the disk is not used any more."""
        if self.store.failure is None or self._is_closed or self._has_said_why:
            return
        self._has_said_why = True
        self._unsaved.clear()
        # Where warnings are errors, this one would fail the step.
        with contextlib.suppress(Warning):
            warnings.warn(
                f"[engine] {self.store.failure}; from now on K/V are kept in memory only",
                stacklevel=2,
            )


_open_tiers: weakref.WeakSet[DiskTier] = weakref.WeakSet()


def _close_all() -> None:
    deadline = time.monotonic() + SECONDS_AT_EXIT
    for tier in list(_open_tiers):
        tier.close(max(0.0, deadline - time.monotonic()))


# Before the writers' own end, which takes nothing more; finalizers may run after that.
atexit.register(_close_all)


def open_disk_tier(
    made: Callable[[Fingerprint], Tier],
    cache: KVCache,
    identities: Callable[[], Sequence[ModelIdentity]],
    num_parameters: int,
) -> DiskTier:
    """The tier of an engine.

    Args:
        made: makes the place for the blocks of a fingerprint.
        identities: of the model, and of the draft model if there is one.
        num_parameters: of the model.

    Raises:
        ArgumentError: the folder can't be used, or its limit holds no block.
    """
    assert isinstance(cache, PagedKVCache), "checked with the options"
    if isinstance(made, DiskTierOptions):
        made.check_block(cache.config.nbytes_per_block)
    return DiskTier(cache, made(fingerprint_of(cache, identities())), num_parameters)


def fingerprint_of(cache: PagedKVCache, identity: Sequence[ModelIdentity]) -> Fingerprint:
    """What the bytes of a block depend on beside its tokens. Versions of MLX, backends and devices
    round in different places, and an answer is to be the one that would be computed here.
    """
    config = cache.config
    layers = tuple(
        f"group {index}: {_described(config.layers[layer])}, {_kept(group.retention)}"
        for index, group in enumerate(config.groups)
        for layer in group.layers
    )
    digests = "\n".join(each.digest for each in identity)
    formats = dict.fromkeys(str(spec.format) for spec in config.layers)
    return Fingerprint(
        model=hashlib.sha256(digests.encode()).hexdigest(),
        model_name=" + ".join(each.name for each in identity),
        layers=layers,
        kv_format=", ".join(formats),
        block_size=config.block_size,
        code=f"mlx_paged {KV_VERSION}, mlx {version('mlx')}, {_computer(cache)}",
    )


def _computer(cache: PagedKVCache) -> str:
    return f"{cache.backend.name} backend on a {mx.default_device().type.name}"


def _described(spec: LayerSpec) -> str:
    window = "" if spec.window is None else f", window {spec.window}"
    widths = f"K {spec.key_dim} and V {spec.value_dim} wide"
    return f"{spec.num_kv_heads} heads, {widths}{window}, {spec.format.description}"


def _kept(retention: Retention) -> str:
    return "all tokens" if retention == KEEP_ALL else str(retention)
