"""Random calls of the manager, over slabs that remember what was written: no request reads
another's rows.

Hypothesis makes short sequences of calls, which it can shrink; a seeded generator makes long ones,
which must reach the rare events.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from helpers.fast_lane import mostly_slow
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_testing.integrity import check_manager

from mlx_paged.core import (
    KEEP_ALL,
    BlockPool,
    BlockTable,
    BlockTableError,
    KVCacheManager,
    Retention,
)
from mlx_paged.core.block_hash import hash_token_blocks

# Prompts begin with one of these, so that prefixes are shared in whole and in part.
STEMS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [1, 2, 3, 4, 5, 6, 40, 41], [50, 51, 52, 53, 54]]


class Slabs:
    """What each slot holds: the group of layers, the salt, the tokens up to and including its own,
    and the position at which its key was rotated.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.slots: dict[int, tuple] = {}

    def copy(self, source: int, destination: int, distance: int = 0) -> None:
        for offset in range(self.block_size):
            held = self.slots.get(source * self.block_size + offset, ((), 0))
            content, position = held
            slot = destination * self.block_size + offset
            self.slots[slot] = content, position + distance

    def write(self, tables: Sequence[BlockTable], start: int, tokens: list[int], salt: str) -> None:
        for group, table in enumerate(tables):
            for token in range(start, len(tokens)):
                (slot,) = table.slot_mapping(token, 1)
                self.slots[slot] = (
                    (group, salt, *tokens[: token + 1]),
                    token - table.positions.position_origin,
                )

    def read(self, table: BlockTable) -> list[tuple]:
        ids, size = table.block_ids, self.block_size
        return [self.slots[ids[i // size] * size + i % size] for i in range(table.num_held_tokens)]


class Driver:
    """Requests that come, grow, fork, are trimmed, fail and go, as under a scheduler."""

    def __init__(
        self,
        generator: random.Random,
        num_blocks: int,
        block_size: int,
        retentions: Sequence[Retention] = (KEEP_ALL,),
    ):
        self.random = generator
        pool = BlockPool(num_blocks + 1, block_size)
        self.manager = KVCacheManager(pool, retentions)
        self.slabs = Slabs(block_size)
        self.requests: dict[int, tuple[str, list[int]]] = {}  # salt, tokens with slots
        # Blocks have left their windows, and what stayed was not shifted, for want of blocks.
        self.behind: set[int] = set()
        self.next_id = 0
        self.counts = dict.fromkeys(
            ["hits", "refusals", "cuts", "copies", "discards", "forks", "shifts", "untrimmable"], 0
        )

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
        new_tokens = new_tokens[: self.manager.max_run(request_id)]
        most = self.manager.max_fitting(request_id, len(new_tokens))
        if most < len(new_tokens):
            assert self.manager.allocate_slots(request_id, most + 1) is None
            if self.random.random() < 0.5:
                del new_tokens[most:]
                self.counts["cuts"] += 1
        copies = self.manager.allocate_slots(request_id, len(new_tokens))
        if copies is None:
            self.behind.add(request_id)
            self.refuse()
            return
        self.behind.discard(request_id)
        for source, destination in copies:
            self.counts["copies"] += 1
            self.slabs.copy(source, destination)
        self.shift_keys(request_id)
        if self.random.random() < 0.1:  # The step fails, and nothing is written.
            self.manager.cache_blocks(request_id, self.hashes(salt, tokens + new_tokens))
            for table in self.manager.groups[request_id]:
                num_held = len(tokens) - table.num_evicted_tokens
                self.manager.pool.evict_blocks(table.block_ids[num_held // table.block_size :])
            self.manager.trim(request_id, len(tokens))
            self.counts["discards"] += 1
            return
        start = len(tokens)
        tokens += new_tokens
        self.slabs.write(self.manager.groups[request_id], start, tokens, salt)
        self.manager.cache_blocks(request_id, self.hashes(salt, tokens))

    def shift_keys(self, request_id: int) -> None:
        for _, shift in self.manager.take_key_shifts(request_id):
            self.counts["shifts"] += 1
            for source, destination in zip(shift.sources, shift.destinations, strict=True):
                self.slabs.copy(source, destination, shift.distance)

    def come(self) -> None:
        salt = self.random.choice(["", "", "salt"])
        stem = self.random.choice(STEMS)
        tokens = stem[: self.random.randint(1, len(stem))] + [
            self.random.randint(60, 62)
        ] * self.random.randint(0, 6)
        computed = self.manager.get_computed_blocks(self.hashes(salt, tokens), len(tokens))
        self.counts["hits"] += computed.num_tokens
        del tokens[computed.num_tokens + self.manager.max_run(self.next_id, computed) :]
        copies = self.manager.allocate_slots(
            self.next_id, len(tokens) - computed.num_tokens, computed
        )
        if copies is None:
            self.refuse()
            return
        assert copies == []
        self.shift_keys(self.next_id)
        self.slabs.write(self.manager.groups[self.next_id], computed.num_tokens, tokens, salt)
        self.manager.cache_blocks(self.next_id, self.hashes(salt, tokens))
        self.requests[self.next_id] = (salt, tokens)
        self.next_id += 1

    def fork(self, request_id: int) -> None:
        salt, tokens = self.requests[request_id]
        num_free_blocks = self.manager.num_free_blocks
        parent = self.manager.tables[request_id].block_ids
        self.manager.fork(request_id, self.next_id)
        child = self.manager.tables[self.next_id].block_ids
        assert self.manager.num_free_blocks == num_free_blocks
        assert child == parent
        for source, destination in zip(parent, child, strict=True):
            self.slabs.copy(source, destination)
        self.requests[self.next_id] = (salt, list(tokens))
        self.behind |= {self.next_id} if request_id in self.behind else set()
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
            try:
                self.manager.trim(request_id, length)
                del tokens[length:]
            except BlockTableError:
                self.counts["untrimmable"] += 1
        else:
            self.manager.free(request_id)
            del self.requests[request_id]
        return None

    def check(self) -> None:
        check_manager(self.manager)
        assert set(self.manager.tables) == set(self.requests)
        for request_id, (salt, tokens) in self.requests.items():
            tables = self.manager.groups[request_id]
            for group, (table, retention) in enumerate(
                zip(tables, self.manager.retentions, strict=True)
            ):
                assert table.num_tokens == len(tokens)
                num_sinks, num_evicted = retention.num_sink_tokens, table.num_evicted_tokens
                kept = [*range(len(tokens))]
                del kept[num_sinks : num_sinks + num_evicted]
                expected = [
                    (
                        (group, salt, *tokens[: token + 1]),
                        place + num_evicted - table.positions.position_origin,
                    )
                    for place, token in enumerate(kept)
                ]
                held = self.slabs.read(table)
                if request_id in self.behind:
                    held, expected = ([content for content, _ in each] for each in (held, expected))
                assert held == expected


@settings(deadline=None, max_examples=60)
@given(st.randoms(), st.integers(1, 12), st.integers(1, 4))
def test_every_request_reads_its_own_tokens_after_any_calls(generator, num_blocks, block_size):
    driver = Driver(generator, num_blocks, block_size)
    for _ in range(30):
        driver.act()
        driver.check()


@pytest.mark.parametrize(("num_blocks", "block_size"), [(6, 4), (12, 4), (40, 2), (9, 8)], ids=str)
@mostly_slow("seed", range(3))
def test_every_request_reads_its_own_tokens_after_thousands_of_calls(seed, num_blocks, block_size):
    driver = Driver(random.Random(seed), num_blocks, block_size)
    for _ in range(1500):
        driver.act()
        driver.check()
    for request_id in list(driver.requests):
        driver.manager.free(request_id)
    check_manager(driver.manager)
    assert driver.manager.num_free_blocks == num_blocks
    del driver.counts["shifts"], driver.counts["untrimmable"], driver.counts["cuts"]
    assert min(driver.counts.values()) > 10, driver.counts
    assert driver.manager.stats().num_evictions > 10


STREAM = Retention.streaming(8, 2, 2, 4, position_wrap=8)
SHORT_STREAM = Retention.streaming(3, 3, 4, 4, position_wrap=10**6)
WINDOWS = {
    "stream": [STREAM],
    "stream without sinks": [Retention.streaming(6, 0, 2, 2, position_wrap=8)],
    "short stream": [SHORT_STREAM],
    "window": [Retention.sliding_window(5, 4)],
    "window of one": [Retention.sliding_window(1, 2)],
    "all beside windows": [
        KEEP_ALL,
        Retention.sliding_window(3, 2),
        Retention.sliding_window(6, 2),
    ],
    "stream beside a window": [STREAM, Retention.sliding_window(5, 2, primary=STREAM)],
}


@mostly_slow("seed", range(3))
@pytest.mark.parametrize("name", WINDOWS)
def test_every_request_reads_what_its_window_keeps_after_thousands_of_calls(seed, name):
    retentions = WINDOWS[name]
    block_size = 4 if name in ("short stream", "window") else 2
    num_blocks = 24 * len(retentions)
    driver = Driver(random.Random(seed), num_blocks, block_size, retentions)
    for _ in range(1500):
        driver.act()
        driver.check()
    for request_id in list(driver.requests):
        driver.manager.free(request_id)
    check_manager(driver.manager)
    assert driver.manager.num_free_blocks == num_blocks
    if not any(retention.num_sink_tokens for retention in retentions):
        driver.counts["shifts"] += 100 * (retentions[0].position_wrap is None)
    if retentions[0].cuts_runs:  # Steps are short as it is.
        del driver.counts["cuts"]
    assert min(driver.counts.values()) > 10, driver.counts


@settings(deadline=None, max_examples=60)
@given(st.randoms(), st.integers(1, 40), st.sampled_from(sorted(WINDOWS)))
def test_every_request_reads_what_its_window_keeps_after_any_calls(generator, num_blocks, name):
    block_size = 4 if name in ("short stream", "window") else 2
    driver = Driver(generator, num_blocks, block_size, WINDOWS[name])
    for _ in range(30):
        driver.act()
        driver.check()


@settings(deadline=None)
@given(
    st.sampled_from(sorted(WINDOWS)), st.integers(0, 300), st.integers(1, 64), st.integers(0, 300)
)
def test_a_retention_holds_what_it_says(name, num_tokens, run, extra):
    for retention in WINDOWS[name]:
        most = length = 0
        evicted = retention.num_evicted(0)
        while length < num_tokens:
            evicted = retention.num_evicted(length)
            length += min(run, retention.max_run(length) or run, num_tokens - length)
            sinks = retention.num_sink_tokens if evicted > retention.position_origin(length) else 0
            most = max(most, length - evicted + sinks)
        num_more = 0 if retention.cuts_runs else run - 1
        assert most <= retention.max_num_held(num_tokens) + num_more
        assert retention.num_evicted(num_tokens) <= retention.num_evicted(num_tokens + extra)
