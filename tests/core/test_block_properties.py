"""Random sequences of operations, checked after every single one.

`PoolMachine` holds the pool against lists that are searched from end to end: same ids, same order,
same index. `TableMachine` runs sequences over simulated slabs: every row that is written says which
prefix it stands for, and each sequence, and each cached block, must read back its own rows after
every operation.

Hypothesis drives both with short sequences, which it can shrink; a seeded generator with long ones,
which reach the rare events and must show that they did.
"""

import random
from collections import Counter

from helpers.block_tables import append_token_slot
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from paged_testing.integrity import check_pool_integrity, check_table_integrity

from mlx_paged.core import (
    BlockPool,
    BlockTable,
    FrozenBlockError,
    extend_block_hashes,
    hash_token_blocks,
)

seeds = st.integers(0, 2**16)


def pick(items, seed):
    return items[seed % len(items)]


class PoolMachine(RuleBasedStateMachine):
    """Against a model of plain lists, in which every step is written as the rule says it."""

    @initialize(num_blocks=st.integers(1, 12))
    def make(self, num_blocks):
        self.seen = Counter()
        self.pool = BlockPool(num_blocks, 4)
        self.num_blocks = num_blocks
        self.queue = list(range(1, num_blocks))
        self.refs = {}  # block id -> holders, of blocks in use
        self.hash_of = {}  # block id -> hash, in the order of entering the index
        self.num_evictions = 0

    def blocks(self, ids):
        return [self.pool.get_block(block_id) for block_id in ids]

    def uncache(self, block_id):
        block_hash = self.hash_of.pop(block_id)
        self.seen["a duplicate was evicted"] += block_hash in self.hash_of.values()
        self.num_evictions += 1

    @rule(n=st.integers(0, 6), after=st.none() | seeds)
    def take(self, n, after):
        after = None if after is None else after % self.num_blocks
        blocks = self.pool.get_new_blocks(n, after)
        if n > len(self.queue):
            assert blocks is None
            self.seen["none were left"] += 1
            return
        expected, previous = [], after
        for _ in range(n):
            following = None if previous is None else previous + 1
            if following not in self.queue or following in self.hash_of:
                following = self.queue[0]
                self.seen["a run began"] += 1
            else:
                self.seen["a run went on"] += 1
            previous = following
            self.queue.remove(previous)
            if previous in self.hash_of:
                self.seen["a block was evicted"] += 1
                self.uncache(previous)
            self.refs[previous] = 1
            expected.append(previous)
        assert [block.block_id for block in blocks] == expected

    @precondition(lambda self: self.refs)
    @rule(chosen=st.lists(seeds, min_size=1, max_size=6))
    def free(self, chosen):
        ids, counts = [], dict(self.refs)
        for seed in chosen:
            block_id = pick(sorted(self.refs), seed)
            if counts[block_id]:
                counts[block_id] -= 1
                ids.append(block_id)
        freed = [
            block_id
            for i, block_id in enumerate(ids)
            if not counts[block_id] and block_id not in ids[i + 1 :]
        ]
        assert [block.block_id for block in self.pool.free_blocks(self.blocks(ids))] == freed
        for block_id in freed:
            if block_id in self.hash_of:
                self.queue.append(block_id)
            else:
                self.queue.insert(0, block_id)
        self.refs = {block_id: count for block_id, count in counts.items() if count}

    @rule(chosen=st.lists(seeds, max_size=5))
    def touch(self, chosen):
        alive = sorted({*self.refs, *self.hash_of})
        ids = [pick(alive, seed) for seed in chosen if alive]
        self.pool.touch(self.blocks(ids))
        for block_id in ids:
            self.refs[block_id] = self.refs.get(block_id, 0) + 1
            if block_id in self.queue:
                self.queue.remove(block_id)
                self.seen["a block was revived"] += 1

    @rule(chosen=st.lists(st.tuples(seeds, st.sampled_from([b"a", b"b", b"c"])), max_size=5))
    def cache(self, chosen):
        entering = {}
        for seed, block_hash in chosen:
            fresh = sorted({*self.refs} - {*self.hash_of})
            if fresh:
                entering.setdefault(pick(fresh, seed), block_hash)
        self.pool.cache_full_blocks(
            self.blocks(entering), list(entering.values()), 0, len(entering)
        )
        self.hash_of.update(entering)

    @rule(chosen=st.lists(seeds, max_size=4))
    def evict(self, chosen):
        ids = [seed % self.num_blocks for seed in chosen]
        self.pool.evict_blocks(ids)
        gone = [block_id for block_id in dict.fromkeys(ids) if block_id in self.hash_of]
        for block_id in gone:
            self.uncache(block_id)
        free = [block_id for block_id in gone if block_id in self.queue]
        self.queue = free + [block_id for block_id in self.queue if block_id not in free]

    @rule()
    def reset(self):
        assert self.pool.reset_prefix_cache() is not bool(self.refs)
        if not self.refs:
            self.seen["the cache was reset"] += bool(self.hash_of)
            self.queue.sort()
            self.hash_of.clear()

    @precondition(lambda self: self.num_blocks < 16)
    @rule(n=st.integers(0, 4))
    def grow(self, n):
        new_ids = list(range(self.num_blocks, self.num_blocks + n))
        self.pool.grow(n)
        assert [block.block_id for block in self.pool.blocks[-n:] if n] == new_ids
        self.queue = new_ids + self.queue
        self.num_blocks += n

    @rule(seed=seeds)
    def shrink(self, seed):
        num_blocks = self.num_blocks - seed % min(4, self.num_blocks)
        fits = all(block_id < num_blocks for block_id in self.refs)
        assert self.pool.shrink_to(num_blocks) is fits
        if fits:
            self.seen["the pool shrank"] += num_blocks < self.num_blocks
            self.num_blocks = num_blocks
            self.queue = [block_id for block_id in self.queue if block_id < num_blocks]
            for block_id in [block_id for block_id in self.hash_of if block_id >= num_blocks]:
                self.uncache(block_id)

    @invariant()
    def the_pool_agrees_with_the_lists(self):
        pool = self.pool
        check_pool_integrity(
            pool, [self.blocks(block_id for block_id, n in self.refs.items() for _ in range(n))]
        )
        assert [block.block_id for block in pool.free_block_queue] == self.queue
        assert [block.block_hash for block in pool.blocks] == [
            self.hash_of.get(i) for i in range(self.num_blocks)
        ]
        for block_hash in b"a", b"b", b"c":
            first = next(
                (block_id for block_id, other in self.hash_of.items() if other == block_hash), None
            )
            found = pool.get_cached_block(block_hash)
            assert (found.block_id if found else None) == first
        assert (pool.num_free_blocks, pool.num_used_blocks) == (len(self.queue), len(self.refs))
        assert (pool.num_cached_blocks, pool.num_evictions) == (
            len(self.hash_of),
            self.num_evictions,
        )


