"""``make_kv_cache``: an empty cache for a model."""

from __future__ import annotations

from typing import Literal, overload

from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from mlx_paged.argument_values import check_integer
from mlx_paged.cache import ContiguousKVCache, KVCache, KVCacheConfig, PagedKVCache
from mlx_paged.config import (
    DEFAULT_BACKEND,
    DEFAULT_BLOCK_SIZE,
    DEFAULT_KV,
    KV_CACHES,
    KVBudget,
)
from mlx_paged.errors import shown
from mlx_paged.foreign_arguments import refuses_unknown_arguments
from mlx_paged.memory import default_kv_cache_bytes
from mlx_paged.models.language_model import check_model
from mlx_paged.ops import check_backend_name


@overload
def make_kv_cache(
    model: Module,
    kind: Literal["paged"] = "paged",
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    kv_cache_bytes: str | int | None = None,
    backend: str = DEFAULT_BACKEND,
    draft_model: Module | None = None,
) -> PagedKVCache: ...


@overload
def make_kv_cache(
    model: Module,
    kind: Literal["basic"],
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    kv_cache_bytes: str | int | None = None,
    backend: str = DEFAULT_BACKEND,
    draft_model: Module | None = None,
) -> ContiguousKVCache: ...


@overload
def make_kv_cache(
    model: Module,
    kind: str,
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    kv_cache_bytes: str | int | None = None,
    backend: str = DEFAULT_BACKEND,
    draft_model: Module | None = None,
) -> KVCache: ...


@refuses_unknown_arguments("cache")
def make_kv_cache(
    model: Module,
    kind: str = DEFAULT_KV,
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    kv_cache_bytes: str | int | None = None,
    backend: str = DEFAULT_BACKEND,
    draft_model: Module | None = None,
) -> KVCache:
    """An empty cache for ``model``, in the dtype of its activations (mlx-lm:
    ``make_prompt_cache``).

    Args:
        kind: ``"paged"`` or ``"basic"`` (contiguous).
        block_size: tokens per block: 8, 16, 32 or 64.
        kv_cache_bytes: the budget, as :meth:`KVBudget.parse` reads it; by default a share of the
            machine's memory.
        backend: ``"auto"``, ``"reference"`` or ``"metal"``; a basic cache attends with MLX's own
            SDPA whatever it is.
        draft_model: its layers are put behind those of the model.

    Raises:
        ValueError: no model of :func:`mlx_paged.load`, an unknown kind, block size or backend, or a
            budget that can't be read or holds no block.
    """
    checked = check_model(model)
    for name, value in (("kind", kind), ("backend", backend)):
        if not isinstance(value, str):
            raise ValueError(f"[kv cache] {name} must be a text, got {shown(value)}")
    if kind not in KV_CACHES:
        raise ValueError(
            f"[kv cache] unknown cache mode {shown(kind)}; supported: {', '.join(KV_CACHES)}"
        )
    check_backend_name(backend)  # a basic cache has no backend, and would not ask
    block_size = check_integer("kv cache", "block_size", block_size, 1)
    if kv_cache_bytes is None:
        weights = [
            dict(tree_flatten(m.parameters())) for m in (model, draft_model) if m is not None
        ]
        weight_nbytes = sum(leaf.nbytes for each in weights for leaf in each.values())
        budget = KVBudget(nbytes=default_kv_cache_bytes(weight_nbytes))
    else:
        budget = KVBudget.parse(kv_cache_bytes)
    specs = checked.layer_specs
    if draft_model is not None:
        specs = [*specs, *check_model(draft_model).layer_specs]
    config = KVCacheConfig.within(budget, specs, block_size)
    return PagedKVCache(config, backend) if kind == "paged" else ContiguousKVCache(config)
