"""What the tests of the Metal kernels share: the Metal backend on the emulator, or on Metal itself where it is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import pytest
from metal_emulator import Checks, patched
from metal_emulator.checks import Call

from mlx_paged.ops import backends, in_place, kernels


@contextmanager
def emulated_metal(checks: Checks | None = None) -> Iterator[list[Call]]:
    """``backend="metal"`` runs the kernels on the emulator inside, and ``"auto"`` chooses it; yields the trace."""
    with pytest.MonkeyPatch.context() as patch, patched(checks) as trace:
        patch.setattr(backends, "metal_is_there", lambda: True)
        patch.setattr(in_place, "NUM_BLOCKS", 4)
        kernels.kernel.cache_clear()
        try:
            assert in_place.writes_in_place()
            trace.clear()
            yield trace
        finally:
            kernels.kernel.cache_clear()
            in_place.writes_in_place.cache_clear()


@pytest.fixture
def metal(compiler) -> Iterator[list[Call]]:
    """The Metal backend with one run per call: guard pages and poison; the trace of its calls."""
    if mx.metal.is_available():
        yield []
        return
    with emulated_metal(Checks.quick()) as trace:
        yield trace


@pytest.fixture
def strict_metal(compiler) -> Iterator[list[Call]]:
    """The Metal backend with three runs per call in different orders, for missing barriers."""
    if mx.metal.is_available():
        pytest.skip("only the emulator runs threads in other orders")
    with emulated_metal() as trace:
        yield trace