# Prompts that share prefixes of several lengths, so that there is something to hit.
PROMPTS = [[0] * 16, [0] * 5 + [1] * 11, [0] * 5 + [1] * 4 + [0] * 7, [1] * 16]


class Sequence:
    """What the model knows of a sequence: its tokens, and the adapter that makes its K/V differ
    from others'.
    """

    def __init__(self, table, adapter, token_ids=(), block_hashes=()):
        self.table = table
        self.adapter = adapter
        self.token_ids = list(token_ids)
        self.block_hashes = list(block_hashes)

    def row(self, position, token_ids=None):
        """K/V of a token depend on everything before it: the row is named by its whole prefix."""
        return self.adapter, tuple((token_ids or self.token_ids)[: position + 1])


class TableMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(6, 16), block_size=st.integers(1, 4))
    def make(self, num_blocks, block_size):
        self.seen = Counter()
        self.pool = BlockPool(num_blocks, block_size)
        self.block_size = block_size
        self.slab = {}  # slot -> row
        self.sequences = []
        self.rows_of = {}  # block hash -> the rows that a block with it holds

    # The simulated engine

    def holders(self, block):
        return sum(block in sequence.table for sequence in self.sequences)

    def blocks_needed(self, sequence, n):
        table, num_tokens = sequence.table, len(sequence.token_ids)
        num_blocks = -(-(num_tokens + n) // self.block_size)
        copy = 0
        if n and num_tokens % self.block_size:
            tail = table.blocks[num_tokens // self.block_size]
            copy = self.holders(tail) > 1 or tail.block_hash is not None
        return max(0, num_blocks - len(table)) + copy

    def reserve(self, sequence, n):
        table = sequence.table
        needed, num_free = self.blocks_needed(sequence, n), self.pool.num_free_blocks
        before = table.block_ids.copy()
        assert table.num_new_blocks(n) == needed
        copies = table.reserve(n)
        assert (copies is None) == (needed > num_free)
        if copies is None:
            assert (table.block_ids, self.pool.num_free_blocks) == (before, num_free)
            self.seen["none were left"] += 1
            return None
        assert len(copies) <= 1
        for source, _ in copies:
            self.seen["a shared block was copied"] += self.pool.blocks[source].ref_cnt > 0
            self.seen["a hashed block was copied"] += (
                self.pool.blocks[source].block_hash is not None
            )
            self.seen["a copied block had reserved ones behind it"] += source != before[-1]
        renamed = dict(copies)
        assert table.block_ids[: len(before)] == [
            renamed.get(block_id, block_id) for block_id in before
        ]
        for source, _ in copies:
            assert source == before[len(sequence.token_ids) // self.block_size]
        released = sum(self.pool.blocks[source].ref_cnt == 0 for source, _ in copies)
        assert self.pool.num_free_blocks == num_free - needed + released
        return copies

    def copy_blocks(self, copies):
        for source, copy in copies:
            for offset in range(self.block_size):
                row = self.slab.get(source * self.block_size + offset)
                self.slab[copy * self.block_size + offset] = row

    def write(self, slots, sequence, first, token_ids):
        for position, slot in enumerate(slots, first):
            self.slab[slot] = sequence.row(position, token_ids)

    def poison(self, freed):
        """Rows of a freed block that nothing can find again are gone."""
        for block in freed:
            if block.block_hash is None:
                for offset in range(self.block_size):
                    self.slab[block.block_id * self.block_size + offset] = "poison"

    # Operations

    @precondition(lambda self: len(self.sequences) < 6)
    @rule(
        prompt=st.sampled_from(PROMPTS),
        length=st.integers(0, 16),
        adapter=st.sampled_from([0, 0, 0, 1]),
        by_token=st.booleans(),
        then_cache=st.booleans(),
    )
    def start(self, prompt, length, adapter, by_token, then_cache):
        """A prompt: adopt what the index has of it, at most all but the last token, and compute the
        rest.
        """
        token_ids = prompt[:length]
        hashes = hash_token_blocks(token_ids, self.block_size, (adapter,))
        hit = []
        for block_hash in hashes:
            block = self.pool.get_cached_block(block_hash)
            if block is None:
                break
            hit.append(block)
        num_hit = min(len(hit) * self.block_size, max(0, len(token_ids) - 1))
        if not by_token:
            num_hit -= num_hit % self.block_size
        del hit[-(-num_hit // self.block_size) :]
        self.seen["a block was hit in use"] += sum(block.ref_cnt > 0 for block in hit)
        self.seen["a block was hit and revived"] += sum(block.ref_cnt == 0 for block in hit)
        self.seen["a block was hit in part"] += num_hit % self.block_size > 0
        self.pool.touch(hit)
        table = BlockTable(self.pool)
        table.adopt(hit, num_hit)
        sequence = Sequence(
            table, adapter, token_ids[:num_hit], hashes[: num_hit // self.block_size]
        )
        assert table.num_cached_blocks == num_hit // self.block_size
        self.sequences.append(sequence)
        self.extend(sequence, token_ids[num_hit:])
        if then_cache:
            self.cache_blocks(sequence)

    def extend(self, sequence, token_ids, num_kept=None):
        n = len(token_ids)
        copies = self.reserve(sequence, n)
        if copies is None:
            return
        self.copy_blocks(copies)
        first = len(sequence.token_ids)
        self.write(
            sequence.table.slot_mapping(first, n), sequence, first, sequence.token_ids + token_ids
        )
        num_kept = n if num_kept is None else min(num_kept, n)
        sequence.table.advance(num_kept)
        sequence.token_ids += token_ids[:num_kept]

    @precondition(lambda self: self.sequences)
    @rule(seed=seeds, token_ids=st.lists(st.integers(0, 1), max_size=9), num_kept=st.integers(0, 9))
    def append(self, seed, token_ids, num_kept):
        """Several tokens at once, of which the last may be rejected speculation."""
        self.extend(pick(self.sequences, seed), token_ids, num_kept)

    @precondition(lambda self: self.sequences)
    @rule(seed=seeds, n=st.integers(0, 6))
    def reserve_ahead(self, seed, n):
        """Room that is filled later, or never."""
        self.copy_blocks(self.reserve(pick(self.sequences, seed), n) or [])

    @precondition(lambda self: self.sequences)
    @rule(seed=seeds, token=st.integers(0, 1))
    def append_token(self, seed, token):
        sequence = pick(self.sequences, seed)
        position, needed = len(sequence.token_ids), self.blocks_needed(sequence, 1)
        num_free = self.pool.num_free_blocks
        appended = append_token_slot(sequence.table)
        assert (appended is None) == (needed > num_free)
        assert needed <= 1
        if appended is not None:
            assert [appended.slot] == sequence.table.slot_mapping(position, 1)
            self.copy_blocks(appended.copies)
            sequence.token_ids.append(token)
            self.write([appended.slot], sequence, position, None)

    @rule(counts=st.lists(st.integers(1, 5), max_size=6), token=st.integers(0, 1))
    def step(self, counts, token):
        """A batch: all reserve first, then all copies in their order, then all rows are written."""
        all_copies, writes = [], []
        for sequence, n in zip(self.sequences, counts, strict=False):
            copies = self.reserve(sequence, n)
            if copies is not None:
                taken = {copy for _, copy in copies} | set(sequence.table.block_ids[-1:])
                self.seen["a copied block was taken in the same step"] += any(
                    src in taken for src, _ in all_copies
                )
                all_copies += copies
                first = len(sequence.token_ids)
                writes.append((sequence.table.slot_mapping(first, n), sequence, first))
        self.copy_blocks(all_copies)
        for slots, sequence, first in writes:
            sequence.token_ids += [token] * len(slots)
            self.write(slots, sequence, first, None)
            sequence.table.advance(len(slots))

    @precondition(lambda self: self.sequences)
    @rule(seed=seeds, how_many=seeds)
    def trim(self, seed, how_many):
        sequence = pick(self.sequences, seed)
        length = how_many % (len(sequence.token_ids) + 1)
        self.poison(sequence.table.trim_to(length))
        del sequence.token_ids[length:]
        del sequence.block_hashes[length // self.block_size :]
        assert len(sequence.table) == -(-length // self.block_size)

    @precondition(lambda self: 0 < len(self.sequences) < 6)
    @rule(seed=seeds)
    def fork(self, seed):
        sequence = pick(self.sequences, seed)
        num_free = self.pool.num_free_blocks
        table = sequence.table.fork()
        self.sequences.append(
            Sequence(table, sequence.adapter, sequence.token_ids, sequence.block_hashes)
        )
        assert self.pool.num_free_blocks == num_free

    @precondition(lambda self: self.sequences)
    @rule(seed=seeds)
    def cache(self, seed):
        self.cache_blocks(pick(self.sequences, seed))

    def cache_blocks(self, sequence):
        extend_block_hashes(
            sequence.block_hashes, sequence.token_ids, self.block_size, (sequence.adapter,)
        )
        num_cached = sequence.table.num_cached_blocks
        num_full = len(sequence.token_ids) // self.block_size
        assert sequence.table.cache_full_blocks(sequence.block_hashes) == num_full - num_cached
        for index, block_hash in enumerate(sequence.block_hashes):
            first = index * self.block_size
            rows = [sequence.row(position) for position in range(first, first + self.block_size)]
            assert self.rows_of.setdefault(block_hash, rows) == rows

    @precondition(lambda self: self.sequences)
    @rule(seed=seeds)
    def free(self, seed):
        sequence = self.sequences.pop(seed % len(self.sequences))
        expected = [block for block in reversed(sequence.table.blocks) if self.holders(block) == 0]
        freed = sequence.table.free()
        assert freed == expected
        self.poison(freed)

    @precondition(lambda self: self.sequences)
    @rule(seed=seeds, token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def write_without_reserving(self, seed, token_ids):
        """Free slots are written at once, unless their block is hashed or shared."""
        sequence = pick(self.sequences, seed)
        table, first = sequence.table, len(sequence.token_ids)
        token_ids = token_ids[: table.num_unfilled_slots]
        n = len(token_ids)
        if not n or first % self.block_size == 0:
            return
        block = table.blocks[first // self.block_size]
        is_frozen = block.block_hash is not None or self.holders(block) > 1
        try:
            table.advance(n)
            assert not is_frozen
            sequence.token_ids += token_ids
            self.write(table.slot_mapping(first, n), sequence, first, None)
        except FrozenBlockError:
            assert is_frozen
        self.seen[f"a write was {'refused' if is_frozen else 'allowed'}"] += 1

    @rule(seed=seeds)
    def evict(self, seed):
        block = self.pool.get_block(seed % self.pool.num_blocks)
        self.seen["a held block was evicted"] += block.ref_cnt > 0 and block.block_hash is not None
        self.pool.evict_blocks([seed % self.pool.num_blocks])

    @rule()
    def reset(self):
        in_use = any(len(sequence.table) for sequence in self.sequences)
        assert self.pool.reset_prefix_cache() is not in_use

    @precondition(lambda self: self.pool.num_blocks < 20)
    @rule(n=st.integers(0, 4))
    def grow(self, n):
        self.pool.grow(n)

    @rule(seed=seeds)
    def shrink(self, seed):
        highest = max(
            (block_id for sequence in self.sequences for block_id in sequence.table.block_ids),
            default=0,
        )
        num_blocks = self.pool.num_blocks - seed % min(4, self.pool.num_blocks)
        self.seen["the pool shrank"] += highest < num_blocks < self.pool.num_blocks
        assert self.pool.shrink_to(num_blocks) is (highest < num_blocks)

    # What must hold after every operation

    @invariant()
    def the_books_are_sound(self):
        check_pool_integrity(self.pool, [sequence.table for sequence in self.sequences])
        for sequence in self.sequences:
            check_table_integrity(sequence.table)

    @invariant()
    def every_sequence_reads_back_its_own_rows(self):
        for sequence in self.sequences:
            num_tokens = len(sequence.token_ids)
            assert sequence.table.num_tokens == num_tokens
            rows = [self.slab[slot] for slot in sequence.table.slot_mapping(0, num_tokens)]
            assert rows == [sequence.row(position) for position in range(num_tokens)]

    @invariant()
    def every_cached_block_holds_the_rows_that_its_hash_names(self):
        for block_hash, block in self.pool.prefix_index:
            first = block.block_id * self.block_size
            assert [
                self.slab[slot] for slot in range(first, first + self.block_size)
            ] == self.rows_of[block_hash]


unhurried = settings(deadline=None, suppress_health_check=list(HealthCheck))

TestPool = PoolMachine.TestCase
TestPool.settings = settings(unhurried, max_examples=50, stateful_step_count=40)

TestTables = TableMachine.TestCase
TestTables.settings = settings(unhurried, max_examples=60, stateful_step_count=40)


# Long runs: the same operations, weighted, from a seed


def run_pool(seed, num_operations):
    rng = random.Random(seed)
    machine = PoolMachine()
    machine.make(num_blocks=rng.randint(8, 14))

    def many(most):
        return [rng.randrange(2**16) for _ in range(rng.randint(0, most))]

    operations = {
        lambda: machine.take(rng.randint(0, 5), rng.choice([None, rng.randrange(2**16)])): 8,
        lambda: machine.refs and machine.free(many(6)): 10,
        lambda: machine.touch(many(3)): 3,
        lambda: machine.cache([(number, rng.choice([b"a", b"b", b"c"])) for number in many(5)]): 6,
        lambda: machine.evict(many(2)): 1,
        lambda: machine.reset(): 1,
        lambda: machine.num_blocks < 16 and machine.grow(rng.randint(0, 3)): 1,
        lambda: machine.shrink(rng.randrange(2**16)): 1,
    }
    for operation in rng.choices(list(operations), list(operations.values()), k=num_operations):
        operation()
        machine.the_pool_agrees_with_the_lists()
    return machine.seen


def run_tables(seed, num_operations):
    rng = random.Random(seed)
    machine = TableMachine()
    machine.make(num_blocks=rng.randint(16, 24), block_size=1 + seed % 4)

    def number():
        return rng.randrange(2**16)

    def tokens(most):
        return [rng.randint(0, 1)] * rng.randint(0, most)

    def on_one(operation):
        """Only if there is a sequence to do it on."""
        return lambda: machine.sequences and operation()

    def on_few(operation):
        """Only if there is room for another sequence."""
        return lambda: len(machine.sequences) < 6 and operation()

    operations = {
        on_few(
            lambda: machine.start(
                rng.choice(PROMPTS),
                rng.randint(0, 16),
                rng.choice([0, 0, 0, 1]),
                rng.random() < 0.5,
                rng.random() < 0.7,
            )
        ): 12,
        on_one(lambda: machine.append(number(), tokens(6), rng.randint(0, 6))): 8,
        on_one(lambda: machine.reserve_ahead(number(), rng.randint(0, 6))): 8,
        on_one(lambda: machine.append_token(number(), rng.randint(0, 1))): 8,
        lambda: machine.step([rng.randint(1, 3) for _ in machine.sequences], rng.randint(0, 1)): 5,
        on_one(lambda: machine.trim(number(), number())): 5,
        on_one(on_few(lambda: machine.fork(number()))): 6,
        on_one(lambda: machine.cache(number())): 6,
        on_one(lambda: machine.free(number())): 14,
        on_one(lambda: machine.write_without_reserving(number(), [*tokens(5), 0])): 4,
        lambda: machine.evict(number()): 1,
        lambda: machine.reset(): 1,
        lambda: machine.pool.num_blocks < 28 and machine.grow(rng.randint(0, 3)): 1,
        lambda: machine.pool.num_blocks > 16 and machine.shrink(number()): 1,
    }
    for operation in rng.choices(list(operations), list(operations.values()), k=num_operations):
        operation()
        machine.the_books_are_sound()
        machine.every_sequence_reads_back_its_own_rows()
        machine.every_cached_block_holds_the_rows_that_its_hash_names()
    return machine.seen + Counter({"a block was evicted": machine.pool.num_evictions})


def test_a_pool_agrees_with_plain_lists_over_thousands_of_operations():
    seen = sum((run_pool(seed, 1_000) for seed in range(3)), Counter())
    rare = {name: count for name, count in seen.items() if count < 5}
    assert (len(seen), rare) == (8, {})


def test_sequences_read_back_their_own_rows_over_thousands_of_operations():
    seen = sum((run_tables(seed, 1_000) for seed in range(8)), Counter())
    rare = {name: count for name, count in seen.items() if count < 5}
    assert (len(seen), rare) == (13, {})
