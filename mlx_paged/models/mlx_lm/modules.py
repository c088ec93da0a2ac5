"""The modules of a model of mlx-lm: which of them it calls and in which order, their classes, the
list of caches that they are called with, and the last norm, which can drop rows.

Modules get subclasses while the model runs once, or for good; their weights stay in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import CacheList

from mlx_paged.models.language_model import wanted_hidden_rows


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


# The list of caches, some of whose entries are lists of caches


def leaves_of(caches: Sequence[Any]) -> Iterator[Any]:
    """Every single cache, in the model's order."""
    for entry in caches:
        if isinstance(entry, CacheList):
            yield from leaves_of(entry.caches)
        else:
            yield entry


def with_leaves(caches: Sequence[Any], make: Callable[[Any], Any]) -> list[Any]:
    """The same lists with each cache replaced by what ``make`` returns for it, called in order."""
    return [
        CacheList(*with_leaves(entry.caches, make)) if isinstance(entry, CacheList) else make(entry)
        for entry in caches
    ]


# The last norm. The product with the vocabulary is a tenth of a small model's work on a prompt, of
# which one row of logits is needed: the norm drops the other rows, so that what follows it is
# computed for the requested ones alone.

# The rows and their axis, for the thread that runs a step.
_wanted: ContextVar[tuple[mx.array, int] | None] = ContextVar("wanted rows", default=None)


@contextmanager
def rows_wanted(rows: mx.array | None, axis: int) -> Iterator[None]:
    """Have the norm that :func:`prepare_final_norm` has prepared return these rows only.

    Args:
        rows: ``[num_rows] int32``; ``None`` for all.
        axis: the token axis of the norm's input.
    """
    token = _wanted.set(None if rows is None else (rows, axis))
    try:
        yield
    finally:
        _wanted.reset(token)


def prepare_final_norm(calls: Calls, run: Callable[[], mx.array], axis: int) -> bool:
    """Prepare a model's last norm to drop rows, and return whether the model then gives logits of
    the requested rows only.

    Args:
        calls: those of the model's modules in one run.
        run: builds the graph once more and returns the logits.
        axis: the token axis.
    """
    norms = [norm for norm, _ in calls.of_kind("norm")]
    # By identity: modules compare as the dictionaries that they are.
    if not norms or sum(norm is norms[-1] for norm in norms) != 1:
        return False
    norm = norms[-1]
    if not hasattr(norm, "keeps_wanted_rows"):
        norm.__class__ = _of_wanted_rows(type(norm))
    try:
        with rows_wanted(mx.array([0]), axis):
            return run().shape[:2] == (1, 1)
    except Exception:
        return False  # something after the norm needs the other rows


@cache
def _of_wanted_rows(kind: type[Module]) -> type[Module]:
    def call(self: Module, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        wanted, hidden = _wanted.get(), wanted_hidden_rows()
        takes_all = hidden is not None and hidden.takes_all
        if wanted is not None and not takes_all:
            x = mx.take(x, wanted[0], axis=wanted[1])
        normed = kind.__call__(self, x, *args, **kwargs)
        if hidden is not None:
            if takes_all:
                hidden.take(x, normed)
                normed = normed if wanted is None else mx.take(normed, wanted[0], axis=wanted[1])
            hidden.take_of_logits(normed)
        return normed

    return type(kind.__name__, (kind,), {"__call__": call, "keeps_wanted_rows": True})
