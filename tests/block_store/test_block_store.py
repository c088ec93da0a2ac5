"""``BlockStore``: blocks come back, the least recently used go, pinned ones stay."""

from __future__ import annotations

import shutil
import threading
import time

import pytest
from helpers.block_stores import (
    UNIT,
    block_files,
    file_of,
    found,
    header,
    make_older,
    named,
    open_store,
    payload_of,
    put,
    put_chain,
)

from mlx_paged.block_store import CacheFolder
from mlx_paged.core.tier import TierStats


def test_blocks_are_found_by_a_later_process_and_by_another_one(tmp_path, store):
    assert not store.has(named("a")) and store.load(named("a")) is None
    put_chain(store, "a", "b", "c")
    assert found(store, "abcd") == "abc"
    beside = open_store(tmp_path / "cache")
    assert found(beside, "abcd") == "abc"
    store.close()
    assert found(store, "abc") == "" and not put(store, "d")
    assert found(beside, "abcd") == "abc"
    assert found(open_store(tmp_path / "cache"), "abcd") == "abc"


def test_blocks_of_one_fingerprint_are_not_found_under_another(tmp_path):
    put_chain(open_store(tmp_path / "cache"), "a")
    other = open_store(tmp_path / "cache", model="another model")
    assert found(other, "a") == ""
    put_chain(other, "a")
    assert len(block_files(tmp_path)) == 2


def test_what_is_there_is_not_written_again(store):
    put_chain(store, "a")
    before = file_of(store, "a").stat()
    assert put(store, "a")
    after = file_of(store, "a").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert store.stats() == TierStats(num_blocks=1, nbytes=UNIT, num_written=1, nbytes_written=UNIT)


def test_the_least_recently_used_block_goes_first(tmp_path):
    store = open_store(tmp_path / "cache", num_blocks=4)
    for name in "abcd":
        put(store, name)
    store.note_used([named("a"), named("b")])
    put(store, "e")
    put(store, "f")
    assert found(store, "abcdef") == "abef"
    assert store.stats() == TierStats(
        num_blocks=4,
        nbytes=4 * UNIT,
        num_hits=4,
        num_written=6,
        num_evicted=2,
        nbytes_written=6 * UNIT,
    )


def test_a_prefix_goes_from_its_end(tmp_path):
    store = open_store(tmp_path / "cache", num_blocks=4)
    put_chain(store, *"abcd")  # a was written first, and is of use for as long as any other
    put(store, "e")
    assert found(store, "abcde") == "abce"
    put(store, "f")
    assert found(store, "abcdef") == "abef"


def test_at_equal_times_the_later_tokens_go_first(tmp_path):
    store = open_store(tmp_path / "cache", num_blocks=3)
    for position, name in enumerate("abc"):
        put(store, name, parent="gone" if position else None, first_token=16 * position)
    store.note_used([named(name) for name in "abc"])
    store.maintain()
    put(store, "d")
    assert found(store, "abcd") == "abd"


def test_an_ancestor_of_a_block_that_was_used_stays(tmp_path):
    store = open_store(tmp_path / "cache", num_blocks=4)
    put_chain(store, "a", "b")
    put(store, "c")
    put(store, "d")
    for name in "abcd":
        make_older(file_of(store, name), 100)
    store.note_used([named("b")])
    put(store, "e")
    put(store, "f")
    assert found(store, "abcdef") == "abef"


def test_the_order_outlives_the_process(tmp_path):
    store = open_store(tmp_path / "cache", num_blocks=4)
    for age, name in enumerate("dbca"):
        put(store, name)
        make_older(file_of(store, name), 100 - age)
    store.note_used([named("d")])
    store.close()
    store = open_store(tmp_path / "cache", num_blocks=2)
    store.maintain()
    assert found(store, "abcd") == "ad"


def test_a_smaller_limit_takes_effect_at_the_start(tmp_path):
    put_chain(open_store(tmp_path / "cache"), *"abcdefgh")
    store = open_store(tmp_path / "cache", num_blocks=3)
    store.maintain()
    assert found(store, "abcdefgh") == "abc"
    assert (store.stats().num_blocks, store.stats().num_evicted) == (3, 5)


