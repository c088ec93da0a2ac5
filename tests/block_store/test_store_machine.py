"""A store against a model of it: a dictionary of times, over random histories."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from helpers.block_stores import UNIT, block_files, file_of, header, named, open_store, payload_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_paged.block_store import CacheFolder, layout
from mlx_paged.block_store import block_files as block_files_module
from mlx_paged.block_store import catalogue as catalogue_module
from mlx_paged.block_store import store as store_module

LIMIT = 5
TTL = 50.0
SAME_USE = TTL / 4
# A forest: each block's parent.
PARENTS = {
    "a": None,
    "b": "a",
    "c": "b",
    "d": "c",
    "e": "b",
    "f": None,
    "g": "f",
    "h": "g",
    "i": "a",
}
DEPTHS: dict[str, int] = {}
for _name, _parent in PARENTS.items():
    DEPTHS[_name] = 0 if _parent is None else DEPTHS[_parent] + 1
blocks = st.sampled_from(sorted(PARENTS))


def chain(name: str) -> list[str]:
    parent = PARENTS[name]
    return [*(chain(parent) if parent else []), name]


class Clock:
    """Time that passes when it is told to, and a little at each look, so that none are equal."""

    def __init__(self):
        self.now = 1_000_000_000.0

    def time(self) -> float:
        self.now += 1e-3
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    def monotonic(self) -> float:
        return self.now


class StoreMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.patch = pytest.MonkeyPatch()
        self.clock = Clock()
        for module in (catalogue_module, block_files_module, store_module):
            self.patch.setattr(module, "time", self.clock)
        self.patch.setattr(store_module, "_SECONDS_BETWEEN_LISTINGS", 0.0)
        self.times: dict[str, float] = {}  # of the last use, of what should be there
        self.pins: dict[str, list[str]] = {}  # with the ancestors that were there
        self.limit = LIMIT
        self.open()

    def open(self):
        self.store = open_store(self.folder / "cache", num_blocks=self.limit, ttl=TTL)
        self.tool = CacheFolder(self.folder / "cache")

    def teardown(self):
        self.store.close()
        self.patch.undo()
        shutil.rmtree(self.folder)

    # The model

    def kept(self) -> set[str]:
        return {name for names in self.pins.values() for name in names}

    def is_over(self, name: str) -> bool:
        return name not in self.kept() and self.clock.now - self.times[name] > TTL

    def evict_beyond(self, limit: int):
        while len(self.times) > limit:
            parents = {PARENTS[name] for name in self.times}
            leaves = self.times.keys() - parents - self.kept()
            if not leaves:
                return
            del self.times[min(leaves, key=self.turn)]

    def turn(self, name: str) -> tuple[float, int, bool]:
        """Of two that branch off one block at one time, either may go first."""
        is_there = file_of(self.store, name).exists()
        return self.times[name], -DEPTHS[name], is_there

    def time_behind(self, name: str | None) -> float:
        if name not in self.times:
            return self.clock.now
        if self.clock.now - self.times[name] <= SAME_USE:
            return min(self.clock.now, self.times[name])
        self.times[name] = self.time_behind(PARENTS[name])
        return self.times[name]

    def forget_what_is_over(self):
        for name in [name for name in self.times if self.is_over(name)]:
            del self.times[name]

    # What happens

    @rule(name=blocks)
    def put(self, name):
        was_there = name in self.times and not self.is_over(name)
        block = header(name, PARENTS[name], 16 * DEPTHS[name])
        is_present = self.store.store(block, payload_of(named(name)))
        if not was_there:
            self.times.pop(name, None)
            used = self.time_behind(PARENTS[name])
            before = dict(self.times)
            self.evict_beyond(self.limit - 1)
            if len(self.times) < self.limit:
                self.times[name] = used
            else:
                assert len(before) >= self.limit
        assert is_present == (name in self.times)

    @rule(name=blocks)
    def get(self, name):
        expected = name in self.times and not self.is_over(name)
        assert self.store.has(named(name)) == expected
        assert self.store.load(named(name)) == (payload_of(named(name)) if expected else None)
        if not expected:
            self.times.pop(name, None)

    @rule(name=blocks)
    def use(self, name):
        self.store.note_used([named(each) for each in chain(name)])
        for each in chain(name):
            if each in self.times:
                self.times[each] = self.clock.now

    @rule(seconds=st.sampled_from([1.0, 30.0, 60.0]))
    def let_time_pass(self, seconds):
        self.clock.now += seconds

    @rule(name=blocks)
    def pin(self, name):
        assert self.tool.pin(self.store.fingerprint.digest, named(name)) == (name in self.times)
        if name in self.times:
            there = itertools.takewhile(self.times.__contains__, reversed(chain(name)))
            self.pins[name] = list(there)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        name = data.draw(st.sampled_from(sorted(self.pins)))
        assert self.tool.unpin(self.store.fingerprint.digest, named(name))
        del self.pins[name]

    @rule(name=blocks)
    def remove(self, name):
        removed = self.tool.remove([(self.store.fingerprint.digest, named(name))])
        assert removed.num_blocks == (name in self.times)
        self.times.pop(name, None)
        self.pins.pop(name, None)

    @rule(name=blocks, bit=st.integers(0, 8 * 1100))
    def break_a_file(self, name, bit):
        path = file_of(self.store, name)
        if not path.exists() or self.is_over(name):
            return
        data = bytearray(path.read_bytes())
        data[bit // 8 % len(data)] ^= 1 << bit % 8
        times = path.stat().st_atime, path.stat().st_mtime
        path.write_bytes(data)
        os.utime(path, times)
        assert self.store.load(named(name)) is None and not path.exists()
        self.times.pop(name)

    @rule(has_index=st.booleans(), is_killed=st.booleans(), limit=st.sampled_from([2, LIMIT]))
    def restart(self, has_index, is_killed, limit):
        self.limit = limit
        if not is_killed:
            self.store.close()
        if has_index:  # as if an earlier version had been here
            (self.folder / "cache" / "index-v1.sqlite3").touch()
        self.open()

    @invariant()
    def nothing_failed_and_sums_are_right(self):
        assert self.store.failure is None
        self.store.maintain()
        self.evict_beyond(self.limit)
        self.forget_what_is_over()
        files = block_files(self.folder)
        assert self.store.stats().num_blocks == len(files)
        assert self.store.stats().nbytes == UNIT * len(files)
        assert len(files) <= max(self.limit, len(self.kept()))


def test_a_store_does_what_its_model_does():
    assert layout.VERSION == 1 and block_files_module.ALLOCATION_UNIT == UNIT
    StoreMachine.TestCase.settings = settings(
        max_examples=15,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    StoreMachine.TestCase().runTest()
