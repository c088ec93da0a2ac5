"""Recurrent states of sequences, in stacks, and how a step reads and writes them.

The state of a sequence is a row of a stack, whose arrays hold the states of all sequences that ran
together. A step that runs the same sequences again reads the stack without a copy.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import mlx.core as mx

# By recurrent cache of the model and its slot; None for a slot that is not set.
StateArrays: TypeAlias = Sequence[Sequence[mx.array | None]]
# What a step reads: the array of a cache and a slot, [num_sequences, ...].
ReadState: TypeAlias = Callable[[int, int], mx.array | None]


class StateStack:
    """States of sequences that ran together.

    Args:
        arrays: ``[num_states, ...]`` each.
        num_states: one per sequence.
    """

    def __init__(self, arrays: StateArrays, num_states: int):
        self.arrays = arrays
        self.num_states = num_states
        self._rows: list[weakref.ref[StateRow]] = []

    @classmethod
    def of(cls, rows: Sequence[StateRow]) -> StateStack:
        """A stack of these rows, whose :attr:`shapes` are equal: their own stack if they are the
        whole of it, in order, else a new one.
        """
        stack = rows[0].stack
        if len(rows) == stack.num_states and all(
            row.stack is stack and row.index == index for index, row in enumerate(rows)
        ):
            return stack
        read = reader_of(rows)
        arrays = [
            [read(cache, slot) for slot in range(size)]
            for cache, size in enumerate(stack.num_slots)
        ]
        return cls(arrays, len(rows))

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...] | None, ...]:
        """The shape of each array of one state: only states with equal shapes can share a stack."""
        return tuple(
            None if array is None else tuple(array.shape[1:])
            for slots in self.arrays
            for array in slots
        )

    @classmethod
    def of_leaves(cls, leaves: Iterable[mx.array], num_slots: Sequence[int]) -> StateStack:
        """A stack of these arrays, for recurrent caches with these numbers of slots."""
        taken = iter(leaves)
        arrays = [list(itertools.islice(taken, size)) for size in num_slots]
        return cls(arrays, len(arrays[0][0]))

    @property
    def num_slots(self) -> list[int]:
        """The number of slots of each recurrent cache."""
        return [len(slots) for slots in self.arrays]

    @property
    def leaves(self) -> list[mx.array]:
        """All arrays."""
        return [array for slots in self.arrays for array in slots if array is not None]

    def rows(self) -> list[StateRow]:
        """The states one by one. They keep the whole stack, until :meth:`split`."""
        return [StateRow(self, index) for index in range(self.num_states)]

    @property
    def _held(self) -> list[StateRow]:
        return [row for row in (each() for each in self._rows) if row is not None]

    @property
    def is_whole(self) -> bool:
        """Whether each of its states is still held."""
        return len({row.index for row in self._held}) == self.num_states

    def split(self) -> list[mx.array]:
        """Unless the stack is whole, copy each state that is still held to a separate stack, so
        that this one can be freed.

        Returns:
            The copies, to be evaluated.
        """
        if self.is_whole:
            return []
        held, self._rows = self._held, []
        for row in held:
            row.stack, row.index = row.alone().stack, 0
        return [array for row in held for array in row.stack.leaves]


class StateRow:
    """The state of one sequence. Its value never changes; the stack that holds it may.

    Attributes:
        of_draft_model: the state of a recurrent draft model after the same tokens, if it is known
            there.
    """

    __slots__ = ("__weakref__", "index", "of_draft_model", "stack")

    def __init__(self, stack: StateStack, index: int):
        self.stack, self.index = stack, index
        self.of_draft_model: StateRow | None = None
        stack._rows.append(weakref.ref(self))

    def alone(self) -> StateRow:
        """The same state in a separate stack."""
        stack = self.stack
        if stack.num_states == 1:
            return self
        place = slice(self.index, self.index + 1)
        arrays = [
            [None if array is None else mx.contiguous(array[place]) for array in slots]
            for slots in stack.arrays
        ]
        return StateRow(StateStack(arrays, 1), 0)


@dataclass(slots=True, eq=False)
class StepState:
    """The recurrent state of a sequence before and after a step.

    Attributes:
        before: :attr:`after` of the previous step of the sequence; ``None`` at its beginning.
        cuts: after how many of the new tokens, ascending, the model has to leave a state.
        num_checkpoints: how many of these states are checkpoints. A further one is at the end of a
            block before drafts, for the sequence itself if some are rejected.
        num_drafts: how many of the last new tokens are drafts, which may be rejected.
        at_cuts: the states at the cuts, in separate stacks, added by the model.
        after: the state after all new tokens, set by the model.
    """

    before: StateRow | None
    cuts: Sequence[int] = ()
    num_checkpoints: int = 0
    num_drafts: int = 0
    at_cuts: list[StateRow] = field(default_factory=list)
    after: StateRow | None = None


def reader_of(rows: Sequence[StateRow]) -> ReadState:
    """A function that reads these states together, one array at a time; without a copy if they are
    a whole stack.
    """
    pieces: list[tuple[StateStack, list[int]]] = []
    for row in rows:
        if pieces and pieces[-1][0] is row.stack:
            pieces[-1][1].append(row.index)
        else:
            pieces.append((row.stack, [row.index]))
    indices = [
        None if places == list(range(stack.num_states)) else mx.array(places)
        for stack, places in pieces
    ]

    def read(cache: int, slot: int) -> mx.array | None:
        parts = []
        for (stack, _), index in zip(pieces, indices, strict=True):
            array = stack.arrays[cache][slot]
            if array is None:
                return None  # in all of them: their shapes are equal
            parts.append(array if index is None else array[index])
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    return read


def separate_states(stacks: Sequence[StateStack]) -> list[StateStack]:
    """After a step that continued from these stacks, move states that are still held to separate
    stacks: one held state would keep its whole stack in memory.

    Returns:
        The stacks of which every state is held: if drafts are rejected, all of their sequences may
        fall back to them.
    """
    copies = [array for stack in stacks for array in stack.split()]
    if copies:
        mx.async_eval(copies)
    return [stack for stack in stacks if stack.is_whole]
