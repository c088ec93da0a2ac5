"""``BlockWorker``: blocks that are offered are written in another thread, or dropped. Blocks are
read ahead in order, up to the first that is missing.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from helpers.block_stores import (
    UNIT,
    block_files,
    file_of,
    found,
    header,
    named,
    open_store,
    payload_of,
    put_chain,
)

from mlx_paged.block_store import BlockWorker, Read, catalogue
from mlx_paged.block_store import worker as worker_module


class Gate:
    """Holds the writes of a store up until it is opened."""

    def __init__(self, store, monkeypatch):
        self.is_open = threading.Event()
        self.num_begun = 0
        put = store.store

        def wait_and_put(*block):
            self.num_begun += 1
            assert self.is_open.wait(10)
            return put(*block)

        monkeypatch.setattr(store, "store", wait_and_put)

    def wait_for_a_write(self):
        while not self.num_begun:
            time.sleep(0.001)


def hashes(names: str) -> list[bytes]:
    return [named(name) for name in names]


def payloads(names: str) -> list[tuple[bytes, bytes]]:
    """What is read of these blocks."""
    return [(named(name), payload_of(named(name))) for name in names]


def reading(worker: BlockWorker, names: str) -> Read:
    read = Read()
    worker.read(read, hashes(names))
    return read


def take_all(worker: BlockWorker, *reads: Read) -> list[list[tuple[bytes, bytes]]]:
    taken: list[list[tuple[bytes, bytes]]] = [[] for _ in reads]
    while worker.wait(10):
        for read, blocks in zip(reads, taken, strict=True):
            blocks += worker.take(read, 1 << 30)
    return taken


def wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# Writes


def offer(worker: BlockWorker, name: str) -> bool:
    return worker.offer(header(name), payload_of(named(name)))


def test_what_is_offered_is_written_in_order(store):
    worker = BlockWorker(store, 1 << 20, 1 << 20)
    assert all(offer(worker, name) for name in "abcdef")
    assert worker.flush(10)
    assert found(store, "abcdef") == "abcdef"
    assert store.stats().num_written == 6 and store.stats().nbytes == 6 * UNIT
    assert worker.close(10)


def test_a_full_queue_drops_and_never_waits(monkeypatch, store):
    gate = Gate(store, monkeypatch)
    worker = BlockWorker(store, 2500, 1 << 20)
    assert offer(worker, "a")
    gate.wait_for_a_write()  # a is in hand, and no more in the queue
    assert [offer(worker, name) for name in "bcde"] == [True, True, False, False]
    assert not worker.flush(0.01)
    gate.is_open.set()
    assert worker.flush(10)
    assert found(store, "abcde") == "abc"
    assert store.stats().num_dropped == 2
    worker.close()


def test_a_block_larger_than_the_queue_is_taken_when_nothing_waits(store):
    worker = BlockWorker(store, 1, 1 << 20)
    assert offer(worker, "a") and worker.flush(10)
    assert found(store, "a") == "a"
    worker.close()


def test_a_closed_writer_has_written_all_and_takes_nothing_more(tmp_path, store):
    worker = BlockWorker(store, 1 << 20, 1 << 20)
    for name in "abcd":
        offer(worker, name)
    assert worker.close(10)
    assert store.load(named("a")) is None, "the store is closed"
    assert found(open_store(tmp_path / "cache"), "abcd") == "abcd"
    assert not offer(worker, "e") and store.stats().num_dropped == 1
    assert worker.close(10) and worker.flush(10)
    assert not worker._writer.is_alive()


def test_closing_takes_no_longer_than_it_may(tmp_path, monkeypatch, store):
    gate = Gate(store, monkeypatch)
    worker = BlockWorker(store, 1 << 20, 1 << 20)
    for name in "abc":
        offer(worker, name)
    gate.wait_for_a_write()
    assert not worker.close(0.02)
    assert store.stats().num_dropped == 2
    gate.is_open.set()
    assert worker.close(10)
    assert found(open_store(tmp_path / "cache"), "abc") == "a"


def test_uses_are_written_down_with_the_blocks(tmp_path):
    store = open_store(tmp_path / "cache", num_blocks=2)
    worker = BlockWorker(store, 1 << 20, 1 << 20)
    offer(worker, "a")
    offer(worker, "b")
    assert worker.flush(10)
    store.note_used([named("a")])
    assert worker.flush(10)
    offer(worker, "c")
    assert worker.flush(10)
    assert found(store, "abc") == "ac"
    worker.close()


def test_a_writer_that_finishes_ends_after_its_work(tmp_path, monkeypatch, store):
    gate = Gate(store, monkeypatch)
    worker = BlockWorker(store, 1 << 20, 1 << 20)
    offer(worker, "a")
    worker.finish()
    assert not offer(worker, "b")
    gate.is_open.set()
    worker._writer.join(10)
    assert not worker._writer.is_alive() and block_files(tmp_path) != []
    assert store.load(named("a")) is None, "the store is closed"


def test_an_error_that_nobody_thought_of_ends_in_the_failure_of_the_store(monkeypatch, store):
    worker = BlockWorker(store, 1 << 20, 1 << 20)
    assert worker.flush(10)
    monkeypatch.setattr(store, "_write", lambda *_: 1 // 0)
    assert offer(worker, "a") and worker.flush(10)
    assert store.failure is not None and "ZeroDivisionError" in store.failure
    assert not offer(worker, "b") and worker.close(10)


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "1 / 0"])
def test_what_is_queued_is_written_before_the_interpreter_ends(tmp_path, end):
    script = f"""
