"""Memory that large requests took goes back to the system.

Python frees what refers to itself (a connection and its transport, an error and its frames) only
when it looks for that, and the C library keeps what was freed for the next allocation. Both may
take minutes, and hundreds of megabytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc

LARGE_BODY = 2**20  # bytes
SECONDS = 1.0  # between a large request and tidying up, which is done once for all of that time


class Tidying:
    """Tidies up some time after the last large requests, in a thread."""

    def __init__(self) -> None:
        self._is_planned = False

    def note(self, num_bytes: int) -> None:
        """A request with a body of this size was answered."""
        if num_bytes >= LARGE_BODY and not self._is_planned:
            self._is_planned = True
            asyncio.get_running_loop().call_later(SECONDS, self._begin)

    def _begin(self) -> None:
        self._is_planned = False
        asyncio.get_running_loop().run_in_executor(None, give_back_memory)


def keep_out_of_sight() -> None:
    """Take what a program has made so far for needed until its end, so that Python looks for unused
    memory among what requests made alone: milliseconds, not tenths of a second.
    """
    gc.collect()
    gc.freeze()


def give_back_memory() -> None:
    """Free what is not used, and give it back to the system."""
    gc.collect()
    # Of glibc. Others, such as macOS's, give large pieces back by themselves.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
