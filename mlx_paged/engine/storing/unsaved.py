"""``Unsaved``: which blocks and recurrent states of the prefix cache are saved, and when. Pure
Python, no arrays.

A full block is saved as soon as it is computed. A state may take as many bytes as the K/V of
thousands of tokens (147 MiB for a 27B model), and each turn of an agent leaves a new one, which the
next turn supersedes. Writing all of them would wear a disk out. So a state is saved according to
its worth: the tokens of its prefix since the last saved state, which would be computed again
without it. It is saved

- when its worth is ``num_tokens_per_state``, whose K/V take ``KV_PER_STATE`` times its bytes;
- when a second prompt has continued from it (``Checkpoints.is_shared``);
- when it is evicted from memory, if no later prompt has passed it and its worth is at least
  ``SHARE_OF_EVICTED`` of that;
- when the engine is closed, if no later prompt has passed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from mlx_paged.core import (
    BlockHash,
    BlockPool,
    Checkpoint,
    Checkpoints,
    KVCacheBlock,
    group_hashes,
    state_key,
)
from mlx_paged.core.block_hash import HASH_NBYTES
from mlx_paged.core.tier import STATES, BlockHeader
from mlx_paged.engine.request import Completion

# The most blocks that wait to be copied out; each takes some hundred bytes of bookkeeping.
MAX_UNSAVED_BLOCKS = 100_000
# Bytes of K/V per byte of a state that is saved while it is in memory, so that states add at most
# half of the bytes of the K/V; and the number of tokens per state for a model without K/V.
KV_PER_STATE = 2
TOKENS_WITHOUT_KV = 4096
SHARE_OF_EVICTED = 1 / 2
# States that are tracked, also after their eviction; each takes some hundred bytes of bookkeeping.
MAX_TRACKED = 10_000

IsStored: TypeAlias = Callable[[BlockHash], bool]  # by the key of a block or a state


def num_tokens_per_state(state_nbytes: int, kv_nbytes_per_token: int) -> int:
    """The least worth, in tokens, of a state that is saved while it is in memory.

    Args:
        kv_nbytes_per_token: 0 for a model without K/V.
    """
    if not kv_nbytes_per_token:
        return TOKENS_WITHOUT_KV
    return -(-KV_PER_STATE * state_nbytes // kv_nbytes_per_token)


@dataclass(slots=True, eq=False)
class _TrackedState:
    header: BlockHeader
    before: BlockHash | None  # the nearest tracked state before it in the same prefix
    num_tokens: int  # since that state
    is_saved: bool
    is_passed: bool = False  # a later prompt has left a state after it
    answer: BlockHash | None = None  # state of the answer to the prompt that ends here


class Unsaved:
    """The blocks and states that are to be saved and were not copied out yet, in the order of
    computation.

    Args:
        pool: of the blocks.
        groups: of layers, whose blocks are saved.
        is_stored: whether a tier has a block or a state, or is about to write it.
        checkpoints: the states in memory of a model with recurrent layers; ``None`` for others.
        num_tokens_per_state: see :func:`num_tokens_per_state`.

    Attributes:
        num_dropped: blocks that are not saved because they are too many, or were evicted first.
    """

    def __init__(
        self,
        pool: BlockPool,
        groups: range,
        is_stored: IsStored,
        checkpoints: Checkpoints | None = None,
        num_tokens_per_state: int = 0,
    ):
        self.num_dropped = 0
        self.checkpoints = checkpoints
        self._pool, self._block_size, self._groups = pool, pool.block_size, groups
        self._is_stored = is_stored
        self._num_tokens_per_state = num_tokens_per_state
        self._headers: dict[bytes, BlockHeader] = {}
        self._tracked: dict[BlockHash, _TrackedState] = {}  # states

    def __len__(self) -> int:
        return len(self._headers)

    def headers(self, keys: Iterable[BlockHash] | None = None) -> list[BlockHeader]:
        """The headers of all blocks and states, or of those that are among ``keys``."""
        if keys is None:
            return list(self._headers.values())
        return [self._headers[key] for key in keys if key in self._headers]

    def remove(self, key: bytes) -> None:
        """A block or a state was queued to be written, or is not to be saved any more."""
        self._headers.pop(key, None)

    def clear(self) -> None:
        self._headers.clear()

    def find(self, header: BlockHeader) -> KVCacheBlock | Checkpoint | None:
        """The block or state of a header, unless it was evicted. If it is foreign, there is no
        other, and it is never saved.
        """
        if header.group != STATES:
            key = BlockHash(header.block_hash)
            return self._pool.get_storable_block(key) or self._pool.get_cached_block(key)
        block_hash = BlockHash(header.block_hash[:HASH_NBYTES])
        if self.checkpoints is None or block_hash not in self.checkpoints:
            return None
        return self.checkpoints.get(block_hash)

    def note(
        self, completion: Completion, num_full_blocks: int, min_uses: int
    ) -> list[list[BlockHash]]:
        """Add the blocks that a request has filled, and the states after them that are due. Called
        after each step of a request.

        Args:
            min_uses: how many requests have to use a block before it is saved (``Tier.min_uses``).

        Returns:
            The blocks of the request that are stored already, in order; a list for each group.
        """
        begin = completion.num_saved_blocks
        if num_full_blocks <= begin and self.checkpoints is None:
            return []
        completion.num_saved_blocks = max(begin, num_full_blocks)
        num_hit_blocks = completion.request.num_cached_tokens // self._block_size
        # The blocks that may be saved: all, or those that another request has left in memory.
        end = {1: num_full_blocks, 2: num_hit_blocks}.get(min_uses, 0)
        stored: list[list[BlockHash]] = []
        if blocks := range(begin, num_full_blocks):
            stored = [self._note_blocks(completion, group, blocks, end) for group in self._groups]
        if self.checkpoints is not None:
            self.note_states(completion, begin, min(end, num_full_blocks))
            if not begin and num_hit_blocks:
                last_hit = completion.block_hashes[num_hit_blocks - 1]
                state = self._tracked.get(last_hit)
                stored.append([state_key(last_hit)] if state and state.is_saved else [])
        return [keys for keys in stored if keys]

    def _note_blocks(
        self, completion: Completion, group: int, blocks: range, end: int
    ) -> list[BlockHash]:
        """Add those blocks before ``end`` that are not stored; returns the stored ones."""
        hashes, size, stored = completion.block_hashes, self._block_size, []
        begin = blocks.start
        parent = group_hashes(hashes[begin - 1 : begin], group)[0] if begin else None
        for index, key in enumerate(group_hashes(hashes[begin : blocks.stop], group), begin):
            if self._is_stored(key):
                stored.append(key)
            elif index < end and len(self._headers) >= MAX_UNSAVED_BLOCKS:
                self.num_dropped += 1
            elif index < end:
                start = index * size
                tokens = tuple(completion.token_ids[start : start + size])
                self._headers.setdefault(key, BlockHeader(key, parent, tokens, start, group))
            parent = key
        return stored

    # States

    def note_states(self, completion: Completion, begin: int, end: int) -> None:
        """Add the states that are due after a request's blocks from ``begin`` to ``end`` were
        filled.

        The state after a block of an answer becomes a checkpoint one step after the block is full,
        so the block before ``begin`` is examined, too.
        """
        assert self.checkpoints is not None, "only a model with states has some to note"
        for index in range(max(0, begin - 1), end):
            block_hash = completion.block_hashes[index]
            if self.checkpoints.has_storable(block_hash):
                state = self._tracked.get(block_hash) or self._track(completion, index)
                if not begin:
                    self._look_up(state)
                is_due = self._worth(state) >= self._num_tokens_per_state
                if is_due or self.checkpoints.is_shared(block_hash):
                    self._add(state)

    def add_last(self) -> None:
        """Add the states that are saved when the engine is closed, newest first."""
        assert self.checkpoints is not None, "only a model with states has some to add"
        for block_hash in filter(self.checkpoints.has_storable, reversed(self._tracked)):
            if (state := self._last(block_hash)) is not None:
                self._add(state)

    def take_evicted(self, checkpoint: Checkpoint) -> BlockHeader | None:
        """The header of a state that is about to be evicted from memory, if it is saved now."""
        key = state_key(checkpoint.block_hash)
        if key not in self._headers and not checkpoint.is_foreign:
            state = self._last(checkpoint.block_hash)
            if state and self._worth(state) >= SHARE_OF_EVICTED * self._num_tokens_per_state:
                self._add(state)
        header = self._headers.pop(key, None)
        return None if checkpoint.is_foreign else header

    def _add(self, state: _TrackedState) -> None:
        if not state.is_saved:
            state.is_saved = True
            self._headers.setdefault(state.header.block_hash, state.header)

    def _track(self, completion: Completion, index: int) -> _TrackedState:
        hashes, block_size = completion.block_hashes, self._block_size
        block_hash, start = hashes[index], index * block_size
        earlier = next((i for i in range(index - 1, -1, -1) if hashes[i] in self._tracked), -1)
        before = hashes[earlier] if earlier >= 0 else None
        # Without K/V, a state is used without the blocks before it.
        key, parent = state_key(block_hash), block_hash if self._groups else None
        tokens = tuple(completion.token_ids[start : start + block_size])
        header = BlockHeader(key, parent, tokens, start, STATES)
        is_saved = key in self._headers or self._is_stored(key)
        state = _TrackedState(header, before, (index - earlier) * block_size, is_saved)
        self._tracked[block_hash] = state
        if start + block_size <= completion.num_prompt_tokens:
            self._mark_passed(before)
        elif before is not None:
            self._tracked[before].answer = block_hash
        if len(self._tracked) > MAX_TRACKED:
            del self._tracked[next(iter(self._tracked))]
        return state

    def _look_up(self, state: _TrackedState) -> None:
        """Check that a saved state still is: it may have been dropped or evicted."""
        key = BlockHash(state.header.block_hash)
        state.is_saved = state.is_saved and (key in self._headers or self._is_stored(key))

    def _mark_passed(self, block_hash: BlockHash | None) -> None:
        """Mark a state and those before it as passed, since a prompt has left a later state. The
        prompt either continued from the answer or does not contain it, so the answer's state is
        passed, too.
        """
        state = self._tracked.get(block_hash) if block_hash else None
        while state is not None and not state.is_passed:
            state.is_passed = True
            answer = self._tracked.get(state.answer) if state.answer else None
            if answer is not None:
                answer.is_passed = True
            state = self._tracked.get(state.before) if state.before else None

    def _worth(self, state: _TrackedState) -> int:
        """The number of tokens since the last state of its prefix that is saved."""
        num_tokens = state.num_tokens
        before = self._tracked.get(state.before) if state.before else None
        while before is not None and not before.is_saved:
            num_tokens += before.num_tokens
            before = self._tracked.get(before.before) if before.before else None
        return num_tokens

    def _last(self, block_hash: BlockHash) -> _TrackedState | None:
        """A tracked state, unless prompts have passed it."""
        state = self._tracked.get(block_hash)
        assert self.checkpoints is not None, "states are tracked only if there are some"
        if state is None or (state.is_passed and not self.checkpoints.is_shared(block_hash)):
            return None
        self._look_up(state)
        return state
