"""The default K/V budget, and the limit of wired memory while a model runs."""

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
    """The K/V budget in bytes for a model whose weights take ``weight_nbytes``.

    That is ``DEVICE_SHARE`` of the working set that Metal recommends, or else ``HOST_SHARE`` of
    physical memory, less the weights, and at least ``MIN_KV_CACHE_BYTES``. It is a limit and not an
    allocation: a cache grows into it.
    """
    recommended = (
        mx.device_info().get("max_recommended_working_set_size")
        if mx.metal.is_available()
        else None
    )
    if isinstance(recommended, int) and recommended > 0:
        usable = int(DEVICE_SHARE * recommended)
    else:
        usable = int(HOST_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return max(usable - weight_nbytes, MIN_KV_CACHE_BYTES)


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
