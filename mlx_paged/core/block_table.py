"""``BlockTable``: the blocks of one sequence, and how many tokens are in them."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mlx_paged.core.block_hash import BlockHash
from mlx_paged.core.block_pool import BlockPool
from mlx_paged.core.errors import (
    BlockTableError,
    DoubleFreeError,
    FrozenBlockError,
    UseAfterFreeError,
)
from mlx_paged.core.free_queue import KVCacheBlock
from mlx_paged.core.key_positions import KeyPositions
from mlx_paged.core.retention import KEEP_ALL, Retention

BlockCopy = tuple[int, int]
"""(src block id, dst block id): copy the whole block in every slab."""


class TableState(NamedTuple):
    """A table without its blocks, to resume it later with their contents (swap)."""

    num_blocks: int  # of its tokens
    num_sinks: int  # blocks of sinks as they were computed, after the others
    num_held_tokens: int
    num_evicted_tokens: int = 0
    shift: int = 0
    position_origin: int = 0
    num_cached_blocks: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_held_tokens + self.num_evicted_tokens


class BlockTable:
    """The block table of one sequence (elsewhere: page table, sequence, ``KVCacheBlocks`` of a
    request).

    As long as all tokens are kept, token t is in block ``block_ids[t // block_size]`` at offset
    ``t % block_size``. A step is

        copies = table.reserve(n)       # None: out of blocks, and nothing has changed
        copy_blocks(slabs, copies)
        slots = table.slot_mapping(table.num_tokens, n)     # write the n new rows there
        table.advance(n)

    The table grows and is trimmed at its end. Where its ``retention`` does not keep all tokens,
    ``evict`` removes whole blocks from its middle, after the sinks, and the later ones move up:
    ``block_ids`` are the blocks that attention reads, without a gap. Sinks are then held twice: as
    they were computed, for others to share, and in the table with their K shifted to positions
    right before the window (:class:`KeyPositions`).

    Besides those of the sinks, an id changes in place only for copy-on-write. A partly filled block
    is writable while this table is its only holder and it has no hash. It stops being writable
    after a ``fork``, and after ``adopt`` or ``trim_to`` left a part of a hashed block at the end;
    the next ``reserve`` then replaces it by a new block and returns the copy to make.

    The method is PagedAttention's (Kwon et al. 2023). Names are those of vLLM, and where vLLM has
    none, of other serving engines (``slot_mapping(offset, n)``, ``advance(n)``,
    ``trim_to(length)``). Elsewhere, ``append_token`` is ``increment_fill``, ``free`` is ``drain``
    or ``free_all``, and ``reserve`` is repeated ``push``.

    ``len(table)`` counts blocks, so an empty table is falsy: compare with None to test for absence.

    Args:
        pool: the blocks.
        retention: which tokens are kept; all of them by default.
    """

    __slots__ = (
        "_block_ids",
        "_blocks",
        "block_size",
        "is_foreign",
        "is_freed",
        "num_cached_blocks",
        "num_evicted_tokens",
        "num_held_tokens",
        "pool",
        "positions",
        "retention",
    )

    def __init__(self, pool: BlockPool, retention: Retention = KEEP_ALL) -> None:
        self.pool = pool
        self.retention = retention
        self.block_size = pool.block_size
        self._blocks: list[KVCacheBlock] = []
        self._block_ids = array("i")
        self.positions = KeyPositions(pool, retention)
        """The positions of its keys."""
        self.num_held_tokens = 0
        """Tokens in the table, the context of attention: without evicted ones."""
        self.num_evicted_tokens = 0
        """Evicted tokens after the sinks, in whole blocks."""
        self.num_cached_blocks = 0
        """Leading full blocks that were entered into the prefix index, or came from it, including
        evicted ones."""
        self.is_foreign = False
        """Whether the sequence began with foreign K/V. What is computed after them is foreign, too.
        """
        self.is_freed = False
        """True after ``free``, which ends the use of a table."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """All blocks that it holds: those of its tokens, then the sinks as they were computed."""
        return itertools.chain(self._blocks, self.positions.sinks)

    # Contents

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence, evicted ones included. Also known as ``seq_len``."""
        return self.num_held_tokens + self.num_evicted_tokens

    @property
    def num_full_blocks(self) -> int:
        """Blocks filled to the last slot, which may be cached; evicted ones are counted."""
        return self.num_tokens // self.block_size

    @property
    def capacity(self) -> int:
        """Token slots in the table, filled or not, without those of evicted tokens."""
        return len(self._blocks) * self.block_size

    @property
    def num_unfilled_slots(self) -> int:
        """Slots that are not filled: the internal fragmentation of this sequence."""
        return len(self._blocks) * self.block_size - self.num_held_tokens

    @property
    def blocks(self) -> Sequence[KVCacheBlock]:
        """The blocks, first token first. The live list: don't change or keep it."""
        return self._blocks

    @property
    def block_ids(self) -> list[int]:
        """The ids of the blocks, first token first."""
        return self._block_ids.tolist()

    @property
    def packed_block_ids(self) -> array[int]:
        """``block_ids`` as int32, which a device array takes in one copy. The live array: don't
        change or keep it.
        """
        return self._block_ids

    # Token -> slot

    def slot_mapping(self, offset: int, n: int) -> list[int]:
        """The slots of tokens offset .. offset + n - 1, ``[n]``, reserved ones beyond
        ``num_tokens`` included. Raises BlockTableError beyond the capacity, and for evicted ones.
        """
        num_evicted, num_sinks = self.num_evicted_tokens, self.retention.num_sink_tokens
        if offset < 0 or n < 0 or offset + n > self.capacity + num_evicted:
            raise BlockTableError(
                f"BlockTable.slot_mapping: tokens {offset} to {offset + n} of a table of "
                f"{len(self._blocks)} blocks of {self.block_size} = {self.capacity} slots"
            )
        start = offset
        if num_evicted and offset + n > num_sinks:
            if offset < num_sinks + num_evicted:
                raise BlockTableError(
                    f"BlockTable.slot_mapping: tokens {offset} to {offset + n}, of which "
                    f"{num_sinks} to {num_sinks + num_evicted} have left the window"
                )
            start -= num_evicted
        ids, block_size = self._block_ids, self.block_size
        return [ids[t // block_size] * block_size + t % block_size for t in range(start, start + n)]

    # Growing

    def num_new_blocks(self, n: int) -> int:
        """Blocks that ``reserve(n)`` would take from the pool.

        Free slots in the partly filled last block and in reserved blocks are used first. A block
        that must be copied before it is written counts as one, and so does each shared block whose
        keys have to be shifted.

        Raises:
            BlockTableError: for n < 0.
            UseAfterFreeError: for a freed table.
        """
        num_missing, must_copy = self._shortage("num_new_blocks", n)
        num_new_blocks = num_missing + must_copy
        if self.num_evicted_tokens:
            num_new_blocks += self.positions.num_copies(
                self._blocks, self.num_tokens, self.num_evicted_tokens
            )
        return num_new_blocks

    def reserve(self, n: int) -> list[BlockCopy] | None:
        """Reserve slots for n more tokens, or return None and change nothing when out of blocks.

        Returns:
            The copy-on-write pairs: ``[]`` almost always, one pair when the partly filled block is
            not writable. Compare with None: an empty list is falsy, too. Apply the pairs of all
            tables in the order in which they were returned, and before any slot of the step is
            written: a source may be free now, and the next ``reserve`` may hand it out.

        Raises:
            BlockTableError: for n < 0.
            UseAfterFreeError: for a freed table.
        """
        num_missing, must_copy = self._shortage("reserve", n)
        if self.num_evicted_tokens and not self.positions.move(
            self._blocks,
            self._block_ids,
            self.num_tokens,
            self.num_evicted_tokens,
            num_missing + must_copy,
        ):
            return None
        if not must_copy and not num_missing:
            return []
        blocks = self._blocks
        tail = self.num_held_tokens // self.block_size if must_copy else len(blocks)
        before = self._block_ids[tail - 1] if tail else None
        new_blocks = self.pool.get_new_blocks(num_missing + must_copy, after=before)
        if new_blocks is None:
            return None
        copies: list[BlockCopy] = []
        if must_copy:
            source, copy = blocks[tail], new_blocks.pop(0)
            blocks[tail] = copy
            self._block_ids[tail] = copy.block_id
            copies.append((source.block_id, copy.block_id))
            self.pool.free_blocks([source])
        blocks += new_blocks
        self._block_ids.extend([block.block_id for block in new_blocks])
        return copies

    def advance(self, n: int) -> None:
        """Count n more tokens, whose rows are written into reserved slots.

        Raises:
            BlockTableError: for n < 0, or more than were reserved.
            FrozenBlockError: if the partly filled block is hashed or shared: ``reserve`` comes
                first.
            UseAfterFreeError: for a freed table.
        """
        _, must_copy = self._shortage("advance", n)
        if n > self.num_unfilled_slots:
            raise BlockTableError(
                f"BlockTable.advance: {n} tokens, but {self.num_unfilled_slots} slots are reserved"
            )
        if must_copy:
            block = self._blocks[self.num_held_tokens // self.block_size]
            raise FrozenBlockError(
                f"BlockTable.advance: {n} tokens into block {block.block_id}, which is frozen "
                f"(ref_cnt {block.ref_cnt}, hashed: {block.block_hash is not None}); reserve first"
            )
        self.num_held_tokens += n

    def append_token(self) -> list[BlockCopy] | None:
        """``reserve(1)`` and ``advance(1)`` in one; O(1), and takes at most one block.

        Raises UseAfterFreeError for a freed table.
        """
        index, offset = divmod(self.num_held_tokens, self.block_size)
        copies: list[BlockCopy] | None = []
        if not offset or not self._blocks[index].is_writable:
            copies = self.reserve(1)
            if copies is None:
                return None
        self.num_held_tokens += 1
        return copies

    def adopt(self, blocks: Sequence[KVCacheBlock], num_tokens: int) -> None:
        """Begin with the blocks of the first ``num_tokens`` tokens, as far as the retention keeps
        them: a prefix hit, or blocks loaded from a tier.

        The caller has taken them for this table, by ``touch`` or ``get_new_blocks``; ``free``
        returns them. The last one may be used in part (a hit is capped at one token less than the
        prompt); the next ``reserve`` copies it if it is hashed.

        Raises (nothing has changed then):
            BlockTableError: if the table is not empty, or ``num_tokens`` don't need exactly these
                blocks.
            ForeignBlockError: for a block of another pool.
            UseAfterFreeError: for a freed table, or a block without a reference.
        """
        self._check_usable("adopt", num_tokens)
        if self._blocks:
            raise BlockTableError(
                f"BlockTable.adopt: the table already has {len(self._blocks)} blocks"
            )
        num_evicted = self.retention.num_evicted(num_tokens)
        num_needed = -(-(num_tokens - num_evicted) // self.block_size)
        if len(blocks) != num_needed:
            raise BlockTableError(
                f"BlockTable.adopt: {len(blocks)} blocks for {num_tokens} tokens, "
                f"which need {num_needed} blocks of {self.block_size}"
            )
        for block in blocks:
            self.pool.check_own("BlockTable.adopt", block)
            if block.ref_cnt == 0:
                raise UseAfterFreeError(
                    f"BlockTable.adopt: block {block.block_id} is free (ref_cnt 0); touch it first"
                )
        self._blocks = list(blocks)
        self._block_ids = array("i", [block.block_id for block in blocks])
        self.num_held_tokens, self.num_evicted_tokens = num_tokens - num_evicted, num_evicted
        self.positions.position_origin = self.retention.position_origin(num_tokens)
        for block in self._blocks[: self.num_held_tokens // self.block_size]:
            if block.block_hash is None:
                break
            self.num_cached_blocks += 1
        if self.num_cached_blocks * self.block_size >= self.retention.num_sink_tokens:
            self.num_cached_blocks += num_evicted // self.block_size

    def renumber(self) -> None:
        """Read the ids of its blocks again, after some have moved (:meth:`BlockPool.shrink_by`)."""
        self._block_ids = array("i", [block.block_id for block in self._blocks])

    def state(self) -> TableState:
        """The table without its blocks, for ``resume``."""
        return TableState(
            -(-self.num_held_tokens // self.block_size),
            len(self.positions.sinks),
            self.num_held_tokens,
            self.num_evicted_tokens,
            self.positions.distance,
            self.positions.position_origin,
            self.num_cached_blocks,
        )

    def resume(self, state: TableState, blocks: Sequence[KVCacheBlock]) -> None:
        """Restore the table that ``state`` describes.

        Args:
            blocks: those of its tokens, then the sinks as they were computed, taken for this table
                as for ``adopt``. ``evict`` was called before the state was taken.

        Raises as ``adopt``.
        """
        self.adopt(blocks[: state.num_blocks], state.num_tokens)
        self.positions.sinks = list(blocks[state.num_blocks :])
        self.positions.distance, self.positions.position_origin = state.shift, state.position_origin
        if state.num_evicted_tokens:
            # The keys after the sinks may have been shifted: don't cache more of these blocks.
            self.num_cached_blocks = state.num_cached_blocks

    def cache_full_blocks(self, block_hashes: Sequence[BlockHash]) -> int:
        """Enter the full blocks that are not yet in the prefix index; return how many.

        Call it after ``advance``: other sequences may read the blocks from then on, so their rows
        must be written before any read of the same step.

        Args:
            block_hashes: of the sequence's leading blocks, those to cache (``hash_token_blocks``);
                hashes after its last full block are ignored.

        Raises:
            UseAfterFreeError: for a freed table.
            FrozenBlockError: if a block has another hash: these are not the hashes of this
                sequence.
        """
        self._check_usable("cache_full_blocks", 0)
        num_evicted = self.num_evicted_tokens // self.block_size
        begin, end = self.num_cached_blocks, min(self.num_full_blocks, len(block_hashes))
        if num_evicted:
            # Blocks evicted before they were cached are gone, and so are the sinks: those in the
            # table have shifted keys.
            num_sinks = self.retention.num_sink_tokens // self.block_size
            begin = max(begin, num_sinks + num_evicted)
        if end <= begin:
            return 0
        blocks = self._blocks[begin - num_evicted : end - num_evicted]
        hashes, is_foreign = block_hashes[begin:end], self.is_foreign
        self.pool.cache_full_blocks(blocks, hashes, 0, end - begin, is_foreign)
        self.num_cached_blocks = end
        return end - begin

    # Shrinking and sharing

    def evict(self) -> list[KVCacheBlock]:
        """Free the blocks that the next token does not see; return those that became free.

        They are freed first token first, so that of the cached ones the oldest is evicted first.
        The next ``reserve`` shifts the sinks.
        """
        num_tokens = self.retention.num_evicted(self.num_tokens) - self.num_evicted_tokens
        if num_tokens <= 0:
            return []
        begin = self.retention.num_sink_tokens // self.block_size
        end = begin + num_tokens // self.block_size
        freed = self.pool.free_blocks(self._blocks[begin:end])
        del self._blocks[begin:end]
        del self._block_ids[begin:end]
        self.num_held_tokens -= num_tokens
        self.num_evicted_tokens += num_tokens
        return freed

    def trim_to(self, length: int) -> list[KVCacheBlock]:
        """Drop all tokens from ``length`` on, as after rejected drafts; return the blocks that
        became free.

        Whole blocks after the new end return to the pool, tail first, reserved ones too; the last
        block may stay in part. ``trim_to(num_tokens)`` frees unused reserved blocks.

        Raises:
            BlockTableError: unless 0 <= length <= num_tokens, or evicted tokens would be needed.
            UseAfterFreeError: for a freed table.
        """
        self._check_usable("trim_to", length)
        if length > self.num_tokens:
            raise BlockTableError(
                f"BlockTable.trim_to: length {length} of a table of {self.num_tokens} tokens"
            )
        if self.num_evicted_tokens:
            self.retention.check_evicted(length, self.num_evicted_tokens)
        freed = self._cut(length - self.num_evicted_tokens)
        self.num_cached_blocks = min(self.num_cached_blocks, length // self.block_size)
        return freed

    def _cut(self, num_held_tokens: int) -> list[KVCacheBlock]:
        num_kept = -(-num_held_tokens // self.block_size)
        freed = self.pool.free_blocks(reversed(self._blocks[num_kept:]))
        del self._blocks[num_kept:]
        del self._block_ids[num_kept:]
        self.num_held_tokens = num_held_tokens
        return freed

    def fork(self) -> BlockTable:
        """A second table with the same tokens, which shares every block that holds one
        (copy-on-write).

        Full blocks stay shared. A partly filled one is copied when one side writes, and the last
        holder writes in place. Blocks reserved and still empty stay with this table. Raises
        UseAfterFreeError for a freed table.
        """
        self._check_usable("fork", 0)
        num_shared = -(-self.num_held_tokens // self.block_size)
        other = BlockTable(self.pool, self.retention)
        other._blocks = self._blocks[:num_shared]
        other._block_ids = self._block_ids[:num_shared]
        other.positions.continue_from(self.positions)
        other.num_held_tokens = self.num_held_tokens
        other.num_evicted_tokens = self.num_evicted_tokens
        other.num_cached_blocks = self.num_cached_blocks
        other.is_foreign = self.is_foreign
        self.pool.touch(other)
        return other

    def free(self) -> list[KVCacheBlock]:
        """Free all blocks, tail first, so that a shared prefix is evicted last; return those that
        became free.

        Raises:
            DoubleFreeError: the second time.
        """
        if self.is_freed:
            raise DoubleFreeError("BlockTable.free: the table was freed before")
        freed = self._cut(0) + self.positions.free()
        self.num_evicted_tokens = self.num_cached_blocks = 0
        self.is_freed = True
        return freed

    def _shortage(self, operation: str, n: int) -> tuple[int, bool]:
        """How many blocks are missing for n more tokens, and whether the partly filled block must
        be copied before they are written.
        """
        self._check_usable(operation, n)
        index, offset = divmod(self.num_held_tokens, self.block_size)
        must_copy = n > 0 and offset > 0 and not self._blocks[index].is_writable
        num_missing = index + -(-(offset + n) // self.block_size) - len(self._blocks)
        return max(0, num_missing), must_copy

    def _check_usable(self, operation: str, n: int) -> None:
        if self.is_freed:
            raise UseAfterFreeError(f"BlockTable.{operation}: the table was freed")
        if n < 0:
            raise BlockTableError(f"BlockTable.{operation}: a count must be at least 0, got {n}")
