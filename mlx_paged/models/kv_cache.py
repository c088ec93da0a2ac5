"""``make_kv_cache``: an empty cache for a model; and how the states of recurrent layers share its
budget with K/V.
"""

from __future__ import annotations

import mmap
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Unpack, overload

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

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
from mlx_paged.core import BudgetSizes, KVCacheManager, SequenceStates, SharedBudget
from mlx_paged.core.checkpoints import MANY
from mlx_paged.errors import ArgumentError, shown
from mlx_paged.models.activations import default_activation_nbytes
from mlx_paged.models.context_length import context_length
from mlx_paged.models.language_model import LanguageModel, model_type_of
from mlx_paged.models.memory import (
    default_kv_cache_bytes,
    format_nbytes,
    why_too_large,
)
from mlx_paged.models.mlx_lm import check_model
from mlx_paged.models.mlx_lm.draft_head import DraftHead
from mlx_paged.ops import check_backend_name
from mlx_paged.options.argument_values import AT_LEAST_1, BOOL, as_integer
from mlx_paged.options.config import (
    DEFAULT_BACKEND,
    DEFAULT_BLOCK_SIZE,
    DEFAULT_KV,
    KV_BITS,
    KV_CACHES,
    MAX_WINDOW,
    KVBits,
    KVBudget,
    SchedulerConfig,
    StreamingWindow,
)
from mlx_paged.options.engine_options import CacheOptions
from mlx_paged.options.foreign_arguments import refuse_unknown

# More than one checkpoint per this many tokens of K/V would be of no use.
TOKENS_PER_CHECKPOINT = 128
# Copies of a running sequence's state that exist at once: before and after a step, and one that is
# gathered or computed meanwhile; MLX delays work that would need more.
NUM_COPIES = 3
# One more if the next step is launched while one runs.
NUM_COPIES_AHEAD = 4
# And one more with drafts: some sequences are rolled back to the state before a step.
NUM_COPIES_BEFORE_DRAFTS = 1

# Floating-point operations per byte of memory bandwidth: an M1 has 2.6 TFLOPS and 68 GB/s, and its
# successors are close to that.
OPERATIONS_PER_BYTE = 38
# The same for a disk: that of an M1 reads some 2.6 GB/s.
OPERATIONS_PER_DISK_BYTE = 1_000
# The default swap space, as a share of the K/V budget.
DEFAULT_SWAP_SHARE = 1 / 8

