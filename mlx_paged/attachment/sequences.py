"""The sequences of an attached model: each lives as long as there is a reference to its prompt
cache.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field

from mlx_paged.attachment.token_history import TokenHistory
from mlx_paged.cache import KVCache, Sequences
from mlx_paged.core import BlockHash, BlockTableError, extend_block_hashes


@dataclass(slots=True)
class SequenceState:
    """What is known of a sequence beside its block table, which it has from its first token on
    until its blocks are given up.
    """

    seq_id: int
    tokens: TokenHistory = field(default_factory=TokenHistory)
    # Of its full blocks whose tokens were read
    block_hashes: list[BlockHash] = field(default_factory=list)
    last_call: int = 0


class CachedSequence:
    """One sequence; its blocks go back when no reference to it is left."""

    def __init__(self, sequences: CachedSequences, state: SequenceState):
        self.sequences = sequences
        self.state = state
        # A finalizer runs wherever the garbage collector does, in the middle of a step even, so it
        # leaves a note and touches no block.
        weakref.finalize(self, sequences.released.append, state).atexit = False
        sequences.alive.add(self)

    @property
    def num_tokens(self) -> int:
        return len(self.state.tokens)

    def fork(self) -> CachedSequence:
        """Another one with the same tokens, which shares their blocks until one of the two writes
        into them.
        """
        return self.sequences.fork(self)

    def trim(self, num_tokens: int) -> None:
        """Forget the tokens from ``num_tokens`` on. Where that needs tokens that have left a
        window, the sequence is computed again when it is called.
        """
        self.sequences.trim(self, num_tokens)


class CachedSequences:
    """All sequences on one cache. Threads may take turns: the thread that holds ``lock`` may touch
    blocks.

    Attributes:
        alive: those to which there is a reference.
        released: sequences to which no reference is left, and which may still have blocks.
        num_calls: of the model, so far.
    """

    def __init__(self, cache: KVCache):
        self._held: Sequences | None = Sequences(cache)
        self._seq_ids = itertools.count()
        self.lock = threading.RLock()
        self.alive: weakref.WeakSet[CachedSequence] = weakref.WeakSet()
        self.released: deque[SequenceState] = deque()
        self.num_calls = 0

    @property
    def held(self) -> Sequences:
        """Those that have blocks; raises ``RuntimeError`` when the model was detached."""
        if self._held is None:
            raise RuntimeError(
                "[attach] this prompt cache is of a model that was detached since; make another "
                "one, with make_prompt_cache(model)"
            )
        return self._held

    @property
    def cache(self) -> KVCache:
        """Their K/V; raises ``RuntimeError`` when the model was detached."""
        return self.held.cache

    def close(self) -> None:
        """Forget all sequences and give back their memory."""
        with self.lock:
            self._held = None
            self.released.clear()

    def new_id(self) -> int:
        return next(self._seq_ids)

    def new(self) -> CachedSequence:
        """A sequence without tokens."""
        return CachedSequence(self, SequenceState(self.new_id()))

    def has_blocks(self, state: SequenceState) -> bool:
        return state.seq_id in self.held

    def fork(self, sequence: CachedSequence) -> CachedSequence:
        with self.lock:
            state = sequence.state
            copied = SequenceState(
                self.new_id(), state.tokens.copy(), state.block_hashes.copy(), state.last_call
            )
            if self.has_blocks(state):
                self.held.fork(state.seq_id, copied.seq_id)
            return CachedSequence(self, copied)

    def trim(self, sequence: CachedSequence, num_tokens: int) -> None:
        with self.lock:
            state = sequence.state
            if num_tokens >= len(state.tokens):
                return
            if self.has_blocks(state):
                try:
                    self.held.trim(state.seq_id, num_tokens)
                except BlockTableError:  # It needs tokens that have left a window.
                    self.free(state)
            if num_tokens == 0:
                self.free(state)
            state.tokens.trim(num_tokens)
            del state.block_hashes[num_tokens // self.cache.config.block_size :]

    def free_released(self) -> None:
        """Give back the blocks of sequences to which no reference is left."""
        while self.released:
            self.free(self.released.popleft())

    def free(self, state: SequenceState) -> None:
        """Give back the blocks of a sequence. What they have computed can be found until it is
        evicted.
        """
        if self.has_blocks(state):
            self.enter_full_blocks(state)
            self.held.free(state.seq_id)

    def give_up_one(self, kept: Container[CachedSequence]) -> bool:
        """Give back the blocks of the sequence that was not called for the longest time; False if
        only ``kept`` ones have any. It is computed again when it is called.
        """
        idle = [each for each in self.alive if each not in kept and self.has_blocks(each.state)]
        if not idle:
            return False
        self.free(min(idle, key=lambda each: each.state.last_call).state)
        return True

    def enter_full_blocks(self, state: SequenceState) -> None:
        """Let other sequences find the full blocks of this one. Reads their tokens."""
        block_size, hashes = self.cache.config.block_size, state.block_hashes
        if len(state.tokens) // block_size > len(hashes):
            extend_block_hashes(hashes, state.tokens.read(), block_size)
            self.held.manager.cache_blocks(state.seq_id, hashes)
