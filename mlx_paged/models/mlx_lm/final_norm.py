"""Logits of some rows only: what comes after a model's last norm is done for those alone.

The product with the vocabulary is a tenth of a small model's work on a prompt, and of a prompt one
row of logits is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

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