REMEDIES = (
    "a smaller model or one of fewer bits, kv_format (--kv-bits) "
    f"{' or '.join(map(str, KV_BITS))}, a smaller max_model_len (--max-model-len), "
    "or a kv_cache_bytes (--kv-cache-bytes) of your own"
)


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
    bits = KVBits.parse(options.get("kv_format"))
    stored, groups = layers_of(models, bits, block_size, streaming)
    if kind == "basic":
        return ContiguousKVCache(KVCacheConfig.within(budget, stored, block_size))
    rotate_keys = None
    if streaming is not None:
        _check_streaming(checked, groups)
        rotate_keys = checked.rotate_keys
    config = replace(
        KVCacheConfig.within(
            budget,
            stored,
            block_size,
            groups,
            num_state_copies * sum(each.state_nbytes for each in models),
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


def layers_of(
    models: Sequence[LanguageModel],
    bits: KVBits | None,
    block_size: int,
    streaming: StreamingWindow | None = None,
) -> tuple[Sequence[LayerSpec], tuple[LayerGroup, ...]]:
    """The layers of a cache for a model, perhaps followed by its draft model, and their groups.

    With a draft model there is a single group that keeps all tokens, since it may still need tokens
    that have left the model's windows. The layer of a head keeps all tokens anyway; another one
    after it holds hidden rows.

    Args:
        bits: of K and V; ``None`` for the dtype of the models' activations.

    Raises:
        ArgumentError: a layer's rows can't be stored in these bits, or a window is combined with a
            draft model.
    """
    layers = [*stored_as(bits, [spec for each in models for spec in each.layer_specs])]
    *_, last = models
    if isinstance(last, DraftHead):
        layers.append(LayerSpec.of_hidden_rows(last.hidden_size, block_size, last.dtype))
    if len(models) == 1 or (isinstance(last, DraftHead) and streaming is None):
        return layers, group_layers(layers, block_size, streaming)
    if streaming is not None:
        raise ArgumentError(
            "[kv cache] window can't be combined with draft_model, which needs all tokens; "
            "with num_draft_tokens alone, drafts are looked up in the request's own tokens",
            "window",
        )
    return layers, ()


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
        # Whether the system grants this much memory. On a CPU, MLX does not check its own
        # allocations, and the process crashes when it writes.
        nbytes = (num_blocks + 1) * config.nbytes_per_block
        mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
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
    """Bytes of the parameters of a model and of its draft model, and of the adapters that may be
    loaded.
    """
    models = [each for each in (model, draft_model) if each is not None]
    weights = [dict(tree_flatten(each.parameters())) for each in models]
    nbytes: int = sum(leaf.nbytes for each in weights for leaf in each.values())
    return nbytes + sum(getattr(each, "adapter_nbytes", 0) for each in models)


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


# The budget of an engine


def num_state_copies(model: LanguageModel, config: SchedulerConfig, runs_ahead: bool) -> int:
    """Copies of a running sequence's recurrent state that exist at once; 0 without states.

    Args:
        runs_ahead: whether the next step may be launched while one runs.
    """
    if not model.state_nbytes:
        return 0
    copies = NUM_COPIES_AHEAD if runs_ahead else NUM_COPIES
    return copies + (NUM_COPIES_BEFORE_DRAFTS if config.num_draft_tokens else 0)


def make_states(
    model: LanguageModel,
    cache: KVCache,
    config: SchedulerConfig,
    budget: KVBudget,
    num_copies: int,
    draft_model: LanguageModel | None = None,
) -> SequenceStates:
    """The recurrent states of a model's sequences, with those of its draft model. They share a
    budget in bytes with the blocks of the cache; one in blocks is for K/V only. Warns if the budget
    holds the states of fewer sequences than may run at once.

    There are as many checkpoints as are of use and as the budget holds beside one sequence: one for
    each ``TOKENS_PER_CHECKPOINT`` tokens of K/V, two per sequence, or ``MANY``, whichever is most.
    """
    nbytes, num_checkpoints = budget.nbytes, 0
    state_nbytes = model.state_nbytes + (draft_model.state_nbytes if draft_model else 0)
    if config.enable_prefix_caching:
        num_tokens = (nbytes or 0) // sum(spec.nbytes_per_token for spec in model.layer_specs)
        num_checkpoints = max(2 * config.max_num_seqs, MANY, num_tokens // TOKENS_PER_CHECKPOINT)
        if nbytes is not None:
            num_held = max(1, nbytes // state_nbytes - num_copies)
            num_checkpoints = min(num_checkpoints, num_held)
    states = SequenceStates(num_checkpoints)
    if nbytes is None:
        return states
    sizes = BudgetSizes(nbytes, cache.config.nbytes_per_block, state_nbytes, num_copies)
    cache.shared_budget = SharedBudget(sizes, cache.pool, states)
    numbers = range(config.max_num_seqs, 0, -1)
    most = next(n for n in numbers if n == 1 or sizes.max_num_blocks(n) >= n)
    if most < config.max_num_seqs:
        warnings.warn(
            f"[engine] at most {most} sequences run at once instead of max_num_seqs "
            f"{config.max_num_seqs}: kv_cache_bytes of {nbytes:,} holds no more than {most} times "
            f"{num_copies} copies of a state of {sizes.state:,} bytes",
            stacklevel=3,
        )
    return states


def is_moving_cheaper(num_parameters: int, nbytes_per_token: int, operations_per_byte: int) -> bool:
    """Whether moving a token's K/V takes less time than computing them, which takes two operations
    per parameter. The rule depends on sizes and no clock, so that all machines decide alike.

    Args:
        operations_per_byte: of the chip's speed and the bandwidth of the move.
    """
    return nbytes_per_token * operations_per_byte < 2 * num_parameters


def is_swapping_cheaper(num_parameters: int, kv_nbytes_per_token: int) -> bool:
    """Whether copying K/V out and back takes less time than computing them."""
    return is_moving_cheaper(num_parameters, 2 * kv_nbytes_per_token, OPERATIONS_PER_BYTE)


def is_reading_cheaper(num_parameters: int, kv_nbytes_per_token: int) -> bool:
    """Whether reading K/V from disk takes less time than computing them."""
    return is_moving_cheaper(num_parameters, kv_nbytes_per_token, OPERATIONS_PER_DISK_BYTE)


def num_swap_blocks(swap_bytes: str | int | None, cache: KVCache, num_parameters: int) -> int:
    """The number of blocks of a swap space of ``swap_bytes``, by default ``DEFAULT_SWAP_SHARE`` of
    the budget if swapping is cheaper than computing.

    Raises:
        ArgumentError: it is neither a budget nor 0, or the cache can't swap.
    """
    config = cache.config
    if swap_bytes is None:
        is_cheaper = is_swapping_cheaper(num_parameters, config.nbytes_per_token)
        can_swap = cache.kind == "paged"
        return int(config.num_blocks * DEFAULT_SWAP_SHARE) if can_swap and is_cheaper else 0
    is_zero = isinstance(swap_bytes, str) and swap_bytes.strip() == "0"
    if is_zero or as_integer(swap_bytes) == 0:
        return 0
    budget = KVBudget.parse(swap_bytes, "swap_bytes")
    if cache.kind != "paged":
        raise ArgumentError(
            f"[engine] swap_bytes={shown(swap_bytes)} needs kv='paged': preempted requests of a "
            f"{cache.kind} cache are recomputed; leave it out",
            "swap_bytes",
        )
    if budget.num_blocks is not None:
        return budget.num_blocks
    return (budget.nbytes or 0) // config.nbytes_per_block


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
    num_held = num_tokens_held(cache, manager)
    if max_model_len is None:
        held = "an unlimited context" if num_held == sys.maxsize else f"{num_held:,} tokens"
    else:
        most = f"its {max_model_len:,} tokens of context"
        held = most if num_held >= max_model_len else f"{num_held:,} of {most}"
    warnings.warn(
        f"[engine] the model does not fit into this machine: its weights take "
        f"{format_nbytes(weight_nbytes)}, and {reason}; the K/V budget is "
        f"{format_nbytes(cache.config.nbytes)} and holds {held}. "
        f"What you can do: {REMEDIES}",
        stacklevel=3,
    )
