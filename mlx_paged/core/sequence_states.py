"""``SequenceStates``: what a model keeps of each sequence beside its K/V, as of its last token."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mlx_paged.core.block_hash import BlockHash
from mlx_paged.core.block_table import BlockTable
from mlx_paged.core.errors import BlockTableError


class SequenceState(NamedTuple):
    """What a model keeps of the first ``num_tokens`` tokens of a sequence; only models look at the
    ``content``, and it is never changed.
    """

    num_tokens: int
    content: Any


class Checkpoint(NamedTuple):
    """The state after a block, of all tokens up to its last one."""

    block_hash: BlockHash
    content: Any


class SequenceStates:
    """The newest state of each sequence, of a model with recurrent layers.

    A state stands for all tokens before it and can't be cut, so a sequence goes on from exactly the
    number of tokens that its state is of. Forks share a state, since it is a value.

    *Checkpoints* are states at the ends of blocks, by the hash of the block, for others that begin
    with the same tokens (vLLM: Mamba's prefix caching in ``align`` mode). The least recently used
    one goes first.

    Args:
        num_checkpoints: how many are kept, at most.
    """

    def __init__(self, num_checkpoints: int = 0) -> None:
        self.num_checkpoints = num_checkpoints
        self.reset()

    def reset(self) -> None:
        """Forget all states and checkpoints."""
        self._states: dict[Hashable, SequenceState] = {}
        self._checkpoints: dict[BlockHash, Any] = {}  # least recently used first
        # Of each sequence: a state at the end of a block whose tokens are not all known yet, and
        # the block after which a decode left a checkpoint.
        self._pending: dict[Hashable, tuple[SequenceState, bool]] = {}
        self._decoded: dict[Hashable, BlockHash] = {}

    def __len__(self) -> int:
        return len(self._states)

    # The newest state of each sequence

    def get(self, seq: Hashable, num_tokens: int) -> Any:
        """The content of the state of this many tokens; ``None`` for 0, for a sequence that begins.

        Raises:
            BlockTableError: the sequence has no such state.
        """
        if num_tokens == 0:
            return None
        state = self._states.get(seq)
        if state is None or state.num_tokens != num_tokens:
            found = "none" if state is None else f"one of {state.num_tokens} tokens"
            raise BlockTableError(
                f"SequenceStates.get: sequence {seq!r} has {found}, and not the state of "
                f"{num_tokens} tokens"
            )
        return state.content

    def put(self, states: Mapping[Hashable, SequenceState]) -> None:
        """Replace the states of these sequences, all of them or, if interrupted, none."""
        self._states.update(states)

    def snapshot(self) -> Mapping[Hashable, SequenceState]:
        """All states of this moment, to :meth:`restore` them."""
        return dict(self._states)

    def restore(self, seq: Hashable, snapshot: Mapping[Hashable, SequenceState]) -> None:
        """Give a sequence the state that it had at a snapshot, or none."""
        self._pending.pop(seq, None)
        if seq in snapshot:
            self._states[seq] = snapshot[seq]
        else:
            self._states.pop(seq, None)

    def fork(self, seq: Hashable, new_seq: Hashable) -> None:
        if seq in self._states:
            self._states[new_seq] = self._states[seq]

    def free(self, seq: Hashable) -> None:
        for of_sequence in (self._states, self._pending, self._decoded):
            of_sequence.pop(seq, None)

    def trim(self, seq: Hashable, num_tokens: int) -> None:
        """Forget the tokens of a sequence from ``num_tokens`` on.

        Raises:
            BlockTableError: its state is of more tokens and of fewer than all; nothing has changed.
        """
        state = self._states.get(seq)
        if state is None or state.num_tokens <= num_tokens:
            return
        if num_tokens:
            raise BlockTableError(
                f"SequenceStates.trim: sequence {seq!r} has a recurrent state of "
                f"{state.num_tokens} tokens, which can't be cut to {num_tokens}; free the sequence "
                "and compute it again"
            )
        self.free(seq)

    # Checkpoints

    def longest(self, block_hashes: Sequence[BlockHash], num_blocks: int) -> int:
        """The most of the first ``num_blocks`` blocks that have a checkpoint after them."""
        while num_blocks and block_hashes[num_blocks - 1] not in self._checkpoints:
            num_blocks -= 1
        return num_blocks

    def checkpoint(self, block_hash: BlockHash) -> Checkpoint:
        """The one after this block; ``KeyError`` if there is none."""
        return Checkpoint(block_hash, self._checkpoints[block_hash])

    def begin(self, seq: Hashable, num_tokens: int, checkpoint: Checkpoint) -> None:
        """A sequence begins with a checkpoint of this many tokens."""
        self._states[seq] = SequenceState(num_tokens, checkpoint.content)
        self._keep(checkpoint)

    def offer(self, seq: Hashable, state: SequenceState, is_decoded: bool) -> None:
        """Note a state at the end of a block, until :meth:`name` says which block it is.

        Args:
            is_decoded: whether a decode made it. Of each sequence one of these is kept, since only
                what goes on from its end will ask for it.
        """
        if self.num_checkpoints:
            self._pending[seq] = state, is_decoded

    def name(self, seq: Hashable, table: BlockTable) -> None:
        """Keep what was offered as a checkpoint, if its block in the sequence's table has a hash by
        now.
        """
        if seq not in self._pending:
            return
        state, is_decoded = self._pending[seq]
        index = (state.num_tokens - table.num_evicted_tokens) // table.block_size - 1
        block_hash = table.blocks[index].block_hash if 0 <= index < len(table.blocks) else None
        if block_hash is None:
            return
        del self._pending[seq]
        if is_decoded:
            if seq in self._decoded:
                self._checkpoints.pop(self._decoded[seq], None)
            self._decoded[seq] = block_hash
        self._keep(Checkpoint(block_hash, state.content))

    def _keep(self, checkpoint: Checkpoint) -> None:
        self._checkpoints.pop(checkpoint.block_hash, None)
        self._checkpoints[checkpoint.block_hash] = checkpoint.content
        while len(self._checkpoints) > self.num_checkpoints:
            del self._checkpoints[next(iter(self._checkpoints))]

    def forget_checkpoints(self, block_hashes: Iterable[BlockHash]) -> None:
        for block_hash in block_hashes:
            self._checkpoints.pop(block_hash, None)

    def clear_checkpoints(self) -> None:
        self._checkpoints.clear()
