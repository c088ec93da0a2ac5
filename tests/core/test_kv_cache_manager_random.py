"""Random calls of the manager, over slabs that remember what was written: no request reads
another's rows.

Hypothesis makes short sequences of calls, which it can shrink; a seeded generator makes long ones,
which must reach the rare events.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged.core import BlockPool, KVCacheManager
from mlx_paged.core.block_hash import hash_token_blocks

# Prompts begin with one of these, so that prefixes are shared in whole and in part.
STEMS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [1, 2, 3, 4, 5, 6, 40, 41], [50, 51, 52, 53, 54]]


class Slabs:
    """What each slot holds: the salt and the tokens, up to and including its own."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.slots: dict[int, tuple] = {}

    def copy(self, source: int, destination: int) -> None:
        for offset in range(self.block_size):
            self.slots[destination * self.block_size + offset] = self.slots.get(
                source * self.block_size + offset, ()
            )

    def write(self, block_ids: list[int], start: int, tokens: list[int], salt: str) -> None:
        for position in range(start, len(tokens)):
            slot = (
                block_ids[position // self.block_size] * self.block_size
                + position % self.block_size
            )
            self.slots[slot] = (salt, *tokens[: position + 1])

    def read(self, block_ids: list[int], num_tokens: int) -> list[tuple]:
        slots = (
            block_ids[p // self.block_size] * self.block_size + p % self.block_size
            for p in range(num_tokens)
        )
        return [self.slots[slot] for slot in slots]


class Driver:
    """Requests that come, grow, fork, are trimmed, fail and go, as under a scheduler."""

    def __init__(
        self, generator: random.Random, num_blocks: int, block_size: int, shares_blocks: bool
    ):
        self.random = generator
        self.manager = KVCacheManager(BlockPool(num_blocks + 1, block_size), shares_blocks)
        self.slabs = Slabs(block_size)
        self.requests: dict[int, tuple[str, list[int]]] = {}  # salt, tokens with slots
        self.next_id = 0
        self.counts = dict.fromkeys(["hits", "refusals", "copies", "discards", "forks"], 0)

    def hashes(self, salt: str, tokens: list[int]) -> list:
        return hash_token_blocks(tokens, self.slabs.block_size, (salt,))

    def refuse(self) -> None:
        """Out of blocks: the newest request makes room."""
        self.counts["refusals"] += 1
        if self.requests:
            newest = max(self.requests)
            self.manager.free(newest)
            del self.requests[newest]

    def extend(self, request_id: int, new_tokens: list[int]) -> None:
        salt, tokens = self.requests[request_id]
        copies = self.manager.allocate_slots(request_id, len(new_tokens))
        if copies is None:
            self.refuse()
            return
        for source, destination in copies:
            self.counts["copies"] += 1
            self.slabs.copy(source, destination)
        if self.random.random() < 0.1:  # The step fails, and nothing is written.
            self.manager.cache_blocks(request_id, self.hashes(salt, tokens + new_tokens))
            table = self.manager.tables[request_id]
            self.manager.pool.evict_blocks(table.block_ids[len(tokens) // table.block_size :])
            self.manager.trim(request_id, len(tokens))
            self.counts["discards"] += 1
            return
        start = len(tokens)
        tokens += new_tokens
        self.slabs.write(self.manager.tables[request_id].block_ids, start, tokens, salt)
        self.manager.cache_blocks(request_id, self.hashes(salt, tokens))

    def come(self) -> None:
        salt = self.random.choice(["", "", "salt"])
        stem = self.random.choice(STEMS)
        tokens = stem[: self.random.randint(1, len(stem))] + [
            self.random.randint(60, 62)
        ] * self.random.randint(0, 6)
        computed = self.manager.get_computed_blocks(self.hashes(salt, tokens), len(tokens))
        self.counts["hits"] += computed.num_tokens
        copies = self.manager.allocate_slots(
            self.next_id, len(tokens) - computed.num_tokens, computed
        )
        if copies is None:
            self.refuse()
            return
        assert copies == []
        block_ids = self.manager.tables[self.next_id].block_ids
        self.slabs.write(block_ids, computed.num_tokens, tokens, salt)
        self.manager.cache_blocks(self.next_id, self.hashes(salt, tokens))
        self.requests[self.next_id] = (salt, tokens)
        self.next_id += 1

    def fork(self, request_id: int) -> None:
        salt, tokens = self.requests[request_id]
        num_free_blocks = self.manager.num_free_blocks
        parent = self.manager.tables[request_id].block_ids
        num_needed_blocks = 0 if self.manager.shares_blocks else len(parent)
        is_forked = self.manager.fork(request_id, self.next_id)
        assert is_forked is (num_needed_blocks <= num_free_blocks)
        if not is_forked:
            assert self.manager.num_free_blocks == num_free_blocks
            self.refuse()
            return
        child = self.manager.tables[self.next_id].block_ids
        assert self.manager.num_free_blocks == num_free_blocks - num_needed_blocks
        assert (child == parent) is self.manager.shares_blocks
        for source, destination in zip(parent, child, strict=True):
            self.slabs.copy(source, destination)
        self.requests[self.next_id] = (salt, list(tokens))
        self.next_id += 1
        self.counts["forks"] += 1

    def act(self) -> None:
        if not self.requests or self.random.random() < 0.15:
            return self.come()
        request_id = self.random.choice(list(self.requests))
        _, tokens = self.requests[request_id]
        action = self.random.random()
        if action < 0.6:
            self.extend(
                request_id,
                [self.random.randint(60, 62) for _ in range(self.random.choice([1, 1, 1, 5]))],
            )
        elif action < 0.75:
            self.fork(request_id)
        elif action < 0.85 and len(tokens) > 1:
            length = self.random.randint(1, len(tokens))
            self.manager.trim(request_id, length)
            del tokens[length:]
        else:
            self.manager.free(request_id)
            del self.requests[request_id]
        return None

    def check(self) -> None:
        self.manager.check_integrity()
        assert set(self.manager.tables) == set(self.requests)
        for request_id, (salt, tokens) in self.requests.items():
            table = self.manager.tables[request_id]
            assert table.num_tokens == len(tokens)
            expected = [(salt, *tokens[: position + 1]) for position in range(len(tokens))]
            assert self.slabs.read(table.block_ids, len(tokens)) == expected


@settings(deadline=None, max_examples=60)
@given(st.randoms(), st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_every_request_reads_its_own_tokens_after_any_calls(
    generator, num_blocks, block_size, shares_blocks
):
    driver = Driver(generator, num_blocks, block_size, shares_blocks)
    for _ in range(30):
        driver.act()
        driver.check()


@pytest.mark.parametrize(("num_blocks", "block_size"), [(6, 4), (12, 4), (40, 2), (9, 8)], ids=str)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shares_blocks", [True, False], ids=["shared", "own"])
def test_every_request_reads_its_own_tokens_after_thousands_of_calls(
    seed, num_blocks, block_size, shares_blocks
):
    driver = Driver(random.Random(seed), num_blocks, block_size, shares_blocks)
    for _ in range(1500):
        driver.act()
        driver.check()
    for request_id in list(driver.requests):
        driver.manager.free(request_id)
    driver.manager.check_integrity()
    assert driver.manager.num_free_blocks == num_blocks
    assert min(driver.counts.values()) > 10, driver.counts
    assert driver.manager.stats().num_evictions > 10
