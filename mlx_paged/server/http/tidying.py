"""Returns the memory of large requests to the system.

Python frees reference cycles (a connection and its transport, an error and its frames) only in a
garbage collection, and the C library keeps freed memory for later allocations. Both can hold
hundreds of megabytes for minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc

LARGE_BODY = 2**20  # bytes
SECONDS = 1.0  # after a large request; one run serves all requests of that time


class Tidying:
    """Returns memory to the system some time after large requests, in a thread."""

    def __init__(self) -> None:
        self._is_planned = False

    def note(self, num_bytes: int) -> None:
        """Call this after a request with a body of this size was answered."""
        if num_bytes >= LARGE_BODY and not self._is_planned:
            self._is_planned = True
            asyncio.get_running_loop().call_later(SECONDS, self._begin)

    def _begin(self) -> None:
        self._is_planned = False
        asyncio.get_running_loop().run_in_executor(None, give_back_memory)


def freeze_startup_objects() -> None:
    """Exclude all objects so far from garbage collections, which then take milliseconds instead of
    tenths of a second.
    """
    gc.collect()
    gc.freeze()


def give_back_memory() -> None:
    """Collect garbage, and return free memory to the system."""
    gc.collect()
    # glibc only. Other C libraries, such as macOS's, return large blocks by themselves.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
