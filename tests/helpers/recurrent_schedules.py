"""Random schedules of a model, with recurrent layers or without, whose every row of logits is held
against those of mlx-lm's own caches.

Sequences join, wait, are left out of steps, fork, are preempted and begin again from what is
cached; prompts run in odd chunks beside decodes, and are cut where they leave a checkpoint. Answers
have drafts, right and wrong ones, after which a sequence falls back to its state before them.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from weakref import WeakSet

import mlx.core as mx
from mlx.nn import Module
from mlx_lm.models.cache import make_prompt_cache
from paged_testing.integrity import check_manager

from mlx_paged.cache.step_states import forget_before, put_states, states_before
from mlx_paged.core import (
    BlockHash,
    BudgetSizes,
    ComputedBlocks,
    KVCacheManager,
    SequenceStates,
    SharedBudget,
    extend_block_hashes,
)
from mlx_paged.models.kv_cache import NUM_COPIES, make_engine_cache
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.ops import StateStack

BLOCK_SIZE = 8
MAX_LIVE = 4
MAX_DRAFTS = 4
MAX_REPEATED = 6
# Tokens of a fork that its parent lacks, drafts, and a block that both write.
MARGIN = 12 + MAX_DRAFTS + BLOCK_SIZE
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
    num_repeated: int = 0  # the tokens after these, which were right and have no state
    hashes: list[BlockHash] = field(default_factory=list)


class Schedule:
    """Random steps of one model.

    Args:
        stock: the model as mlx-lm has it.
        model: the same one, as it runs here.
        num_states: of a budget in bytes, which K/V and states share; by default K/V have 600 blocks
            and states as much as they need.

    Attributes:
        events: how often each kind of thing has happened.
        worst: the largest error of a logit, over the spread of its sequence's.
    """

    def __init__(
        self, stock: Module, model: LanguageModel, seed: int = 0, num_states: int | None = None
    ):
        self.stock, self.model = stock, model
        nbytes = 0 if num_states is None else num_states * model.state_nbytes
        self.cache = make_engine_cache(
            model,
            "paged",
            None,
            {"block_size": BLOCK_SIZE, "kv_cache_bytes": nbytes or "600blocks"},
            NUM_COPIES,
        )
        self.states = SequenceStates(NUM_CHECKPOINTS) if model.state_nbytes else None
        self.manager = KVCacheManager(self.cache.pool, self.cache.config.retentions, self.states)
        if nbytes:
            assert self.states is not None
            config = self.cache.config
            sizes = BudgetSizes(nbytes, config.nbytes_per_block, config.state_nbytes, NUM_COPIES)
            self.cache.shared_budget = SharedBudget(sizes, self.cache.pool, self.states)
            self.cache.shared_budget.count_seqs = lambda: len(self._live)
        self.events: Counter[str] = Counter()
        self.worst = 0.0
        self._random = random.Random(seed)
        self._live: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._known: list[list[int]] = []  # beginnings to share
        self._stacks = WeakSet[StateStack]()

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
            new = self._waiting.pop() if self._waiting and draw() < 0.5 else self._new()
            (self._live if self._fits(new) else self._waiting).append(new)
        ran = [each for each in self._live if 0 < each.num_done < len(each.ids)]
        if ran and draw() < 0.08:
            preempted = self._random.choice(ran)
            self._leave(preempted)
            preempted.num_done = preempted.num_repeated = 0
            self._waiting.append(preempted)
            self.events["preempted"] += 1
        elif ran and draw() < 0.15:
            parent = self._random.choice(ran)
            # An engine forks a sequence before it has drafts.
            if not parent.num_repeated and self._fits(parent):
                self._fork(parent)

    def _fits(self, new: Sequence) -> bool:
        """Whether all tokens of those that are live fit beside their states, and those of another
        one; slabs shrink for it, as between two steps of an engine.
        """
        cache, manager = self.cache, self.manager
        if cache.shared_budget is None:
            return True
        need = manager.block_need.max_num_held_blocks
        num_needed = sum(need(len(each.ids) + MARGIN) for each in [*self._live, new])
        num_growable = cache.num_growable_blocks(1)
        if num_needed > num_growable + cache.pool.num_usable_blocks:
            self.events["refused"] += 1
            return False
        num_given = min(cache.num_blocks_to_shrink_by(1), manager.num_free_blocks - num_needed)
        num_given = max(0, -num_growable, num_given)
        if num_given:
            self.events["shrunk"] += 1
            copies = manager.shrink_pool(num_given)
            self.events["moved"] += len(copies)
            cache.shrink_slabs(copies)
        return cache.make_room_for_states(1)

    def _check_budget(self) -> None:
        budget = self.cache.shared_budget
        if budget is not None:
            nbytes = self.cache.nbytes_held + len(self._live) * budget.sizes.sequence
            assert nbytes <= budget.nbytes_used <= budget.sizes.budget
            check_manager(self.manager)

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
        child = Sequence(ids, self._expected(ids), 0, parent.num_done)
        child.hashes = parent.hashes.copy()
        del child.hashes[parent.num_done // BLOCK_SIZE :]
        self.manager.fork(parent, child)
        self._live.append(child)
        self.events["forked"] += 1

    def _expected(self, ids: list[int]) -> mx.array:
        logits = self.stock(mx.array([ids]), cache=make_prompt_cache(self.stock))[0]
        return _finite(logits)

    def _step(self, batch: list[Sequence]) -> None:
        counts, tokens, num_drafts, num_right = [], [], [], []
        for each in batch:
            count = self._allocate(each)
            drafts, right = self._drafts(each, count)
            tokens.append(each.ids[each.num_done : each.num_done + count] + drafts)
            counts.append(count + len(drafts))
            num_drafts.append(len(drafts))
            num_right.append(count + right)
        states = states_before(self.manager, batch, counts, num_drafts)
        if states is not None:
            self.events["cut"] += sum(
                len({*state.cuts, count}) - 1 for state, count in zip(states, counts, strict=True)
            )
        with self.cache.open_step(
            [self.manager.groups[each] for each in batch], counts, counts, states=states
        ) as step:
            logits = self.model(
                mx.array(list(itertools.chain(*tokens))), self.cache.layers, step.logit_rows
            )
            mx.eval(logits, self.cache.arrays)
        if states is not None:
            put_states(self.manager, batch, counts, states)
            self._stacks = WeakSet(forget_before(states, self._stacks))
            self._check_budget()
            self.manager.states.forget_released()
        begin = 0
        for each, count, right, drafts in zip(batch, counts, num_right, num_drafts, strict=True):
            self._check(each, logits[begin : begin + right])
            begin += count
            num_tokens = each.num_done + right
            if drafts:
                self.events["drafted"] += 1
                self.events["fell back"] += right < count
                each.num_done = self.manager.trim(each, num_tokens)
            else:
                each.num_done = num_tokens
            each.num_repeated = num_tokens - each.num_done
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
        if num_left < 2:
            count = sequence.num_repeated + 1
        else:
            count = min(num_left, self._random.choice([1, 3, 5, 8, 13, 40]))
        self.cache.make_room(self.manager.num_needed_blocks(sequence, count, computed))
        copies = self.manager.allocate_slots(sequence, count, computed)
        assert copies is not None
        self.cache.make_room_for_states(0)
        self.cache.copy_blocks(copies)
        return count

    def _drafts(self, sequence: Sequence, count: int) -> tuple[list[int], int]:
        """Drafts that follow the next ``count`` tokens of an answer, and how many of them are
        right.
        """
        end = sequence.num_done + count
        reaches_end_of_block = end // BLOCK_SIZE > sequence.num_done // BLOCK_SIZE
        is_short = count <= MAX_REPEATED + 1 and sequence.num_done
        if end <= sequence.num_prompt or reaches_end_of_block or not is_short:
            return [], 0
        most = min(MAX_DRAFTS, len(sequence.ids) - end, self.manager.max_more(sequence))
        num_drafts = self._random.randint(0, max(0, most))
        if not num_drafts:
            return [], 0
        right = sequence.ids[end : end + self._random.choice([num_drafts, 0, 1, 2])][:num_drafts]
        wrong = [(token + 1) % 256 for token in sequence.ids[end + len(right) : end + num_drafts]]
        self.cache.make_room(1)
        assert self.manager.allocate_slots(sequence, num_drafts) == []
        return right + wrong, len(right)

    def _check(self, sequence: Sequence, logits: mx.array) -> None:
        expected = sequence.expected[sequence.num_done : sequence.num_done + len(logits)]
        error = mx.abs(_finite(logits) - expected).max() / mx.std(sequence.expected)
        # A NaN is an error, too.
        self.worst = max(self.worst, error.item() if mx.isfinite(error).item() else float("inf"))


def _finite(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return mx.where(mx.isneginf(logits), 0, logits)
