"""Ctrl-C while an answer comes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from mlx_paged.engine.thread import Call
from mlx_paged.standard_streams import say


@contextmanager
def interrupted_waits() -> Iterator[list[int]]:
    """The first Ctrl-C ends a wait for the engine with ``KeyboardInterrupt``. Where none is under
    way, it is noted in the list alone: no line that keeps the conversation is cut in the middle.
    The second one ends the process at once, since the step that runs may take long.

    Only the main thread catches anything, as Python delivers signals to no other.
    """
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def note(number: int, frame: FrameType | None) -> None:
        if caught:
            say("")
            # Nothing of Python's or MLX's is taken down, so nothing can fail at it.
            os._exit(130)
        caught.append(number)
        while frame is not None:
            if frame.f_code is Call.wait.__code__:
                raise KeyboardInterrupt
            frame = frame.f_back

    before = signal.signal(signal.SIGINT, note)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)
