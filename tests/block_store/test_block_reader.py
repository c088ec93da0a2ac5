"""``BlockReader``: blocks are there before they are asked for, in order, up to the first miss."""

from __future__ import annotations

import threading
import time

from helpers.block_stores import file_of, named, open_store, payload_of, put_chain

from mlx_paged.block_store import BlockReader, ReadBlock


def hashes(names: str) -> list[bytes]:
    return [named(name) for name in names]


def read_blocks(key, names: str) -> list[ReadBlock]:
    return [ReadBlock(key, named(name), payload_of(named(name))) for name in names]


def take_all(reader: BlockReader) -> list[ReadBlock]:
    taken = []
    while reader.wait(10):
        taken += reader.take(1 << 30)
    return taken


def wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_blocks_come_in_order_and_end_at_the_first_miss(tmp_path):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"abcdef")
    reader = BlockReader(store, 1 << 20)
    assert not reader.wait(0) and reader.take(1) == []
    reader.read("one", hashes("abc"))
    reader.read("two", hashes("dxe"))
    reader.read("three", hashes("xyz"))
    reader.read("four", [])
    assert take_all(reader) == read_blocks("one", "abc") + read_blocks("two", "d")
    assert not any(map(reader.is_reading, ("one", "two", "three", "four")))
    reader.close()


def test_a_wait_may_be_for_several_blocks_and_ends_when_no_more_can_come(tmp_path):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"abcdef")
    size = len(payload_of(named("a")))
    reader = BlockReader(store, 1 << 20)
    reader.read("one", hashes("abcdef"))
    assert reader.wait(10, 3 * size) and len(reader.take(1 << 20)) >= 3
    while reader.wait(10, 1 << 30):  # all of them are fewer
        reader.take(1 << 20)
    assert not reader.is_reading("one")
    small = BlockReader(store, 2 * size)
    small.read("two", hashes("abcdef"))
    assert small.wait(10, 3 * size), "no more have room"
    assert len(small.take(1 << 20)) == 2
    reader.close(), small.close()


def test_a_bad_block_is_a_miss(tmp_path):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"abc")
    file_of(store, "b").write_bytes(b"garbage")
    reader = BlockReader(store, 1 << 20)
    reader.read("key", hashes("abc"))
    assert take_all(reader) == read_blocks("key", "a")
    assert store.stats().num_corrupt == 1
    reader.close()


def test_only_so_much_is_read_ahead(tmp_path):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"abcdef")
    reader = BlockReader(store, max_ready_nbytes=2000)
    reader.read("key", hashes("abcdef"))
    wait_until(lambda: store.stats().num_hits == 2)
    time.sleep(0.02)
    assert store.stats().num_hits == 2 and reader.is_reading("key")
    assert take_all(reader) == read_blocks("key", "abcdef")
    reader.close()


def test_as_much_is_taken_as_asked_for_but_one_block_at_least(tmp_path):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"abcdef")
    reader = BlockReader(store, 1 << 20)
    reader.read("key", hashes("abcdef"))
    wait_until(lambda: store.stats().num_hits == 6)
    time.sleep(0.01)
    taken = [reader.take(limit) for limit in (0, 2999, 3000)]
    assert taken == [read_blocks("key", names) for names in ("a", "bc", "def")]
    assert not reader.is_reading("key")
    reader.close()


def test_a_block_that_is_larger_than_the_bound_is_read_all_the_same(tmp_path):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"ab")
    reader = BlockReader(store, max_ready_nbytes=1)
    reader.read("key", hashes("ab"))
    assert take_all(reader) == read_blocks("key", "ab")
    reader.close()


def test_a_key_that_was_cancelled_gets_nothing_and_can_be_used_again(tmp_path, monkeypatch):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"abcdef")
    get, may_read, num_begun = store.load, threading.Semaphore(0), []

    def wait_and_get(block_hash):
        num_begun.append(block_hash)
        assert may_read.acquire(timeout=10)
        return get(block_hash)

    monkeypatch.setattr(store, "load", wait_and_get)
    reader = BlockReader(store, 1 << 20)
    reader.read("one", hashes("abc"))
    reader.read("two", hashes("de"))
    may_read.release()  # a
    wait_until(lambda: len(num_begun) == 2)  # b is in hand
    reader.cancel("one")
    assert not reader.is_reading("one") and reader.is_reading("two") and reader.take(1) == []
    reader.read("one", hashes("f"))
    reader.cancel("unknown")
    for _ in range(9):
        may_read.release()
    assert take_all(reader) == read_blocks("two", "de") + read_blocks("one", "f")
    reader.close()


def test_a_key_may_be_read_more_than_once(tmp_path):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"abc")
    reader = BlockReader(store, 1 << 20)
    reader.read("key", hashes("axb"))
    reader.read("key", hashes("c"))
    assert take_all(reader) == read_blocks("key", "ac")
    reader.close()


def test_a_closed_reader_reads_nothing(tmp_path):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"abc")
    reader = BlockReader(store, 1)
    reader.read("key", hashes("abc"))
    wait_until(lambda: reader.wait(1))
    reader.close()
    reader.read("other", hashes("abc"))
    assert not reader.is_reading("key") and not reader.is_reading("other")
    assert not reader.wait(0.01) and reader.take(1 << 20) == []
    reader.close()


def test_a_closed_reader_ends_its_thread(tmp_path):
    before = set(threading.enumerate())
    reader = BlockReader(open_store(tmp_path / "cache"), 1)
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    reader.close()
    thread.join(10)
    assert not thread.is_alive()


def test_an_error_that_nobody_thought_of_ends_in_the_failure_of_the_store(tmp_path, monkeypatch):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"ab")
    monkeypatch.setattr(store, "load", lambda _: 1 // 0)
    reader = BlockReader(store, 1 << 20)
    reader.read("key", hashes("ab"))
    assert take_all(reader) == []
    assert store.failure is not None and "ZeroDivisionError" in store.failure
    reader.close()
