"""How far a long prompt is, in words that fit the terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

# A prompt with fewer tokens to compute than this has an answer before its progress could be read.
LONG_PROMPT = 128
# The rate is that of the last reports, since a token costs more the more stand before it.
NUM_REPORTS = 16


class PromptProgress:
    """Says how many tokens of a prompt are done, at which rate, and how long the rest takes.

    Args:
        num_known: tokens of the prompt that were computed in earlier turns, as far as is known.
        clock: in seconds.
    """

    def __init__(self, num_known: int, clock: Callable[[], float] = time.monotonic):
        self._num_known = num_known
        self._clock = clock
        self._reports = deque([(clock(), num_known)], NUM_REPORTS)

    def words(self, done: int, total: int) -> Sequence[str]:
        """What to show when ``done`` of ``total`` tokens are computed, the longest form first;
        nothing where the prompt is short or done.
        """
        now = self._clock()
        if done >= total or total - self._num_known < LONG_PROMPT:
            return ()
        share = f"{done / total:.0%}"
        begin, num_before = self._reports[0]
        self._reports.append((now, done))
        if done <= num_before or now <= begin:
            return f"[prompt {done:,}/{total:,} tokens, {share}]", f"[prompt {share}]"
        rate = (done - num_before) / (now - begin)
        left = _duration((total - done) / rate)
        return (
            f"[prompt {done:,}/{total:,} tokens, {share}, {rate:,.0f} tokens/s, {left} left]",
            f"[{done:,}/{total:,}, {rate:,.0f} tokens/s, {left} left]",
            f"[{done:,}/{total:,}, {left} left]",
            f"[{share}, {left} left]",
        )


def _duration(seconds: float) -> str:
    """``"9 s"`` or ``"3 min"``."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
