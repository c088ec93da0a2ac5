"""``DiskStates``: which recurrent states of the prefix cache go to disk, and when. Pure Python, no
arrays.

A state may weigh as much as thousands of tokens of K/V (147 MiB of a 27B), and each turn of an
agent leaves a new one, which the next turn supersedes. Written as they come they would wear out a
disk. So a state is written

- when the K/V of its prefix since the last state that is on disk weigh ``KV_PER_STATE`` times as
  much, so that states never add more than half of what K/V take anyway;
- when a second prompt has gone on from it (``Checkpoints.is_shared``);
- when it leaves memory, or the engine is closed, and no prompt has gone past it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from mlx_paged.core import BlockHash, Checkpoint, Checkpoints, state_key
from mlx_paged.core.block_hash import HASH_NBYTES
from mlx_paged.core.tier import STATES, BlockHeader
from mlx_paged.request import Request

# Bytes of K/V per byte of a state that is written while it is in memory.
KV_PER_STATE = 2
# States that were seen and may have left memory; each is some hundred bytes of bookkeeping.
MAX_SEEN = 10_000

IsOnDisk: TypeAlias = Callable[[BlockHash], bool]  # by the key of a state


@dataclass(slots=True, eq=False)
class _Seen:
    header: BlockHeader
    before: BlockHash | None  # the nearest one that was seen before it in the same prefix
    num_unwritten_tokens: int  # of the prefix, since the last state that is on disk
    is_written: bool
    is_passed: bool = False  # a later prompt has left a state of its own behind it

    def look_up(self, is_on_disk: IsOnDisk) -> None:
        """It may have been dropped, or removed from a disk that is full."""
        self.is_written = self.is_written and is_on_disk(BlockHash(self.header.block_hash))


class DiskStates:
    """The states of requests that have come by, as long as they are worth a note.

    Args:
        checkpoints: what is in memory.
        block_size: tokens per block.
        state_nbytes: of one state.
        kv_nbytes_per_token: 0 for a model without K/V.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        block_size: int,
        state_nbytes: int,
        kv_nbytes_per_token: int,
    ):
        self.checkpoints = checkpoints
        self._block_size = block_size
        self._state_nbytes = state_nbytes
        self._kv_nbytes_per_token = kv_nbytes_per_token
        self._seen: dict[BlockHash, _Seen] = {}

    def note(
        self, request: Request, begin: int, end: int, is_on_disk: IsOnDisk
    ) -> Iterator[BlockHeader]:
        """The states to be written now that a request's blocks from ``begin`` to ``end`` are full.

        Called after each step of a request. The state at the end of an answer's block is named a
        step after the block is full, so the last one of before is looked at again.
        """
        for index in range(max(0, begin - 1), end):
            block_hash = request.block_hashes[index]
            if block_hash in self.checkpoints:
                seen = self._seen.get(block_hash) or self._see(request, index, is_on_disk)
                if not begin:
                    seen.look_up(is_on_disk)
                if not seen.is_written and self._is_due(block_hash, seen):
                    seen.is_written = True
                    yield seen.header

    def evicted(self, block_hash: BlockHash, is_on_disk: IsOnDisk) -> BlockHeader | None:
        """What to write of a state that is about to leave memory, if it is worth it."""
        seen = self._seen.get(block_hash)
        if seen is None or not self._is_last(block_hash, seen, is_on_disk):
            return None
        seen.is_written = True
        return seen.header

    def left(self, is_on_disk: IsOnDisk) -> list[BlockHeader]:
        """What to write of all states in memory when it ends, the newest first."""
        headers = [
            self.evicted(block_hash, is_on_disk)
            for block_hash in reversed(self._seen)
            if block_hash in self.checkpoints
        ]
        return [header for header in headers if header is not None]

    def in_memory(self, header: BlockHeader) -> Checkpoint | None:
        """The state that a header is of, if it is still there."""
        block_hash = BlockHash(header.block_hash[:HASH_NBYTES])
        return self.checkpoints.get(block_hash) if block_hash in self.checkpoints else None

    def is_written(self, block_hash: BlockHash) -> bool:
        seen = self._seen.get(block_hash)
        return seen is not None and seen.is_written

    def _see(self, request: Request, index: int, is_on_disk: IsOnDisk) -> _Seen:
        hashes, block_size = request.block_hashes, self._block_size
        block_hash, start = hashes[index], index * block_size
        key, num_tokens, before = state_key(block_hash), start + block_size, None
        earlier = next((i for i in range(index - 1, -1, -1) if hashes[i] in self._seen), None)
        if earlier is not None:
            before = hashes[earlier]
            of_before = self._seen[before]
            num_tokens = (index - earlier) * block_size
            num_tokens += 0 if of_before.is_written else of_before.num_unwritten_tokens
        # Without the blocks before it a state is of no use, unless the model has no others.
        parent = block_hash if self._kv_nbytes_per_token else None
        tokens = tuple(request.token_ids[start : start + block_size])
        header = BlockHeader(key, parent, tokens, start, STATES)
        seen = _Seen(header, before, num_tokens, is_on_disk(key))
        self._seen[block_hash] = seen
        if start + block_size <= request.num_prompt_tokens:
            self._pass(before)
        if len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        return seen

    def _pass(self, block_hash: BlockHash | None) -> None:
        seen = self._seen.get(block_hash) if block_hash else None
        while seen is not None and not seen.is_passed:
            seen.is_passed = True
            seen = self._seen.get(seen.before) if seen.before else None

    def _is_due(self, block_hash: BlockHash, seen: _Seen) -> bool:
        of_kv = seen.num_unwritten_tokens * self._kv_nbytes_per_token
        is_outweighed = of_kv >= KV_PER_STATE * self._state_nbytes
        return is_outweighed or self.checkpoints.is_shared(block_hash)

    def _is_last(self, block_hash: BlockHash, seen: _Seen, is_on_disk: IsOnDisk) -> bool:
        if seen.is_passed and not self.checkpoints.is_shared(block_hash):
            return False
        seen.look_up(is_on_disk)
        return not seen.is_written
