"""Notices, by MLX's memory counters, when a step copies a whole slab, which costs more than all its
attention.
"""

from __future__ import annotations

import warnings

import mlx.core as mx

# What else a step of a few tokens allocates, logits above all, stays below the smallest slab that
# is judged.
MAX_TOKENS = 8
MIN_SLAB_BYTES = 32 * 1024**2


class CopyDetector:
    """Judges the first ``num_steps`` small steps over slabs of some size, and warns at most once.

    It resets MLX's peak memory counter in the steps it judges.
    """

    def __init__(self, num_steps: int):
        self._num_steps_left = num_steps
        self._base: int | None = None

    @property
    def is_watching(self) -> bool:
        """Whether it judges the step that is open."""
        return self._base is not None

    def begin_step(self, num_tokens: int, slab_nbytes: int) -> None:
        """Before the step's graph is built."""
        self._base = None
        if self._num_steps_left > 0 and num_tokens <= MAX_TOKENS and slab_nbytes >= MIN_SLAB_BYTES:
            mx.reset_peak_memory()
            self._base = mx.get_active_memory()

    def end_step(self, slab_nbytes: int) -> None:
        """After the step was evaluated; an aborted step has none."""
        if self._base is None:
            return
        extra = mx.get_peak_memory() - self._base
        self._base = None
        self._num_steps_left -= 1
        if extra >= slab_nbytes:
            self._num_steps_left = 0
            warnings.warn(
                f"[paged cache] a step of at most {MAX_TOKENS} tokens took {extra} bytes, a slab "
                f"has {slab_nbytes}: MLX copies slabs instead of writing into them; keep no "
                "reference to a slab across a step",
                stacklevel=2,
            )
