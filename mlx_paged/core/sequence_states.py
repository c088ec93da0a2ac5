"""``SequenceStates``: what a model keeps of each sequence beside its K/V, as of its last token."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mlx_paged.core.block_hash import BlockHash
from mlx_paged.core.block_table import BlockTable
from mlx_paged.core.checkpoints import INTERVAL, Checkpoint, Checkpoints
from mlx_paged.core.errors import BlockTableError


class SequenceState(NamedTuple):
    """What a model keeps of the first ``num_tokens`` tokens of a sequence; only models look at the
    ``content``, and it is never changed.
    """

    num_tokens: int
    content: Any


NO_STATE = SequenceState(0, None)


class Cut(NamedTuple):
    """The end of a block at which a state is to be kept."""

    num_tokens: int  # of the sequence, up to there
    is_junction: bool = False  # where a prompt leaves an earlier one
    is_of_answer: bool = False  # of each answer the newest one is kept


@dataclass(slots=True, eq=False)
class _Beginning:
    """What a sequence began with."""

    num_tokens: int = 0  # of a prefix hit
    num_prompt_tokens: int = 0
    num_junction_tokens: int = 0  # that have K/V, whether or not they have a state
    checkpoint: BlockHash | None = None
    # The newest checkpoint of its answer, and the tokens up to the last one of any kind.
    of_answer: BlockHash | None = None
    num_kept_tokens: int = 0


class SequenceStates:
    """The newest state of each sequence, of a model with recurrent layers.

    A state stands for all tokens before it and can't be cut, so a sequence goes on from exactly the
    number of tokens that its state is of. The state before a step with drafts is kept until it is
    known which of them are accepted (:meth:`trim`). Forks share a state, since it is a value. Some
    states at the ends of blocks are kept for others that begin with the same tokens
    (:class:`Checkpoints`; vLLM: Mamba's prefix caching in ``align`` mode).

    Args:
        num_checkpoints: how many are kept, at most.
    """

    def __init__(self, num_checkpoints: int = 0) -> None:
        self.checkpoints = Checkpoints(num_checkpoints)
        self.reset()

    def reset(self) -> None:
        """Forget all states and checkpoints."""
        self.checkpoints.clear()
        self._states: dict[Hashable, SequenceState] = {}
        # Of each sequence whose newest tokens are drafts, the state before the step with them.
        self._before_drafts: dict[Hashable, SequenceState] = {}
        self._beginnings: dict[Hashable, _Beginning] = {}
        # Of each sequence, states at the ends of blocks whose tokens are not all known yet.
        self._pending: dict[Hashable, list[tuple[Cut, Any]]] = {}

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

    def end_step(
        self,
        newest: Mapping[Hashable, SequenceState],
        at_block_ends: Mapping[Hashable, Sequence[tuple[Cut, Any]]],
        tables: Mapping[Hashable, BlockTable],
        drafted: Iterable[Hashable] = (),
    ) -> None:
        """A step has made these states.

        Args:
            newest: of each sequence of the step.
            at_block_ends: of each sequence the states that are to be kept; others may hit them from
                now on, or as soon as their tokens are known.
            tables: of all sequences.
            drafted: the sequences whose last tokens were drafts.
        """
        before = {seq: self._states.get(seq, NO_STATE) for seq in drafted}
        self.put(newest)
        self._before_drafts.update(before)
        for seq, kept in at_block_ends.items():
            for cut, content in kept:
                self.offer(seq, cut, content)
            self.name(seq, tables[seq])

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
        if seq in self._beginnings:
            self._beginnings[new_seq] = replace(self._beginnings[seq], of_answer=None)

    def free(self, seq: Hashable) -> None:
        for of_sequence in (self._states, self._before_drafts, self._pending, self._beginnings):
            of_sequence.pop(seq, None)

    def trim(self, seq: Hashable, num_tokens: int) -> int:
        """Forget the tokens of a sequence from ``num_tokens`` on. After a step with drafts, of
        which some are forgotten, it falls back to the state before that step.

        Returns:
            How many tokens its state is of, at most ``num_tokens``.

        Raises:
            BlockTableError: its state is of more tokens and of fewer than all, and there is none
                before it; nothing has changed.
        """
        before = self._before_drafts.pop(seq, None)
        state = self._states.get(seq)
        if state is None or state.num_tokens <= num_tokens:
            return num_tokens
        if before is not None:
            self._states[seq] = before
            return before.num_tokens
        if num_tokens:
            raise BlockTableError(
                f"SequenceStates.trim: sequence {seq!r} has a recurrent state of "
                f"{state.num_tokens} tokens, which can't be cut to {num_tokens}; free the sequence "
                "and compute it again"
            )
        self.free(seq)
        return 0

    # Checkpoints

    def begin(
        self,
        seq: Hashable,
        num_tokens: int,
        checkpoint: Checkpoint | None,
        num_prompt_tokens: int,
        num_junction_tokens: int,
    ) -> None:
        """A sequence begins, perhaps with a checkpoint of ``num_tokens`` tokens.

        Args:
            num_prompt_tokens: that it has already.
            num_junction_tokens: of them, those in whole blocks whose K/V were there. With fewer
                tokens of state it leaves an earlier prompt there.
        """
        self._beginnings[seq] = _Beginning(
            num_tokens,
            num_prompt_tokens,
            num_junction_tokens,
            None if checkpoint is None else checkpoint.block_hash,
            num_kept_tokens=num_tokens,
        )
        if checkpoint is not None:
            self._states[seq] = SequenceState(num_tokens, checkpoint.content)
            self.checkpoints.use(checkpoint)

    def cuts(self, seq: Hashable, begin: int, end: int, block_size: int) -> list[Cut]:
        """Where states are to be kept of the tokens from ``begin`` to ``end`` of a sequence, in
        their order.
        """
        beginning = self._beginnings.get(seq)
        if beginning is None or not self.checkpoints.num_checkpoints:
            return []
        of_prompt = beginning.num_prompt_tokens // block_size * block_size
        cuts = {}
        if self.checkpoints.keeps_everywhere:
            first = -(-(begin + 1) // INTERVAL) * INTERVAL
            cuts = {place: Cut(place) for place in range(first, of_prompt, INTERVAL)}
        cuts[of_prompt] = Cut(of_prompt)
        if self.checkpoints.keeps_many:
            of_answer = end // block_size * block_size
            if of_answer > beginning.num_prompt_tokens:
                cuts[of_answer] = Cut(of_answer, is_of_answer=True)
            junction = beginning.num_junction_tokens
            if junction > beginning.num_tokens:
                cuts[junction] = Cut(junction, is_junction=True)
        return [cuts[place] for place in sorted(cuts) if begin < place <= end]

    def offer(self, seq: Hashable, cut: Cut, content: Any) -> None:
        """Note a state at the end of a block, until :meth:`name` says which block it is."""
        self._pending.setdefault(seq, []).append((cut, content))

    def name(self, seq: Hashable, table: BlockTable) -> None:
        """Keep what was offered as checkpoints, if its blocks in the sequence's table have hashes
        by now.
        """
        pending = self._pending.pop(seq, [])
        for place, (cut, content) in enumerate(pending):
            index = (cut.num_tokens - table.num_evicted_tokens) // table.block_size - 1
            block_hash = table.blocks[index].block_hash if 0 <= index < len(table.blocks) else None
            if block_hash is None:
                self._pending[seq] = pending[place:]
                return
            self._keep(self._beginnings[seq], cut, Checkpoint(block_hash, content))

    def _keep(self, beginning: _Beginning, cut: Cut, checkpoint: Checkpoint) -> None:
        if cut.is_of_answer:
            if beginning.of_answer is not None:
                self.checkpoints.remove([beginning.of_answer])
            beginning.of_answer = checkpoint.block_hash
        num_lost = cut.num_tokens - beginning.num_kept_tokens
        if not cut.is_of_answer:
            beginning.num_kept_tokens = cut.num_tokens
        is_end_of_prompt = not cut.is_of_answer and not cut.is_junction
        if is_end_of_prompt and beginning.checkpoint not in (None, checkpoint.block_hash):
            # First, so that it makes room.
            self.checkpoints.supersede(beginning.checkpoint)
            beginning.checkpoint = checkpoint.block_hash
        self.checkpoints.put(checkpoint, num_lost, cut.is_junction)
