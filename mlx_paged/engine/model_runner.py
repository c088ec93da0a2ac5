"""One model on one cache: packs the tokens of a step, runs it, and leaves nothing unevaluated behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_reduce

from mlx_paged.cache import KVCache, SeqId, create_kv_cache
from mlx_paged.config import KVBudget, KVCacheConfig
from mlx_paged.memory import default_kv_cache_bytes

T = TypeVar("T")

# Steps between two times that MLX is told to give back buffers it keeps for reuse: a growing context asks for ever new
# sizes. As in mlx-lm.
CLEAR_CACHE_INTERVAL = 256


def make_kv_cache(
    model: nn.Module,
    kind: str = "paged",
    *,
    block_size: int = 16,
    kv_cache_bytes: str | int | None = None,
    backend: str = "auto",
) -> KVCache:
    """An empty cache for ``model``, in the dtype of its activations (mlx-lm: ``make_prompt_cache``).

    Args:
        kind: ``"paged"`` or ``"basic"``.
        block_size: tokens per block: 8, 16, 32 or 64.
        kv_cache_bytes: the budget, as :meth:`KVBudget.parse` reads it; by default a share of the machine's memory.
        backend: ``"auto"``, ``"reference"`` or ``"metal"``.

    Raises:
        ValueError: an unknown kind, block size or backend, or a budget that can't be read or holds no block.
    """
    args = model.args
    if kv_cache_bytes is None:
        weight_nbytes = tree_reduce(lambda total, leaf: total + leaf.nbytes, model.parameters(), 0)
        budget = KVBudget(nbytes=default_kv_cache_bytes(weight_nbytes))
    else:
        budget = KVBudget.parse(kv_cache_bytes)
    config = KVCacheConfig.within(
        budget,
        num_layers=args.num_hidden_layers,
        num_kv_heads=args.num_key_value_heads,
        head_dim=args.head_dim,
        dtype=str(model.dtype).removeprefix("mlx.core."),
        block_size=block_size,
    )
    return create_kv_cache(kind, config, backend)


class ModelRunner:
    """Runs steps of any mix of sequences: whole prompts, chunks of them and single tokens are one rule."""

    def __init__(self, model: nn.Module, cache: KVCache):
        self.model = model
        self.cache = cache
        self._num_steps = 0

    def run(self, batch: Mapping[SeqId, Sequence[int]], head: Callable[[mx.array], T] | None = None) -> T | Any:
        """One step: the new tokens of each sequence, in the mapping's order.

        Args:
            batch: new token ids per sequence, at least one each.
            head: what to make of the logits ``[num_seqs, vocab_size]`` of each sequence's last token, built into the
                same evaluation; ``None`` returns the logits themselves.

        Returns:
            What ``head`` returned, evaluated.

        Raises:
            CacheFullError: the budget can't hold the new tokens; nothing was changed.
        """
        tokens = mx.array([token for new_tokens in batch.values() for token in new_tokens])
        with self.cache.step({seq: len(new_tokens) for seq, new_tokens in batch.items()}) as step:
            logits = self.model(tokens, step.positions, self.cache, step.last_rows)
            outputs = logits if head is None else head(logits)
            # One step ahead of its evaluation, a slab would have a reader in flight and each write would copy it.
            mx.eval(outputs, self.cache.arrays)
        self._num_steps += 1
        if self._num_steps % CLEAR_CACHE_INTERVAL == 0:
            mx.clear_cache()
        return outputs
