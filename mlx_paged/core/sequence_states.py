"""``SequenceStates``: the recurrent state of each sequence, as of its last token."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from mlx_paged.core.block_hash import BlockHash
from mlx_paged.core.block_table import BlockTable
from mlx_paged.core.checkpoints import EVERYWHERE, INTERVAL, Checkpoint, Checkpoints
from mlx_paged.core.errors import BlockTableError


class SequenceState(NamedTuple):
    """The recurrent state after the first ``num_tokens`` tokens of a sequence. The ``content`` is
    opaque here, and immutable.
    """

    num_tokens: int
    content: Any


NO_STATES: Mapping[Hashable, SequenceState] = MappingProxyType({})


class Cut(NamedTuple):
    """The end of a block at which the state has to be kept."""

    num_tokens: int  # of the sequence, up to there
    is_junction: bool = False  # where a prompt diverges from an earlier one
    is_of_answer: bool = False  # only the newest one of each answer is kept


@dataclass(slots=True, eq=False)
class _Beginning:
    """The prefix hit with which a sequence began, and its checkpoints since."""

    num_tokens: int = 0  # of the prefix hit
    num_prompt_tokens: int = 0
    num_junction_tokens: int = 0  # with cached K/V, whether or not with a state
    checkpoint: BlockHash | None = None
    # The newest checkpoint of its answer, and the others of its tokens, the last one first.
    of_answer: BlockHash | None = None
    kept: tuple[tuple[BlockHash, int], ...] = ()


class SequenceStates:
    """The newest state of each sequence, of a model with recurrent layers.

    A state covers all tokens before it and can't be cut, so a sequence continues after exactly the
    tokens that its state covers. A state before drafts is kept until it is known which of them are
    accepted (:meth:`trim`). States are immutable, so forks share them. Some states
    at the ends of blocks are kept for other sequences with the same prefix (:class:`Checkpoints`;
    vLLM: Mamba's prefix caching in ``align`` mode).

    Args:
        num_checkpoints: the most checkpoints that are kept.
    """

    def __init__(self, num_checkpoints: int = 0) -> None:
        self.checkpoints = Checkpoints(num_checkpoints)
        self.reset()

    def reset(self) -> None:
        """Drop all states and checkpoints."""
        self.checkpoints.clear()
        self._states: dict[Hashable, SequenceState] = {}
        # By sequence whose newest tokens are drafts: a state before them.
        self._before_drafts: dict[Hashable, SequenceState] = {}
        self._beginnings: dict[Hashable, _Beginning] = {}
        # By sequence: states at the ends of blocks that have no hash yet.
        self._pending: dict[Hashable, list[tuple[Cut, Any]]] = {}
        self.forget_released()

    def __len__(self) -> int:
        return len(self._states)

    @property
    def num_pending(self) -> int:
        """States at the ends of blocks that have no hash yet."""
        return sum(map(len, self._pending.values()))

    @property
    def num_released(self) -> int:
        """Sequences that were freed, whose states may still be in memory: in stacks of the newest
        step, or of the one before, which may not be computed yet.
        """
        return sum(self._num_released)

    def forget_released(self) -> None:
        """No step is in flight, and the states of freed sequences are out of memory."""
        self._num_released = 0, 0  # since the newest step, and before it

    # The newest state of each sequence

    def get(self, seq: Hashable, num_tokens: int) -> Any:
        """The content of the state after ``num_tokens`` tokens; ``None`` for 0, at the beginning.

        Raises:
            BlockTableError: the sequence has no such state.
        """
        if num_tokens == 0:
            return None
        state = self._states.get(seq)
        if state is None or state.num_tokens != num_tokens:
            found = "" if state is None else f", only one of {state.num_tokens}"
            raise BlockTableError(
                f"SequenceStates.get: sequence {seq!r} has no state of {num_tokens} tokens{found}"
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
        before_drafts: Mapping[Hashable, SequenceState] = NO_STATES,
    ) -> None:
        """Store the states that a step has computed.

        Args:
            newest: of each sequence of the step.
            at_block_ends: by sequence, the states to keep as checkpoints. They can be hit from now
                on, or as soon as their tokens are known.
            tables: of all sequences.
            before_drafts: the states to which sequences whose last tokens are drafts fall back.
        """
        self._num_released = 0, self._num_released[0]
        self.put(newest)
        self._before_drafts.update(before_drafts)
        for seq, kept in at_block_ends.items():
            for cut, content in kept:
                self.offer(seq, cut, content)
            self.name(seq, tables[seq])

    def snapshot(self) -> Mapping[Hashable, SequenceState]:
        """The current states, for :meth:`restore`."""
        return dict(self._states)

    def restore(self, seq: Hashable, snapshot: Mapping[Hashable, SequenceState]) -> None:
        """Reset the state of a sequence to that of a snapshot, or to none."""
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
        since, before = self._num_released
        self._num_released = since + (seq in self._states), before
        for of_sequence in (self._states, self._before_drafts, self._pending, self._beginnings):
            of_sequence.pop(seq, None)

    def trim(self, seq: Hashable, num_tokens: int) -> int:
        """Drop the tokens of a sequence from ``num_tokens`` on. If this drops drafts of the last
        step, the sequence falls back to the state that was kept before them.

        Returns:
            How many tokens its state covers, at most ``num_tokens``.

        Raises:
            BlockTableError: its state covers dropped tokens, and there is no earlier one; nothing
                has changed.
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
        """Register a new sequence, which may begin with a checkpoint of ``num_tokens`` tokens.

        Args:
            num_prompt_tokens: of the sequence.
            num_junction_tokens: prompt tokens with cached K/V, in whole blocks. If these are more
                than ``num_tokens``, the prompt diverges from an earlier one there.
        """
        self._beginnings[seq] = _Beginning(
            num_tokens,
            num_prompt_tokens,
            num_junction_tokens,
            None if checkpoint is None else checkpoint.block_hash,
        )
        if checkpoint is not None:
            self._states[seq] = SequenceState(num_tokens, checkpoint.content)
            self.checkpoints.use(checkpoint, num_tokens)
            self._beginnings[seq].kept = (
                *self.checkpoints.of_prefix(checkpoint.block_hash, num_tokens),
            )

    def cuts(self, seq: Hashable, begin: int, end: int, block_size: int) -> list[Cut]:
        """Where states have to be kept between tokens ``begin`` and ``end`` of a sequence, in
        ascending order.
        """
        beginning = self._beginnings.get(seq)
        if beginning is None or not self.checkpoints.num_checkpoints:
            return []
        of_prompt = beginning.num_prompt_tokens // block_size * block_size
        cuts = {}
        if self.checkpoints.num_checkpoints >= EVERYWHERE:
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

    def plan_cuts(
        self, seq: Hashable, begin: int, end: int, block_size: int, num_planned: int = 0
    ) -> list[Cut]:
        """The :meth:`cuts` of a sequence that a step makes: those for which there is memory, after
        checkpoints of less worth were evicted.

        Args:
            num_planned: of the other sequences of the step.
        """
        planned: list[Cut] = []
        # Ends of prompts, the last one first, and junctions before answers.
        for cut in sorted(
            self.cuts(seq, begin, end, block_size),
            key=lambda cut: (cut.is_of_answer, cut.is_junction, -cut.num_tokens),
        ):
            beginning = self._beginnings[seq]
            num_new = num_planned + len(planned) + 1
            num_lost = cut.num_tokens - self._newest(beginning)[1]
            if not self.checkpoints.make_room(num_new, num_lost):
                # It would replace the earlier one of its answer in any case.
                earlier = beginning.of_answer if cut.is_of_answer else None
                if earlier is None or earlier not in self.checkpoints:
                    continue
                self.checkpoints.remove([earlier])
            planned.append(cut)
        return sorted(planned)

    def offer(self, seq: Hashable, cut: Cut, content: Any) -> None:
        """Hold a state at the end of a block until :meth:`name` finds the hash of the block."""
        self._pending.setdefault(seq, []).append((cut, content))

    def name(self, seq: Hashable, table: BlockTable) -> None:
        """Keep offered states as checkpoints once their blocks in the table have hashes."""
        pending = self._pending.pop(seq, [])
        for place, (cut, content) in enumerate(pending):
            index = (cut.num_tokens - table.num_evicted_tokens) // table.block_size - 1
            block_hash = table.blocks[index].block_hash if 0 <= index < len(table.blocks) else None
            if block_hash is None:
                self._pending[seq] = pending[place:]
                return
            checkpoint = Checkpoint(block_hash, content, table.is_foreign)
            self._keep(self._beginnings[seq], cut, checkpoint)

    def _keep(self, beginning: _Beginning, cut: Cut, checkpoint: Checkpoint) -> None:
        if cut.is_of_answer:
            if beginning.of_answer is not None:
                self.checkpoints.remove([beginning.of_answer])
            beginning.of_answer = checkpoint.block_hash
        before, num_kept = self._newest(beginning)
        if not cut.is_of_answer:
            beginning.kept = (checkpoint.block_hash, cut.num_tokens), *beginning.kept
        is_end_of_prompt = not cut.is_of_answer and not cut.is_junction
        if is_end_of_prompt and beginning.checkpoint not in (None, checkpoint.block_hash):
            # First, so that it is evicted for the new one if need be.
            self.checkpoints.supersede(beginning.checkpoint)
            beginning.checkpoint = checkpoint.block_hash
        self.checkpoints.put(checkpoint, cut.num_tokens - num_kept, cut.is_junction, before)

    def _newest(self, beginning: _Beginning) -> tuple[BlockHash | None, int]:
        """The newest checkpoint of a sequence that is kept, and the number of its tokens."""
        there = (each for each in beginning.kept if each[0] in self.checkpoints)
        return next(there, (None, 0))
