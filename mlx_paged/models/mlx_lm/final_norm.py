"""Logits of some rows only: what comes after a model's last norm is done for those alone.

The product with the vocabulary is a tenth of a small model's work on a prompt, and of a prompt one
row of logits is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_paged.models.mlx_lm.module_calls import last_called_once

# The rows and their axis; of the thread that runs a step.
_wanted: ContextVar[tuple[mx.array, int] | None] = ContextVar("wanted rows", default=None)


@contextmanager
def rows_wanted(rows: mx.array | None, axis: int) -> Iterator[None]:
    """Let the norm that :func:`keep_wanted_rows` has prepared return these rows only.

    Args:
        rows: ``[num_rows] int32``; ``None`` for all.
        axis: of the norm's input, on which the tokens are.
    """
    token = _wanted.set(None if rows is None else (rows, axis))
    try:
        yield
    finally:
        _wanted.reset(token)


def leaves_rows_out(
    norms: Sequence[Module], run: Callable[[], mx.array], row: int, axis: int
) -> bool:
    """Prepare the last of these norms, and say whether the logits are those of the wanted rows
    then; their values are compared later.

    Args:
        norms: of a model, in the order in which it called them.
        run: builds the graph once more; returns the logits.
        row, axis: that is wanted for the trial.
    """
    norm = last_called_once(norms)
    if norm is None:
        return False
    keep_wanted_rows(norm)
    try:
        with rows_wanted(mx.array([row]), axis):
            return run().shape[:2] == (1, 1)
    except Exception:
        return False  # something after the norm needs the other rows


def keep_wanted_rows(norm: Module) -> None:
    """Prepare a model's last norm, once. Its weights stay where they are."""
    if not hasattr(norm, "keeps_wanted_rows"):
        norm.__class__ = _of_wanted_rows(type(norm))


@cache
def _of_wanted_rows(kind: type[Module]) -> type[Module]:
    def call(self: Module, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        wanted = _wanted.get()
        if wanted is not None:
            rows, axis = wanted
            x = mx.take(x, rows, axis=axis)
        return kind.__call__(self, x, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call, "keeps_wanted_rows": True})
