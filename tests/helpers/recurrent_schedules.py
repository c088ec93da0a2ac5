"""Random schedules of a model, with recurrent layers or without, whose every row of logits is held
against those of mlx-lm's own caches.

Sequences join, wait, are left out of steps, fork, are preempted and begin again from what is
cached; prompts run in odd chunks beside decodes, and are cut where they leave a checkpoint.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import mlx.core as mx
from mlx.nn import Module
from mlx_lm.models.cache import make_prompt_cache

from mlx_paged.cache.step_states import forget_before, put_states, states_before
from mlx_paged.core import (
    BlockHash,
    ComputedBlocks,
    KVCacheManager,
    SequenceStates,
    extend_block_hashes,
)
from mlx_paged.models.kv_cache import make_kv_cache
from mlx_paged.models.language_model import LanguageModel

BLOCK_SIZE = 8
MAX_LIVE = 4
NUM_CHECKPOINTS = 40
# Of the spread of logits, in float32: sums are added up in another order.
TOLERANCE = 5e-5


@dataclass(eq=False)
class Sequence:
    """Tokens, their logits on mlx-lm's caches, and how far a schedule has come."""

    ids: list[int]
    expected: mx.array  # [num_tokens, vocab_size]
    num_prompt: int
    num_done: int = 0
    hashes: list[BlockHash] = field(default_factory=list)


class Schedule:
    """Random steps of one model.

    Args:
        stock: the model as mlx-lm has it.
        model: the same one, as it runs here.

    Attributes:
        events: how often each kind of thing has happened.
        worst: the largest error of a logit, over the spread of its sequence's.
    """

    def __init__(self, stock: Module, model: LanguageModel, seed: int = 0):
        self.stock, self.model = stock, model
        self.cache = make_kv_cache(model, block_size=BLOCK_SIZE, kv_cache_bytes="600blocks")
        self.states = SequenceStates(NUM_CHECKPOINTS) if model.state_nbytes else None
        self.manager = KVCacheManager(self.cache.pool, self.cache.config.retentions, self.states)
        self.events: Counter[str] = Counter()
        self.worst = 0.0
        self._random = random.Random(seed)
        self._live: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._known: list[list[int]] = []  # beginnings to share

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._change()
            batch = [each for each in self._live if self._random.random() < 0.8]
            self.events["left out"] += len(self._live) - len(batch)
            if batch:
                self._step(batch)
            for each in [each for each in self._live if each.num_done == len(each.ids)]:
                self._leave(each)

    def _change(self) -> None:
        draw = self._random.random
        if len(self._live) < MAX_LIVE and draw() < 0.5:
            self._live.append(
                self._waiting.pop() if self._waiting and draw() < 0.5 else self._new()
            )
        ran = [each for each in self._live if 0 < each.num_done < len(each.ids)]
        if ran and draw() < 0.08:
            preempted = self._random.choice(ran)
            self._leave(preempted)
            preempted.num_done = 0
            self._waiting.append(preempted)
            self.events["preempted"] += 1
        elif ran and draw() < 0.15:
            self._fork(self._random.choice(ran))

    def _leave(self, sequence: Sequence) -> None:
        self._live.remove(sequence)
        if sequence in self.manager.groups:
            self.manager.free(sequence)

    def _tokens(self, low: int, high: int) -> list[int]:
        return [self._random.randrange(256) for _ in range(self._random.randint(low, high))]

    def _new(self) -> Sequence:
        begin: list[int] = []
        if self._known and self._random.random() < 0.6:
            shared = self._random.choice(self._known)
            begin = shared[: self._random.randint(1, len(shared))]
        ids = begin + self._tokens(3, 30)
        num_prompt = len(ids)
        ids += self._tokens(2, 14)
        self._known.append(ids)
        return Sequence(ids, self._expected(ids), num_prompt)

    def _fork(self, parent: Sequence) -> None:
        ids = parent.ids[: parent.num_done] + self._tokens(2, 12)
        child = Sequence(ids, self._expected(ids), 0, parent.num_done, parent.hashes.copy())
        del child.hashes[parent.num_done // BLOCK_SIZE :]
        self.manager.fork(parent, child)
        self._live.append(child)
        self.events["forked"] += 1

    def _expected(self, ids: list[int]) -> mx.array:
        logits = self.stock(mx.array([ids]), cache=make_prompt_cache(self.stock))[0]
        return _finite(logits)

    def _step(self, batch: list[Sequence]) -> None:
        counts = [self._allocate(each) for each in batch]
        states = states_before(self.manager, batch, counts)
        if states is not None:
            self.events["cut"] += sum(
                len({*state.cuts, count}) - 1 for state, count in zip(states, counts, strict=True)
            )
        tokens = [
            each.ids[each.num_done : each.num_done + count]
            for each, count in zip(batch, counts, strict=True)
        ]
        with self.cache.open_step(
            [self.manager.groups[each] for each in batch], counts, counts, states=states
        ) as step:
            logits = self.model(
                mx.array(list(itertools.chain(*tokens))), self.cache.layers, step.logit_rows
            )
            mx.eval(logits, self.cache.arrays)
        if states is not None:
            put_states(self.manager, batch, counts, states)
            forget_before(states)
        begin = 0
        for each, count in zip(batch, counts, strict=True):
            self._check(each, logits[begin : begin + count])
            begin += count
            each.num_done += count
            self.manager.cache_blocks(each, each.hashes[: each.num_done // BLOCK_SIZE])
        self.events["steps"] += 1

    def _allocate(self, sequence: Sequence) -> int:
        """Slots for its next tokens; returns how many."""
        computed = ComputedBlocks()
        if sequence not in self.manager.groups:
            sequence.hashes.clear()
            extend_block_hashes(sequence.hashes, sequence.ids, BLOCK_SIZE)
            computed = self.manager.get_computed_blocks(sequence.hashes, sequence.num_prompt)
            sequence.num_done = computed.num_tokens
            self.events["hit"] += computed.num_tokens > 0
        extend_block_hashes(sequence.hashes, sequence.ids, BLOCK_SIZE)
        num_left = sequence.num_prompt - sequence.num_done
        count = 1 if num_left < 2 else min(num_left, self._random.choice([1, 3, 5, 8, 13, 40]))
        copies = self.manager.allocate_slots(sequence, count, computed)
        assert copies is not None
        self.cache.copy_blocks(copies)
        return count

    def _check(self, sequence: Sequence, logits: mx.array) -> None:
        expected = sequence.expected[sequence.num_done : sequence.num_done + len(logits)]
        error = mx.abs(_finite(logits) - expected).max() / mx.std(sequence.expected)
        # A NaN is an error, too.
        self.worst = max(self.worst, error.item() if mx.isfinite(error).item() else float("inf"))


def _finite(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return mx.where(mx.isneginf(logits), 0, logits)
