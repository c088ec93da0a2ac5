"""Which modules of a kind a model calls, and what they return."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlx.nn.layers.base import Module


@contextmanager
def noted_calls(model: Module, kind: str) -> Iterator[list[tuple[Module, Any]]]:
    """Note each call of a module, and its result, while the context lasts.

    Args:
        kind: is in the names of the modules' classes, as "norm" is in RMSNorm and LayerNorm.
    """
    calls: list[tuple[Module, Any]] = []

    def noting(module_class: type[Module]) -> type[Module]:
        def call(self: Module, *args: Any, **kwargs: Any) -> Any:
            result = module_class.__call__(self, *args, **kwargs)
            calls.append((self, result))
            return result

        return type(module_class.__name__, (module_class,), {"__call__": call})

    modules = [each for each in model.modules() if kind in type(each).__name__.lower()]
    classes = [type(module) for module in modules]
    try:
        for module, module_class in zip(modules, classes, strict=True):
            module.__class__ = noting(module_class)
        yield calls
    finally:
        for module, module_class in zip(modules, classes, strict=True):
            module.__class__ = module_class


def last_called_once(called: Sequence[Module]) -> Module | None:
    """The module that was called last, if it was called once."""
    # By identity: modules compare as the dictionaries that they are.
    if not called or sum(module is called[-1] for module in called) != 1:
        return None
    return called[-1]
