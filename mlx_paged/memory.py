"""How much memory there is, how much of it the K/V take by default, and what stays wired."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn

# The share of the recommended (on a Mac) or physical memory that weights and K/V may take together.
DEVICE_SHARE = 0.8
HOST_SHARE = 0.5
MIN_KV_CACHE_BYTES = 64 * 2**20


def default_kv_cache_bytes(weight_nbytes: int) -> int:
    """``DEVICE_SHARE`` of what Metal recommends as working set, else ``HOST_SHARE`` of physical
    memory, less the weights.

    At least ``MIN_KV_CACHE_BYTES``. It is a limit, not an allocation: a paged cache grows into it.
    """
    recommended = _metal_info("max_recommended_working_set_size")
    usable = DEVICE_SHARE * recommended if recommended else HOST_SHARE * memory_size()
    return max(int(usable) - weight_nbytes, MIN_KV_CACHE_BYTES)


def memory_size() -> int:
    """Bytes of physical memory of this machine."""
    size = _metal_info("memory_size")
    return size or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _metal_info(name: str) -> int:
    """A size that Metal says of the device; 0 where there is no Metal, or it does not say."""
    size = mx.device_info().get(name) if mx.metal.is_available() else None
    return size if isinstance(size, int) else 0


@contextlib.contextmanager
def wired_limit(model: nn.Module) -> Iterator[None]:
    """mlx-lm's ``wired_limit``: while the model runs, as much memory may stay wired as Metal
    recommends.
    """
    from mlx_lm.generate import wired_limit as mlx_lm_wired_limit

    with contextlib.ExitStack() as stack:
        # mlx-lm prints its warning about large models to stdout, where the answer's text goes.
        with contextlib.redirect_stdout(sys.stderr):
            stack.enter_context(mlx_lm_wired_limit(model))
        yield
