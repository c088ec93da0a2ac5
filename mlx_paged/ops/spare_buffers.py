"""The buffers that MLX keeps for reuse, which steps of many sizes would pile up. Here, below both
that run steps: the engine, and sequences without one.
"""

from __future__ import annotations

import mlx.core as mx

# Tokens after which MLX is told to give back its buffers: growing contexts and chunks of prompts
# ask for new sizes all the time. mlx-lm does so every 256 steps, and after each chunk.
CLEAR_CACHE_INTERVAL = 256


class SpareBuffers:
    """Gives them back every ``CLEAR_CACHE_INTERVAL`` tokens."""

    def __init__(self) -> None:
        self._num_tokens = 0  # since the last time

    def end_step(self, num_tokens: int, num_seqs: int) -> None:
        """A step is over."""
        # A decode of many sequences asks for no more sizes than that of one.
        self._num_tokens += num_tokens - num_seqs + 1
        if self._num_tokens >= CLEAR_CACHE_INTERVAL:
            mx.clear_cache()
            self._num_tokens = 0
