"""What a model has that an ordinary one lacks, in the words of the table of models."""

from __future__ import annotations

from collections.abc import Iterator

from mlx.nn import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from helpers.model_zoo.common import SLIDING, Config

# Fields of configurations in which layers use K/V of other layers.
SHARED_KV = ("num_kv_shared_layers", "num_kv_reuse_layers")


def traits_of(model: Module, config: Config) -> str:
    """Of a tiny model, separated by commas; a dash for none."""
    return ", ".join(_traits(model, config)) or "-"


def _traits(model: Module, config: Config) -> Iterator[str]:
    config = config | config.get("text_config", {})
    names = [name for name, _ in tree_flatten(model.parameters())]
    kinds = {type(cache).__name__ for cache in _caches(make_prompt_cache(model))}
    if any("expert" in name or "switch_mlp" in name for name in names):
        yield "experts"
    if "RotatingKVCache" in kinds or _has_windowed_layers(config):
        yield "windows"
    if "ChunkedKVCache" in kinds:
        yield "chunks"
    if config.get("attn_logit_softcapping"):
        yield "capped scores"
    if any("sink" in name for name in names):
        yield "sinks"
    if "kv_lora_rank" in config:
        yield "MLA"
    if any("index" in name for name in names):
        yield "indexer"
    if any(config.get(name) for name in SHARED_KV):
        yield "shared K/V"
    if "ArraysCache" in kinds:
        yield "state"


def _caches(caches: list) -> Iterator[object]:
    for cache in caches:
        parts = getattr(cache, "caches", None)  # of a CacheList
        yield from [cache] if parts is None else _caches(list(parts))


def _has_windowed_layers(config: Config) -> bool:
    return SLIDING in (config.get("layer_types") or ())
