"""``DiskStates``: which recurrent states of the prefix cache are written to disk, and when. Pure
Python, no arrays.

A state may take as many bytes as the K/V of thousands of tokens (147 MiB for a 27B model), and each
turn of an agent leaves a new one, which the next turn supersedes. Writing all of them would wear a
disk out. So a state is written according to its worth: the tokens of its prefix since the last
state on disk, which would be computed again without it. It is written

- when its worth is ``num_tokens_per_state``, whose K/V take ``KV_PER_STATE`` times its bytes;
- when a second prompt has continued from it (``Checkpoints.is_shared``);
- when it is evicted from memory, if no later prompt has passed it and its worth is at least
  ``SHARE_OF_EVICTED`` of that;
- when the engine is closed, if no later prompt has passed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from mlx_paged.core import BlockHash, Checkpoint, Checkpoints, state_key
from mlx_paged.core.block_hash import HASH_NBYTES
from mlx_paged.core.tier import STATES, BlockHeader
from mlx_paged.engine.request import Completion

# Bytes of K/V per byte of a state that is written while it is in memory, so that states add at most
# half of the bytes of the K/V; and the number of tokens per state for a model without K/V.
KV_PER_STATE = 2
TOKENS_WITHOUT_KV = 4096
SHARE_OF_EVICTED = 1 / 2
# States that are tracked, also after their eviction; each takes some hundred bytes of bookkeeping.
MAX_SEEN = 10_000

IsOnDisk: TypeAlias = Callable[[BlockHash], bool]  # by the key of a state


def num_tokens_per_state(state_nbytes: int, kv_nbytes_per_token: int) -> int:
    """The least worth, in tokens, of a state that is written while it is in memory.

    Args:
        kv_nbytes_per_token: 0 for a model without K/V.
    """
    if not kv_nbytes_per_token:
        return TOKENS_WITHOUT_KV
    return -(-KV_PER_STATE * state_nbytes // kv_nbytes_per_token)


@dataclass(slots=True, eq=False)
class _Seen:
    header: BlockHeader
    before: BlockHash | None  # the nearest tracked state before it in the same prefix
    num_tokens: int  # since that state
    is_written: bool
    is_passed: bool = False  # a later prompt has left a state after it
    answer: BlockHash | None = None  # state of the answer to the prompt that ends here

    def look_up(self, is_on_disk: IsOnDisk) -> None:
        """Check that it is still on disk: it may have been dropped or evicted."""
        self.is_written = self.is_written and is_on_disk(BlockHash(self.header.block_hash))


class DiskStates:
    """Tracks the states of requests.

    Args:
        checkpoints: the states in memory.
        block_size: tokens per block.
        num_tokens_per_state: see :func:`num_tokens_per_state`.
        needs_blocks: whether a state can be used only with the K/V before it.
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
        self, completion: Completion, begin: int, end: int, is_on_disk: IsOnDisk
    ) -> Iterator[BlockHeader]:
        """The states to write after a request's blocks from ``begin`` to ``end`` were filled.

        Called after each step of a request. The state after a block of an answer becomes a
        checkpoint one step after the block is full, so the block before ``begin`` is examined, too.
        """
        for index in range(max(0, begin - 1), end):
            block_hash = completion.block_hashes[index]
            if self.checkpoints.has_storable(block_hash):
                seen = self._seen.get(block_hash) or self._see(completion, index, is_on_disk)
                if not begin:
                    seen.look_up(is_on_disk)
                is_due = self._worth(seen) >= self._num_tokens_per_state
                if is_due or self.checkpoints.is_shared(block_hash):
                    yield from self._written(seen)

    def evicted(self, block_hash: BlockHash, is_on_disk: IsOnDisk) -> Iterator[BlockHeader]:
        """A state that is about to be evicted from memory, if it is to be written."""
        seen = self._last(block_hash, is_on_disk)
        if seen and self._worth(seen) >= SHARE_OF_EVICTED * self._num_tokens_per_state:
            yield from self._written(seen)

    def left(self, is_on_disk: IsOnDisk) -> Iterator[BlockHeader]:
        """The states in memory that are to be written when the engine is closed, newest first."""
        for block_hash in reversed(self._seen):
            has_storable = self.checkpoints.has_storable(block_hash)
            if has_storable and (seen := self._last(block_hash, is_on_disk)):
                yield from self._written(seen)

    def in_memory(self, header: BlockHeader) -> Checkpoint | None:
        """The state of a header, unless it was evicted or is foreign."""
        block_hash = BlockHash(header.block_hash[:HASH_NBYTES])
        has_storable = self.checkpoints.has_storable(block_hash)
        return self.checkpoints.get(block_hash) if has_storable else None

    def is_written(self, block_hash: BlockHash) -> bool:
        seen = self._seen.get(block_hash)
        return seen is not None and seen.is_written

    def _see(self, completion: Completion, index: int, is_on_disk: IsOnDisk) -> _Seen:
        hashes, block_size = completion.block_hashes, self._block_size
        block_hash, start = hashes[index], index * block_size
        earlier = next((i for i in range(index - 1, -1, -1) if hashes[i] in self._seen), -1)
        before = hashes[earlier] if earlier >= 0 else None
        key, parent = state_key(block_hash), block_hash if self._needs_blocks else None
        tokens = tuple(completion.token_ids[start : start + block_size])
        header = BlockHeader(key, parent, tokens, start, STATES)
        seen = _Seen(header, before, (index - earlier) * block_size, is_on_disk(key))
        self._seen[block_hash] = seen
        if start + block_size <= completion.num_prompt_tokens:
            self._pass(before)
        elif before is not None:
            self._seen[before].answer = block_hash
        if len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        return seen

    def _pass(self, block_hash: BlockHash | None) -> None:
        """Mark a state and those before it as passed, since a prompt has left a later state. The
        prompt either continued from the answer or does not contain it, so the answer's state is
        passed, too.
        """
        seen = self._seen.get(block_hash) if block_hash else None
        while seen is not None and not seen.is_passed:
            seen.is_passed = True
            answer = self._seen.get(seen.answer) if seen.answer else None
            if answer is not None:
                answer.is_passed = True
            seen = self._seen.get(seen.before) if seen.before else None

    def _worth(self, seen: _Seen) -> int:
        """The number of tokens since the last state of its prefix that is on disk."""
        num_tokens = seen.num_tokens
        before = self._seen.get(seen.before) if seen.before else None
        while before is not None and not before.is_written:
            num_tokens += before.num_tokens
            before = self._seen.get(before.before) if before.before else None
        return num_tokens

    def _last(self, block_hash: BlockHash, is_on_disk: IsOnDisk) -> _Seen | None:
        """A tracked state, unless prompts have passed it."""
        seen = self._seen.get(block_hash)
        if seen is None or (seen.is_passed and not self.checkpoints.is_shared(block_hash)):
            return None
        seen.look_up(is_on_disk)
        return seen

    def _written(self, seen: _Seen) -> Iterator[BlockHeader]:
        if not seen.is_written:
            seen.is_written = True
            yield seen.header
