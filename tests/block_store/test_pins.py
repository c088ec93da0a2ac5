"""Pins: read once, and again when another process changes them."""

from __future__ import annotations

import os
import threading
import time

from helpers.block_stores import named, open_store, put, put_chain

from mlx_paged.block_store import CacheFolder
from mlx_paged.block_store.block_files import BlockFiles


def set_time(folder, seconds_ago: float) -> None:
    then = time.time() - seconds_ago
    os.utime(folder, (then, then))


def test_pins_are_read_again_only_when_they_change(tmp_path, monkeypatch, store):
    put_chain(store, *"abc")
    digest, folder = (
        store.fingerprint.digest,
        store.files.path_of(store.fingerprint.digest) / "pins",
    )
    pins, tool = BlockFiles(store.folder), CacheFolder(tmp_path / "cache")
    assert pins.kept(digest) == frozenset()
    tool.pin(digest, named("b"))
    set_time(folder, 100)
    reads = []
    pinned = pins.pinned
    monkeypatch.setattr(pins, "pinned", lambda digest: reads.append(digest) or pinned(digest))
    for _ in range(5):
        assert named("a") in pins.kept(digest) and named("c") not in pins.kept(digest)
    assert reads == [digest]
    tool.pin(digest, named("c"))
    set_time(folder, 50)
    assert pins.kept(digest) == {named(name) for name in "abc"}
    tool.unpin(digest, named("c"))
    tool.unpin(digest, named("b"))
    assert pins.kept(digest) == frozenset()


def test_pins_are_not_read_again_for_each_eviction(tmp_path, monkeypatch, store):
    put_chain(store, *(f"block {number}" for number in range(64)))
    digest = store.fingerprint.digest
    CacheFolder(tmp_path / "cache").pin(digest, named("block 1"))  # just now
    store.close()
    reads = []
    pinned = BlockFiles.pinned
    monkeypatch.setattr(BlockFiles, "pinned", lambda *names: reads.append(names) or pinned(*names))
    small = open_store(tmp_path / "cache", num_blocks=2)
    small.maintain()
    assert small.stats().num_evicted == 62
    assert len(reads) <= 1 + 62 // 16 + 1  # once for the listing, and for sixteen evictions


def test_pins_from_the_future_are_read_once(tmp_path, monkeypatch, store):
    put_chain(store, *"ab")
    digest = store.fingerprint.digest
    pins = store.files
    CacheFolder(tmp_path / "cache").pin(digest, named("a"))
    set_time(store.files.path_of(digest) / "pins", -1e8)
    assert pins.kept(digest) == {named("a")}
    monkeypatch.setattr(pins, "pinned", None)
    assert pins.kept(digest) == {named("a")}


def test_a_pin_that_comes_while_blocks_are_evicted_is_kept_or_said_not_to_be(tmp_path, monkeypatch):
    store = open_store(tmp_path / "cache", num_blocks=2)
    for name in "ab":
        put(store, name)
    store.maintain()
    tool, digest = CacheFolder(tmp_path / "cache"), store.fingerprint.digest
    tool.entries()
    answers: list[bool] = []
    pin = threading.Thread(target=lambda: answers.append(tool.pin(digest, named("a"))))
    is_added = threading.Event()
    add, remove = tool._files.pin, store.files.remove

    def add_and_say_so(*names):
        add(*names)
        is_added.set()

    def pin_and_remove(name):
        # Evictions have looked at the pins by now.
        if name == (digest, named("a")):
            pin.start()
            assert is_added.wait(30)
        return remove(name)

    monkeypatch.setattr(tool._files, "pin", add_and_say_so)
    monkeypatch.setattr(store.files, "remove", pin_and_remove)
    put(store, "c")
    pin.join(30)
    assert answers == [store.has(named("a"))]


def test_two_changes_within_a_tick_of_the_clock_are_both_seen(tmp_path, store):
    put_chain(store, *"ab")
    digest, folder = (
        store.fingerprint.digest,
        store.files.path_of(store.fingerprint.digest) / "pins",
    )
    pins, tool = BlockFiles(store.folder), CacheFolder(tmp_path / "cache")
    tool.pin(digest, named("a"))
    status = folder.stat()
    assert pins.kept(digest) == {named("a")}
    tool.pin(digest, named("b"))
    os.utime(folder, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert pins.kept(digest) == {named("a"), named("b")}


def test_a_block_that_goes_while_it_is_pinned_is_not_said_to_be(tmp_path, monkeypatch, store):
    put_chain(store, *"ab")
    tool = CacheFolder(tmp_path / "cache")
    add = tool._files.pin

    def evict_and_add(digest, chain):
        os.unlink(store.files.path_of_block((digest, chain[-1])))
        add(digest, chain)

    monkeypatch.setattr(tool._files, "pin", evict_and_add)
    assert not tool.pin(store.fingerprint.digest, named("b"))
    assert tool.pins() == []
