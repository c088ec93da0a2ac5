"""``Pins``: read once, and again when another process changes them."""

from __future__ import annotations

import os
import time

from helpers.block_stores import named, open_store, put_chain

from mlx_paged.block_store import CacheFolder
from mlx_paged.block_store.pins import Pins


def set_time(folder, seconds_ago: float) -> None:
    then = time.time() - seconds_ago
    os.utime(folder, (then, then))


def test_pins_are_read_again_only_when_they_change(tmp_path, monkeypatch):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"abc")
    digest, folder = store.fingerprint.digest, store.layout.pins(store.fingerprint.digest)
    pins, tool = Pins(store.layout), CacheFolder(tmp_path / "cache")
    assert pins.kept(digest) == frozenset()
    tool.pin(digest, named("b"))
    set_time(folder, 100)
    reads = []
    pinned = pins.pinned
    monkeypatch.setattr(pins, "pinned", lambda digest: reads.append(digest) or pinned(digest))
    for _ in range(5):
        assert pins.keeps((digest, named("a"))) and not pins.keeps((digest, named("c")))
    assert reads == [digest]
    tool.pin(digest, named("c"))
    set_time(folder, 50)
    assert pins.kept(digest) == {named(name) for name in "abc"}
    tool.unpin(digest, named("c"))
    tool.unpin(digest, named("b"))
    assert pins.kept(digest) == frozenset()


def test_two_changes_within_a_tick_of_the_clock_are_both_seen(tmp_path):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"ab")
    digest, folder = store.fingerprint.digest, store.layout.pins(store.fingerprint.digest)
    pins, tool = Pins(store.layout), CacheFolder(tmp_path / "cache")
    tool.pin(digest, named("a"))
    status = folder.stat()
    assert pins.kept(digest) == {named("a")}
    tool.pin(digest, named("b"))
    os.utime(folder, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert pins.kept(digest) == {named("a"), named("b")}


def test_a_block_that_goes_while_it_is_pinned_is_not_said_to_be(tmp_path, monkeypatch):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"ab")
    tool = CacheFolder(tmp_path / "cache")
    add = tool._inventory.pins.add

    def evict_and_add(digest, chain):
        os.unlink(store.layout.block(digest, chain[-1]))
        add(digest, chain)

    monkeypatch.setattr(tool._inventory.pins, "add", evict_and_add)
    assert not tool.pin(store.fingerprint.digest, named("b"))
    assert tool.pins() == []
