"""One budget for K/V blocks, states of running sequences and checkpoints, by its arithmetic."""

from __future__ import annotations

import random

import pytest
from paged_testing.integrity import check_manager

from mlx_paged.core import (
    BlockPool,
    BudgetSizes,
    Checkpoint,
    Checkpoints,
    KVCacheManager,
    SequenceState,
    SequenceStates,
    SharedBudget,
    hash_token_blocks,
)
from mlx_paged.core.checkpoints import MANY

# Qwen3.5-27B: 16 layers that attend, 4 heads of 256, in bfloat16; blocks of 16 tokens.
STATE = int(146.8 * 2**20)
BLOCK = 16 * 65_536
# 32 GB of memory, of which Metal recommends 26,801 MB: 80% of it, less weights of 4 bits.
BUDGET = int(0.8 * 26_801e6) - int(15.1e9)


def sizes_of_27b(budget: int = BUDGET) -> BudgetSizes:
    return BudgetSizes(budget, BLOCK, STATE, num_copies=4)


def test_a_27b_on_32_gb_runs_several_sequences_where_it_ran_one():
    sizes = sizes_of_27b()
    # A quarter of this budget held ten states, two sequences of five copies each.
    assert BUDGET // 4 // STATE == 10
    tokens = {n: sizes.max_num_blocks(n) // n * 16 for n in range(1, 9)}
    assert tokens[1] > 80_000
    assert [n for n, each in tokens.items() if each >= 8_192] == [1, 2, 3, 4, 5]
    assert max(n for n, each in tokens.items() if each >= 2_048) == 8
    # With 2/3 of the memory, as older systems recommend, one quarter held no two.
    older = sizes_of_27b(int(0.8 * 32e9 * 2 / 3) - int(15.1e9))
    assert older.budget // 4 // STATE // 5 == 0
    assert older.max_num_blocks(1) * 16 >= 16_384 and older.max_num_blocks(2) * 16 >= 2 * 2_048


class Model:
    """Sequences one after the other, or beside each other, on a pool that grows and shrinks."""

    def __init__(self, sizes: BudgetSizes, num_checkpoints: int = 100, block_size: int = 4):
        self.sizes = sizes
        self.states = SequenceStates(num_checkpoints)
        self.pool = BlockPool(2, block_size)
        self.manager = KVCacheManager(self.pool, states=self.states)
        self.budget = SharedBudget(sizes, self.pool, self.states)
        self.budget.count_seqs = lambda: len(self.manager.tables)

    def check(self) -> None:
        check_manager(self.manager)
        sizes = self.sizes
        nbytes = self.pool.num_blocks * sizes.block
        nbytes += len(self.manager.tables) * sizes.sequence
        nbytes += (len(self.states.checkpoints) + self.states.num_pending) * sizes.state
        assert nbytes <= self.budget.nbytes_used <= sizes.budget

    def begin(self, seq: str, tokens: list[int]) -> int | None:
        """How many tokens are hit; ``None`` if the sequence does not fit."""
        manager, size = self.manager, self.pool.block_size
        num_needed = -(-len(tokens) // size)
        if num_needed > self.budget.max_num_blocks(1) - self.pool.num_used_blocks:
            return None
        num_free = self.pool.num_free_blocks - num_needed
        num_surplus = self.pool.num_usable_blocks - self.budget.max_num_blocks(1)
        num_given = max(num_surplus, min(self.budget.num_blocks_to_shrink_by(1), num_free))
        before = {seq: list(table.blocks) for seq, table in manager.tables.items()}
        for source, destination in manager.shrink_pool(max(0, num_given)):
            assert destination < self.pool.num_blocks <= source
        for name, table in manager.tables.items():
            assert table.blocks == before[name]
            assert table.block_ids == [block.block_id for block in table.blocks]
        hashes = hash_token_blocks(tokens, size)
        computed = manager.get_computed_blocks(hashes, len(tokens))
        assert self.budget.make_room_for_states(1)
        num_new = len(tokens) - computed.num_tokens
        self.grow(manager.num_needed_blocks(seq, num_new, computed), 1)
        assert manager.allocate_slots(seq, num_new, computed) is not None
        self.budget.make_room_for_states(0)
        self.end(seq, tokens, computed.num_tokens)
        return computed.num_tokens

    def grow(self, num_blocks: int, num_new_seqs: int = 0) -> None:
        num_missing = num_blocks - self.pool.num_empty_blocks
        if num_missing > 0:
            num_most = self.budget.make_room(num_blocks, num_new_seqs)
            self.pool.grow(min(num_missing, num_most))

    def end(self, seq: str, tokens: list[int], begin: int) -> None:
        size, end = self.pool.block_size, len(tokens)
        cuts = self.states.plan_cuts(seq, begin, end, size)
        self.manager.cache_blocks(seq, hash_token_blocks(tokens, size))
        kept = [(cut, tuple(tokens[: cut.num_tokens])) for cut in cuts]
        newest = {seq: SequenceState(end, tuple(tokens))}
        self.states.end_step(newest, {seq: kept}, self.manager.tables)
        self.check()

    def free(self, seq: str) -> None:
        self.manager.free(seq)
        self.check()
        self.states.forget_released()


def text(seed: int, length: int) -> list[int]:
    return [random.Random(seed * 1000 + place).randrange(1000) for place in range(length)]


def test_cached_kv_leave_the_states_of_one_sequence_and_three_checkpoints():
    sizes = BudgetSizes(budget=200, block=1, state=10, num_copies=4)
    model = Model(sizes)
    model.budget.make_room(1000)
    model.grow(1)
    # The pool has room for 200 - 4 * 10 states less the null block; 30 stay for checkpoints.
    model.manager.allocate_slots("a", 4)
    model.manager.free("a")
    num_free = model.budget.make_room(model.pool.num_free_blocks)
    assert num_free == 200 - 40 - 30 - model.pool.num_blocks


def test_a_running_sequence_takes_the_memory_of_checkpoints_and_cached_kv():
    model = Model(BudgetSizes(budget=100, block=1, state=10, num_copies=4))
    for number in range(8):
        assert model.begin("short", text(number, 40)) == 0
        model.free("short")
    assert len(model.states.checkpoints) > 0
    # 59 blocks beside the states of one sequence and the null block.
    assert model.begin("too long", text(99, 60 * 4)) is None
    assert model.begin("long", text(99, 59 * 4)) == 0
    assert model.pool.num_used_blocks == 59 and len(model.states.checkpoints) == 0


def test_a_pool_that_is_full_of_cached_kv_shrinks_for_the_states_of_another_sequence():
    model = Model(BudgetSizes(budget=100, block=1, state=10, num_copies=4))
    first = text(1, 20)
    assert model.begin("a", text(0, 59 * 4)) == 0
    model.free("a")
    assert model.begin("b", first) == 0
    assert model.begin("c", text(2, 20)) == 0
    assert model.pool.num_usable_blocks <= 100 - 2 * 40 - 1
    assert model.begin("d", text(3, 4)) is None, "three sequences of 40 bytes of states"


def test_a_checkpoint_goes_with_the_block_that_it_follows():
    told = []
    model = Model(BudgetSizes(budget=100, block=1, state=10, num_copies=4))
    model.states.checkpoints.on_eviction = lambda checkpoint: told.append(checkpoint.content)
    tokens = text(1, 24)
    model.begin("a", tokens)
    model.free("a")
    (block,) = [b for b in model.pool.blocks if b.block_hash == hash_token_blocks(tokens, 4)[-1]]
    model.pool.evict_blocks([block.block_id])
    assert len(model.states.checkpoints) == 0 and told == [tuple(tokens)]


def test_a_failed_steps_checkpoint_is_removed_without_being_told():
    told = []
    model = Model(BudgetSizes(budget=100, block=1, state=10, num_copies=4))
    model.states.checkpoints.on_eviction = told.append
    model.begin("a", text(1, 24))
    model.manager.evict_blocks(model.manager.tables["a"].block_ids)
    assert len(model.states.checkpoints) == 0 and told == []


def test_memory_moves_from_kv_to_checkpoints_after_one_long_prompt():
    """A prompt that took everything leaves blocks for many conversations, and memory for three
    states. Where conversations lose checkpoints for others, K/V give up some of theirs.
    """
    model = Model(BudgetSizes(budget=400, block=1, state=10, num_copies=4))
    assert model.begin("long", text(500, 355 * 4)) == 0
    model.free("long")
    texts = [text(number, 40) for number in range(9)]
    for turn in range(8):
        hits = []
        for number, tokens in enumerate(texts):
            hits.append(model.begin("turn", tokens))
            model.free("turn")
            texts[number] = [*tokens, *text(100 * turn + number + 7000, 4)]
        if turn == 0:
            assert hits == [0] * 9 and len(model.states.checkpoints) <= 6
    assert len(model.states.checkpoints) >= 15
    assert sum(hit > 0 for hit in hits) >= 6


@pytest.mark.parametrize("seed", range(6))
def test_the_budget_holds_after_each_change_of_random_sequences(seed: int):
    draw = random.Random(seed)
    sizes = BudgetSizes(draw.randint(90, 400), draw.choice([1, 3, 7]), draw.choice([2, 10, 17]), 4)
    model = Model(sizes, num_checkpoints=draw.choice([2, MANY, 100]))
    live: dict[str, list[int]] = {}
    num_begun = num_refused = 0
    for number in range(300):
        if live and draw.random() < 0.4:
            name = draw.choice(list(live))
            del live[name]
            model.free(name)
        elif live and draw.random() < 0.5:
            name = draw.choice(list(live))
            tokens = [*live[name], *text(number, draw.randint(1, 9))]
            num_new = len(tokens) - len(live[name])
            model.grow(model.manager.num_needed_blocks(name, num_new))
            if model.manager.allocate_slots(name, num_new) is not None:
                model.end(name, tokens, len(live[name]))
                live[name] = tokens
        else:
            tokens = [*text(draw.randrange(6), draw.randint(0, 50)), *text(number, 3)]
            if model.begin(str(number), tokens) is None:
                num_refused += 1
            else:
                live[str(number)] = tokens
                num_begun += 1
    assert num_begun > 20


# What checkpoints are worth


def test_the_loss_of_a_checkpoint_makes_the_next_one_of_its_prefix_worth_more():
    kept = Checkpoints(MANY)
    first, second, third, other = (hash_token_blocks([n] * 4, 4)[0] for n in range(4))
    kept.put(Checkpoint(first, "a"), 1000)
    kept.put(Checkpoint(second, "b"), 100, before=first)
    kept.put(Checkpoint(third, "c"), 10, before=second)
    kept.put(Checkpoint(other, "d"), 500)
    assert kept.of_prefix(third, 1110) == [(third, 1110), (second, 1100), (first, 1000)]
    kept.remove([second])
    assert kept.of_prefix(third, 1110) == [(third, 1110), (first, 1000)]
    kept.remove([first])
    assert kept.of_prefix(third, 1110) == [(third, 1110)]
    # 1,110 tokens are lost with it now, more than with the other one.
    kept.evict()
    assert third in kept and other not in kept
