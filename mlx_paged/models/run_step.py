"""``run_step``: a model on the sequences of a cache, without an engine; and probes, with which
models are tested.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_paged.argument_values import kind_of
from mlx_paged.cache import (
    AnySeqId,
    KVCacheConfig,
    LayerSpec,
    PagedKVCache,
    Sequences,
    group_layers,
)
from mlx_paged.config import KVBudget
from mlx_paged.errors import shown
from mlx_paged.models.language_model import LanguageModel, check_model
from mlx_paged.token_ids import TokenIds, check_token_ids

PROBE_BLOCK_SIZE = 8


def run_step(
    model: Module,
    sequences: Sequences,
    batch: Mapping[AnySeqId, TokenIds],
    num_logit_rows: Sequence[int] | None = None,
) -> mx.array:
    """Run the new tokens of each sequence, in the mapping's order: whole prompts, chunks of them
    and single tokens of any sequences.

    Args:
        model: as :func:`mlx_paged.load` returns it.
        sequences: of a cache of the model.
        batch: new token ids per sequence, at least one each.
        num_logit_rows: for each sequence the number of last tokens whose logits are returned; 1 by
            default.

    Returns:
        The logits, ``[sum(num_logit_rows), vocab_size]``, evaluated.

    Raises:
        CacheFullError: the new tokens exceed the budget; nothing was changed.
        ValueError: no sequences, a sequence without tokens, or a token outside the vocabulary;
            nothing was changed.
    """
    checked, cache = check_model(model), sequences.cache
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"[run] batch must be a mapping of sequences to their new tokens, got {kind_of(batch)}"
        )
    new_tokens = {
        seq: check_token_ids(ids, checked.args.vocab_size, f"batch[{shown(seq)}]")
        for seq, ids in batch.items()
    }
    num_new_tokens = {seq: len(ids) for seq, ids in new_tokens.items()}
    with sequences.step(num_new_tokens, num_logit_rows) as step:
        tokens = mx.array(list(itertools.chain.from_iterable(new_tokens.values())))
        logits = checked(tokens, cache.layers, step.logit_rows)
        # While this step is unevaluated, a later one would copy every slab it writes to.
        mx.eval(logits, cache.arrays)
    return logits


def probe_ids(vocab_size: int, count: int, first: int = 3) -> list[int]:
    """Token ids without meaning, which hardly repeat."""
    return [(first + 7 * i + 13 * i * i) % vocab_size for i in range(count)]


def probe_sequences(
    model: LanguageModel, num_tokens: int, layers: Sequence[LayerSpec] | None = None
) -> Sequences:
    """Sequences on a small cache in plain MLX, for ``num_tokens`` tokens together.

    Args:
        layers: those of the model, possibly with another K/V format; by default as they are.
    """
    layers = model.layer_specs if layers is None else layers
    groups = group_layers(layers, PROBE_BLOCK_SIZE)
    budget = KVBudget(num_blocks=(num_tokens // PROBE_BLOCK_SIZE + 4) * len(groups))
    config = KVCacheConfig.within(budget, layers, PROBE_BLOCK_SIZE, groups)
    config = replace(
        config,
        state_nbytes=model.state_nbytes,
        state_layout=model.state_layout,
        keeps_kv=model.keeps_kv,
    )
    return Sequences(PagedKVCache(config, "reference"))
