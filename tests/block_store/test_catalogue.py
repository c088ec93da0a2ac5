"""What lies in a folder is known from its directory entries, and blocks go leaves first."""

from __future__ import annotations

import os
import random
import threading

import pytest
from helpers.block_stores import (
    UNIT,
    block_files,
    file_of,
    fingerprint,
    found,
    header,
    make_older,
    named,
    open_store,
    payload_of,
    put,
    put_chain,
)

from mlx_paged.block_store import BlockStore, CacheFolder
from mlx_paged.block_store import block_files as block_files_module
from mlx_paged.block_store import catalogue as catalogue_module
from mlx_paged.block_store import store as store_module
from mlx_paged.block_store.block_files import BlockFiles, nbytes_on_disk
from mlx_paged.block_store.catalogue import Catalogue, ListedBlock, Oldest

SECOND = 10**9


def test_files_take_whole_units():
    assert [nbytes_on_disk(size) for size in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]


# The oldest


def block(name: str, used: int) -> ListedBlock:
    return ListedBlock(("0" * 32, name.encode()), used, UNIT)


def place_of(name: tuple[str, bytes]) -> tuple[float, int]:
    """The name of a block is its place."""
    return float(name[1].decode()), 0


def in_order(oldest: Oldest) -> list[str]:
    return [each.name[1].decode() for each in iter(oldest.pop, None)]


def test_the_oldest_blocks_come_by_time_and_those_of_one_time_by_their_place():
    oldest = Oldest(100, place_of)
    for name, used in {"1": 5, "30": 2, "2": 2, "10": 2, "4": 9, "5": 1}.items():
        oldest.add(block(name, used))
    assert in_order(oldest) == ["5", "30", "10", "2", "1", "4"]


def test_of_many_blocks_those_of_one_time_are_kept_or_left_out_together():
    rng = random.Random(3)
    blocks = [block(str(number), rng.randrange(40)) for number in range(400)]
    expected = sorted(blocks, key=lambda each: (each.used, -int(each.name[1])))
    for number in (1, 15, 100, 1000):
        oldest = Oldest(number, place_of)
        for each in rng.sample(blocks, len(blocks)):
            oldest.add(each)
        kept = list(iter(oldest.pop, None))
        assert kept == expected[: len(kept)]
        end = kept[-1].used
        assert sum(each.used < end for each in blocks) < number
        assert len(kept) == sum(each.used <= end for each in blocks)


def test_outdated_blocks_come_before_all_others():
    oldest = Oldest(3, place_of)
    for name, used in {"1": 5, "3": 2, "4": 9}.items():
        oldest.add(block(name, used))
    for name, used in {"10": 7, "20": 8}.items():
        oldest.add(block(name, used)._replace(is_outdated=True))
    assert in_order(oldest) == ["10", "20", "3"]


def test_places_are_asked_for_only_where_times_are_equal():
    asked = []
    oldest = Oldest(100, lambda name: (asked.append(name), place_of(name))[1])
    for number in range(10):
        oldest.add(block(str(number), number))
    oldest.add(block("20", 7))
    assert len(in_order(oldest)) == 11 and {name[1] for name in asked} == {b"7", b"20"}


def test_a_block_that_comes_late_takes_its_place():
    oldest = Oldest(100, place_of)
    for number in range(3):
        oldest.add(block(str(number), 1))
    assert oldest.pop() == block("2", 1)
    oldest.add(block("9", 1))
    assert in_order(oldest) == ["9", "1", "0"]


