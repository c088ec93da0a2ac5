"""The arrays of a model as a flat list, so that they can be the inputs of a function."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from mlx_paged.models.language_model import LanguageModel


class ModelArrays:
    """All arrays in the tree of a model's modules, dictionaries and lists.

    :meth:`current` reflects weights that are replaced or changed in place. A tree whose modules
    change, as by quantisation or adapters, has to be :meth:`read` again.
    """

    def __init__(self, model: LanguageModel):
        self._model = model
        self.read()

    def read(self) -> list[mx.array]:
        """Find all arrays of the tree; returns them."""
        edges = list(_edges(self._model))
        arrays = [edge for edge in edges if isinstance(edge[2], mx.array)]
        others = [edge for edge in edges if not isinstance(edge[2], mx.array)]
        self._num_arrays = len(arrays)
        self._parents = [parent for parent, _, _ in arrays + others]
        self._keys = [key for _, key, _ in arrays + others]
        self._nodes = [node for _, _, node in others]
        self._lengths = list(map(len, [self._model, *self._nodes]))
        return [array for _, _, array in arrays]

    def current(self) -> list[mx.array] | None:
        """The current arrays, in the order of :meth:`read`; ``None`` if the tree has changed."""
        # Loops in C, because there are hundreds of arrays and this runs once per step.
        try:
            found: list[Any] = list(map(operator.getitem, self._parents, self._keys))
        except LookupError:
            return None
        nodes = found[self._num_arrays :]
        if not all(map(operator.is_, nodes, self._nodes)):
            return None
        if list(map(len, [self._model, *nodes])) != self._lengths:
            return None
        return found[: self._num_arrays]

    def copy_on(self, arrays: list[mx.array]) -> LanguageModel:
        """A copy of the model with other arrays, in the order of :meth:`read`."""
        places = zip(map(id, self._parents), self._keys, strict=True)
        copied: LanguageModel = _copy_on(self._model, dict(zip(places, arrays, strict=False)))
        return copied


def _children(node: Any) -> Iterator[tuple[Any, Any]]:
    """The keys and values of a module, dictionary, list or tuple."""
    return iter(node.items()) if isinstance(node, dict) else enumerate(node)


def _edges(node: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Parent, key and child for each array, and for each container that may hold arrays."""
    for key, child in _children(node):
        if isinstance(child, mx.array):
            yield node, key, child
        elif isinstance(child, dict | list | tuple):
            yield node, key, child
            yield from _edges(child)


def _copy_on(node: Any, arrays: dict[tuple[int, Any], mx.array]) -> Any:
    """A copy of a tree whose array at ``key`` of ``parent`` is ``arrays[id(parent), key]``."""
    children = {}
    for key, child in _children(node):
        if isinstance(child, mx.array):
            children[key] = arrays[id(node), key]
        elif isinstance(child, dict | list | tuple):
            children[key] = _copy_on(child, arrays)
        else:
            children[key] = child
    if isinstance(node, list | tuple):
        return type(node)(children.values())
    copied = copy.copy(node)
    dict.update(copied, children)  # ``nn.Module.update`` is another method.
    return copied
