"""The memory of the machine: its size, the default K/V budget, the wired limit, and the limit of
MLX's buffer cache.
"""

from __future__ import annotations

import itertools
import os
import threading
import warnings
from collections.abc import Callable, Iterable
from functools import partial

import mlx.core as mx

from mlx_paged.errors import ArgumentError
from mlx_paged.options.config import WIRED_LIMIT

# The share that K/V take by default of what the weights leave of recommended (on a Mac) or physical
# memory. MLX's buffer cache and, without Metal, other programs take the rest.
DEVICE_SHARE = 0.8
HOST_SHARE = 0.5
MIN_KV_CACHE_BYTES = 64 * 2**20
# How many times a step's activations MLX's buffer cache may hold: two, because the size is an
# estimate and a Mac frees those of several layers at once, when a command buffer ends.
CACHED_STEPS = 2


def default_kv_cache_bytes(weight_nbytes: int, activation_nbytes: int) -> int:
    """:func:`kv_share` of this machine, at least ``MIN_KV_CACHE_BYTES``.

    It is a limit, not an allocation: a paged cache grows into it.
    """
    share = kv_share(weight_nbytes, activation_nbytes, recommended_memory(), memory_size())
    return max(share, MIN_KV_CACHE_BYTES)


def kv_share(weight_nbytes: int, activation_nbytes: int, recommended: int, memory: int) -> int:
    """The bytes that K/V take by default, where ``left`` is what weights leave of Metal's
    recommended working set, or of the memory without Metal: ``left - activation_nbytes``, at most
    ``DEVICE_SHARE * left``, or ``HOST_SHARE * left`` without Metal. Negative if nothing is left.

    Args:
        activation_nbytes: of the largest step.
        recommended: the recommended working set in bytes; 0 for a machine without Metal.
        memory: of the machine, in bytes.
    """
    left = (recommended or memory) - weight_nbytes
    share = DEVICE_SHARE if recommended else HOST_SHARE
    return min(left - activation_nbytes, int(share * left))


def why_too_large(weight_nbytes: int, activation_nbytes: int | None) -> str | None:
    """Which limit of this machine these weights exceed, in words; ``None`` if they fit.

    Args:
        activation_nbytes: of the largest step, if the K/V budget is the default one. Then weights
            have to leave memory for both, and for K/V at least ``MIN_KV_CACHE_BYTES``. ``None`` if
            the user has chosen a budget; then weights only have to fit into the recommended or
            physical memory.
    """
    recommended, memory = recommended_memory(), memory_size()
    nbytes = recommended or memory
    if weight_nbytes > nbytes:
        has = "Metal recommends at most" if recommended else "this machine has"
        return f"{has} {format_nbytes(nbytes)}{'' if recommended else ' of memory'}"
    if activation_nbytes is None:
        return None
    if kv_share(weight_nbytes, activation_nbytes, recommended, memory) < MIN_KV_CACHE_BYTES:
        whole = "that Metal recommends" if recommended else "of memory"
        return (
            f"they leave {format_nbytes(nbytes - weight_nbytes)} of the {format_nbytes(nbytes)} "
            f"{whole} for K/V and some {format_nbytes(activation_nbytes)} of activations"
        )
    return None


def recommended_memory() -> int:
    """Metal's recommended working set in bytes; 0 without Metal."""
    return _metal_info("max_recommended_working_set_size")


def memory_size() -> int:
    """This machine's physical memory in bytes."""
    size = _metal_info("memory_size")
    return size or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _metal_info(name: str) -> int:
    """A size that Metal reports of the device; 0 without Metal, or if it is not reported."""
    size = mx.device_info().get(name) if mx.metal.is_available() else None
    return size if isinstance(size, int) else 0


def format_nbytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2g} MB"


def read_wired_limit(value: str | int | None) -> int:
    """The wired limit in bytes.

    Args:
        value: a number of bytes in the notation of budgets, ``"recommended"``, or ``None`` for 0.
            Without Metal the limit is 0, with a warning.

    Raises:
        ArgumentError: another value, or more than Metal recommends.
    """
    if value is None:
        return 0
    given, recommended = WIRED_LIMIT.check("engine", "wired_limit", value), recommended_memory()
    if not recommended:
        warnings.warn("[engine] wired_limit has no effect without Metal", stacklevel=3)
        return 0
    nbytes = given if isinstance(given, int) else recommended
    if nbytes > recommended:
        raise ArgumentError(
            f"[engine] wired_limit: {nbytes:,} bytes are more than the {recommended:,} that Metal "
            "recommends on this machine; use less, or raise the system's limit with "
            "sudo sysctl iogpu.wired_limit_mb=N",
            "wired_limit",
        )
    return nbytes


class _HeldLimits:
    """A limit of MLX for the whole process, combined from those that engines request.

    Args:
        set_limit: sets MLX's limit and returns the previous one.
        join: combines the requested limits.
        is_default: whether a limit that was set before the first request may be changed.
    """

    def __init__(
        self,
        set_limit: Callable[[int], int],
        join: Callable[[Iterable[int]], int],
        is_default: Callable[[int], bool] = lambda before: True,
    ) -> None:
        # Reentrant, since the garbage collector may run a finalizer while the lock is held.
        self._lock = threading.RLock()
        self._set_limit, self._join, self._is_default = set_limit, join, is_default
        self._keys = itertools.count()
        self._held: dict[int, int] = {}
        self._before = 0  # the limit before the first request

    def acquire(self, nbytes: int) -> Callable[[], None]:
        with self._lock:
            before = self._set_limit(self._join([nbytes, *self._held.values()]))
            if not self._held:
                self._before = before
                if not self._is_default(before):
                    self._set_limit(before)
                    return _no_op
            key = next(self._keys)
            self._held[key] = nbytes
        return partial(self._release, key)

    def _release(self, key: int) -> None:
        with self._lock:
            if self._held.pop(key, None) is not None:
                mx.synchronize()  # The limit must not change while a step is in flight.
                held = self._held.values()
                self._set_limit(self._join(held) if held else self._before)


def _no_op() -> None:
    pass


_wired_limits = _HeldLimits(lambda nbytes: mx.set_wired_limit(nbytes), max)
_cache_limits = _HeldLimits(
    lambda nbytes: mx.set_cache_limit(nbytes), sum, lambda before: before >= recommended_memory()
)


def acquire_wired_limit(nbytes: int) -> Callable[[], None]:
    """Wire up to ``nbytes`` of MLX's memory; returns a function that releases the limit, which does
    nothing when called again. 0 changes nothing.

    MLX's limit belongs to the process. While several are acquired, the largest is set; after the
    last release, the limit before the first is restored.

    With memory allocated and freed all the time, a wired limit panics macOS's kernel within minutes
    on several machines (ml-explore/mlx#3186 and #3346), so it is off by default.
    """
    return _wired_limits.acquire(nbytes) if nbytes else _no_op


def acquire_cache_limit(activation_nbytes: int) -> Callable[[], None]:
    """Limit MLX's buffer cache to ``CACHED_STEPS`` times these bytes; returns a function that
    releases the limit, which does nothing when called again.

    A step reuses the buffers that the previous one has freed; anything beyond the activations of
    the largest step has sizes that are not needed again, and by default MLX keeps it as long as
    memory lasts. The limit belongs to the process: the limits of several engines add up, and after
    the last release the one before the first is restored. A limit below Metal's recommended working
    set was set by the user and is not changed. Without Metal nothing changes; MLX keeps 32 MiB.
    """
    if not recommended_memory():
        return _no_op
    return _cache_limits.acquire(CACHED_STEPS * activation_nbytes)
