"""KV caches: the interface for models, runners and library users, and the two implementations."""

from mlx_paged.cache.base import KVCache
from mlx_paged.cache.config import KVCacheConfig
from mlx_paged.cache.contiguous import ContiguousKVCache
from mlx_paged.cache.layer import LayerKV, LayerSpec
from mlx_paged.cache.layer_groups import LayerGroup, group_layers
from mlx_paged.cache.paged import PagedKVCache
from mlx_paged.cache.sequences import AnySeqId, Sequences
from mlx_paged.errors import CacheFullError, PromptTooLongError
from mlx_paged.ops import KVFormat

__all__ = [
    "AnySeqId",
    "CacheFullError",
    "ContiguousKVCache",
    "KVCache",
    "KVCacheConfig",
    "KVFormat",
    "LayerGroup",
    "LayerKV",
    "LayerSpec",
    "PagedKVCache",
    "PromptTooLongError",
    "Sequences",
    "group_layers",
]
