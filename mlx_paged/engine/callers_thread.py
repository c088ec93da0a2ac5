"""Lets functions of a request run in the engine's thread as they would in the caller's.

An engine calls samplers and logits processors in its own thread. A lazy array belongs to the
streams of the thread that made it, and each thread has its own random state.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from mlx_paged.engine.thread import end_before_python
from mlx_paged.errors import RequestError


def evaluate_arrays(*trees: Module | None) -> None:
    """Evaluate the arrays of modules: parameters, and others such as the frequencies of RoPE. Other
    values are ignored; they are checked later.
    """
    for tree in trees:
        if isinstance(tree, Module):
            leaves = dict(tree_flatten(tree)).values()
            mx.eval([leaf for leaf in leaves if isinstance(leaf, mx.array)])


def evaluate_captured(function: Callable[..., Any] | None) -> None:
    """Evaluate the arrays that a function of a request refers to itself: in its closure, its
    defaults, the globals that it names, the arguments of a ``partial``, the attributes of an
    object; and those in lists, tuples and dictionaries there. Arrays of functions and objects that
    it refers to in turn are not found (:func:`lazy_array_error`).
    """
    if function is not None:
        mx.eval([array for value in _referred_to(function) for array in _arrays(value)])


def lazy_array_error(error: BaseException) -> BaseException:
    """The error of a request's function; for a lazy array of another thread one that says what to
    do.
    """
    if not (isinstance(error, RuntimeError) and "There is no Stream" in str(error)):
        return error
    wrapped = RequestError(
        f"[engine] a sampler or logits processor uses a lazy array of another thread ({error}); "
        "call mx.eval on its arrays before the request is added"
    )
    wrapped.__cause__ = error
    return wrapped


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


def _arrays(value: object) -> Iterator[mx.array]:
    items: Iterable[object] = (value,)
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, list | tuple):
        items = value
    return (item for item in items if isinstance(item, mx.array))


def _referred_to(function: Any) -> Iterator[object]:
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values())
        yield from _referred_to(function.func)
        return
    if hasattr(function, "__func__"):  # a method
        yield from getattr(function.__self__, "__dict__", {}).values()
        function = function.__func__
    if not hasattr(function, "__code__"):
        yield from getattr(function, "__dict__", {}).values()
        return
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # It is not set yet.
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from (function.__globals__.get(name) for name in function.__code__.co_names)
