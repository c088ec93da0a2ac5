"""Modules that mix the tokens of a sequence through a recurrent state, on the packed axis.

Such a module runs once per group of runs (:mod:`mlx_paged.models.mlx_lm.run_groups`): it gets
another class, which cuts its arguments and joins its results. All others see packed rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache, CacheList

from mlx_paged.cache import LayerKV
from mlx_paged.errors import UnsuitableModelError
from mlx_paged.models.mlx_lm.cache_tree import leaves_of, with_leaves
from mlx_paged.models.mlx_lm.group_kv import GroupKV
from mlx_paged.models.mlx_lm.packed_kv import PackedKV
from mlx_paged.models.mlx_lm.run_groups import RunGroup, RunGroups


class RecordedState(ArraysCache):
    """A recurrent cache that notes which modules use it: the innermost one that is being called,
    each time.

    Args:
        calls: the modules that are being called, outermost first.
    """

    def __init__(self, num_slots: int, calls: Sequence[Module]):
        super().__init__(num_slots)
        self._calls = calls
        self.users: dict[int, Module] = {}  # by identity

    def _note(self) -> None:
        if not self._calls:
            raise UnsuitableModelError("it uses a recurrent cache outside of its modules")
        self.users[id(self._calls[-1])] = self._calls[-1]

    def __getitem__(self, slot: int) -> Any:
        self._note()
        return super().__getitem__(slot)

    def __setitem__(self, slot: int, value: Any) -> None:
        self._note()
        super().__setitem__(slot, value)


class PackedState:
    """Stands for a recurrent cache in a packed step, outside of the modules that use it.

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
    """Let these modules run by groups where they get a :class:`PackedState`. Their weights stay
    where they are, and so does what identifies them.
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
            results.append(kind.__call__(self, *positional, **named))
        return groups.join(results)

    names = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**names, "runs_by_groups": True})


def _for_group(value: Any, group: RunGroup, groups: RunGroups) -> Any:
    """An argument of a module, as a group has it."""
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
