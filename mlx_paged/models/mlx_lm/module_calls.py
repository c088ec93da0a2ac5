"""Which modules a model calls, and what they return: noted by other classes that they have for a
while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    with _other_classes(modules, noting):
        yield calls


@contextmanager
def open_calls(model: Module) -> Iterator[list[Module]]:
    """The modules of a model that are being called, outermost first and without the model itself,
    while the context lasts.
    """
    calls: list[Module] = []

    def noting(module_class: type[Module]) -> type[Module]:
        def call(self: Module, *args: Any, **kwargs: Any) -> Any:
            calls.append(self)
            try:
                return module_class.__call__(self, *args, **kwargs)
            finally:
                calls.pop()

        return type(module_class.__name__, (module_class,), {"__call__": call})

    with _other_classes([each for each in model.modules() if each is not model], noting):
        yield calls


@contextmanager
def _other_classes(
    modules: Sequence[Module], other: Callable[[type[Module]], type[Module]]
) -> Iterator[None]:
    classes = [(module, type(module)) for module in modules]
    try:
        for module, module_class in classes:
            module.__class__ = other(module_class)
        yield
    finally:
        put_back(classes)


def put_back(classes: Iterable[tuple[Module, type[Module]]]) -> None:
    """Give modules the classes again that they had."""
    for module, module_class in classes:
        if type(module) is not module_class:
            module.__class__ = module_class


def last_called_once(called: Sequence[Module]) -> Module | None:
    """The module that was called last, if it was called once."""
    # By identity: modules compare as the dictionaries that they are.
    if not called or sum(module is called[-1] for module in called) != 1:
        return None
    return called[-1]
