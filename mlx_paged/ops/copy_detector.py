"""Detects steps that copy a whole slab, which costs more than all their attention."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_paged.ops.kv_handle import KVHandle

# Longer steps write many blocks at once, and are few.
MAX_TOKENS = 8


class CopyDetector:
    """Checks the first ``num_steps`` small steps, and warns at most once.

    A slab that was written in place has the same address as before the step, a copy has another.
    Addresses are compared because resetting MLX's peak memory counter would affect the whole
    process.
    """

    def __init__(self, num_steps: int):
        self._num_steps_left = num_steps
        self._before: list[int] | None = None

    def begin_step(self, num_tokens: int, handles: Sequence[KVHandle]) -> None:
        """Before the step's graph is built."""
        self._before = None
        if self._num_steps_left > 0 and num_tokens <= MAX_TOKENS:
            self._before = _addresses(handles)

    def end_step(self, handles: Sequence[KVHandle]) -> None:
        """After the step's graph was built; not called for an aborted step. A step that is checked
        is evaluated here.
        """
        if self._before is None:
            return
        after = _addresses(handles)
        num_copied = sum(one != other for one, other in zip(self._before, after, strict=True))
        self._before = None
        self._num_steps_left -= 1
        if num_copied:
            self._num_steps_left = 0
            warnings.warn(
                f"[paged cache] a step of at most {MAX_TOKENS} tokens copied {num_copied} of "
                f"{len(after)} slabs: MLX copies slabs instead of writing into them; keep no "
                "reference to a slab across a step",
                stacklevel=2,
            )


def _addresses(handles: Sequence[KVHandle]) -> list[int]:
    """The address of each evaluated slab. No reference to a slab is kept, or the next write would
    copy it.
    """
    mx.eval([kv.arrays for kv in handles])
    # Of bytes: numpy has no bfloat16.
    return [np.asarray(slab.view(mx.uint8)).ctypes.data for kv in handles for slab in kv.slabs]
