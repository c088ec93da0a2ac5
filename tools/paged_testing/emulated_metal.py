"""The package's Metal backend on the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
from metal_emulator import Checks, patched
from metal_emulator.checks import Call
from pytest import MonkeyPatch

from mlx_paged.models import matmul_choice
from mlx_paged.ops import choose, in_place, kernels, rows_matmul, self_check
from mlx_paged.ops.metal import MetalBackend
from mlx_paged.ops.tried_once import TrialResult, TriedOnce


@contextmanager
def emulated_metal(
    checks: Checks | None = None, tries_kernels: bool = False
) -> Iterator[list[Call]]:
    """Inside, kernels run on the emulator and ``"auto"`` is the Metal backend; yields the trace.

    The emulator evaluates what it is given, which can't be done while a function is traced. So
    ``mx.compile`` returns its function, and a replayed decode runs the function that was made for
    another step: what this one took from its own step shows as wrong tokens.

    Args:
        tries_kernels: whether a new cache tries its kernels first, as on a device; that has tests
            of its own, and its calls are in the trace.
    """
    with MonkeyPatch.context() as patch, patched(checks) as trace:
        patch.setattr(choose, "is_metal_available", lambda: True)
        patch.setattr(mx, "compile", lambda function: function)
        # Durations on the emulator mean nothing, and the check of this kernel has tests of its own.
        patch.setattr(matmul_choice, "known_choices", lambda modules, clock: {})
        works = TriedOnce(lambda *_: TrialResult(True))
        patch.setattr(matmul_choice, "try_rows_matmul", works)
        # The check at start-up has a slab of a megabyte and many turns, which take the emulator
        # seconds.
        for name, value in (("NUM_BLOCKS", 4), ("NUM_KV_HEADS", 1), ("NUM_TURNS", 2)):
            patch.setattr(in_place, name, value)
        if not tries_kernels:
            patch.setattr(
                choose, "working_backend", lambda _: MetalBackend(in_place.writes_in_place())
            )
            patch.setattr(choose, "try_beforehand", lambda shapes, go_on: None)
        _forget_verdicts()
        try:
            assert in_place.writes_in_place()
            trace.clear()
            yield trace
        finally:
            _forget_verdicts()


def _forget_verdicts() -> None:
    kernels.kernel.cache_clear()
    in_place.writes_in_place.forget()
    self_check.try_kernels.forget()
    rows_matmul.try_rows_matmul.forget()
