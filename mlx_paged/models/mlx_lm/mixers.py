"""Modules that mix the tokens of a sequence through a recurrent state, on the packed axis.

Such a module runs once per group of runs (:mod:`mlx_paged.models.mlx_lm.run_groups`): its class is
replaced by a subclass that splits the arguments and joins the results. All other modules get packed
rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import CacheList

from mlx_paged.cache import LayerKV
from mlx_paged.models.mlx_lm.cache_tree import leaves_of, with_leaves
from mlx_paged.models.mlx_lm.group_kv import GroupKV
from mlx_paged.models.mlx_lm.packed_kv import PackedKV
from mlx_paged.models.mlx_lm.run_groups import RunGroup, RunGroups


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
