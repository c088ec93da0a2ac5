"""``SequenceStates``: what a model keeps of each sequence beside its K/V, as of its last token."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from mlx_paged.core.errors import BlockTableError


class SequenceState(NamedTuple):
    """What a model keeps of the first ``num_tokens`` tokens of a sequence; only models look at the
    ``content``, and nobody changes it.
    """

    num_tokens: int
    content: Any


class SequenceStates:
    """The newest state of each sequence, of a model with recurrent layers; empty for all others.

    A state stands for all tokens before it and can't be cut, so a sequence goes on from exactly the
    number of tokens that its state is of. Forks share a state, since it is a value.
    """

    def __init__(self) -> None:
        self._states: dict[Hashable, SequenceState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def get(self, seq: Hashable, num_tokens: int) -> Any:
        """The content of the state of so many tokens; ``None`` of none, for a sequence that begins.

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
        if seq in snapshot:
            self._states[seq] = snapshot[seq]
        else:
            self._states.pop(seq, None)

    def fork(self, seq: Hashable, new_seq: Hashable) -> None:
        if seq in self._states:
            self._states[new_seq] = self._states[seq]

    def free(self, seq: Hashable) -> None:
        self._states.pop(seq, None)

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
        del self._states[seq]
