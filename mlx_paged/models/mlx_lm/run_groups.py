"""Modules that mix the tokens of a sequence through a recurrent state, on the packed axis.

Such a module takes ``[num_sequences, length, ...]``, as in mlx-lm. So it runs once per group of the
step's runs with equal length: all decodes are one such batch, and a run of a prompt usually is
another. Nothing is padded, so no module needs a mask. The module's class is replaced by a subclass
that splits the arguments and joins the results. All other modules get packed rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache, CacheList

from mlx_paged.cache import LayerKV
from mlx_paged.models.adapted_layers import adapters_of
from mlx_paged.models.mlx_lm.attention import FetchedKeys, FetchedValues, PackedKV
from mlx_paged.models.mlx_lm.modules import leaves_of, with_leaves
from mlx_paged.ops import AttentionMetadata, ReadState, StateRow, StateStack, StepState, reader_of

_UNREAD: Any = object()
# The packed rows of a group: consecutive ones, any, or None for all.
RowIndex: TypeAlias = slice | mx.array | None


class GroupCache(ArraysCache):
    """The recurrent cache of mlx-lm that a module gets for a group. A state is gathered when the
    module reads it, so that no state occupies memory before its layer runs.
    """

    def __init__(self, num_slots: int, read: Any):
        super().__init__(num_slots)
        self.cache: list[Any] = [_UNREAD] * num_slots
        self._read = read

    def __getitem__(self, slot: int) -> mx.array | None:
        value: mx.array | None = self.cache[slot]
        return self._read(slot) if value is _UNREAD else value

    def empty(self) -> bool:
        return self[0] is None

    @property
    def arrays(self) -> list[mx.array | None]:
        return [self[slot] for slot in range(len(self.cache))]


class Run(NamedTuple):
    """Consecutive new tokens of a sequence."""

    seq: int  # its place in the step
    begin: int  # the first of them, among the new tokens of the sequence
    length: int


class RunGroup:
    """Runs of a step with equal lengths, whose states have equal shapes.

    Args:
        runs: at least one.
        read: returns the states that they begin with.
        num_slots: one number per recurrent cache.

    Attributes:
        length: of each run.
        caches: the recurrent caches of the group; after the step they hold the new states.
    """

    def __init__(
        self,
        step: AttentionMetadata,
        runs: Sequence[Run],
        read: ReadState,
        num_slots: Sequence[int],
    ):
        self.runs, self.length = runs, runs[0].length
        self.caches = [
            GroupCache(size, partial(read, index)) for index, size in enumerate(num_slots)
        ]
        starts = step.cu_seqlens_q
        self._first_rows = [starts[run.seq] + run.begin for run in runs]
        self._num_tokens = step.num_tokens

    @cached_property
    def rows(self) -> list[int]:
        """Indices on the packed axis, run by run."""
        return [row for first in self._first_rows for row in range(first, first + self.length)]

    @cached_property
    def first_rows(self) -> mx.array:
        """``[num_runs] int32``"""
        return mx.array(self._first_rows, dtype=mx.int32)

    @cached_property
    def _index(self) -> RowIndex:
        first, rows = self._first_rows[0], self.rows
        if rows != list(range(first, first + len(rows))):
            return mx.array(rows, dtype=mx.int32)
        return None if len(rows) == self._num_tokens else slice(first, first + len(rows))

    @cached_property
    def is_packed(self) -> bool:
        """Whether the group is the whole packed axis, with runs of one token."""
        return self.length == 1 and self._index is None

    def take(self, x: mx.array) -> mx.array:
        """The group's rows of ``[num_tokens, 1, ...]``, as ``[num_runs, length, ...]``."""
        if self._index is not None:
            x = x[self._index]
        return x.reshape(len(self.runs), self.length, *x.shape[2:])

    def new_states(self) -> StateStack:
        arrays = [cache.arrays for cache in self.caches]
        if self.length > 1:
            # A convolution's state is a view of its input, which would stay in memory as a whole.
            arrays = [
                [None if array is None else mx.contiguous(array) for array in slots]
                for slots in arrays
            ]
        return StateStack(arrays, len(self.runs))


