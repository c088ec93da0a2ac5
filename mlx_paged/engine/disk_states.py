"""``DiskStates``: which recurrent states of the prefix cache go to disk, and when. Pure Python, no
arrays.

A state may weigh as much as thousands of tokens of K/V (147 MiB of a 27B), and each turn of an
agent leaves a new one, which the next turn supersedes. Written as they come they would wear out a
disk. So a state is written by what it is worth: the tokens of its prefix since the last state that
is on disk, which would be computed again without it. It is written

- when these are ``num_tokens_per_state``, whose K/V weigh ``KV_PER_STATE`` times as much;
- when a second prompt has gone on from it (``Checkpoints.is_shared``);
- when it leaves memory, if no later prompt has gone past it, and it is worth a share of that,
  ``SHARE_OF_EVICTED``;
- when the engine is closed, if no later prompt has gone past it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from mlx_paged.core import BlockHash, Checkpoint, Checkpoints, state_key
from mlx_paged.core.block_hash import HASH_NBYTES
from mlx_paged.core.tier import STATES, BlockHeader
from mlx_paged.request import Request

# Bytes of K/V per byte of a state that is written while it is in memory, so that states add half of
# what K/V take at most; or else as many tokens, of a model that has no K/V.
KV_PER_STATE = 2
TOKENS_WITHOUT_KV = 4096
SHARE_OF_EVICTED = 1 / 2
# States that were seen and may have left memory; each is some hundred bytes of bookkeeping.
MAX_SEEN = 10_000

IsOnDisk: TypeAlias = Callable[[BlockHash], bool]  # by the key of a state


def num_tokens_per_state(state_nbytes: int, kv_nbytes_per_token: int) -> int:
    """How many tokens a state is worth that is written while it is in memory.

    Args:
        kv_nbytes_per_token: 0 for a model without K/V.
    """
    if not kv_nbytes_per_token:
        return TOKENS_WITHOUT_KV
    return -(-KV_PER_STATE * state_nbytes // kv_nbytes_per_token)


@dataclass(slots=True, eq=False)
class _Seen:
    header: BlockHeader
    before: BlockHash | None  # the nearest one that was seen before it in the same prefix
    num_tokens: int  # since that one
    is_written: bool
    is_passed: bool = False  # a later prompt has left a state of its own behind it
    answer: BlockHash | None = None  # that of the answer to the prompt which ends here

    def look_up(self, is_on_disk: IsOnDisk) -> None:
        """It may have been dropped, or removed from a disk that is full."""
        self.is_written = self.is_written and is_on_disk(BlockHash(self.header.block_hash))


class DiskStates:
    """The states of requests that have come by.

    Args:
        checkpoints: what is in memory.
        block_size: tokens per block.
        num_tokens_per_state: see :func:`num_tokens_per_state`.
        needs_blocks: whether a state is of no use without the K/V before it.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        block_size: int,
        num_tokens_per_state: int,
        needs_blocks: bool = True,
    ):
        self.checkpoints = checkpoints
        self._block_size = block_size
        self._num_tokens_per_state = num_tokens_per_state
        self._needs_blocks = needs_blocks
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
                is_due = self._worth(seen) >= self._num_tokens_per_state
                if is_due or self.checkpoints.is_shared(block_hash):
                    yield from self._written(seen)

    def evicted(self, block_hash: BlockHash, is_on_disk: IsOnDisk) -> Iterator[BlockHeader]:
        """The state that is about to leave memory, if it is to be written."""
        seen = self._last(block_hash, is_on_disk)
        if seen and self._worth(seen) >= SHARE_OF_EVICTED * self._num_tokens_per_state:
            yield from self._written(seen)

    def left(self, is_on_disk: IsOnDisk) -> Iterator[BlockHeader]:
        """Of all states in memory those that are to be written before it ends, the newest first."""
        for block_hash in reversed(self._seen):
            if block_hash in self.checkpoints and (seen := self._last(block_hash, is_on_disk)):
                yield from self._written(seen)

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
        earlier = next((i for i in range(index - 1, -1, -1) if hashes[i] in self._seen), -1)
        before = hashes[earlier] if earlier >= 0 else None
        key, parent = state_key(block_hash), block_hash if self._needs_blocks else None
        tokens = tuple(request.token_ids[start : start + block_size])
        header = BlockHeader(key, parent, tokens, start, STATES)
        seen = _Seen(header, before, (index - earlier) * block_size, is_on_disk(key))
        self._seen[block_hash] = seen
        if start + block_size <= request.num_prompt_tokens:
            self._pass(before)
        elif before is not None:
            self._seen[before].answer = block_hash
        if len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        return seen

    def _pass(self, block_hash: BlockHash | None) -> None:
        """A prompt has left a state behind this one. It has gone on from here or from the answer,
        which it has in other tokens or not at all otherwise.
        """
        seen = self._seen.get(block_hash) if block_hash else None
        while seen is not None and not seen.is_passed:
            seen.is_passed = True
            answer = self._seen.get(seen.answer) if seen.answer else None
            if answer is not None:
                answer.is_passed = True
            seen = self._seen.get(seen.before) if seen.before else None

    def _worth(self, seen: _Seen) -> int:
        """The tokens since the last state in its prefix that is on disk."""
        num_tokens = seen.num_tokens
        before = self._seen.get(seen.before) if seen.before else None
        while before is not None and not before.is_written:
            num_tokens += before.num_tokens
            before = self._seen.get(before.before) if before.before else None
        return num_tokens

    def _last(self, block_hash: BlockHash, is_on_disk: IsOnDisk) -> _Seen | None:
        """A state, unless prompts have gone past it."""
        seen = self._seen.get(block_hash)
        if seen is None or (seen.is_passed and not self.checkpoints.is_shared(block_hash)):
            return None
        seen.look_up(is_on_disk)
        return seen

    def _written(self, seen: _Seen) -> Iterator[BlockHeader]:
        if not seen.is_written:
            seen.is_written = True
            yield seen.header
