"""Whether a model and its context fit into the memory of this machine."""

from __future__ import annotations

import sys
import warnings

from mlx_paged.cache import KVCache
from mlx_paged.core import KVCacheManager
from mlx_paged.memory import format_nbytes, why_too_large

REMEDIES = (
    "a smaller model or one of fewer bits, kv_format (--kv-bits) 8 or 4, a smaller max_model_len "
    "(--max-model-len), or a kv_cache_bytes (--kv-cache-bytes) of your own"
)


def num_tokens_held(cache: KVCache, manager: KVCacheManager) -> int:
    """The most tokens of a single sequence in the budget; ``sys.maxsize`` if it is unlimited."""
    return manager.block_need.max_num_tokens(cache.config.num_blocks)


def warn_unless_it_fits(
    weight_nbytes: int,
    cache: KVCache,
    manager: KVCacheManager,
    max_model_len: int | None,
    activation_nbytes: int | None,
) -> None:
    """Warn, with the numbers, if the weights leave too little of this machine's memory for K/V.

    Args:
        activation_nbytes: of the largest step; ``None`` if the budget is of the user's choice.
    """
    reason = why_too_large(weight_nbytes, activation_nbytes)
    if reason is None:
        return
    held = _context_held(num_tokens_held(cache, manager), max_model_len)
    warnings.warn(
        f"[engine] the model does not fit into this machine: its weights take "
        f"{format_nbytes(weight_nbytes)}, and {reason}; the K/V budget is "
        f"{format_nbytes(cache.config.nbytes)} and holds {held}. "
        f"What you can do: {REMEDIES}",
        stacklevel=3,
    )


def _context_held(num_held: int, max_model_len: int | None) -> str:
    if max_model_len is None:
        return "an unlimited context" if num_held == sys.maxsize else f"{num_held:,} tokens"
    if num_held < max_model_len:
        return f"{num_held:,} of its {max_model_len:,} tokens of context"
    return f"its {max_model_len:,} tokens of context"
