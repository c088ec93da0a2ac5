"""The sequences of an attached model, each of which lives as long as its prompt cache."""

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
    """A sequence's tokens and hashes. The manager has its block table, from its first token until
    its blocks are evicted.

    Attributes:
        block_hashes: of its full blocks whose tokens were read.
        last_call: the number of the last call that has used it.
    """

    seq_id: int
    tokens: TokenHistory = field(default_factory=TokenHistory)
    block_hashes: list[BlockHash] = field(default_factory=list)
    last_call: int = 0


class CachedSequence:
    """One sequence; its blocks are freed after the last reference to it is gone."""

    def __init__(self, sequences: CachedSequences, state: SequenceState):
        self.sequences = sequences
        self.state = state
        # The garbage collector may run the finalizer in the middle of a step, so it only appends
        # to a list and touches no block.
        weakref.finalize(self, sequences.released.append, state).atexit = False
        sequences.alive.add(self)

    @property
    def num_tokens(self) -> int:
        return len(self.state.tokens)

    def fork(self) -> CachedSequence:
        """A copy that shares the blocks of this sequence until one of the two writes into them."""
        state, sequences = self.state, self.sequences
        with sequences.lock:
            copied = SequenceState(
                sequences.new_id(), state.tokens.copy(), state.block_hashes.copy(), state.last_call
            )
            if sequences.has_blocks(state):
                sequences.held.fork(state.seq_id, copied.seq_id)
            return CachedSequence(sequences, copied)

    def trim(self, num_tokens: int) -> None:
        """Drop the tokens from ``num_tokens`` on. If that needs tokens that have left a window, the
        sequence is recomputed at its next call.
        """
        state, sequences = self.state, self.sequences
        with sequences.lock:
            if num_tokens >= len(state.tokens):
                return
            if sequences.has_blocks(state):
                try:
                    sequences.held.trim(state.seq_id, num_tokens)
                except BlockTableError:  # It needs tokens that have left a window.
                    sequences.free(state)
            if num_tokens == 0:
                sequences.free(state)
            state.tokens.trim(num_tokens)
            del state.block_hashes[num_tokens // sequences.cache.config.block_size :]


class CachedSequences:
    """All sequences on one cache. Only a thread that holds ``lock`` may touch blocks.

    Attributes:
        alive: the sequences that are referenced.
        released: sequences without a reference, which may still have blocks.
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
        """Those that have blocks; raises ``RuntimeError`` if the model was detached."""
        if self._held is None:
            raise RuntimeError(
                "[attach] the model of this prompt cache was detached; make a new one with "
                "make_prompt_cache(model)"
            )
        return self._held

    @property
    def cache(self) -> KVCache:
        """Their K/V; raises ``RuntimeError`` if the model was detached."""
        return self.held.cache

    def close(self) -> None:
        """Drop all sequences and free their memory."""
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

    def free_released(self) -> None:
        """Free the blocks of sequences without a reference."""
        while self.released:
            self.free(self.released.popleft())

    def free(self, state: SequenceState) -> None:
        """Free the blocks of a sequence. They stay in the prefix cache until they are evicted."""
        if self.has_blocks(state):
            self.enter_full_blocks(state)
            self.held.free(state.seq_id)

    def give_up_one(self, kept: Container[CachedSequence]) -> bool:
        """Free the blocks of the least recently called sequence, which is recomputed at its next
        call; returns False if only sequences in ``kept`` have blocks.
        """
        idle = [each for each in self.alive if each not in kept and self.has_blocks(each.state)]
        if not idle:
            return False
        self.free(min(idle, key=lambda each: each.state.last_call).state)
        return True

    def enter_full_blocks(self, state: SequenceState) -> None:
        """Add the full blocks of a sequence to the prefix cache. Reads their tokens."""
        block_size, hashes = self.cache.config.block_size, state.block_hashes
        if len(state.tokens) // block_size > len(hashes):
            extend_block_hashes(hashes, state.tokens.read(), block_size)
            self.held.manager.cache_blocks(state.seq_id, hashes)
