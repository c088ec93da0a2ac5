"""How much memory there is, how much of it the K/V take by default, what stays wired, and how many
freed buffers MLX keeps.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import warnings
from collections.abc import Callable, Iterable
from functools import partial

import mlx.core as mx

from mlx_paged.config import WIRED_LIMIT
from mlx_paged.errors import ArgumentError

# The share of the recommended (on a Mac) or physical memory that weights and K/V may take together.
DEVICE_SHARE = 0.8
HOST_SHARE = 0.5
MIN_KV_CACHE_BYTES = 64 * 2**20
# How many times the activations of a step MLX may keep in freed buffers: two, since they are an
# estimate, and a Mac frees those of several layers at a time, when a command buffer ends.
CACHED_STEPS = 2


def default_kv_cache_bytes(weight_nbytes: int) -> int:
    """:func:`usable_memory` less the weights.

    At least ``MIN_KV_CACHE_BYTES``. It is a limit, not an allocation: a paged cache grows into it.
    """
    return max(usable_memory() - weight_nbytes, MIN_KV_CACHE_BYTES)


def why_too_large(weight_nbytes: int, has_default_budget: bool) -> str | None:
    """What of this machine these weights are too large for, in words; ``None`` where they fit.

    Args:
        has_default_budget: whether the K/V budget is :func:`default_kv_cache_bytes`. Then weights
            have to leave ``MIN_KV_CACHE_BYTES`` of :func:`usable_memory`; else it is for the user
            to say what share is left to others, and they have to fit into the whole.
    """
    recommended = recommended_memory()
    nbytes, share = (recommended, DEVICE_SHARE) if recommended else (memory_size(), HOST_SHARE)
    if has_default_budget and weight_nbytes + MIN_KV_CACHE_BYTES > usable_memory():
        whole = "that Metal recommends" if recommended else "of memory"
        return (
            f"weights and K/V may take {format_nbytes(usable_memory())}, {share:.0%} of the "
            f"{format_nbytes(nbytes)} {whole}"
        )
    if weight_nbytes > nbytes:
        has = "Metal recommends at most" if recommended else "this machine has"
        return f"{has} {format_nbytes(nbytes)}{'' if recommended else ' of memory'}"
    return None


def usable_memory() -> int:
    """Bytes that weights and K/V may take together by default: ``DEVICE_SHARE`` of what Metal
    recommends as working set, else ``HOST_SHARE`` of physical memory.
    """
    return usable_share(recommended_memory(), memory_size())


def usable_share(recommended: int, memory: int) -> int:
    """:func:`usable_memory` of a machine with ``memory`` bytes, of which Metal recommends
    ``recommended``; 0 of these is no Metal.
    """
    return int(DEVICE_SHARE * recommended if recommended else HOST_SHARE * memory)


def recommended_memory() -> int:
    """Bytes that Metal recommends as working set; 0 where there is no Metal."""
    return _metal_info("max_recommended_working_set_size")


def memory_size() -> int:
    """Bytes of physical memory of this machine."""
    size = _metal_info("memory_size")
    return size or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_available(nbytes: int) -> None:
    """Ask the system for this much memory at once, and give it back untouched. On a CPU, MLX does
    not look whether it got what it asked for, and the process ends where it writes.

    Raises:
        OSError, OverflowError: there is less, or this process may not have it.
    """
    mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()


def _metal_info(name: str) -> int:
    """A size that Metal says of the device; 0 where there is no Metal, or it does not say."""
    size = mx.device_info().get(name) if mx.metal.is_available() else None
    return size if isinstance(size, int) else 0


def format_nbytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2g} MB"


def read_wired_limit(value: str | int | None) -> int:
    """Bytes that may stay wired: a number of them in the notation of budgets, ``"recommended"``,
    or 0 for ``None``. Without Metal it is 0, and a warning says so.

    Raises:
        ArgumentError: it has none of these forms, or is more than Metal recommends.
    """
    if value is None:
        return 0
    given, recommended = WIRED_LIMIT.check("engine", "wired_limit", value), recommended_memory()
    if not recommended:
        warnings.warn(
            "[engine] wired_limit does nothing here: only Metal wires memory", stacklevel=3
        )
        return 0
    nbytes = given if isinstance(given, int) else recommended
    if nbytes > recommended:
        raise ArgumentError(
            f"[engine] wired_limit: {nbytes:,} bytes are more than the {recommended:,} that Metal "
            "recommends on this machine; give less, or raise the system's limit with "
            "sudo sysctl iogpu.wired_limit_mb=N",
            "wired_limit",
        )
    return nbytes


class _HeldLimits:
    """A limit of MLX's, which is the process's, while engines want one.

    Args:
        set_limit: gives MLX a limit, and returns the one before.
        join: of all limits that are held, the one that counts.
        is_default: whether a limit that was there before the first may be changed.
    """

    def __init__(
        self,
        set_limit: Callable[[int], int],
        join: Callable[[Iterable[int]], int],
        is_default: Callable[[int], bool] = lambda before: True,
    ) -> None:
        # Finalizers run wherever the garbage collector does, also inside the lock.
        self._lock = threading.RLock()
        self._set_limit, self._join, self._is_default = set_limit, join, is_default
        self._keys = itertools.count()
        self._held: dict[int, int] = {}
        self._before = 0  # what was set when there were none

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
                mx.synchronize()  # MLX wants no step in flight while the limit changes.
                held = self._held.values()
                self._set_limit(self._join(held) if held else self._before)


def _no_op() -> None:
    pass


_wired_limits = _HeldLimits(lambda nbytes: mx.set_wired_limit(nbytes), max)
_cache_limits = _HeldLimits(
    lambda nbytes: mx.set_cache_limit(nbytes), sum, lambda before: before >= recommended_memory()
)


def acquire_wired_limit(nbytes: int) -> Callable[[], None]:
    """Let ``nbytes`` of MLX's memory stay wired until the function that is returned is called, for
    the first time; 0 changes nothing.

    The only place that sets the limit. It is MLX's own and the process's: while several are held,
    the largest counts, and after the last one it is again what it was before the first.

    A wired limit beside allocations that come and go panics macOS's kernel within minutes on
    several machines (ml-explore/mlx#3186 and #3346), which is why it is off by default.
    """
    return _wired_limits.acquire(nbytes) if nbytes else _no_op


def acquire_cache_limit(activation_nbytes: int) -> Callable[[], None]:
    """Have MLX keep at most ``CACHED_STEPS`` times these bytes of freed buffers for reuse, until
    the function that is returned is called, for the first time.

    What one step frees is what the next one takes, so more than the activations of the largest step
    are buffers of sizes that do not come back. MLX itself keeps as many as there is memory. The
    limit is the process's: of several engines it is the sum, and after the last one it is again
    what it was before the first. One below what Metal recommends as working set is the user's, and
    stays as it is. Nothing changes without Metal, where MLX keeps 32 MiB.
    """
    if not recommended_memory():
        return _no_op
    return _cache_limits.acquire(CACHED_STEPS * activation_nbytes)