class RunGroups:
    """All runs of a step. A run with a checkpoint inside is cut there: the rest is in a later wave
    of groups, which begin with the states that the previous wave ends with.

    Args:
        states: one per sequence of the step; :meth:`put_states` sets the new ones.
        num_slots: one number per recurrent cache.
    """

    def __init__(
        self, step: AttentionMetadata, states: Sequence[StepState], num_slots: Sequence[int]
    ):
        self.step = step
        self._states, self._num_slots = states, num_slots
        first, *later = _waves(step.query_lens, states)
        kinds = [_kind_of(state.before) for state in states]
        self.groups = wave = [
            self._group(runs, _reader_before([states[run.seq].before for run in runs]))
            for runs in _alike(first, dict(enumerate(kinds)))
        ]
        for cut_runs in later:
            places = {run.seq: (group, row) for group in wave for row, run in enumerate(group.runs)}
            # States of one group of the previous wave have equal shapes.
            origins = {seq: id(group) for seq, (group, _) in places.items()}
            wave = [
                self._group(runs, _reader_within([places[run.seq] for run in runs]))
                for runs in _alike(cut_runs, origins)
            ]
            self.groups = [*self.groups, *wave]

    def _group(self, runs: Sequence[Run], read: ReadState) -> RunGroup:
        return RunGroup(self.step, runs, read, self._num_slots)

    @cached_property
    def _row_order(self) -> mx.array | None:
        """``[num_tokens] int32``, which restores the packed order of the groups' joined rows."""
        rows = list(itertools.chain.from_iterable(group.rows for group in self.groups))
        order = sorted(range(len(rows)), key=rows.__getitem__)
        return None if order == list(range(len(rows))) else mx.array(order, dtype=mx.int32)

    def join(self, results: Sequence[Any]) -> Any:
        """A module's results for all groups, ``[num_runs, length, ...]`` each, on the packed axis,
        ``[num_tokens, 1, ...]``. A result may be several arrays.
        """
        one = results[0]
        if isinstance(one, tuple | list):
            return type(one)(map(self.join, zip(*results, strict=True)))
        if not isinstance(one, mx.array) or self.groups[0].is_packed:
            return one
        parts = [part.reshape(-1, 1, *part.shape[2:]) for part in results]
        joined = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return joined if self._row_order is None else joined[self._row_order]

    def put_states(self) -> list[mx.array]:
        """Set the states after the step; returns their arrays, to be evaluated with its logits."""
        leaves: list[mx.array] = []
        for group in self.groups:
            stack = group.new_states()
            leaves += stack.leaves
            for row, run in zip(stack.rows(), group.runs, strict=True):
                state = self._states[run.seq]
                if run.begin + run.length in state.cuts:
                    state.at_cuts.append(row.alone())
                    leaves += state.at_cuts[-1].stack.leaves
                state.after = row  # later waves overwrite it
        return leaves


def _waves(query_lens: Sequence[int], states: Sequence[StepState]) -> list[list[Run]]:
    """The runs between the cuts of each sequence; wave ``i`` has the ``i``-th run of each."""
    waves: list[list[Run]] = []
    for seq, (length, state) in enumerate(zip(query_lens, states, strict=True)):
        ends = sorted({*state.cuts, length})
        for number, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
            if number == len(waves):
                waves.append([])
            waves[number].append(Run(seq, begin, end - begin))
    return waves


def _alike(runs: Iterable[Run], kinds: Mapping[int, object]) -> Iterable[list[Run]]:
    """Groups of runs with the same length, of sequences of the same kind."""
    groups: dict[object, list[Run]] = {}
    for run in runs:
        groups.setdefault((run.length, kinds[run.seq]), []).append(run)
    return groups.values()


def _kind_of(state: StateRow | None) -> object:
    """The shapes of a state, which are equal within a group; ``None`` for no state, which a module
    may treat differently from zeros.
    """
    return None if state is None else state.stack.shapes


