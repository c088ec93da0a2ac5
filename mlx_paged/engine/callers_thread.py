"""Lets functions of a request run in the engine's thread as they would in the caller's.

An engine calls samplers and logits processors in its own thread. A lazy array belongs to the
streams of the thread that made it, and each thread has its own random state.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from mlx_paged.engine.thread import end_before_python

_DEPTH = 6  # of nested functions and objects
_MOST_ITEMS = 100  # of a container: vocabularies are not searched


def evaluate_arrays(*trees: Module | None) -> None:
    """Evaluate the arrays of modules: parameters, and others such as the frequencies of RoPE. Other
    values are ignored; they are checked later.
    """
    for tree in trees:
        if isinstance(tree, Module):
            leaves = dict(tree_flatten(tree)).values()
            mx.eval([leaf for leaf in leaves if isinstance(leaf, mx.array)])


def evaluate_captured(function: Callable[..., Any] | None) -> None:
    """Evaluate the arrays that a function refers to: in its closure, its defaults, the globals that
    it names, its attributes if it is an object, and in turn those of all of these.
    """
    if function is not None:
        mx.eval(list(_arrays(function, _DEPTH, set())))


def random_key() -> int:
    """The random state of this thread, for ``mx.random.seed`` in another one: that continues with
    the same numbers.
    """
    here = threading.current_thread()
    if here is not threading.main_thread():
        end_before_python(here)
    state: Any = mx.random.state
    high, low = state[0].tolist()
    return int(high) << 32 | int(low)


def _arrays(value: object, depth: int, seen: set[int]) -> Iterator[mx.array]:
    if isinstance(value, mx.array):
        yield value
    elif depth and not isinstance(value, type) and id(value) not in seen:
        seen.add(id(value))
        for held in _held_by(value):
            yield from _arrays(held, depth - 1, seen)


def _held_by(value: object) -> Iterator[object]:
    if isinstance(value, ModuleType):
        return
    if isinstance(value, list | tuple | dict):
        if len(value) <= _MOST_ITEMS:
            yield from value.values() if isinstance(value, dict) else value
        return
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    function: Any = getattr(value, "__func__", value)  # of a method
    yield getattr(value, "__self__", None)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # It is not set yet.
            continue
    yield from getattr(function, "__defaults__", None) or ()
    yield from (getattr(function, "__kwdefaults__", None) or {}).values()
    if hasattr(function, "__code__"):
        names = function.__code__.co_names
        yield from (function.__globals__[name] for name in names if name in function.__globals__)
    else:
        yield from getattr(value, "__dict__", {}).values()