import sys
sys.path[:0] = {sys.path!r}
from helpers.block_stores import header, named, open_store, payload_of
from mlx_paged.block_store import BlockWorker
store = open_store({str(tmp_path / "cache")!r})
worker = BlockWorker(store, 1 << 30, 1)
for number in range(50):
    worker.offer(header(str(number)), payload_of(named(str(number))))
{end}
"""
    subprocess.run([sys.executable, "-c", script], stderr=subprocess.DEVNULL, timeout=60)
    assert len(block_files(tmp_path)) == 50


def test_closing_during_a_long_listing_does_not_wait_for_its_end(tmp_path, monkeypatch, store):
    put_chain(store, *map(str, range(100)))
    monkeypatch.setattr(catalogue, "_FILES_AT_A_TIME", 1)
    monkeypatch.setattr(catalogue, "_SECONDS_BETWEEN_PAUSES", -1.0)
    monkeypatch.setattr(worker_module, "_SECONDS_OF_A_PAUSE", 0.5)  # a hundred take 50 s
    beside = open_store(tmp_path / "cache")
    worker = BlockWorker(beside, 1 << 20, 1 << 20)
    assert worker.close(5)
    assert beside.failure is None and beside.stats().num_blocks == 0
    # Whoever comes next lists them.
    store.maintain()
    assert store.stats().num_blocks == 100


# Reads


def test_blocks_come_in_order_and_end_at_the_first_miss(store):
    put_chain(store, *"abcdef")
    worker = BlockWorker(store, 1 << 20, 1 << 20)
    assert not worker.wait(0) and worker.take(Read(), 1) == []
    reads = [reading(worker, names) for names in ("abc", "dxe", "xyz", "")]
    assert take_all(worker, *reads) == [payloads("abc"), payloads("d"), [], []]
    assert not any(read.is_reading for read in reads)
    worker.close()


def test_a_wait_may_be_for_several_blocks_and_ends_when_no_more_can_come(tmp_path, store):
    put_chain(store, *"abcdef")
    size = len(payload_of(named("a")))
    worker = BlockWorker(store, 1 << 20, 1 << 20)
    one = reading(worker, "abcdef")
    assert worker.wait(10, 3 * size) and len(worker.take(one, 1 << 20)) >= 3
    while worker.wait(10, 1 << 30):  # all of them are fewer
        worker.take(one, 1 << 20)
    assert not one.is_reading
    small = BlockWorker(open_store(tmp_path / "cache"), 1 << 20, 2 * size)
    two = reading(small, "abcdef")
    assert small.wait(10, 3 * size), "no more have room"
    assert len(small.take(two, 1 << 20)) == 2
    worker.close(), small.close()


def test_a_bad_block_is_a_miss(store):
    put_chain(store, *"abc")
    file_of(store, "b").write_bytes(b"garbage")
    worker = BlockWorker(store, 1 << 20, 1 << 20)
    assert take_all(worker, reading(worker, "abc")) == [payloads("a")]
    assert store.stats().num_corrupt == 1
    worker.close()


def test_only_so_much_is_read_ahead(store):
    put_chain(store, *"abcdef")
    worker = BlockWorker(store, 1 << 20, max_ready_nbytes=2000)
    read = reading(worker, "abcdef")
    wait_until(lambda: store.stats().num_hits == 2)
    time.sleep(0.02)
    assert store.stats().num_hits == 2 and read.is_reading
    assert take_all(worker, read) == [payloads("abcdef")]
    worker.close()


def test_blocks_are_taken_up_to_the_one_that_exceeds_what_is_asked_for(store):
    put_chain(store, *"abcdef")
    worker = BlockWorker(store, 1 << 20, 1 << 20)
    read = reading(worker, "abcdef")
    assert worker.wait(10, 6000)
    taken = [worker.take(read, limit) for limit in (0, 1, 2000, 2001)]
    assert taken == [payloads(names) for names in ("", "a", "bc", "def")]
    assert not read.is_reading
    worker.close()


def test_a_block_that_is_larger_than_the_bound_is_read_all_the_same(store):
    put_chain(store, *"ab")
    worker = BlockWorker(store, 1 << 20, max_ready_nbytes=1)
    assert take_all(worker, reading(worker, "ab")) == [payloads("ab")]
    worker.close()


def test_a_read_that_was_cancelled_gets_nothing_and_can_be_used_again(monkeypatch, store):
    put_chain(store, *"abcdef")
    get, may_read, num_begun = store.load, threading.Semaphore(0), []

    def wait_and_get(block_hash):
        num_begun.append(block_hash)
        assert may_read.acquire(timeout=10)
        return get(block_hash)

    monkeypatch.setattr(store, "load", wait_and_get)
    worker = BlockWorker(store, 1 << 20, 1 << 20)
    one, two = reading(worker, "abc"), reading(worker, "de")
    may_read.release()  # a
    wait_until(lambda: len(num_begun) == 2)  # b is in hand
    worker.cancel(one)
    assert not one.is_reading and two.is_reading and worker.take(one, 1) == []
    worker.read(one, hashes("f"))
    worker.cancel(Read())
    for _ in range(9):
        may_read.release()
    assert take_all(worker, one, two) == [payloads("f"), payloads("de")]
    worker.close()


def test_a_closed_worker_reads_nothing(store):
    put_chain(store, *"abc")
    worker = BlockWorker(store, 1 << 20, 1)
    before = reading(worker, "abc")
    wait_until(lambda: worker.wait(1))
    worker.close()
    after = reading(worker, "abc")
    assert not before.is_reading and not after.is_reading
    assert not worker.wait(0.01) and worker.take(before, 1 << 20) == []
    worker.close()


def test_a_closed_worker_ends_its_threads(tmp_path):
    before = set(threading.enumerate())
    worker = BlockWorker(open_store(tmp_path / "cache"), 1 << 20, 1)
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2 and all(thread.daemon for thread in threads)
    worker.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_an_unforeseen_error_of_a_read_ends_in_the_failure_of_the_store(monkeypatch, store):
    put_chain(store, *"ab")
    monkeypatch.setattr(store, "load", lambda _: 1 // 0)
    worker = BlockWorker(store, 1 << 20, 1 << 20)
    assert take_all(worker, reading(worker, "ab")) == [[]]
    assert store.failure is not None and "ZeroDivisionError" in store.failure
    worker.close()
