"""Ctrl-C between two steps, so that no step is cut in the middle. Imports no MLX."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def caught_interrupts(second: BaseException) -> Iterator[list[int]]:
    """Collect Ctrl-C in a list, to be looked at between two steps. A second one raises ``second``
    at once.

    Only the main thread catches anything, as Python delivers signals to no other.
    """
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def note(signum: int, frame: object) -> None:
        if caught:
            raise second
        caught.append(signum)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)
