"""One model on one cache: packs the tokens of a step and launches it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast
from weakref import WeakSet

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from mlx_paged.cache import KVCache, PagedKVCache
from mlx_paged.cache.step_states import forget_before, put_states, states_before
from mlx_paged.cache.transfer import load_blocks, store_blocks
from mlx_paged.core import KVCacheManager
from mlx_paged.engine.compiled_decode import CompiledDecode
from mlx_paged.engine.request import PENDING_TOKEN, Completion
from mlx_paged.engine.sampling.sampler import NO_TOKENS, LogprobReport, SampledTokens
from mlx_paged.engine.scheduling.batch import (
    Batch,
    CopyBlocks,
    Scheduled,
    ShiftKeys,
    SwapOut,
    Transfer,
)
from mlx_paged.engine.scheduling.prefix_cache import SwapSpace
from mlx_paged.engine.speculation.draft_model import DraftModel
from mlx_paged.models.adapted_layers import AdapterRows, running_adapters
from mlx_paged.models.language_model import taking_hidden_rows
from mlx_paged.models.matmul import Matmul
from mlx_paged.models.mlx_lm import check_model
from mlx_paged.ops import StateStack


class PooledRow(NamedTuple):
    """The end of a prompt in a step: what its request is answered with, launched and not waited
    for.
    """

    completion: Completion
    row: mx.array  # [hidden_size] or [num_token_ids] float32

    def read(self) -> list[float]:
        """Wait for the row; an embedding is cut, then divided by its length.

        Raises:
            ValueError: it has infinities or NaN.
        """
        pooling = self.completion.request.pooling
        assert pooling is not None
        numbers = np.array(self.row)[: pooling.dimensions if pooling.is_embedding else None]
        if not np.isfinite(numbers).all():
            raise ValueError("[engine] the model's results for this prompt are not finite")
        if pooling.is_embedding and pooling.normalize:
            # The length in float64: it does not overflow there.
            length = np.linalg.norm(numbers.astype(np.float64))
            numbers = (numbers / max(length, np.finfo(np.float32).tiny)).astype(np.float32)
        return cast(list[float], numbers.tolist())


@dataclass(eq=False)
class StepInFlight:
    """A step that was launched and not read yet.

    Attributes:
        logits: ``[num_rows, vocab_size]``.
        pooled: what requests with ``PoolingParams`` are answered with.
        sampled: the sampled tokens, once the sampler is launched.
        scored: the log-probabilities of prompts, launched with the sampler.
        forks: completions that were forked in this step.
    """

    batch: Batch
    logits: mx.array = field(default_factory=lambda: NO_TOKENS.token_ids)
    pooled: list[PooledRow] = field(default_factory=list)
    sampled: SampledTokens = NO_TOKENS
    scored: list[tuple[Completion, LogprobReport]] = field(default_factory=list)
    forks: list[Completion] = field(default_factory=list)


class ModelRunner:
    """Runs steps: whole prompts, chunks of them and single tokens of any sequences are one rule.

    Args:
        manager: of the block tables of the cache's sequences.
        swap_space: for the K/V of preempted requests.
        draft_model: makes the drafts of a step, if given.
        matmul: of the linear layers of both models; MLX's by default.
        deterministic: whether the rows of a step must not depend on each other. Decodes are then
            not replayed, since a trace may fuse operations, which round less often.

    Attributes:
        compiled_decode: replays decodes; without it (``None``) each is built in Python.
    """

    def __init__(
        self,
        model: Module,
        cache: KVCache,
        manager: KVCacheManager,
        swap_space: SwapSpace | None = None,
        draft_model: DraftModel | None = None,
        matmul: Matmul | None = None,
        deterministic: bool = False,
    ):
        self.model = check_model(model)
        self.cache = cache
        self._manager = manager
        self.compiled_decode: CompiledDecode | None = None
        if isinstance(cache, PagedKVCache) and self.model.runs_packed and not deterministic:
            self.compiled_decode = CompiledDecode(self.model, cache)
        self.draft_model, self.matmul = draft_model, matmul or Matmul()
        # Hidden rows of the step: for a head, and so that a model computes as many rows in its last
        # layer as it would with a head.
        self._takes_normed = False if deterministic else None
        if draft_model is not None and draft_model.takes_normed is not None:
            self._takes_normed = draft_model.takes_normed
        # The layers of the draft model come after these.
        self._layers = slice(len(self.model.layer_specs))
        self.vocab_size = self.model.args.vocab_size
        self._swap_space = swap_space or SwapSpace(0)
        # The states of recurrent layers before the newest step, while they are referenced.
        self._stacks_before = WeakSet[StateStack]()

    def launch(self, batch: Batch, awaited: SampledTokens) -> tuple[mx.array, list[PooledRow]]:
        """Launch a step, without waiting for it, inside ``matmul.running()``.

        Args:
            awaited: the tokens of the batch's ``PENDING_TOKEN`` entries.

        Returns:
            The logits ``[num_rows, vocab_size]``, at least one row, which stay lazy if all are rows
            of embeddings; and what requests with ``PoolingParams`` are answered with. Once these
            are evaluated, or the logits if there are none, the step is computed.
        """
        cache, draft_model = self.cache, self.draft_model
        for transfer in batch.transfers:
            self._transfer(transfer)
        scheduled, groups = batch.scheduled, self._manager.groups
        counts = [part.num_new_tokens for part in scheduled]
        num_logit_rows = [part.num_logit_rows for part in scheduled]
        seq_ids = [part.completion.seq_id for part in scheduled]
        num_drafts = [len(part.draft_token_ids) for part in scheduled]
        states = states_before(self._manager, seq_ids, counts, num_drafts)
        embeds = [each.completion.request.is_embedded for each in scheduled if each.num_logit_rows]
        if draft_model is not None:
            draft_model.run(batch, states)
        with cache.open_step(
            [groups[seq] for seq in seq_ids],
            counts,
            num_logit_rows,
            batch.shares_new_blocks,
            self._layers,
            states=states,
        ) as step:
            tokens = self._tokens_of(batch, awaited)
            decode = self.compiled_decode
            adapters = [part.completion.request.adapter for part in scheduled]
            slots = [0 if each is None else each.slot for each in adapters]
            with (
                running_adapters(AdapterRows.of(slots, counts, step.logit_rows)),
                taking_hidden_rows(self._takes_normed, any(embeds)) as hidden,
            ):
                # A trace gives no rows for embeddings.
                logits = None if decode is None or any(embeds) else decode.replay(tokens)
                if logits is None:
                    logits = self.model(tokens, cache.layers[self._layers], step.logit_rows)
            rows = None if hidden is None else hidden.rows
            pooled = _pooled_rows(scheduled, logits, None if hidden is None else hidden.of_logits)
            # The product with the vocabulary is not needed for embeddings alone.
            read = [each.row for each in pooled] if embeds and all(embeds) else [logits]
            mx.async_eval(read, [] if rows is None else rows, cache.arrays)
        if draft_model is not None:
            draft_model.follow(batch, tokens, rows, states)
        if states is not None:
            put_states(self._manager, seq_ids, counts, states)
            self._stacks_before = WeakSet(forget_before(states, self._stacks_before))
        return logits, pooled

    def release_states(self) -> None:
        """Free the states of sequences that have gone. No step is in flight, so the others can be
        moved out of the stacks that they shared.
        """
        states = self._manager.states
        if states is not None and states.num_released:
            rows = [state.content for state in states.snapshot().values()]
            stacks = {*self._stacks_before, *(row.stack for row in rows if row)}
            self._stacks_before = WeakSet(forget_before([], stacks))
            states.forget_released()

    def _tokens_of(self, batch: Batch, awaited: SampledTokens) -> mx.array:
        """``[num_tokens] int32``, the packed new tokens of a batch."""
        scheduled, token_ids = batch.scheduled, batch.token_ids
        if PENDING_TOKEN not in token_ids:
            return mx.array(token_ids, dtype=mx.int32)
        if self.draft_model is not None and batch.drafted:
            # All pending tokens are drafts, because the tokens before them are known by now.
            return self.draft_model.put_drafts(batch, mx.array(token_ids, dtype=mx.int32))
        entry_of = {completion: entry for entry, completion in enumerate(awaited.completions)}
        ends = itertools.accumulate([part.num_new_tokens for part in scheduled])
        pairs = zip(ends, scheduled, strict=True)
        places = [
            (end - 1, entry_of[part.completion]) for end, part in pairs if part.has_pending_token
        ]
        positions, entries = zip(*places, strict=True)
        pending = awaited.token_ids
        if entries != tuple(range(len(entry_of))):
            pending = pending[mx.array(entries, dtype=mx.int32)]
        if len(positions) == len(token_ids):
            return pending
        tokens = mx.array(token_ids, dtype=mx.int32)
        tokens[mx.array(positions, dtype=mx.int32)] = pending
        return tokens

    def _transfer(self, transfer: Transfer) -> None:
        cache = self.cache
        if isinstance(transfer, CopyBlocks):
            cache.copy_blocks(transfer.copies)
            return
        assert isinstance(cache, PagedKVCache), "a basic cache has no windows and does not swap"
        if isinstance(transfer, ShiftKeys):
            cache.shift_keys(transfer.group, transfer.shift)
        elif isinstance(transfer, SwapOut):
            groups = zip(self._swap_space.headers(transfer.seq_id), transfer.block_ids, strict=True)
            blocks = [pair for group in groups for pair in zip(*group, strict=True)]
            store_blocks(cache, self._swap_space.tier, blocks)
        else:
            headers = self._swap_space.headers(transfer.seq_id)
            blocks = [
                (headers[load.group][index], block_id)
                for load in transfer.loads
                for index, block_id in zip(load.indices, load.block_ids, strict=True)
            ]
            load_blocks(cache, self._swap_space.tier, blocks)
            self._swap_space.release(transfer.seq_id)


def _pooled_rows(
    scheduled: Sequence[Scheduled],
    logits: mx.array,  # [num_rows, vocab_size]
    hidden: mx.array | None,  # [num_rows, hidden_size], if there are embeddings
) -> list[PooledRow]:
    """What the requests with ``PoolingParams`` whose prompts end in a step are answered with."""
    pooled: list[PooledRow] = []
    end = 0
    for part in scheduled:
        end += part.num_logit_rows
        pooling = part.completion.request.pooling
        if pooling is None or not part.num_logit_rows:
            continue
        if pooling.is_embedding:
            assert hidden is not None
            row = hidden[end - 1]
        else:
            row = logits[end - 1, mx.array(pooling.token_ids)]
        pooled.append(PooledRow(part.completion, row.astype(mx.float32)))
    mx.async_eval([each.row for each in pooled])
    return pooled
