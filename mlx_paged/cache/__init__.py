"""KV caches: the interface for models, runners and library users, and the two implementations."""

from mlx_paged.cache.base import KVCache
from mlx_paged.cache.config import KVCacheConfig
from mlx_paged.cache.contiguous import ContiguousKVCache
from mlx_paged.cache.layer import LayerKV, LayerSpec
from mlx_paged.cache.layer_groups import LayerGroup, group_layers
from mlx_paged.cache.paged import PagedKVCache
from mlx_paged.cache.sequences import AnySeqId, KVCacheStats, Sequences
from mlx_paged.errors import CacheFullError, PromptTooLongError
from mlx_paged.ops import AffineFormat, DenseFormat, KVFormat, RowFormat
from mlx_paged.request import SeqId

__all__ = [
    "AffineFormat",
    "AnySeqId",
    "CacheFullError",
    "ContiguousKVCache",
    "DenseFormat",
    "KVCache",
    "KVCacheConfig",
    "KVCacheStats",
    "KVFormat",
    "LayerGroup",
    "LayerKV",
    "LayerSpec",
    "PagedKVCache",
    "PromptTooLongError",
    "RowFormat",
    "SeqId",
    "Sequences",
    "group_layers",
]
