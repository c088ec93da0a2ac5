"""What the tests of the operations share: a counter of memory."""

from collections.abc import Callable

import mlx.core as mx
import pytest


@pytest.fixture
def extra_peak_bytes() -> Callable[[Callable[[], object]], int]:
    """A function that runs ``work`` and says how far memory rose above where it stood."""

    def measure(work: Callable[[], object]) -> int:
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        base = mx.get_active_memory()
        work()
        mx.synchronize()
        return max(0, mx.get_peak_memory() - base)

    return measure
