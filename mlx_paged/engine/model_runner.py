"""One model on one cache: packs the tokens of a step, runs it, and leaves nothing unevaluated
behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar, overload

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_paged.argument_values import check_callable, kind_of
from mlx_paged.cache import AnySeqId, KVCache, SeqId, SwappedKV
from mlx_paged.engine.prompts import TokenIds, check_token_ids
from mlx_paged.engine.scheduler_output import SchedulerOutput
from mlx_paged.engine.swap_space import SwapSpace
from mlx_paged.errors import shown
from mlx_paged.models.language_model import check_model

T = TypeVar("T")

# Tokens between two times that MLX is told to give back buffers it keeps for reuse: growing
# contexts and chunks of prompts ask for ever new sizes. As mlx-lm, which does so every 256 steps,
# and after each chunk.
CLEAR_CACHE_INTERVAL = 256


@dataclass(frozen=True)
class PackedInputs:
    """The new tokens of a step's requests, behind one another."""

    token_ids: list[int]  # [num_tokens]
    num_new_tokens: dict[SeqId, int]
    complete: list[int]  # indices of the requests whose tokens are all computed after this step

    @classmethod
    def build(cls, output: SchedulerOutput) -> PackedInputs:
        token_ids: list[int] = []
        num_new_tokens: dict[SeqId, int] = {}
        complete: list[int] = []
        for index, (request, count) in enumerate(
            zip(output.requests, output.num_new_tokens, strict=True)
        ):
            num_computed = request.num_computed_tokens
            if count == 1:
                token_ids.append(request.token_ids[num_computed - 1])
            else:
                token_ids += request.token_ids[num_computed - count : num_computed]
            num_new_tokens[request.seq_id] = count
            if num_computed == len(request.token_ids):
                complete.append(index)
        return cls(token_ids, num_new_tokens, complete)


class ModelRunner:
    """Runs steps of any mix of sequences: whole prompts, chunks of them and single tokens are one
    rule.
    """

    def __init__(self, model: Module, cache: KVCache):
        self.model = check_model(model)
        self.cache = cache
        self.vocab_size = self.model.args.vocab_size
        self._num_tokens = 0  # since MLX was told

    @overload
    def run(self, batch: Mapping[AnySeqId, TokenIds], head: None = None) -> mx.array: ...

    @overload
    def run(self, batch: Mapping[AnySeqId, TokenIds], head: Callable[[mx.array], T]) -> T: ...

    def run(
        self, batch: Mapping[AnySeqId, TokenIds], head: Callable[[mx.array], T] | None = None
    ) -> T | mx.array:
        """One step: the new tokens of each sequence, in the mapping's order.

        Args:
            batch: new token ids per sequence, at least one each.
            head: what to make of the logits ``[num_seqs, vocab_size]`` of each sequence's last
                token, built into the same evaluation; ``None`` returns the logits themselves.

        Returns:
            What ``head`` returned, evaluated.

        Raises:
            CacheFullError: the budget can't hold the new tokens; nothing was changed.
            ValueError: no sequence, one without tokens, or a token that the model does not have;
                nothing was changed.
        """
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"[run] batch must be a mapping of sequences to their new tokens, got {kind_of(batch)}"
            )
        new_tokens = {
            seq: check_token_ids(ids, self.vocab_size, f"batch[{shown(seq)}]")
            for seq, ids in batch.items()
        }
        if head is not None:
            check_callable("run", "head", head, "a function of the logits, or None")
        with self.cache.step({seq: len(ids) for seq, ids in new_tokens.items()}) as step:
            tokens = mx.array([token for ids in new_tokens.values() for token in ids])
            logits = self.model(tokens, self.cache.layers, step.logit_rows)
            outputs = logits if head is None else head(logits)
            # One step ahead of its evaluation, a slab would have a reader in flight and each write
            # would copy it.
            mx.eval(outputs, self.cache.arrays)
        self._end_step(step.num_tokens, len(batch))
        return outputs

    def execute(
        self,
        output: SchedulerOutput,
        sample: Callable[[mx.array], T],
        swap_space: SwapSpace[SwappedKV],
    ) -> T | None:
        """One step that a scheduler chose, on a paged cache.

        Args:
            sample: called with the logits ``[num_rows, vocab_size]`` of those requests whose tokens
                are all computed after this step, in their order; evaluates what it returns. Not
                called if there are none.
            swap_space: holds the K/V of those that are swapped.

        Returns:
            What ``sample`` returned, or ``None``.
        """
        cache = self.cache
        _swap_and_copy(output, cache, swap_space)
        start = time.perf_counter()
        inputs = PackedInputs.build(output)
        num_new_tokens = inputs.num_new_tokens
        num_logit_rows = [0] * len(output.requests)
        for index in inputs.complete:
            num_logit_rows[index] = 1
        with cache.scheduled_step(
            list(num_new_tokens),
            list(num_new_tokens.values()),
            num_logit_rows,
            output.shares_new_blocks,
        ) as step:
            logits = self.model(mx.array(inputs.token_ids), cache.layers, step.logit_rows)
            sampled = sample(logits) if inputs.complete else None
            mx.eval(cache.arrays)
        if step.num_tokens > 2 * len(output.requests):  # most of them of prompts
            swap_space.note_computed(step.num_tokens, time.perf_counter() - start)
        self._end_step(step.num_tokens, len(output.requests))
        return sampled

    def _end_step(self, num_tokens: int, num_seqs: int) -> None:
        # A decode of many sequences asks for no more sizes than that of one.
        self._num_tokens += num_tokens - num_seqs + 1
        if self._num_tokens >= CLEAR_CACHE_INTERVAL:
            mx.clear_cache()
            self._num_tokens = 0


def _swap_and_copy(
    output: SchedulerOutput, cache: KVCache, swap_space: SwapSpace[SwappedKV]
) -> None:
    for swap_out in output.swap_outs:
        start = time.perf_counter()
        swap_space.put(swap_out.seq_id, cache.swap_out(swap_out.block_ids, swap_out.num_tokens))
        swap_space.note_copied(swap_out.num_tokens, time.perf_counter() - start)
    for copies in output.copies:
        cache.copy_blocks(copies)
    for swap_in in output.swap_ins:
        start = time.perf_counter()
        cache.swap_in(swap_in.seq_id, swap_space.get(swap_in.seq_id), swap_in.start, swap_in.end)
        swap_space.note_copied(swap_in.end - swap_in.start, time.perf_counter() - start)
        swap_space.give_back(swap_in.seq_id)