def _reader_before(states: Sequence[StateRow | None]) -> ReadState:
    rows = [row for row in states if row is not None]
    return reader_of(rows) if rows else lambda cache, slot: None


def _reader_within(places: Sequence[tuple[RunGroup, int]]) -> ReadState:
    """Reads the current states of these rows of a group."""
    group, rows = places[0][0], [row for _, row in places]
    index = None if rows == list(range(len(group.runs))) else mx.array(rows)

    def read(cache: int, slot: int) -> mx.array | None:
        array = group.caches[cache][slot]
        return array if array is None or index is None else array[index]

    return read


class GroupKV(PackedKV):
    """K/V of a module that both attends and has a recurrent state (``baichuan_m1``): a cache for
    the ``[num_runs, length]`` tokens of a group, which attend as a separate step.
    """

    layer: LayerKV

    def __init__(self, layer: LayerKV, group: RunGroup):
        runs = group.runs
        self._step = layer.step.runs_of(
            [run.seq for run in runs],
            [run.begin for run in runs],
            [run.begin + run.length for run in runs],
        )
        super().__init__(layer, self._step.positions[:: group.length])
        self._shape = len(runs), group.length

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[FetchedKeys, FetchedValues]:
        return super().update_and_fetch(_packed(keys), _packed(values))

    def attend(self, queries: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        whole = self.layer.step
        self.layer.open(self._step)
        try:
            out = super().attend(_packed(queries), *args, **kwargs)
        finally:
            self.layer.open(whole)
        return out.reshape(*self._shape, out.shape[1], out.shape[3]).swapaxes(1, 2)


def _packed(x: mx.array) -> mx.array:
    """``[num_runs, num_heads, length, width]`` as ``[num_tokens, num_heads, 1, width]``."""
    return x.swapaxes(1, 2).reshape(-1, x.shape[1], 1, x.shape[3])


class PackedState:
    """A recurrent cache as a packed step passes it to the modules that use it.

    Args:
        index: of the cache among the recurrent ones.
    """

    # mlx-lm's names, for batches that are padded.
    lengths = left_padding = None

    def __init__(self, groups: RunGroups, index: int):
        self.groups, self.index = groups, index

    def make_mask(self, N: int) -> None:
        """Nothing is padded."""


def run_by_groups(modules: Iterable[Module]) -> None:
    """Have these modules run by groups where they are called with a :class:`PackedState`. Their
    weights are not moved, and the names of their classes, which a model's identity covers, stay.
    """
    for module in modules:
        if not hasattr(module, "runs_by_groups"):
            module.__class__ = _by_groups(type(module))


@cache
def _by_groups(kind: type[Module]) -> type[Module]:
    def call(self: Module, *args: Any, **kwargs: Any) -> Any:
        given = leaves_of([*args, *kwargs.values()])
        state = next((each for each in given if isinstance(each, PackedState)), None)
        if state is None:
            return kind.__call__(self, *args, **kwargs)
        groups = state.groups
        results = []
        for group in groups.groups:
            positional = [_for_group(value, group, groups) for value in args]
            named = {name: _for_group(value, group, groups) for name, value in kwargs.items()}
            with adapters_of(None if group.is_packed else group.first_rows):
                results.append(kind.__call__(self, *positional, **named))
        return groups.join(results)

    names = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**names, "runs_by_groups": True})


def _for_group(value: Any, group: RunGroup, groups: RunGroups) -> Any:
    """An argument of a module, cut to a group's tokens."""
    if isinstance(value, CacheList):
        return with_leaves([value], lambda each: _for_group(each, group, groups))[0]
    if isinstance(value, PackedState):
        return group.caches[value.index]
    if group.is_packed:
        return value
    if isinstance(value, PackedKV):
        layer = value.layer
        return GroupKV(layer, group) if isinstance(layer, LayerKV) else value
    if value is groups.step.positions:
        return value[group.first_rows]
    if isinstance(value, mx.array) and value.shape[:2] == (groups.step.num_tokens, 1):
        return group.take(value)
    return value
