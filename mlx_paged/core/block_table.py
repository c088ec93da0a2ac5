"""`BlockTable`: the blocks of one sequence, and how many tokens are in them."""

from __future__ import annotations

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
from mlx_paged.core.integrity import check_table_integrity
from mlx_paged.core.kv_cache_block import KVCacheBlock

BlockCopy = tuple[int, int]
"""(src block id, dst block id): copy the whole block in every slab."""


class TokenSlot(NamedTuple):
    """Where the next token goes, and what must be copied before it is written there."""

    slot: int
    """block_id * block_size + offset."""
    copies: list[BlockCopy]
    """Copy-on-write pairs, as from `BlockTable.reserve`."""


class BlockTable:
    """The block table of one sequence (elsewhere: page table, sequence, `KVCacheBlocks` of a
    request).

    Token t lives in block `block_ids[t // block_size]` at offset `t % block_size`. A step is

        copies = table.reserve(n)                          # None: out of blocks, nothing has
        changed: preempt copy_blocks(slabs, copies) slots = table.writable_slots(table.num_tokens,
        n)  # write the n new rows there table.advance(n)

    The table only grows at its end and is trimmed from its end. An id never changes in place, with
    one exception: copy-on-write. A partly filled block is writable while this table is its only
    holder and it has no hash; when that is no longer so (after `fork`, after `adopt` of, or
    `trim_to` into, a part of a hashed block), the next `reserve` puts a new block in its place and
    asks for a copy.

    Method: PagedAttention (Kwon et al. 2023); names as in vLLM, and where vLLM has none, as serving
    engines have (`slot_mapping(offset, n)`, `advance(n)`, `trim_to(length)`). Elsewhere:
    `append_token_slot` is also `increment_fill` or `append_token`, `free` is `drain` or `free_all`,
    `reserve` is `push` as often as needed.

    `len(table)` counts blocks, so an empty table is false: compare with None where that is meant.
    """

    __slots__ = (
        "_block_ids",
        "_blocks",
        "_is_freed",
        "_num_cached_blocks",
        "_num_tokens",
        "block_size",
        "pool",
    )

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.block_size = pool.block_size
        self._blocks: list[KVCacheBlock] = []
        self._block_ids = array("i")
        self._num_tokens = 0
        self._num_cached_blocks = 0
        self._is_freed = False

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        return iter(self._blocks)

    def __repr__(self) -> str:
        state = ", freed" if self._is_freed else ""
        return f"BlockTable(num_tokens={self._num_tokens}, block_ids={self.block_ids}{state})"

    # What is in it

    @property
    def num_tokens(self) -> int:
        """Tokens in the table: those that `advance` counted. Also known as `seq_len`, context
        length.
        """
        return self._num_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks in the table, reserved ones included."""
        return len(self._blocks)

    @property
    def num_full_blocks(self) -> int:
        """Blocks filled to the last slot: the frozen ones, which may be cached."""
        return self._num_tokens // self.block_size

    @property
    def num_cached_blocks(self) -> int:
        """Leading full blocks that were entered into the prefix index, or came from it."""
        return self._num_cached_blocks

    @property
    def capacity(self) -> int:
        """Token slots in the table, filled or not."""
        return len(self._blocks) * self.block_size

    @property
    def num_unfilled_slots(self) -> int:
        """Slots held and not filled: the internal fragmentation of this sequence."""
        return len(self._blocks) * self.block_size - self._num_tokens

    @property
    def blocks(self) -> Sequence[KVCacheBlock]:
        """The blocks, first token first. The live list: read it, don't change or keep it."""
        return self._blocks

    @property
    def block_ids(self) -> list[int]:
        """The ids of the blocks, first token first."""
        return self._block_ids.tolist()

    @property
    def packed_block_ids(self) -> array[int]:
        """The same as int32, which an array of a device takes in one copy. The live array: read it,
        don't keep it.
        """
        return self._block_ids

    @property
    def last(self) -> KVCacheBlock | None:
        """The last block, None when there is none."""
        return self._blocks[-1] if self._blocks else None

    @property
    def is_freed(self) -> bool:
        """True after `free`: the table is then empty for good."""
        return self._is_freed

    # Token -> slot

    def block_for_token(self, token: int) -> int:
        """The id of the block in which token number `token` lives. Raises BlockTableError beyond
        the capacity.
        """
        self._check_range("block_for_token", token, 1)
        return self._block_ids[token // self.block_size]

    def offset_in_block(self, token: int) -> int:
        """The place of token number `token` in its block. Raises BlockTableError beyond the
        capacity.
        """
        self._check_range("offset_in_block", token, 1)
        return token % self.block_size

    def slot_for_token(self, token: int) -> int:
        """block_id * block_size + offset. Raises BlockTableError beyond the capacity."""
        self._check_range("slot_for_token", token, 1)
        index, offset = divmod(token, self.block_size)
        return self._block_ids[index] * self.block_size + offset

    def slot_mapping(self, offset: int, n: int) -> list[int]:
        """The slots of tokens offset .. offset + n - 1, `[n]`. For reading; for writing take
        `writable_slots`.

        Reserved slots beyond `num_tokens` are given too. Raises BlockTableError beyond the
        capacity."""
        self._check_range("slot_mapping", offset, n)
        return self._slots(offset, n)

    def writable_slots(self, offset: int, n: int) -> list[int]:
        """As `slot_mapping`, of a range that may be written.

        Ask between `reserve` and `advance`: a block that `advance` has filled is frozen.

        Raises:
            BlockTableError: beyond the capacity.
            FrozenBlockError: if the range touches a block that is full, hashed or shared.
        """
        self._check_range("writable_slots", offset, n)
        block_size, num_full_blocks = self.block_size, self._num_tokens // self.block_size
        for index in range(offset // block_size, -(-(offset + n) // block_size) if n else 0):
            block = self._blocks[index]
            if index < num_full_blocks or not block.is_writable:
                raise FrozenBlockError(
                    f"BlockTable.writable_slots: tokens {offset}..{offset + n - 1} touch block {block.block_id}, "
                    f"which is frozen ({self._why_frozen(index)})"
                )
        return self._slots(offset, n)

    # Growing

    def num_new_blocks(self, n: int) -> int:
        """Blocks that `reserve(n)` would take from the pool.

        Free slots of the partly filled last block and of blocks reserved before are used first; a
        block that must be copied before it is written counts as one. Raises BlockTableError for n <
        0."""
        self._check_usable("num_new_blocks", n)
        index, offset = divmod(self._num_tokens, self.block_size)
        must_copy = n > 0 and offset > 0 and not self._blocks[index].is_writable
        num_missing = index + -(-(offset + n) // self.block_size) - len(self._blocks)
        return max(0, num_missing) + must_copy

    def reserve(self, n: int) -> list[BlockCopy] | None:
        """Make room for n more tokens: all of it, or None and nothing has changed (out of blocks).

        Returns the copy-on-write pairs: `[]` almost always, one pair when the partly filled block
            is not writable. Test
        the result with `is None`: an empty list is false, too. Apply the pairs of all tables in the
            order in which they
        were returned, and before any slot of the step is written: the source may have become free,
        and the next `reserve` may hand it out.

        Raises:
            BlockTableError: for n < 0.
            UseAfterFreeError: for a freed table.
        """
        if self._is_freed or n < 0:
            self._check_usable("reserve", n)
        blocks = self._blocks
        index, offset = divmod(self._num_tokens, self.block_size)
        must_copy = n > 0 and offset > 0 and not blocks[index].is_writable
        num_missing = index + -(-(offset + n) // self.block_size) - len(blocks)
        if not must_copy and num_missing <= 0:
            return []
        tail = index if must_copy else len(blocks)
        before = self._block_ids[tail - 1] if tail else None
        new_blocks = self.pool.get_new_blocks(max(0, num_missing) + must_copy, after=before)
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
        """Count n more tokens, whose rows were written into reserved slots.

        Raises:
            BlockTableError: for n < 0, or more than were reserved.
            FrozenBlockError: if the partly filled block is hashed or shared: `reserve` comes first.
        """
        if self._is_freed or n < 0:
            self._check_usable("advance", n)
        if n > self.num_unfilled_slots:
            raise BlockTableError(
                f"BlockTable.advance: {n} tokens, but {self.num_unfilled_slots} slots are reserved"
            )
        index, offset = divmod(self._num_tokens, self.block_size)
        if n and offset and not self._blocks[index].is_writable:
            raise FrozenBlockError(
                f"BlockTable.advance: {n} tokens into block {self._block_ids[index]}, "
                f"which is frozen ({self._why_frozen(index)}); reserve first"
            )
        self._num_tokens += n

    def append_token_slot(self) -> TokenSlot | None:
        """`reserve(1)` and `advance(1)` in one: the slot of the next token, or None when out of
        blocks. O(1).

        Takes at most one block. Raises UseAfterFreeError for a freed table.
        """
        position = self._num_tokens
        copies = self.append_token()
        if copies is None:
            return None
        index, offset = divmod(position, self.block_size)
        return TokenSlot(self._block_ids[index] * self.block_size + offset, copies)

    def append_token(self) -> list[BlockCopy] | None:
        """As `append_token_slot`, where the slot is not asked for: the copies, or None when out of
        blocks. O(1).
        """
        position = self._num_tokens
        index, offset = divmod(position, self.block_size)
        copies: list[BlockCopy] | None = []
        if not offset or not self._blocks[index].is_writable:
            copies = self.reserve(1)
            if copies is None:
                return None
        self._num_tokens = position + 1
        return copies

    def adopt(self, blocks: Sequence[KVCacheBlock], num_tokens: int) -> None:
        """Begin with blocks that hold the first `num_tokens` tokens: a prefix hit, or blocks read
        back from elsewhere.

        The caller has taken them for this table, by `touch` or `get_new_blocks`; `free` gives them
        back. The last one may be used in part (a hit is capped at one token less than the prompt);
        the next `reserve` copies it if it is hashed.

        Raises (nothing has changed then):
            BlockTableError: if the table is not empty, or the blocks are not exactly those that
                num_tokens need.
            ForeignBlockError: for a block of another pool.
            UseAfterFreeError: for a freed table, or a block that nobody holds.
        """
        self._check_usable("adopt", num_tokens)
        if self._blocks:
            raise BlockTableError(
                f"BlockTable.adopt: the table already has {len(self._blocks)} blocks"
            )
        if len(blocks) != -(-num_tokens // self.block_size):
            raise BlockTableError(
                f"BlockTable.adopt: {len(blocks)} blocks for {num_tokens} tokens, "
                f"which need {-(-num_tokens // self.block_size)} blocks of {self.block_size}"
            )
        for block in blocks:
            self.pool._check_own("adopt", block)
            if block.ref_cnt == 0:
                raise UseAfterFreeError(
                    f"BlockTable.adopt: block {block.block_id} is free (ref_cnt 0); touch it first"
                )
        self._blocks = list(blocks)
        self._block_ids = array("i", [block.block_id for block in blocks])
        self._num_tokens = num_tokens
        for block in self._blocks[: self.num_full_blocks]:
            if block.block_hash is None:
                break
            self._num_cached_blocks += 1

    def cache_full_blocks(self, block_hashes: Sequence[BlockHash]) -> int:
        """Enter the full blocks that are not yet in the prefix index; return how many.

        Call it after `advance`: others may read the blocks from then on, so their rows must be
        written before any read of the same step. `block_hashes` are those of the sequence
        (`hash_token_blocks`), for all full blocks of the table or as many as are to be cached;
        hashes beyond the full blocks are not used.

        Raises:
            UseAfterFreeError: for a freed table.
            FrozenBlockError: if a block has another hash: these are not the hashes of this
                sequence.
        """
        self._check_usable("cache_full_blocks", 0)
        num_cached_blocks = self._num_cached_blocks
        num_full_blocks = min(self.num_full_blocks, len(block_hashes))
        if num_full_blocks <= num_cached_blocks:
            return 0
        self.pool.cache_full_blocks(self._blocks, block_hashes, num_cached_blocks, num_full_blocks)
        self._num_cached_blocks = num_full_blocks
        return num_full_blocks - num_cached_blocks

    # Shrinking and sharing

    def trim_to(self, length: int) -> list[KVCacheBlock]:
        """Forget all tokens from `length` on (rejected speculation); return the blocks that became
        free.

        Whole blocks behind the new end go back to the pool, tail first, reserved ones too; the last
        block may stay in part. `trim_to(num_tokens)` gives back what was reserved and not used.

        Raises:
            BlockTableError: unless 0 <= length <= num_tokens.
            UseAfterFreeError: for a freed table.
        """
        self._check_usable("trim_to", length)
        if length > self._num_tokens:
            raise BlockTableError(
                f"BlockTable.trim_to: length {length} of a table of {self._num_tokens} tokens"
            )
        num_kept = -(-length // self.block_size)
        freed = self.pool.free_blocks(reversed(self._blocks[num_kept:]))
        del self._blocks[num_kept:]
        del self._block_ids[num_kept:]
        self._num_tokens = length
        self._num_cached_blocks = min(self._num_cached_blocks, length // self.block_size)
        return freed

    def fork(self) -> BlockTable:
        """A second table with the same tokens, which shares every block that holds one
        (copy-on-write).

        Full blocks stay shared. A partly filled one is copied when one side writes, and the last
        holder writes in place. Blocks reserved and still empty stay with this table. Raises
        UseAfterFreeError for a freed table."""
        self._check_usable("fork", 0)
        num_shared = -(-self._num_tokens // self.block_size)
        other = BlockTable(self.pool)
        other._blocks = self._blocks[:num_shared]
        other._block_ids = self._block_ids[:num_shared]
        other._num_tokens = self._num_tokens
        other._num_cached_blocks = self._num_cached_blocks
        self.pool.touch(other._blocks)
        return other

    def free(self) -> list[KVCacheBlock]:
        """Give back all blocks, tail first, so that a shared prefix is evicted last; return those
        that became free.

        Raises:
            DoubleFreeError: the second time.
        """
        if self._is_freed:
            raise DoubleFreeError("BlockTable.free: the table was freed before")
        freed = self.pool.free_blocks(reversed(self._blocks))
        self._blocks = []
        self._block_ids = array("i")
        self._num_tokens = self._num_cached_blocks = 0
        self._is_freed = True
        return freed

    def check_integrity(self) -> None:
        """Verify the table against its blocks; O(blocks), for tests and for debugging. Raises
        IntegrityError.
        """
        check_table_integrity(self)

    def _slots(self, offset: int, n: int) -> list[int]:
        block_size = self.block_size
        slots: list[int] = []
        end = offset + n
        while offset < end:
            index, start = divmod(offset, block_size)
            stop = min(block_size, start + end - offset)
            base = self._block_ids[index] * block_size
            slots += range(base + start, base + stop)
            offset += stop - start
        return slots

    def _why_frozen(self, index: int) -> str:
        block = self._blocks[index]
        is_full = (index + 1) * self.block_size <= self._num_tokens
        return f"ref_cnt {block.ref_cnt}, hashed: {block.block_hash is not None}, full: {is_full}"

    def _check_usable(self, operation: str, n: int) -> None:
        if self._is_freed:
            raise UseAfterFreeError(f"BlockTable.{operation}: the table was freed")
        if n < 0:
            raise BlockTableError(f"BlockTable.{operation}: a count must be at least 0, got {n}")

    def _check_range(self, operation: str, offset: int, n: int) -> None:
        if offset < 0 or n < 0 or offset + n > len(self._blocks) * self.block_size:
            raise BlockTableError(
                f"BlockTable.{operation}: tokens {offset} to {offset + n} of a table of {len(self._blocks)} blocks "
                f"of {self.block_size} = {self.capacity} slots"
            )
