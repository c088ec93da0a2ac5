"""The contiguous cache under random requests and small budgets, row by row."""

from __future__ import annotations

import contextlib
import random

import mlx.core as mx
import numpy as np
import pytest
from helpers.cache_helpers import scheduled_step
from paged_testing.integrity import check_manager

from mlx_paged.cache import CacheFullError, ContiguousKVCache, KVCacheConfig, LayerSpec, Sequences
from mlx_paged.core import hash_token_blocks

LAYERS = (LayerSpec(2, 3, 2), LayerSpec(1, 2, 4))
BLOCK_SIZE = 8


def rows_of(tokens: list[int], start: int) -> list[tuple[mx.array, mx.array]]:
    """Per layer the K and V of ``tokens[start:]``; each row depends on all tokens up to its own."""
    state, values = 0, []
    for token in tokens:
        state = hash((state, token)) % 2**20
        values.append(state)
    numbers = np.array(values[start:], dtype=np.float32)
    rows = []
    for index, spec in enumerate(LAYERS):
        pair = []
        for part, width in enumerate((spec.key_dim, spec.value_dim)):
            scale = 1 + np.arange(spec.num_kv_heads * width) + 10 * part + 100 * index
            shape = (len(numbers), spec.num_kv_heads, width)
            pair.append(mx.array((numbers[:, None] + scale).reshape(shape)))
        rows.append((pair[0], pair[1]))
    return rows


class Failure(Exception):
    pass


