"""``BlockWriter``: blocks are written behind the back of whoever offers them, or dropped."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from helpers.block_stores import (
    UNIT,
    block_files,
    found,
    header,
    named,
    open_store,
    payload_of,
    put_chain,
)

from mlx_paged.block_store import BlockWriter, catalogue
from mlx_paged.block_store import workers as writer_module


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


def offer(writer: BlockWriter, name: str) -> bool:
    return writer.offer(header(name), payload_of(named(name)))


def test_what_is_offered_is_written_in_order(tmp_path):
    store = open_store(tmp_path / "cache")
    writer = BlockWriter(store, 1 << 20)
    assert all(offer(writer, name) for name in "abcdef")
    assert writer.flush(10)
    assert found(store, "abcdef") == "abcdef"
    assert store.stats().num_written == 6 and store.stats().nbytes == 6 * UNIT
    assert writer.close(10)


def test_a_full_queue_drops_and_never_waits(tmp_path, monkeypatch):
    store = open_store(tmp_path / "cache")
    gate = Gate(store, monkeypatch)
    writer = BlockWriter(store, max_queued_nbytes=2500)
    assert offer(writer, "a")
    gate.wait_for_a_write()  # a is in hand, and no more in the queue
    assert [offer(writer, name) for name in "bcde"] == [True, True, False, False]
    assert not writer.flush(0.01)
    gate.is_open.set()
    assert writer.flush(10)
    assert found(store, "abcde") == "abc"
    assert store.stats().num_dropped == 2
    writer.close()


def test_a_block_larger_than_the_queue_is_taken_when_nothing_waits(tmp_path):
    store = open_store(tmp_path / "cache")
    writer = BlockWriter(store, max_queued_nbytes=1)
    assert offer(writer, "a") and writer.flush(10)
    assert found(store, "a") == "a"
    writer.close()


def test_a_closed_writer_has_written_all_and_takes_nothing_more(tmp_path):
    store = open_store(tmp_path / "cache")
    writer = BlockWriter(store, 1 << 20)
    for name in "abcd":
        offer(writer, name)
    assert writer.close(10)
    assert found(store, "abcd") == "abcd"
    assert not offer(writer, "e") and store.stats().num_dropped == 1
    assert writer.close(10) and writer.flush(10)
    assert not writer._thread.is_alive()


def test_closing_takes_no_longer_than_it_may(tmp_path, monkeypatch):
    store = open_store(tmp_path / "cache")
    gate = Gate(store, monkeypatch)
    writer = BlockWriter(store, 1 << 20)
    for name in "abc":
        offer(writer, name)
    gate.wait_for_a_write()
    assert not writer.close(0.02)
    assert store.stats().num_dropped == 2
    gate.is_open.set()
    assert writer.close(10)
    assert found(store, "abc") == "a"


def test_uses_are_written_down_with_the_blocks(tmp_path):
    store = open_store(tmp_path / "cache", num_blocks=2)
    writer = BlockWriter(store, 1 << 20)
    offer(writer, "a")
    offer(writer, "b")
    assert writer.flush(10)
    store.note_used([named("a")])
    assert writer.flush(10)
    offer(writer, "c")
    assert writer.flush(10)
    assert found(store, "abc") == "ac"
    writer.close()


def test_a_writer_that_finishes_ends_after_its_work(tmp_path, monkeypatch):
    store = open_store(tmp_path / "cache")
    gate = Gate(store, monkeypatch)
    writer = BlockWriter(store, 1 << 20)
    offer(writer, "a")
    writer.finish()
    assert not offer(writer, "b")
    gate.is_open.set()
    writer._thread.join(10)
    assert not writer._thread.is_alive() and block_files(tmp_path) != []
    assert store.load(named("a")) is None, "the store is closed"


def test_an_error_that_nobody_thought_of_ends_in_the_failure_of_the_store(tmp_path, monkeypatch):
    store = open_store(tmp_path / "cache")
    writer = BlockWriter(store, 1 << 20)
    assert writer.flush(10)
    monkeypatch.setattr(store, "_write", lambda *_: 1 // 0)
    assert offer(writer, "a") and writer.flush(10)
    assert store.failure is not None and "ZeroDivisionError" in store.failure
    assert not offer(writer, "b") and writer.close(10)


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "1 / 0"])
def test_what_is_queued_is_written_before_the_interpreter_ends(tmp_path, end):
    script = f"""
import sys
sys.path[:0] = {sys.path!r}
from helpers.block_stores import header, named, open_store, payload_of
from mlx_paged.block_store import BlockWriter, catalogue
from mlx_paged.block_store import workers as writer_module
store = open_store({str(tmp_path / "cache")!r})
writer = BlockWriter(store, 1 << 30)
for number in range(50):
    writer.offer(header(str(number)), payload_of(named(str(number))))
{end}
"""
    subprocess.run([sys.executable, "-c", script], stderr=subprocess.DEVNULL, timeout=60)
    assert len(block_files(tmp_path)) == 50


def test_closing_during_a_long_listing_does_not_wait_for_its_end(tmp_path, monkeypatch):
    store = open_store(tmp_path / "cache")
    put_chain(store, *map(str, range(100)))
    monkeypatch.setattr(catalogue, "_FILES_AT_A_TIME", 1)
    monkeypatch.setattr(catalogue, "_SECONDS_BETWEEN_PAUSES", -1.0)
    monkeypatch.setattr(writer_module, "_SECONDS_OF_A_PAUSE", 0.5)  # a hundred take 50 s
    beside = open_store(tmp_path / "cache")
    writer = BlockWriter(beside, 1 << 20)
    assert writer.close(5)
    assert beside.failure is None and beside.stats().num_blocks == 0
    # Whoever comes next lists them.
    beside.maintain()
    assert beside.stats().num_blocks == 100
