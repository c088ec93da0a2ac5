"""One model on one cache: packs the tokens of a step, runs it, and leaves nothing lazy."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal, overload

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from mlx_paged.argument_values import check_integer, kind_of
from mlx_paged.cache import BasicKVCache, KVCache, PagedKVCache, SwappedKV, create_kv_cache
from mlx_paged.cache.base import AnySeqId
from mlx_paged.config import KVBudget, KVCacheConfig
from mlx_paged.engine.batch import Batch, CopyBlocks, SwapOut, Transfer
from mlx_paged.engine.prompts import TokenIds, check_token_ids
from mlx_paged.engine.sampler import SampledToken, sample
from mlx_paged.engine.swap_space import SwapSpace
from mlx_paged.errors import shown
from mlx_paged.foreign_arguments import refuses_unknown_arguments
from mlx_paged.memory import default_kv_cache_bytes
from mlx_paged.models.language_model import as_language_model
from mlx_paged.request import Request

# Tokens after which MLX is told to give back the buffers that it keeps for reuse: growing contexts
# and chunks of prompts ask for new sizes all the time. mlx-lm does so every 256 steps, and after
# each chunk.
CLEAR_CACHE_INTERVAL = 256


@overload
def make_kv_cache(
    model: Module,
    kind: Literal["paged"] = "paged",
    *,
    block_size: int = 16,
    kv_cache_bytes: str | int | None = None,
    backend: str = "auto",
) -> PagedKVCache: ...


@overload
def make_kv_cache(
    model: Module,
    kind: Literal["basic"],
    *,
    block_size: int = 16,
    kv_cache_bytes: str | int | None = None,
    backend: str = "auto",
) -> BasicKVCache: ...


@overload
def make_kv_cache(
    model: Module,
    kind: str,
    *,
    block_size: int = 16,
    kv_cache_bytes: str | int | None = None,
    backend: str = "auto",
) -> KVCache: ...


@refuses_unknown_arguments("cache")
def make_kv_cache(
    model: Module,
    kind: str = "paged",
    *,
    block_size: int = 16,
    kv_cache_bytes: str | int | None = None,
    backend: str = "auto",
) -> KVCache:
    """An empty cache for ``model``, in the dtype of its activations (mlx-lm:
    ``make_prompt_cache``).

    Args:
        kind: ``"paged"`` or ``"basic"``.
        block_size: tokens per block: 8, 16, 32 or 64.
        kv_cache_bytes: the budget, as :meth:`KVBudget.parse` reads it; by default a share of the
            machine's memory.
        backend: ``"auto"``, ``"reference"`` or ``"metal"``.

    Raises:
        ValueError: no model of :func:`mlx_paged.load`, an unknown kind, block size or backend, or a
            budget that can't be read or holds no block.
    """
    check_model(model)
    for name, value in (("kind", kind), ("backend", backend)):
        if not isinstance(value, str):
            raise ValueError(f"[kv cache] {name} must be a text, got {shown(value)}")
    block_size = check_integer("kv cache", "block_size", block_size, 1)
    known = as_language_model(model)
    if kv_cache_bytes is None:
        weight_nbytes = sum(leaf.nbytes for leaf in dict(tree_flatten(model.parameters())).values())
        budget = KVBudget(nbytes=default_kv_cache_bytes(weight_nbytes))
    else:
        budget = KVBudget.parse(kv_cache_bytes)
    config = KVCacheConfig.within(
        budget,
        num_layers=known.args.num_hidden_layers,
        num_kv_heads=known.args.num_key_value_heads,
        head_dim=known.args.head_dim,
        dtype=str(known.dtype).removeprefix("mlx.core."),
        block_size=block_size,
    )
    return create_kv_cache(kind, config, backend)


def check_model(model: object) -> None:
    """Raise ``ValueError`` unless ``model`` is one that :func:`mlx_paged.load` returns."""
    config = getattr(model, "args", None)
    attributes = ("num_hidden_layers", "num_key_value_heads", "head_dim", "vocab_size")
    is_ours = hasattr(model, "dtype") and all(hasattr(config, name) for name in attributes)
    if not isinstance(model, Module) or not is_ours:
        kind = f"{type(model).__module__}.{kind_of(model)}".removeprefix("builtins.")
        raise ValueError(f"[model] model must be one that mlx_paged.load returns, got {kind}")


class ModelRunner:
    """Runs steps: whole prompts, chunks of them and single tokens of any sequences are one rule.

    Args:
        swap_space: holds the K/V of preempted requests.
    """

    def __init__(
        self, model: Module, cache: KVCache, swap_space: SwapSpace[SwappedKV] | None = None
    ):
        self.model = as_language_model(model)
        self.cache = cache
        self.vocab_size = self.model.args.vocab_size
        self._swap_space = swap_space or SwapSpace(0)
        self._num_tokens = 0  # since MLX was told to give back buffers

    def run(self, batch: Mapping[AnySeqId, TokenIds]) -> mx.array:
        """Run the new tokens of each sequence, in the mapping's order, without a scheduler.

        Args:
            batch: new token ids per sequence, at least one each.

        Returns:
            The logits of each sequence's last token, ``[num_seqs, vocab_size]``, evaluated.

        Raises:
            CacheFullError: the budget can't hold the new tokens; nothing was changed.
            ValueError: no sequence, one without tokens, or a token that the model does not have;
                nothing was changed.
        """
        if not isinstance(batch, Mapping):
            raise ValueError(
                "[run] batch must be a mapping of sequences to their new tokens, "
                f"got {kind_of(batch)}"
            )
        new_tokens = {
            seq: check_token_ids(ids, self.vocab_size, f"batch[{shown(seq)}]")
            for seq, ids in batch.items()
        }
        with self.cache.step({seq: len(ids) for seq, ids in new_tokens.items()}) as step:
            tokens = mx.array(list(itertools.chain.from_iterable(new_tokens.values())))
            logits = self.model(tokens, step.positions, self.cache, step.last_rows)
            # A step that is built before this one is evaluated would find a reader of the slabs in
            # flight, and each of its writes would copy a slab.
            mx.eval(logits, self.cache.arrays)
        self._end_step(step.num_tokens, len(new_tokens))
        return logits

    def execute(
        self, batch: Batch, rows: Sequence[int], requests: Sequence[Request]
    ) -> list[SampledToken | Exception]:
        """Run a step that a scheduler planned, and sample from its logits.

        Args:
            rows, requests: for each token wanted, its row of logits and its request.

        Returns:
            One result per token; an exception fails its request.
        """
        cache = self.cache
        for transfer in batch.transfers:
            self._transfer(transfer)
        scheduled = batch.scheduled
        token_ids = list(itertools.chain.from_iterable([part.token_ids for part in scheduled]))
        with cache.scheduled_step(
            {part.request.seq_id: part.num_new_tokens for part in scheduled},
            batch.shares_new_blocks,
        ) as step:
            logits = self.model(mx.array(token_ids), step.positions, cache, step.last_rows)
            complete = [i for i, part in enumerate(scheduled) if part.num_logit_rows]
            if len(complete) < len(scheduled):
                logits = logits[mx.array(complete)] if complete else logits[:0]
            results = sample(logits, rows, requests)
            mx.eval(cache.arrays)
        self._end_step(len(token_ids), len(scheduled))
        return results

    def _transfer(self, transfer: Transfer) -> None:
        if isinstance(transfer, CopyBlocks):
            self.cache.copy_blocks(transfer.copies)
        elif isinstance(transfer, SwapOut):
            swapped = self.cache.swap_out(transfer.block_ids, transfer.num_tokens)
            self._swap_space.put(transfer.seq_id, swapped)
        else:
            swapped = self._swap_space.get(transfer.seq_id)
            self.cache.swap_in(transfer.seq_id, swapped, transfer.start, transfer.end)
            self._swap_space.release(transfer.seq_id)

    def _end_step(self, num_tokens: int, num_seqs: int) -> None:
        # A decode of many sequences asks for no more sizes than that of one.
        self._num_tokens += num_tokens - num_seqs + 1
        if self._num_tokens >= CLEAR_CACHE_INTERVAL:
            mx.clear_cache()
            self._num_tokens = 0
