"""An engine and its cache in a few words, as programs say them when they start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_paged.models.language_model import check_model

if TYPE_CHECKING:
    from mlx_paged.cache import KVCache
    from mlx_paged.engine.engine import Engine


def device_in_words() -> str:
    if mx.metal.is_available():
        return "Metal"
    return "GPU" if mx.default_device().type == mx.gpu else "CPU"


def backend_in_words(cache: KVCache) -> str:
    return "MLX SDPA" if cache.backend is None else cache.backend.name


def model_in_words(name: str | None, engine: Engine) -> str:
    """What was asked for, and the way in which it runs."""
    description = check_model(engine.model).description
    return f"{name or 'bundled demo model'} ({description})"


def budget_in_full(cache: KVCache) -> str:
    config = cache.config
    return (
        f"{config.num_blocks:,} blocks of {config.block_size} tokens = {config.num_slots:,} tokens "
        f"= {config.nbytes / 1e9:.2f} GB ({token_in_words(cache)}); grows into it"
    )


def token_in_words(cache: KVCache) -> str:
    formats = dict.fromkeys(str(layer.format) for layer in cache.config.layers)
    return f"{cache.config.nbytes_per_token:,} bytes a token in {' or '.join(formats)}"


def budget_in_words(cache: KVCache) -> str:
    config, nbytes = cache.config, cache.config.nbytes
    size = f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2g} MB"
    token = "" if config.layers[0].format.is_dense else f", {token_in_words(cache)}"
    return f"{config.num_blocks:,} blocks of {config.block_size} tokens, {size}{token}"


def context_in_words(engine: Engine) -> str:
    limit, retention = engine.max_model_len, engine.cache.config.groups[0].retention
    length = "without end" if limit is None else f"{limit:,} tokens"
    if not retention.cuts_runs:
        return length
    return (
        f"{length}; the first {retention.num_sink_tokens:,} and the last "
        f"{retention.num_recent_tokens:,} are seen"
    )