def test_the_limit_holds_for_all_fingerprints_together(tmp_path):
    first = open_store(tmp_path / "cache", num_blocks=3)
    for name in "ab":
        put(first, name)
    first.maintain()
    second = open_store(tmp_path / "cache", num_blocks=3, model="another model")
    for name in "cd":
        put(second, name)
    assert (found(first, "ab"), found(second, "cd")) == ("b", "cd")


def test_a_block_beyond_the_limit_is_dropped_and_nothing_evicted_for_it(tmp_path):
    store = open_store(tmp_path / "cache", num_blocks=3)
    put_chain(store, "a", "b")
    assert not store.store(header("c"), bytes(4 * UNIT))
    assert found(store, "abc") == "ab"
    assert store.stats().num_dropped == 1


def test_files_count_as_much_as_they_take_on_disk(tmp_path):
    store = open_store(tmp_path / "cache", num_blocks=3)
    assert store.store(header("a"), payload_of(named("a"), UNIT))
    assert store.stats().nbytes == 2 * UNIT
    assert put(store, "b") and put(store, "c")
    assert store.stats().nbytes == 2 * UNIT


def test_an_old_conversation_goes_as_a_whole_before_a_new_one_loses_its_end(tmp_path, store):
    put_chain(store, *"abcd")
    put_chain(store, *"efg")
    for name in "dcba":
        make_older(file_of(store, name), 100)
    store.close()
    store = open_store(tmp_path / "cache", num_blocks=4)
    store.maintain()
    assert found(store, "abcdefg") == "aefg"


def test_pinned_blocks_stay_with_their_ancestors_whatever_the_limit_is(tmp_path):
    store = open_store(tmp_path / "cache", num_blocks=4)
    put_chain(store, *"abcd")
    store.maintain()
    assert CacheFolder(tmp_path / "cache").pin(store.fingerprint.digest, named("c"))
    for name in "efg":
        assert put(store, name)
    assert found(store, "abcdefg") == "abcg"
    CacheFolder(tmp_path / "cache").pin(store.fingerprint.digest, named("g"))
    assert not put(store, "h")
    assert found(store, "abcdefgh") == "abcg"
    assert store.stats().num_dropped == 1
    small = open_store(tmp_path / "cache", num_blocks=1)
    small.maintain()
    assert found(small, "abcg") == "abcg" and not put(small, "i")


def test_pins_outlive_the_process(tmp_path):
    store = open_store(tmp_path / "cache", num_blocks=3)
    put_chain(store, *"abc")
    CacheFolder(tmp_path / "cache").pin(store.fingerprint.digest, named("b"))
    store.close()
    store = open_store(tmp_path / "cache", num_blocks=1)
    store.maintain()
    assert found(store, "abc") == "ab"


def test_a_pin_that_was_taken_back_holds_nothing(tmp_path):
    store = open_store(tmp_path / "cache", num_blocks=3)
    put_chain(store, *"abc")
    store.maintain()
    folder, digest = CacheFolder(tmp_path / "cache"), store.fingerprint.digest
    assert folder.pin(digest, named("b")) and folder.pin(digest, named("c"))
    assert folder.unpin(digest, named("b")) and not folder.unpin(digest, named("b"))
    assert not put(store, "d")
    assert folder.unpin(digest, named("c"))
    assert put(store, "d")
    assert found(store, "abcd") == "abd"


def test_what_is_over_is_a_miss_and_is_removed(tmp_path):
    store = open_store(tmp_path / "cache", ttl=60.0)
    put_chain(store, *"abc")
    for name in "bc":
        make_older(file_of(store, name), 61)
    assert store.load(named("b")) is None  # without a look at has() before
    assert found(store, "ac") == "a"
    assert len(block_files(tmp_path)) == 1
    put_chain(store, "d")
    make_older(file_of(store, "d"), 61)
    store.close()
    store = open_store(tmp_path / "cache")
    store.maintain()  # a process without a limit of its own removes it when it is asked for
    assert found(store, "abcd") == "a" and len(block_files(tmp_path)) == 1
    assert store.stats().num_evicted == 1


