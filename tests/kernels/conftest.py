"""The Metal backend on the emulator, on a Mac, too: test_on_a_mac.py is for Metal itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from helpers.kernel_checks import checked_metal
from metal_emulator.checks import Call

from mlx_paged.ops import kernels
from mlx_paged.ops.metal_sources import read_source


@pytest.fixture
def metal(compiler) -> Iterator[list[Call]]:
    """One run per call, which writes no slot but its own; the trace of its calls."""
    with checked_metal() as trace:
        yield trace


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces one piece of one file, which has to be there, in all kernels that are made from now
    on.
    """

    def put(name: str, text: str, other: str, occurrence: int = 0) -> None:
        parts = read_source(name).split(text)
        assert len(parts) > occurrence + 1, f"{name} has no {text!r} number {occurrence}"
        faulty = text.join(parts[: occurrence + 1]) + other + text.join(parts[occurrence + 1 :])
        monkeypatch.setattr(
            kernels, "read_source", lambda asked: faulty if asked == name else read_source(asked)
        )
        kernels.kernel.cache_clear()

    return put
