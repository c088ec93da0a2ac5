"""What tests of the Metal kernels share: the Metal backend, on the emulator, or on Metal itself where it is there."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest
from emulated_metal import emulated_metal
from metal_emulator import Checks
from metal_emulator.checks import Call


@pytest.fixture
def metal(compiler) -> Iterator[list[Call]]:
    """One run per call, with guard pages and poison; the trace of its calls, which is empty on Metal itself."""
    if mx.metal.is_available():
        yield []
        return
    with emulated_metal(Checks.quick()) as trace:
        yield trace


@pytest.fixture
def strict_metal(compiler) -> Iterator[list[Call]]:
    """Three runs per call with the threads in different orders, for missing barriers."""
    if mx.metal.is_available():
        pytest.skip("Metal runs threads in no other order than its own")
    with emulated_metal() as trace:
        yield trace