# Leaves first


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1_000_000_000 * SECOND

    def time_ns(self) -> int:
        return self.now

    def time(self) -> float:
        return self.now / SECOND

    def monotonic(self) -> float:
        return self.now / SECOND


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (catalogue_module, block_files_module, store_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


def round_times(monkeypatch: pytest.MonkeyPatch, grain: int) -> None:
    """As of a file system that knows no finer times."""
    utime = os.utime

    def coarse(path, *, ns, **options):
        utime(path, ns=tuple(each // grain * grain for each in ns), **options)

    monkeypatch.setattr(os, "utime", coarse)


@pytest.mark.parametrize(
    "grain",
    [
        pytest.param(1, id="APFS"),
        pytest.param(100, id="NTFS", marks=pytest.mark.slow),
        pytest.param(10**7, id="exFAT", marks=pytest.mark.slow),
        pytest.param(2 * SECOND, id="FAT"),
    ],
)
def test_no_block_goes_before_one_that_follows_it(tmp_path, monkeypatch, clock, grain):
    round_times(monkeypatch, grain)
    rng = random.Random(grain)
    parents = {str(number): rng.choice([None, *map(str, range(number))]) for number in range(40)}
    depths: dict[str, int] = {}
    for name, parent in parents.items():
        depths[name] = 0 if parent is None else depths[parent] + 1
    stores = [open_store(tmp_path / "cache", num_blocks=12) for _ in range(2)]
    there: set[str] = set()
    orphans: set[str] = set()
    for _ in range(120):
        clock.now += rng.choice([0, 1000, SECOND // 10, SECOND, 90 * SECOND])
        store, name = rng.choice(stores), rng.choice(list(parents))
        chain = [name]
        while parents[chain[0]] is not None:
            chain.insert(0, parents[chain[0]])
        num_there = next((at for at, each in enumerate(chain) if each not in there), len(chain))
        # As engines do: what was found is noted as used, and the rest is written.
        store.note_used([named(each) for each in chain[:num_there]])
        for each in chain[num_there:]:
            put(store, each, parents[each], 16 * depths[each])
        store.maintain()
        there = {each for each in parents if file_of(store, each).exists()}
        known, orphans = orphans, {each for each in there if parents[each] not in (None, *there)}
        # Where all blocks have one time, one that was just written may go for the next.
        assert len(there) <= 12 and orphans - known <= set(chain[num_there:])


def test_a_new_block_has_the_time_of_the_one_before_it(clock, store):
    put(store, "a")
    began = clock.now
    for name, parent, place in (("b", "a", 16), ("c", "b", 32), ("x", "missing", 16)):
        clock.now += 10 * SECOND
        put(store, name, parent, place)
    times = [file_of(store, name).stat().st_mtime_ns for name in "abcx"]
    assert times == [began, began, began, clock.now]


def test_what_follows_after_a_minute_makes_all_before_it_used(clock, store):
    put_chain(store, *"abc")
    put(store, "d", "a", 16)
    began, clock.now = clock.now, clock.now + 61 * SECOND
    put(store, "e", "c", 48)
    times = {name: file_of(store, name).stat().st_mtime_ns for name in "abcde"}
    assert times == dict.fromkeys("abce", clock.now) | {"d": began}
    clock.now += 61 * SECOND
    store.note_used([named("d")])
    store.maintain()
    times = {name: file_of(store, name).stat().st_mtime_ns for name in "ad"}
    assert times == dict.fromkeys("ad", clock.now)


def test_a_new_block_is_not_over_before_it_is_read(tmp_path, clock):
    store = open_store(tmp_path / "cache", ttl=40.0)
    put(store, "a")
    clock.now += 30 * SECOND
    put(store, "b", "a", 16)
    clock.now += 35 * SECOND
    assert found(store, "ab") == "ab"


def test_nothing_makes_a_block_older(tmp_path, clock):
    store, other = open_store(tmp_path / "cache"), open_store(tmp_path / "cache")
    put_chain(store, *"ab")
    store.note_used([named("a"), named("b")])
    clock.now += 100 * SECOND
    other.note_used([named("a"), named("b")])
    other.maintain()
    store.maintain()  # notes the earlier use late
    assert file_of(store, "b").stat().st_mtime_ns == clock.now


def test_a_header_that_names_a_circle_of_parents_ends_the_walk(clock, store):
    for name, parent in ("ab", "bc", "ca"):
        assert store.store(header(name, parent), payload_of(named(name)))
    clock.now += 100 * SECOND
    store.note_used([named("a")])
    store.maintain()
    assert {file_of(store, name).stat().st_mtime_ns for name in "abc"} == {clock.now}


# What others do


def test_a_limit_that_writers_share_is_exceeded_by_a_sixteenth_for_each_at_most(tmp_path):
    stores = [open_store(tmp_path / "cache", num_blocks=32) for _ in range(3)]
    most = 0
    for number in range(120):
        assert put(stores[number * 7 % 5 % 3], f"block {number}")
        most = max(most, len(block_files(tmp_path)))
    assert 32 < most <= 32 + 3 * (32 // 16 + 1)
    for store in stores:
        store._catalogue.list_again()
        store.maintain()
    assert len(block_files(tmp_path)) == 32 == stores[2].stats().num_blocks


def test_what_others_write_is_seen_now_and_then(tmp_path, monkeypatch):
    store, other = open_store(tmp_path / "cache"), open_store(tmp_path / "cache")
    put(store, "a")
    store.maintain()
    put_chain(other, *"xyz")
    store.maintain()
    assert store.stats().num_blocks == 1
    # A minute after something was written here, or else ten minutes.
    monkeypatch.setattr(store_module, "_SECONDS_BETWEEN_LISTINGS_OF_A_WRITER", 0.0)
    store.maintain()
    assert store.stats().num_blocks == 4
    put(other, "u")
    store.maintain()
    assert store.stats().num_blocks == 4
    monkeypatch.setattr(store_module, "_SECONDS_BETWEEN_LISTINGS", 0.0)
    store.maintain()
    assert store.stats().num_blocks == 5


def test_blocks_that_others_removed_are_no_longer_counted(tmp_path):
    store = open_store(tmp_path / "cache", num_blocks=50)
    for number in range(50):
        put(store, str(number))
    store.maintain()
    for number in range(20):
        file_of(store, str(number)).unlink()
    put(store, "new")
    assert len(block_files(tmp_path)) == 31 and store.stats().num_evicted == 0


def test_a_block_that_is_used_after_the_listing_stays(tmp_path):
    store = open_store(tmp_path / "cache", num_blocks=50)
    for number in range(50):
        put(store, str(number))
        make_older(file_of(store, str(number)), 100 - number)
    store._catalogue.list_again()
    store.maintain()
    make_older(file_of(store, "0"), 1)  # by another process
    put(store, "new")
    assert file_of(store, "0").exists() and not file_of(store, "1").exists()


def test_a_loss_is_counted_once(tmp_path):
    store = open_store(tmp_path / "cache", num_blocks=50)
    for number in range(50):
        put(store, str(number))
    store._catalogue.list_again()
    store.maintain()
    file_of(store, "0").write_bytes(b"garbage")
    assert store.load(named("0")) is None
    assert store.stats().num_blocks == 49
    for name in ("new", "newer"):
        put(store, name)
    assert store.stats().num_blocks == 50 == len(block_files(tmp_path))


def test_more_blocks_go_than_a_listing_keeps(tmp_path, monkeypatch):
    monkeypatch.setattr(catalogue_module, "_MIN_OLDEST", 3)
    store = open_store(tmp_path / "cache")
    for number in range(60):
        put(store, str(number))
        make_older(file_of(store, str(number)), 100 - number)
    small = open_store(tmp_path / "cache", num_blocks=10)
    small.maintain()
    assert [number for number in range(60) if small.has(named(str(number)))] == [*range(50, 60)]


@pytest.mark.parametrize("num_refused", [1, 16, 17])
def test_an_eviction_ends_where_nothing_else_can_be_removed(monkeypatch, num_refused, store):
    for number in range(num_refused):
        put(store, str(number))
    catalogue = Catalogue(BlockFiles(store.folder))
    catalogue.list_files()

    def refuse(name):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(catalogue._files, "remove", refuse)
    with pytest.raises(PermissionError):
        catalogue.shrink(0)
    assert catalogue.num_blocks == num_refused


# Listings


def test_a_listing_that_was_ended_is_taken_up_again(tmp_path, monkeypatch):
    monkeypatch.setattr(catalogue_module, "_FILES_AT_A_TIME", 1)
    monkeypatch.setattr(catalogue_module, "_SECONDS_BETWEEN_PAUSES", -1.0)
    store = open_store(tmp_path / "cache")
    put_chain(store, *map(str, range(20)))
    catalogue, pauses = Catalogue(BlockFiles(store.folder)), []

    def pause():
        pauses.append(catalogue.num_blocks)
        if len(pauses) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        catalogue.list_files(pause)
    catalogue.list_files(pause)
    # For each file, for the fingerprint and for the end.
    assert pauses == [0] * 21 + [20] and catalogue.nbytes == 20 * UNIT


def test_nothing_is_written_before_the_files_were_listed(tmp_path):
    put_chain(open_store(tmp_path / "cache"), *"abcd")
    store = open_store(tmp_path / "cache", num_blocks=4)
    assert store.stats().num_blocks == 0
    put(store, "e")
    assert found(store, "abcde") == "abce" and store.stats().num_blocks == 4


def test_reads_never_wait_for_a_listing(store):
    put_chain(store, *"abcd")
    with store._catalogue._list_lock, store._writing:
        done = []
        thread = threading.Thread(target=lambda: done.append(found(store, "abcde")))
        thread.start()
        thread.join(10)
        store.note_used([named("a")])
        assert done == ["abcd"]


def test_the_tool_sees_what_has_changed(tmp_path, store):
    put_chain(store, *"abc")
    tool = CacheFolder(tmp_path / "cache")
    assert tool.size().num_blocks == 3
    file_of(store, "c").unlink()
    assert tool.size().num_blocks == 2 and len(tool.entries()) == 2


def test_blocks_of_an_earlier_version_are_evicted_before_all_others(tmp_path):
    def open_version(number: int, num_blocks: int = 1000) -> BlockStore:
        known = fingerprint(code=f"mlx_paged {number}, mlx 0.30.0, reference backend on a cpu")
        return BlockStore(tmp_path, num_blocks * UNIT, known)

    old, now, next_one = (open_version(number) for number in (2, 3, 4))
    put_chain(now, *"abc")
    put_chain(next_one, *"d")
    put_chain(old, *"pqrs")  # the most recently used ones
    for store in (old, now, next_one):
        store.close()
    folder = CacheFolder(tmp_path)
    held = {known.code[:11]: known.is_outdated for known in folder.fingerprints().values()}
    assert held == {"mlx_paged 2": True, "mlx_paged 3": False, "mlx_paged 4": False}
    entries = [entry for entry in folder.entries() if entry.block_hash in map(named, "pqrs")]
    assert folder.pin(entries[0].digest, named("p"))
    # One more than fits: the last of the outdated chain goes, although it was used last.
    full = open_version(3, num_blocks=8)
    put_chain(full, "x")
    assert found(full, "abcx") == "abcx" and found(open_version(2), "pqrs") == "pqr"
    for name in "yz":
        put_chain(full, name)
    assert found(full, "abcxyz") == "abcxyz"
    assert found(open_version(2), "pqrs") == "p", "it is pinned"
    put_chain(full, "w")
    assert len(found(full, "abcxyzw") + found(open_version(4), "d")) == 7