class Machine:
    """A cache, the tokens that each of its sequences must hold, and what may happen to them."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        num_blocks = self.rng.choice([6, 20, 70])
        config = KVCacheConfig(LAYERS, BLOCK_SIZE, num_blocks)
        self.cache = ContiguousKVCache(config, initial_blocks=4)
        self.seqs = Sequences(self.cache)
        self.tokens: dict[object, list[int]] = {}
        self.names = iter(range(10**6))
        # Beginnings that requests have in common.
        self.beginnings = [
            [self.rng.randrange(100) for _ in range(self.rng.randrange(1, 6 * BLOCK_SIZE))]
            for _ in range(3)
        ]

    def act(self) -> None:
        actions = [self.run] * 8 + [self.add] * 5 + [self.free] * 3 + [self.fork] * 2
        actions += [self.trim] * 2 + [self.end] * 3 + [self.append, self.preempt, self.shrink]
        self.rng.choice(actions)()

    def some_seq(self) -> object | None:
        return self.rng.choice(list(self.tokens)) if self.tokens else None

    # As a scheduler does

    def add(self) -> None:
        """Requests whose beginnings may be held by others, or cached, in one step with a chunk of
        what runs.
        """
        prompts = {}
        for _ in range(self.rng.randrange(1, 4)):
            beginning = self.rng.choice(self.beginnings)
            more = [self.rng.randrange(100) for _ in range(self.rng.randrange(1, 20))]
            prompts[next(self.names)] = beginning[: self.rng.randrange(len(beginning) + 1)] + more
        self.schedule(prompts)

    def run(self) -> None:
        self.schedule({})

    def preempt(self) -> None:
        seq = self.some_seq()
        if self.tokens.get(seq):
            self.seqs.manager.free(seq)
            self.schedule({seq: self.tokens.pop(seq)})

    def end(self) -> None:
        """As a scheduler ends a request: the cache keeps it for the next one."""
        seq = self.some_seq()
        if seq is not None:
            hashes = hash_token_blocks(self.tokens.pop(seq), BLOCK_SIZE)
            self.cache.keep_last(self.seqs.manager.tables[seq], hashes)
            self.seqs.manager.free(seq)

    def schedule(self, prompts: dict[object, list[int]]) -> None:
        cache, manager, rng = self.cache, self.seqs.manager, self.rng
        counts: dict[object, int] = {}
        running = rng.sample(list(self.tokens), rng.randrange(len(self.tokens) + 1))
        for seq in [*running, *prompts]:
            num_kept = 0
            if seq in prompts:
                hashes = hash_token_blocks(prompts[seq][:-1], BLOCK_SIZE)
                num_kept = cache.num_kept_blocks(hashes) * BLOCK_SIZE
                self.tokens[seq] = prompts[seq]
                num_new = len(prompts[seq]) - num_kept
            else:
                num_new = rng.choice([1, 1, 1, 2, 30])
                self.tokens[seq] = self.tokens[seq] + [rng.randrange(100) for _ in range(num_new)]
            cache.make_room(manager.num_needed_blocks(seq, num_kept + num_new))
            copies = manager.allocate_slots(seq, num_kept + num_new)
            if copies is None:
                if seq in prompts:
                    del self.tokens[seq]
                else:
                    del self.tokens[seq][-num_new:]
                continue
            assert copies == []
            if num_kept:
                cache.take_last(manager.tables[seq])
            counts[seq] = num_new
        if not counts:
            return
        fails = rng.random() < 0.1
        try:
            with scheduled_step(self.seqs, counts):
                self.check_capacity()
                self.write(counts, len(LAYERS) - fails)
                if fails:
                    raise Failure
        except Failure:
            cache.forget_last()
            for seq in counts:
                manager.free(seq)
                del self.tokens[seq]

    def write(self, counts: dict[object, int], num_layers: int) -> None:
        rows = [rows_of(self.tokens[seq], -count) for seq, count in counts.items()]
        for index, layer in enumerate(self.cache.layers[:num_layers]):
            layer.update(*(mx.concatenate([part[index][i] for part in rows]) for i in (0, 1)))
        mx.eval(self.cache.arrays)

    # As a library user does

    def append(self) -> None:
        seq = self.some_seq() if self.rng.random() < 0.5 else None
        seq = next(self.names) if seq is None else seq
        count = self.rng.randrange(1, 40)
        tokens = self.tokens.get(seq, []) + [self.rng.randrange(100) for _ in range(count)]
        rows = rows_of(tokens, -count)
        try:
            self.seqs.append(seq, [k for k, _ in rows], [v for _, v in rows])
        except CacheFullError:
            return
        self.tokens[seq] = tokens
        self.check_capacity()

    def free(self) -> None:
        seq = self.some_seq()
        if seq is not None:
            del self.tokens[seq]
            (self.seqs if self.rng.random() < 0.5 else self.seqs.manager).free(seq)

    def fork(self) -> None:
        seq, new_seq = self.some_seq(), next(self.names)
        if seq is None:
            return
        if self.rng.random() < 0.5:
            is_forked = self.cache.fork(self.seqs.manager, seq, new_seq)
        else:
            with contextlib.suppress(CacheFullError):
                self.seqs.fork(seq, new_seq)
            is_forked = new_seq in self.seqs
        if is_forked:
            self.tokens[new_seq] = list(self.tokens[seq])

    def trim(self) -> None:
        seq = self.some_seq()
        if seq is not None:
            length = self.rng.randrange(len(self.tokens[seq]) + 1)
            self.seqs.trim(seq, length)
            del self.tokens[seq][length:]

    def shrink(self) -> None:
        if self.rng.random() < 0.3:
            before = self.cache.nbytes_held
            assert self.cache.shrink() == before - self.cache.nbytes_held >= 0
            used = self.cache.pool.num_used_blocks * self.cache.config.nbytes_per_block
            assert self.cache.nbytes_held <= used

    # What must hold

    def check_capacity(self) -> None:
        """All rows together are within the budget: after a step has opened."""
        capacity = sum(held.capacity for held in self.cache._held())
        assert capacity <= self.cache.config.num_blocks
        assert self.cache.nbytes_held == capacity * self.cache.config.nbytes_per_block

    def check(self) -> None:
        cache, seqs = self.cache, self.seqs
        check_manager(seqs.manager)
        for held in cache._held():
            for spec, rows in zip(LAYERS, held.layers, strict=True):
                num_tokens = held.capacity * BLOCK_SIZE
                for part, width in ((rows.keys, spec.key_dim), (rows.values, spec.value_dim)):
                    assert part.shape == (1, spec.num_kv_heads, num_tokens, width)
        for table in seqs.manager.tables.values():
            assert len(table) <= cache._sequences[table].capacity
        assert set(seqs) == set(self.tokens)
        for seq, tokens in self.tokens.items():
            assert seqs.seq_len(seq) == len(tokens)
            for index, expected in enumerate(rows_of(tokens, 0)):
                for found, rows in zip(seqs.materialize(seq, index), expected, strict=True):
                    np.testing.assert_array_equal(np.array(found), np.array(rows.swapaxes(0, 1)))


SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 20))]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_sequence_holds_its_own_tokens_and_all_rows_stay_within_the_budget(seed: int):
    machine = Machine(seed)
    for _ in range(150):
        machine.act()
        machine.check()
