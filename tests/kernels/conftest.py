"""The Metal backend on the emulator, on a Mac, too: test_on_a_mac.py is for Metal itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulated_metal import emulated_metal
from metal_emulator import Checks
from metal_emulator.checks import Call


@pytest.fixture
def metal(compiler) -> Iterator[list[Call]]:
    """One run per call, with guard pages and poison; the trace of its calls."""
    with emulated_metal(Checks.quick()) as trace:
        yield trace
