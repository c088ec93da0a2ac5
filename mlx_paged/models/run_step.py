"""``run_step``: a model on the sequences of a cache, without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_paged.cache import AnySeqId, Sequences
from mlx_paged.errors import shown
from mlx_paged.models.language_model import packed_step
from mlx_paged.models.mlx_lm import check_model
from mlx_paged.options.argument_values import TokenIds, check_token_ids, kind_of


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
    checked = check_model(model)
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"[run] batch must be a mapping of sequences to their new tokens, got {kind_of(batch)}"
        )
    new_tokens = {
        seq: check_token_ids(ids, checked.args.vocab_size, f"batch[{shown(seq)}]")
        for seq, ids in batch.items()
    }
    return packed_step(checked, sequences, new_tokens, num_logit_rows)