def test_what_is_over_is_removed_without_being_asked_for(tmp_path):
    store = open_store(tmp_path / "cache", ttl=60.0)
    other = open_store(tmp_path / "cache", model="another model", ttl=60.0)
    for each in (store, other):
        put_chain(each, *"abc")
    CacheFolder(tmp_path / "cache").pin(store.fingerprint.digest, named("a"))
    for each in (store, other):
        for name in "ab":
            make_older(file_of(each, name), 61)
    store = open_store(tmp_path / "cache", ttl=60.0)
    store.maintain()
    left = [file_of(store, "a"), file_of(store, "c"), *(file_of(other, name) for name in "abc")]
    assert block_files(tmp_path) == sorted(left)
    assert (store.stats().num_blocks, store.stats().num_evicted) == (5, 1)


def test_what_is_over_is_not_there_even_before_it_is_read(tmp_path):
    store = open_store(tmp_path / "cache", ttl=60.0)
    put_chain(store, *"ab")
    make_older(file_of(store, "a"), 61)
    assert [store.has(named(name)) for name in "ab"] == [False, True]
    assert file_of(store, "a").exists()


@pytest.mark.parametrize(("written_with", "read_with"), [(60.0, 600.0), (600.0, 60.0)])
def test_of_two_times_to_live_the_shorter_one_holds(tmp_path, written_with, read_with):
    put_chain(open_store(tmp_path / "cache", ttl=written_with), *"abc")
    store = open_store(tmp_path / "cache", ttl=read_with)
    for name in "bc":
        make_older(file_of(store, name), 61)
    assert store.load(named("b")) is None and store.load(named("a")) is not None
    store.maintain()
    assert found(store, "c") == "" and block_files(tmp_path) == [file_of(store, "a")]


def test_the_time_of_a_block_starts_again_when_it_is_used(tmp_path):
    store = open_store(tmp_path / "cache", ttl=60.0)
    put_chain(store, *"ab")
    for name in "ab":
        make_older(file_of(store, name), 59)
    store.note_used([named("a")])
    store.maintain()
    for name in "ab":
        make_older(file_of(store, name), time.time() - file_of(store, name).stat().st_mtime + 2)
    assert found(store, "ab") == "a"


def test_a_shorter_time_holds_for_blocks_of_the_same_fingerprint_only(tmp_path):
    ours, others = open_store(tmp_path / "cache"), open_store(tmp_path / "cache", model="another")
    for store in (ours, others):
        put_chain(store, "a")
        make_older(file_of(store, "a"), 61)
        store.close()
    ours = open_store(tmp_path / "cache", ttl=60.0)
    ours.maintain()
    others = open_store(tmp_path / "cache", model="another")
    assert (found(ours, "a"), found(others, "a")) == ("", "a")


def test_the_time_of_pinned_blocks_is_never_over(tmp_path):
    store = open_store(tmp_path / "cache", ttl=60.0)
    put_chain(store, *"abc")
    CacheFolder(tmp_path / "cache").pin(store.fingerprint.digest, named("b"))
    for name in "abc":
        make_older(file_of(store, name), 61)
    assert found(store, "abc") == "ab"
    store.maintain()
    open_store(tmp_path / "cache").maintain()
    assert len(block_files(tmp_path)) == 2


FUTURE = -1e8  # seconds ago: some three years ahead


def test_blocks_from_the_future_go_first(tmp_path):
    store = open_store(tmp_path / "cache", num_blocks=4)
    for name in "abcd":
        put(store, name)
    for name in "cd":
        make_older(file_of(store, name), FUTURE)
    store.close()
    store = open_store(tmp_path / "cache", num_blocks=4)
    for name in "ef":
        assert put(store, name)
    assert found(store, "abcdef") == "abef"


def test_blocks_that_were_noted_by_a_clock_that_was_ahead_go_first(tmp_path, monkeypatch):
    store = open_store(tmp_path / "cache", num_blocks=4)
    for name in "ab":
        put(store, name)
    now = time.time()
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time", lambda: now + 1e8)
        ahead.setattr(time, "time_ns", lambda: int((now + 1e8) * 1e9))
        for name in "cd":
            put(store, name)
        store.note_used([named("c"), named("d")])
        store.maintain()
    store.note_used([named("c")])  # and the clock is right again
    for name in "ef":
        assert put(store, name)
    assert found(store, "abcdef") == "bcef"


