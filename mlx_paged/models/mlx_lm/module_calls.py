"""Which modules a model calls, and in which order: recorded by subclasses that the modules have
while the model runs once. And the classes of modules, to put them back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from mlx.nn.layers.base import Module


class ModuleClasses:
    """The classes that modules have now."""

    def __init__(self, modules: Iterable[Module]):
        self._classes = [(module, type(module)) for module in modules]

    def restore(self) -> None:
        """Give the modules these classes again."""
        for module, module_class in self._classes:
            if type(module) is not module_class:
                module.__class__ = module_class


class Calls:
    """The calls of a model's modules.

    Attributes:
        running: the modules whose call has not returned, outermost first, without the model itself.
        finished: the calls that have returned, in that order: the module and its result.
    """

    def __init__(self) -> None:
        self.running: list[Module] = []
        self.finished: list[tuple[Module, Any]] = []

    def of_kind(self, word: str) -> list[tuple[Module, Any]]:
        """The finished calls of modules whose class has this word in its name: both RMSNorm and
        LayerNorm have "norm".
        """
        return [call for call in self.finished if word in type(call[0]).__name__.lower()]


@contextmanager
def recorded_calls(model: Module) -> Iterator[Calls]:
    """Record the calls of a model's modules until the context ends."""
    calls = Calls()

    def recording(module_class: type[Module]) -> type[Module]:
        def call(self: Module, *args: Any, **kwargs: Any) -> Any:
            calls.running.append(self)
            try:
                result = module_class.__call__(self, *args, **kwargs)
            finally:
                calls.running.pop()
            calls.finished.append((self, result))
            return result

        return type(module_class.__name__, (module_class,), {"__call__": call})

    # By identity: a module may be in several places.
    modules = {id(module): module for module in model.modules() if module is not model}.values()
    classes = ModuleClasses(modules)
    subclasses = {kind: recording(kind) for kind in set(map(type, modules))}
    try:
        for module in modules:
            module.__class__ = subclasses[type(module)]
        yield calls
    finally:
        classes.restore()
