"""One model on one cache: packs the tokens of a step and launches it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_paged.argument_values import kind_of
from mlx_paged.cache import AnySeqId, KVCache, PagedKVCache
from mlx_paged.cache.transfer import load_blocks, store_blocks
from mlx_paged.engine.batch import Batch, CopyBlocks, Scheduled, ShiftKeys, SwapOut, Transfer
from mlx_paged.engine.compiled_decode import CompiledDecode
from mlx_paged.engine.draft_model import DraftModel
from mlx_paged.engine.prompt_logprobs import ScoredPrompt
from mlx_paged.engine.prompts import TokenIds, check_token_ids
from mlx_paged.engine.sampler import NO_TOKENS, SampledTokens
from mlx_paged.engine.swap_space import SwapSpace
from mlx_paged.errors import shown
from mlx_paged.models.language_model import check_model
from mlx_paged.request import PENDING_TOKEN, Request

# Tokens after which MLX is told to give back the buffers that it keeps for reuse: growing contexts
# and chunks of prompts ask for new sizes all the time. mlx-lm does so every 256 steps, and after
# each chunk.
CLEAR_CACHE_INTERVAL = 256


@dataclass(eq=False)
class StepInFlight:
    """A step that was launched and not read yet.

    Attributes:
        logits: ``[num_rows, vocab_size]``.
        sampled: the tokens sampled from it, once their sampler is launched.
        scored: the log-probabilities of prompts that it gives, launched together with that.
        forks: completions that began with it.
    """

    batch: Batch
    logits: mx.array = field(default_factory=lambda: NO_TOKENS.token_ids)
    sampled: SampledTokens = NO_TOKENS
    scored: list[ScoredPrompt] = field(default_factory=list)
    forks: list[Request] = field(default_factory=list)

    def first_row_of(self, part: Scheduled) -> int:
        """The row of ``logits`` from which the first token of a part is drawn."""
        parts = itertools.takewhile(lambda each: each is not part, self.batch.scheduled)
        return sum(each.num_logit_rows for each in parts)


class ModelRunner:
    """Runs steps: whole prompts, chunks of them and single tokens of any sequences are one rule.

    Args:
        swap_space: holds the K/V of preempted requests.
        draft_model: makes the drafts of a step, if any.

    Attributes:
        compiled_decode: replays decodes; ``None`` builds each of them.
    """

    def __init__(
        self,
        model: Module,
        cache: KVCache,
        swap_space: SwapSpace | None = None,
        draft_model: DraftModel | None = None,
    ):
        self.model = check_model(model)
        self.cache = cache
        self.compiled_decode: CompiledDecode | None = None
        if isinstance(cache, PagedKVCache) and self.model.runs_packed:
            self.compiled_decode = CompiledDecode(self.model, cache)
        self.draft_model = draft_model
        # Behind them are those of the draft model.
        self._layers = slice(len(self.model.layer_specs))
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
            logits = self.model(tokens, self.cache.layers, step.logit_rows)
            # A step that is built before this one is evaluated would find a reader of the slabs in
            # flight, and each of its writes would copy a slab.
            mx.eval(logits, self.cache.arrays)
        self._end_step(step.num_tokens, len(new_tokens))
        return logits

    def launch(self, batch: Batch, awaited: SampledTokens) -> mx.array:
        """Begin to compute a step that a scheduler planned, and don't wait for it.

        Args:
            awaited: the tokens that stand in the batch as ``PENDING_TOKEN``.

        Returns:
            The logits ``[num_rows, vocab_size]``, one row at least; when they are there, the step
            was computed.
        """
        cache = self.cache
        for transfer in batch.transfers:
            self._transfer(transfer)
        if self.draft_model is not None:
            self.draft_model.run(batch)
        scheduled = batch.scheduled
        with cache.scheduled_step(
            [part.request.seq_id for part in scheduled],
            [part.num_new_tokens for part in scheduled],
            [part.num_logit_rows for part in scheduled],
            batch.shares_new_blocks,
            self._layers,
        ) as step:
            tokens = self._tokens_of(batch, awaited)
            decode = self.compiled_decode
            logits = None if decode is None else decode.replay(tokens)
            if logits is None:
                logits = self.model(tokens, cache.layers[self._layers], step.logit_rows)
            mx.async_eval(logits, cache.arrays)
        self._end_step(step.num_tokens, len(scheduled))
        return logits

    def _tokens_of(self, batch: Batch, awaited: SampledTokens) -> mx.array:
        """``[num_tokens] int32``, the packed new tokens of a batch."""
        if self.draft_model is None or not batch.drafted:
            return _tokens_of(batch, awaited)
        # A step with drafts was planned when all tokens before it were known.
        return self.draft_model.put_drafts(batch, mx.array(batch.token_ids, dtype=mx.int32))

    def _transfer(self, transfer: Transfer) -> None:
        if isinstance(transfer, CopyBlocks):
            self.cache.copy_blocks(transfer.copies)
        elif isinstance(transfer, ShiftKeys):
            self.cache.shift_keys(transfer.group, transfer.shift)
        elif isinstance(transfer, SwapOut):
            for group, block_ids in enumerate(transfer.block_ids):
                headers = self._swap_space.headers(transfer.seq_id, group)
                blocks = list(zip(headers, block_ids, strict=True))
                store_blocks(self.cache, self._swap_space.tier, blocks)
        else:
            for load in transfer.loads:
                headers = self._swap_space.headers(transfer.name, load.group)
                wanted = [headers[index] for index in load.indices]
                blocks = list(zip(wanted, load.block_ids, strict=True))
                load_blocks(self.cache, self._swap_space.tier, blocks)
            self._swap_space.release(transfer.name)

    def _end_step(self, num_tokens: int, num_seqs: int) -> None:
        # A decode of many sequences asks for no more sizes than that of one.
        self._num_tokens += num_tokens - num_seqs + 1
        if self._num_tokens >= CLEAR_CACHE_INTERVAL:
            mx.clear_cache()
            self._num_tokens = 0


def _tokens_of(batch: Batch, awaited: SampledTokens) -> mx.array:
    """``[num_tokens] int32``, the packed new tokens of a batch."""
    scheduled, token_ids = batch.scheduled, batch.token_ids
    if PENDING_TOKEN not in token_ids:
        return mx.array(token_ids, dtype=mx.int32)
    entry_of = {request: entry for entry, request in enumerate(awaited.requests)}
    ends = itertools.accumulate([part.num_new_tokens for part in scheduled])
    pairs = zip(ends, scheduled, strict=True)
    places = [(end - 1, entry_of[part.request]) for end, part in pairs if part.has_pending_token]
    positions, entries = zip(*places, strict=True)
    pending = awaited.token_ids
    if entries != tuple(range(len(entry_of))):
        pending = pending[mx.array(entries, dtype=mx.int32)]
    if len(positions) == len(token_ids):
        return pending
    tokens = mx.array(token_ids, dtype=mx.int32)
    tokens[mx.array(positions, dtype=mx.int32)] = pending
    return tokens
