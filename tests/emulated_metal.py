"""The package's Metal backend on the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from metal_emulator import Checks, patched
from metal_emulator.checks import Call
from pytest import MonkeyPatch

from mlx_paged.ops import choose, in_place, kernels


@contextmanager
def emulated_metal(checks: Checks | None = None) -> Iterator[list[Call]]:
    """Inside, kernels run on the emulator and ``"auto"`` is the Metal backend; yields the trace."""
    with MonkeyPatch.context() as patch, patched(checks) as trace:
        patch.setattr(choose, "metal_is_there", lambda: True)
        # The check at start-up has a slab of a megabyte and many turns, which take the emulator
        # seconds.
        for name, value in (("NUM_BLOCKS", 4), ("NUM_KV_HEADS", 1), ("NUM_TURNS", 2)):
            patch.setattr(in_place, name, value)
        kernels.kernel.cache_clear()
        in_place.writes_in_place.cache_clear()
        try:
            assert in_place.writes_in_place()
            trace.clear()
            yield trace
        finally:
            kernels.kernel.cache_clear()
            in_place.writes_in_place.cache_clear()