def test_a_clock_that_is_a_little_ahead_makes_nothing_old(tmp_path):
    store = open_store(tmp_path / "cache", num_blocks=4, ttl=3600.0)
    for name in "abcd":
        put(store, name)
        make_older(file_of(store, name), -30)
    store.close()
    store = open_store(tmp_path / "cache", num_blocks=4, ttl=3600.0)
    store.maintain()
    assert found(store, "abcd") == "abcd"


def test_the_time_of_a_block_from_the_future_is_over(tmp_path):
    store = open_store(tmp_path / "cache", ttl=3600.0)
    put_chain(store, *"abcd")
    CacheFolder(tmp_path / "cache").pin(store.fingerprint.digest, named("a"))
    for name in "abc":
        make_older(file_of(store, name), FUTURE)
    assert not store.has(named("b")) and store.load(named("b")) is None
    assert found(store, "ad") == "ad"  # a is pinned
    store.close()
    store = open_store(tmp_path / "cache", ttl=3600.0)
    store.maintain()
    assert sorted(block_files(tmp_path)) == sorted(file_of(store, name) for name in "ad")


def test_many_blocks_are_evicted_in_one_go_in_order(tmp_path, store):
    names = [f"block {number}" for number in range(150)]
    put_chain(store, *names)
    store.close()
    store = open_store(tmp_path / "cache", num_blocks=40)
    store.maintain()
    assert [name for name in names if store.has(named(name))] == names[:40]


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"num_blocks": 0}, "cache_dir_size"),
        ({"ttl": 0}, "cache_dir_ttl"),
        ({"ttl": -1.0}, "cache_dir_ttl"),
        ({"ttl": float("nan")}, "cache_dir_ttl"),
        ({"ttl": float("inf")}, "cache_dir_ttl"),
        ({"ttl": "soon"}, "cache_dir_ttl"),
    ],
)
def test_limits_that_are_none_are_refused_by_name(tmp_path, options, argument):
    with pytest.raises(ValueError, match=argument) as error:
        open_store(tmp_path / "cache", **options)
    assert error.value.argument == argument
    assert not (tmp_path / "cache").exists()


def test_groups_of_layers_have_blocks_of_their_own(store):
    first, second = named("a"), named("a") + b"\1\0"
    for group, block_hash in enumerate((first, second)):
        block = header("a", group=group)
        assert store.store(type(block)(block_hash, None, block.token_ids, 0, group), block_hash)
    assert (store.load(first), store.load(second)) == (first, second)


def test_the_text_of_a_fingerprint_lies_beside_its_blocks(tmp_path, store):
    known = CacheFolder(tmp_path / "cache").fingerprints()
    assert known == {store.fingerprint.digest: store.fingerprint}


def test_a_model_whose_blocks_were_deleted_by_hand_begins_again(tmp_path):
    store = open_store(tmp_path / "cache", num_blocks=3)
    put_chain(store, *"abc")
    shutil.rmtree(store.files.path_of(store.fingerprint.digest))
    put_chain(store, *"de")
    assert found(store, "abcde") == "de" and store.failure is None
    assert CacheFolder(tmp_path / "cache").size().num_blocks == 2


def test_threads_may_write_read_and_evict_at_once(tmp_path):
    store = open_store(tmp_path / "cache", num_blocks=20)
    wrong = []

    def work(start: int) -> None:
        for number in range(start, start + 60):
            put(store, f"block {number}")
            store.note_used([named(f"block {number - 3}")])
            name = named(f"block {number - 5}")
            payload = store.load(name)
            if payload not in (None, payload_of(name)):
                wrong.append(number)
            if number % 7 == 0:
                store.maintain()

    threads = [threading.Thread(target=work, args=(30 * number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and store.failure is None
    assert len(block_files(tmp_path)) == 20 == store.stats().num_blocks
