"""What is computed after foreign K/V is foreign, whatever happens to requests and blocks; nothing
else is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from paged_testing.integrity import check_manager

from mlx_paged.core import (
    KEEP_ALL,
    BlockPool,
    Checkpoint,
    ComputedBlocks,
    KVCacheManager,
    Retention,
    SequenceState,
    SequenceStates,
    hash_token_blocks,
)
from mlx_paged.core.computed_blocks import SequenceTables
from mlx_paged.core.prefix_lookup import group_hashes

BLOCK_SIZE = 4
STEMS = [list(range(24)), [*range(10), *range(50, 64)], list(range(80, 96))]


def cached(
    manager: KVCacheManager, token_ids: Sequence[int], is_foreign: bool, group: int = 0
) -> list[int]:
    """Blocks of these tokens come in from elsewhere, as far as they are not cached already; returns
    the ids of the new ones.
    """
    pool, hashes = manager.pool, group_hashes(hash_token_blocks(token_ids, BLOCK_SIZE), group)
    missing = [each for each in hashes if pool.get_cached_block(each) is None]
    blocks = pool.get_new_blocks(len(missing)) or []
    pool.cache_full_blocks(blocks, missing, 0, len(blocks), is_foreign)
    pool.free_blocks(reversed(blocks))
    return [block.block_id for block in blocks]


def begin(manager: KVCacheManager, name: str, token_ids: list[int]) -> int | None:
    """A request computes its prompt; how many tokens it has found, None for want of blocks."""
    hashes = hash_token_blocks(token_ids, BLOCK_SIZE)
    found = manager.get_computed_blocks(hashes, len(token_ids))
    if manager.allocate_slots(name, len(token_ids) - found.num_tokens, found) is None:
        return None
    manager.cache_blocks(name, hashes)
    return found.num_tokens


def foreign_ids(manager: KVCacheManager, name: str) -> list[bool]:
    return [block.is_foreign for block in manager.tables[name].blocks]


def test_blocks_after_foreign_ones_are_foreign_and_those_before_are_not():
    manager = KVCacheManager(BlockPool(40, BLOCK_SIZE))
    assert begin(manager, "before", STEMS[0][:8]) == 0
    cached(manager, STEMS[0][:16], is_foreign=True)
    assert begin(manager, "after", STEMS[0]) == 16
    assert foreign_ids(manager, "after") == [False, False, True, True, True, True]
    # A request that ends with the native blocks goes on as ever.
    assert begin(manager, "beside", [*STEMS[0][:8], 9, 9, 9, 9, 9]) == 8
    assert foreign_ids(manager, "beside") == [False] * 4
    check_manager(manager)


def test_a_block_that_leaves_the_index_is_not_foreign_any_more():
    manager = KVCacheManager(BlockPool(8, BLOCK_SIZE))
    cached(manager, STEMS[0][:16], is_foreign=True)
    for remove in (
        lambda: manager.evict_blocks([1, 2]),
        lambda: manager.pool.free_blocks(manager.pool.get_new_blocks(7) or ()),
    ):
        remove()
        check_manager(manager)
    cached(manager, STEMS[0][:16], is_foreign=True)
    assert manager.reset_prefix_cache()
    check_manager(manager)
    assert begin(manager, "a", STEMS[0]) == 0
    assert not any(foreign_ids(manager, "a"))


def test_requests_that_resume_and_forks_remain_foreign():
    manager = KVCacheManager(BlockPool(40, BLOCK_SIZE))
    cached(manager, STEMS[0][:16], is_foreign=True)
    assert begin(manager, "a", STEMS[0]) == 16
    manager.fork("a", "b")
    held, _ = manager.describe("a")
    assert held.is_foreign
    for name in ("a", "b"):
        manager.free(name)
    assert manager.reset_prefix_cache()
    manager.allocate_slots("a", 8, manager.resumed(held, ComputedBlocks()))
    manager.fork("a", "b")
    hashes = hash_token_blocks([*STEMS[0], *range(8)], BLOCK_SIZE)
    for name in ("a", "b"):
        manager.cache_blocks(name, hashes)
        assert all(foreign_ids(manager, name))


def test_a_request_that_resumes_with_foreign_blocks_becomes_foreign():
    manager = KVCacheManager(BlockPool(40, BLOCK_SIZE))
    assert begin(manager, "a", STEMS[0]) == 0
    held, _ = manager.describe("a")
    assert not held.is_foreign
    manager.free("a")
    assert manager.reset_prefix_cache()
    cached(manager, STEMS[0][:8], is_foreign=True)
    hashes = hash_token_blocks(STEMS[0], BLOCK_SIZE)
    hit = manager.get_computed_blocks(hashes, len(STEMS[0]))
    manager.allocate_slots("a", 4, manager.resumed(held, hit))
    manager.cache_blocks("a", hash_token_blocks([*STEMS[0], *range(4)], BLOCK_SIZE))
    assert all(foreign_ids(manager, "a"))


def test_a_foreign_block_of_one_group_makes_all_groups_foreign():
    window = Retention.sliding_window(8, BLOCK_SIZE)
    manager = KVCacheManager(BlockPool(60, BLOCK_SIZE), [KEEP_ALL, window])
    assert begin(manager, "a", STEMS[0]) == 0
    manager.free("a")
    last = [block.block_id for block_hash, block in manager.pool.prefix_index
            if len(block_hash) > 32]  # fmt: skip
    manager.evict_blocks(last)
    cached(manager, STEMS[0], is_foreign=True, group=1)
    assert begin(manager, "b", [*STEMS[0], *range(8)]) == 24
    tables = manager.groups["b"]
    assert [table.is_foreign for table in tables] == [True, True]
    assert [[block.is_foreign for block in table.blocks[-2:]] for table in tables] == [
        [True] * 2
    ] * 2


def test_a_foreign_state_makes_what_follows_foreign_and_so_are_its_checkpoints():
    states = SequenceStates(num_checkpoints=10)
    manager = KVCacheManager(BlockPool(40, BLOCK_SIZE), states=states)
    hashes = hash_token_blocks(STEMS[0], BLOCK_SIZE)
    cached(manager, STEMS[0][:8], is_foreign=False)
    states.checkpoints.put(Checkpoint(hashes[1], "of a file", is_foreign=True))
    assert begin(manager, "a", STEMS[0]) == 8
    assert manager.tables["a"].is_foreign
    (cut,) = states.cuts("a", 8, 24, BLOCK_SIZE)
    states.end_step(
        {"a": SequenceState(24, "after it")}, {"a": [(cut, "after it")]}, manager.tables
    )
    found = states.checkpoints.get(hashes[5])
    assert found == Checkpoint(hashes[5], "after it", is_foreign=True)
    assert not any(map(states.checkpoints.has_storable, hashes))
    # What was computed here is not replaced, and a foreign one doesn't become native.
    states.checkpoints.put(Checkpoint(hashes[0], "computed here"))
    states.checkpoints.put(Checkpoint(hashes[0], "of a file", is_foreign=True))
    states.checkpoints.use(Checkpoint(hashes[5], "computed here"))
    assert states.checkpoints.get(hashes[0]) == Checkpoint(hashes[0], "computed here")
    assert states.checkpoints.get(hashes[5]).is_foreign


class Play:
    """Random requests over blocks some of which are foreign. The slabs remember for each block
    which of its rows were computed after foreign ones.
    """

    def __init__(self, seed: int, retentions: Sequence[Retention]):
        self.rng = random.Random(seed)
        self.manager = KVCacheManager(BlockPool(50, BLOCK_SIZE), retentions)
        self.tokens: dict[str, list[int]] = {}
        self.is_foreign: dict[str, bool] = {}
        self.rows: dict[int, dict[int, bool]] = {}  # by block, then by slot: whether foreign
        self.swapped: list[tuple[list[int], SequenceTables, bool]] = []
        self.counts = dict.fromkeys(("foreign", "native", "resumed", "forks", "both"), 0)

    def write(self, name: str, begin: int) -> None:
        for table in self.manager.groups[name]:
            for token in range(begin, len(self.tokens[name])):
                (slot,) = table.slot_mapping(token, 1)
                rows = self.rows.setdefault(slot // BLOCK_SIZE, {})
                rows[slot % BLOCK_SIZE] = self.is_foreign[name]
        self.manager.cache_blocks(name, hash_token_blocks(self.tokens[name], BLOCK_SIZE))
        self.counts["foreign" if self.is_foreign[name] else "native"] += 1

    def holds_foreign(self, computed: ComputedBlocks) -> bool:
        return any(any(self.rows[block.block_id].values()) for block in computed.blocks)

    def come(self, name: str) -> None:
        stem = self.rng.choice(STEMS)
        token_ids = [
            *stem[: self.rng.randrange(1, len(stem))],
            *[70] * self.rng.choice([0, 0, 1, 5]),
        ]
        hashes = hash_token_blocks(token_ids, BLOCK_SIZE)
        found = self.manager.get_computed_blocks(hashes, len(token_ids))
        is_foreign = self.holds_foreign(found)
        if self.manager.allocate_slots(name, len(token_ids) - found.num_tokens, found) is not None:
            self.tokens[name], self.is_foreign[name] = token_ids, is_foreign
            self.write(name, found.num_tokens)

    def extend(self, name: str) -> None:
        num_new = self.rng.randrange(1, 7)
        copies = self.manager.allocate_slots(name, num_new)
        if copies is None:
            self.swap_out(name)
            return
        for source, destination in copies:
            self.rows[destination] = dict(self.rows.get(source, {}))
        begin = len(self.tokens[name])
        stems = [stem for stem in STEMS if stem[:begin] == self.tokens[name]]
        more = [*(stems[0][begin:] if stems else ()), *[self.rng.randrange(70, 72)] * num_new]
        self.tokens[name] += more[:num_new]
        self.write(name, begin)

    def fork(self, name: str, new_name: str) -> None:
        self.manager.fork(name, new_name)
        self.tokens[new_name] = list(self.tokens[name])
        self.is_foreign[new_name] = self.is_foreign[name]
        self.counts["forks"] += 1

    def swap_out(self, name: str) -> None:
        held, _ = self.manager.describe(name)
        self.end(name)
        self.swapped.append((self.tokens.pop(name), held, self.is_foreign.pop(name)))

    def swap_in(self, name: str) -> None:
        token_ids, held, was_foreign = self.swapped.pop()
        hashes = hash_token_blocks(token_ids, BLOCK_SIZE)
        hit = self.manager.get_computed_blocks(hashes, len(token_ids))
        computed = self.manager.resumed(held, hit)
        is_foreign = was_foreign or self.holds_foreign(computed)
        if self.manager.allocate_slots(name, 1, computed) is None:
            return
        for load in self.manager.take_loads(name):
            for block_id in load.block_ids:
                self.rows[block_id] = dict.fromkeys(range(BLOCK_SIZE), is_foreign)
        self.tokens[name], self.is_foreign[name] = [*token_ids, 70], is_foreign
        self.write(name, len(token_ids))
        self.counts["resumed"] += 1

    def end(self, name: str) -> None:
        self.manager.free(name)

    def load(self) -> None:
        stem, is_foreign = self.rng.choice(STEMS), self.rng.random() < 0.5
        token_ids = stem[: self.rng.randrange(4, len(stem))]
        for group in range(len(self.manager.retentions)):
            for block_id in cached(self.manager, token_ids, is_foreign, group):
                self.rows[block_id] = dict.fromkeys(range(BLOCK_SIZE), is_foreign)

    def check(self) -> None:
        check_manager(self.manager)
        pool = self.manager.pool
        for block_hash, block in pool.prefix_index:
            assert block.is_foreign == any(self.rows[block.block_id].values())
            storable = pool.get_storable_block(block_hash)
            assert storable is None or not any(self.rows[storable.block_id].values())
            self.counts["both"] += block.is_foreign and storable is not None
        for name, is_foreign in self.is_foreign.items():
            assert self.manager.tables[name].is_foreign == is_foreign

    def run(self, num_events: int) -> None:
        for number in range(num_events):
            name = self.rng.choice([*self.tokens]) if self.tokens else None
            kind = self.rng.random()
            if kind < 0.15:
                self.load()
            elif kind < 0.35 or name is None:
                self.come(f"{number}")
            elif kind < 0.65:
                self.extend(name)
            elif kind < 0.75 and len(self.tokens) < 6:
                self.fork(name, f"{number}")
            elif kind < 0.8:
                self.swap_out(name)
            elif kind < 0.85 and self.swapped:
                self.swap_in(f"{number}")
            else:
                self.end(name)
                del self.tokens[name], self.is_foreign[name]
            self.check()


@pytest.mark.parametrize("window", [None, 8])
def test_blocks_are_foreign_if_and_only_if_they_follow_foreign_ones(window: int | None):
    retentions = [KEEP_ALL]
    if window is not None:
        retentions.append(Retention.sliding_window(window, BLOCK_SIZE))
    total: dict[str, int] = {}
    for seed in range(4):
        play = Play(seed, retentions)
        play.run(600)
        total = {name: total.get(name, 0) + count for name, count in play.counts.items()}
    assert min(total.values()) > 20, total
