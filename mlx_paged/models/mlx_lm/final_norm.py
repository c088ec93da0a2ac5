"""Logits of the requested rows only: a model's last norm drops the other rows, so that what follows
it is computed for these alone.

The product with the vocabulary is a tenth of a small model's work on a prompt, of which one row of
logits is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_paged.models.mlx_lm.module_calls import Calls

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
    the requested rows only. Their values are compared later, with those of mlx-lm.

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
        wanted = _wanted.get()
        if wanted is not None:
            rows, axis = wanted
            x = mx.take(x, rows, axis=axis)
        return kind.__call__(self, x, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call, "keeps_wanted_rows": True})
