"""KV caches: one protocol, two implementations, one factory."""

from __future__ import annotations

from typing import Literal, overload

from mlx_paged.cache.base import (
    KVCache,
    KVCacheStats,
    KVSnapshot,
    SeqId,
    Step,
)
from mlx_paged.cache.basic import BasicKVCache
from mlx_paged.cache.paged import PagedKVCache, SwappedKV
from mlx_paged.config import KVCacheConfig
from mlx_paged.errors import CacheFullError, PromptTooLongError, shown

__all__ = [
    "KV_CACHES",
    "BasicKVCache",
    "CacheFullError",
    "KVCache",
    "KVCacheStats",
    "KVSnapshot",
    "PagedKVCache",
    "PromptTooLongError",
    "SeqId",
    "Step",
    "SwappedKV",
    "create_kv_cache",
]

KV_CACHES: dict[str, type[BasicKVCache] | type[PagedKVCache]] = {
    "basic": BasicKVCache,
    "paged": PagedKVCache,
}


@overload
def create_kv_cache(
    kind: Literal["paged"], config: KVCacheConfig, backend: str = "auto"
) -> PagedKVCache: ...


@overload
def create_kv_cache(
    kind: Literal["basic"], config: KVCacheConfig, backend: str = "auto"
) -> BasicKVCache: ...


@overload
def create_kv_cache(kind: str, config: KVCacheConfig, backend: str = "auto") -> KVCache: ...


def create_kv_cache(kind: str, config: KVCacheConfig, backend: str = "auto") -> KVCache:
    """An empty KV cache of ``kind``: ``"basic"`` (contiguous) or ``"paged"``.

    Raises:
        ValueError: the kind is unknown.
        BackendError: the backend is unknown or can't be had on this machine.
    """
    if kind not in KV_CACHES:
        raise ValueError(
            f"[kv cache] unknown cache mode {shown(kind)}; supported: {', '.join(KV_CACHES)}"
        )
    return KV_CACHES[kind](config, backend=backend)
