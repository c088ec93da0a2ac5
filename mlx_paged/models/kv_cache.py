"""``make_kv_cache``: an empty cache for a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Unpack, overload

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from mlx_paged.argument_values import AT_LEAST_1, BOOL
from mlx_paged.cache import (
    ContiguousKVCache,
    KVCache,
    KVCacheConfig,
    KVFormat,
    LayerGroup,
    LayerSpec,
    PagedKVCache,
    group_layers,
)
from mlx_paged.cache.paged import RotateKeys
from mlx_paged.config import (
    DEFAULT_BACKEND,
    DEFAULT_BLOCK_SIZE,
    DEFAULT_KV,
    KV_CACHES,
    MAX_WINDOW,
    KVBits,
    KVBudget,
    StreamingWindow,
)
from mlx_paged.engine_options import CacheOptions
from mlx_paged.errors import ArgumentError, shown
from mlx_paged.foreign_arguments import refuse_unknown
from mlx_paged.memory import check_available, default_kv_cache_bytes
from mlx_paged.models.activations import default_activation_nbytes
from mlx_paged.models.context_length import context_length
from mlx_paged.models.language_model import LanguageModel, model_type_of
from mlx_paged.models.mlx_lm import check_model
from mlx_paged.ops import check_backend_name


@overload
def make_kv_cache(
    model: Module,
    kind: Literal["paged"] = "paged",
    *,
    draft_model: Module | None = None,
    **options: Unpack[CacheOptions],
) -> PagedKVCache: ...


@overload
def make_kv_cache(
    model: Module,
    kind: Literal["basic"],
    *,
    draft_model: Module | None = None,
    **options: Unpack[CacheOptions],
) -> ContiguousKVCache: ...


@overload
def make_kv_cache(
    model: Module,
    kind: str,
    *,
    draft_model: Module | None = None,
    **options: Unpack[CacheOptions],
) -> KVCache: ...


def make_kv_cache(
    model: Module,
    kind: str = DEFAULT_KV,
    *,
    draft_model: Module | None = None,
    **options: Unpack[CacheOptions],
) -> KVCache:
    """Make an empty cache for ``model``, in the dtype of its activations unless ``kv_format`` is
    given (mlx-lm: ``make_prompt_cache``).

    Args:
        kind: ``"paged"`` or ``"basic"`` (contiguous).
        draft_model: its layers follow those of the model.
        options: keyword arguments, see :class:`CacheOptions`.

    Raises:
        ValueError: ``model`` is not one of :func:`mlx_paged.load`; ``kind``, the block size or the
            backend is unknown; the budget is invalid or smaller than a block; or the format or
            window is invalid or not supported for this model, kind or backend.
    """
    refuse_unknown(make_kv_cache, options, CacheOptions.__annotations__)
    return make_engine_cache(model, kind, draft_model, options)


def make_engine_cache(
    model: Module,
    kind: str,
    draft_model: Module | None,
    options: CacheOptions,
    num_state_copies: int = 0,
) -> KVCache:
    """As :func:`make_kv_cache`, for an engine.

    Args:
        num_state_copies: copies of a recurrent state that one sequence needs of a budget in bytes;
            the budget of the cache is what they leave.

    Raises:
        ValueError: as :func:`make_kv_cache`.
    """
    checked = check_model(model)
    backend = options.get("backend", DEFAULT_BACKEND)
    for name, value in (("kind", kind), ("backend", backend)):
        if not isinstance(value, str):
            raise ValueError(f"[kv cache] {name} must be a text, got {shown(value)}")
    if kind not in KV_CACHES:
        raise ValueError(
            f"[kv cache] unknown cache mode {shown(kind)}; supported: {', '.join(KV_CACHES)}"
        )
    check_backend_name(backend)  # here, because a basic cache ignores it
    block_size = options.get("block_size", DEFAULT_BLOCK_SIZE)
    block_size = AT_LEAST_1.check("kv cache", "block_size", block_size)
    budget = kv_budget(options.get("kv_cache_bytes"), model, draft_model)
    if kind == "basic" and (checked.state_nbytes or not checked.runs_packed):
        why = "keeps recurrent states" if checked.state_nbytes else "runs one sequence at a time"
        raise ArgumentError(
            f"[kv cache] kv='basic' can't hold a model that {why}, as {model_type_of(checked)} "
            "does; use kv='paged'",
            "kv",
        )
    streaming = _streaming_window(kind, options.get("window"), options.get("num_sink_tokens"))
    preallocate = _preallocates(kind, options.get("preallocate", False))
    models = [checked] if draft_model is None else [checked, check_model(draft_model)]
    specs = [spec for each in models for spec in each.layer_specs]
    bits = KVBits.parse(options.get("kv_format"))
    stored = stored_as(bits, specs)
    if kind == "basic":
        return ContiguousKVCache(KVCacheConfig.within(budget, stored, block_size))
    groups = _groups(stored, block_size, streaming, draft_model is not None)
    rotate_keys = None
    if streaming is not None:
        _check_streaming(checked, groups)
        rotate_keys = checked.rotate_keys
    config = replace(
        KVCacheConfig.within(
            budget, stored, block_size, groups, num_state_copies * checked.state_nbytes
        ),
        state_nbytes=checked.state_nbytes,
        state_layout=checked.state_layout,
        keeps_kv=any(each.keeps_kv for each in models),
    )
    return _paged_cache(config, backend, preallocate, rotate_keys)


def stored_as(bits: KVBits | None, layers: Sequence[LayerSpec]) -> Sequence[LayerSpec]:
    """The layers with K and V in these bits; unchanged for ``None``.

    Raises:
        ArgumentError: a layer's rows can't be stored in these bits.
    """
    if bits is None:
        return layers
    return [
        replace(
            spec,
            format=KVFormat.quantised(bits, spec.key_dim, spec.value_dim, spec.format.key.dtype),
        )
        for spec in layers
    ]


def _groups(
    layers: Sequence[LayerSpec],
    block_size: int,
    streaming: StreamingWindow | None,
    is_beside_drafts: bool,
) -> tuple[LayerGroup, ...]:
    """Groups of layers; with a draft model a single one that keeps all tokens, since it may still
    need tokens that have left the model's windows.
    """
    if not is_beside_drafts:
        return group_layers(layers, block_size, streaming)
    if streaming is not None:
        raise ArgumentError(
            "[kv cache] window can't be combined with draft_model, which needs all tokens; "
            "with num_draft_tokens alone, drafts are looked up in the request's own tokens",
            "window",
        )
    return ()


def _preallocates(kind: str, given: object) -> bool:
    preallocate: bool = BOOL.check("kv cache", "preallocate", given)
    if preallocate and kind != "paged":
        raise ArgumentError(
            f"[kv cache] preallocate needs the paged cache: a {kind} one has separate arrays for "
            "each sequence; leave it out",
            "preallocate",
        )
    return preallocate


def _paged_cache(
    config: KVCacheConfig,
    backend: str,
    preallocate: bool,
    rotate_keys: RotateKeys | None = None,
) -> PagedKVCache:
    if not preallocate:
        return PagedKVCache(config, backend, rotate_keys=rotate_keys)
    # States of further sequences and checkpoints take the other half.
    num_blocks = -(-config.num_blocks // 2) if config.state_nbytes else config.num_blocks
    try:
        check_available((num_blocks + 1) * config.nbytes_per_block)
        return PagedKVCache(config, backend, num_blocks, rotate_keys)
    except (RuntimeError, OSError, OverflowError) as error:  # of MLX or of the system
        raise ArgumentError(
            f"[kv cache] preallocate: there is no memory for a budget of {config.nbytes:,} bytes "
            f"at once ({error}); make kv_cache_bytes smaller, or leave preallocate out",
            "preallocate",
        ) from error


def kv_budget(
    kv_cache_bytes: str | int | None, model: Module, draft_model: Module | None = None
) -> KVBudget:
    """The budget that ``kv_cache_bytes`` gives, by default the memory that the models leave."""
    if kv_cache_bytes is not None:
        return KVBudget.parse(kv_cache_bytes)
    activations = default_activation_nbytes(check_model(model))
    return KVBudget(nbytes=default_kv_cache_bytes(weight_nbytes(model, draft_model), activations))


def weight_nbytes(model: Module, draft_model: Module | None = None) -> int:
    """Bytes of the parameters of a model and of its draft model."""
    weights = [dict(tree_flatten(m.parameters())) for m in (model, draft_model) if m is not None]
    return sum(leaf.nbytes for each in weights for leaf in each.values())


def _streaming_window(
    kind: str, window: int | None, num_sink_tokens: int | None
) -> StreamingWindow | None:
    if window is None:
        if num_sink_tokens is not None:
            raise ArgumentError(
                "[kv cache] num_sink_tokens has no effect without a window; give a window, too",
                "num_sink_tokens",
            )
        return None
    if kind != "paged":
        raise ArgumentError(
            f"[kv cache] window={shown(window)} needs the paged cache: a {kind} one keeps all "
            "tokens; leave it out",
            "window",
        )
    if num_sink_tokens is None:
        return StreamingWindow(window)
    return StreamingWindow(window, num_sink_tokens)


def _check_streaming(model: LanguageModel, groups: Sequence[LayerGroup]) -> None:
    if model.state_nbytes:
        raise ArgumentError(
            f"[kv cache] window can't be combined with a {model_type_of(model)}: its recurrent "
            "layers remember tokens that have left the window; leave it out",
            "window",
        )
    retention = groups[0].retention
    num_seen = retention.max_num_held(MAX_WINDOW) - retention.num_sink_tokens
    limit = context_length(model.args)
    if num_seen > limit:
        raise ArgumentError(
            f"[kv cache] window: queries would attend to {num_seen} tokens, sinks and whole blocks "
            f"included, but the model's context length is {limit}; make the window smaller",
            "window",
        )
    try:
        for layer, spec in enumerate(model.layer_specs):
            model.rotate_keys(layer, mx.zeros((1, spec.num_kv_heads, spec.key_dim)), 1)
    except NotImplementedError as error:
        raise ArgumentError(
            f"[kv cache] window needs keys that can be rotated to other positions: {error}",
            "window",
        ) from error
