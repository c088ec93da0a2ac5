"""Folders that earlier versions wrote, with an SQLite index and times in the order of writing."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from helpers.block_stores import file_of, found, make_older, named, open_store, put, put_chain

from mlx_paged.block_store import CacheFolder
from mlx_paged.block_store.block_file import encode_header
from mlx_paged.core.tier import STATES, BlockHeader

SIDE_FILES = ("", "-journal", "-wal", "-shm")


def make_earlier(folder: Path) -> Path:
    """Give a folder an index, of which nothing is read any more."""
    index = folder / "index-v1.sqlite3"
    with sqlite3.connect(index) as database:
        database.execute("CREATE TABLE blocks (digest TEXT, hash BLOB)")
    database.close()
    for suffix in SIDE_FILES[1:]:
        Path(f"{index}{suffix}").write_bytes(b"\x07" * 5000)
    return index


def test_blocks_of_an_earlier_version_are_found_and_go_leaves_first(tmp_path):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"abcd")
    put(store, "e", "b", 32)
    put(store, "f")
    # There, a block kept its own time, and the first one of a prompt was the oldest.
    for place, name in enumerate("acfebd"):
        make_older(file_of(store, name), 200 - 10 * place)
    index = make_earlier(tmp_path / "cache")
    again = open_store(tmp_path / "cache")
    again.maintain()
    assert found(again, "abcdef") == "abcdef" and again.stats().num_blocks == 6
    assert not [*(tmp_path / "cache").glob("index*")] and not index.exists()
    for num_blocks, left in ((5, "abcde"), (4, "abcd"), (3, "abc"), (2, "ab"), (1, "a")):
        small = open_store(tmp_path / "cache", num_blocks=num_blocks)
        small.maintain()
        there = "".join(name for name in "abcdef" if file_of(store, name).exists())
        # f was used after c, which d follows, but before e.
        assert there == left


def test_a_state_is_used_no_later_than_the_block_before_it(tmp_path):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"ab")
    key = named("b") + b"\xff\xff"
    assert store.store(BlockHeader(key, named("b"), (1,) * 16, 16, STATES), b"state")
    state = Path(store.layout.block(store.fingerprint.digest, key))
    for path, age in ((file_of(store, "a"), 300), (file_of(store, "b"), 200), (state, 100)):
        make_older(path, age)
    make_earlier(tmp_path / "cache")
    open_store(tmp_path / "cache").maintain()
    times = [path.stat().st_mtime_ns for path in (file_of(store, "a"), file_of(store, "b"), state)]
    assert times[0] == times[1] == times[2]


def test_the_tool_takes_a_folder_over_too(tmp_path):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"abc")
    for name in "abc":
        make_older(file_of(store, name), 100)
    make_earlier(tmp_path / "cache")
    assert CacheFolder(tmp_path / "cache").shrink(2 * 4096).num_blocks == 1
    assert found(store, "abc") == "ab"


def test_a_link_in_the_place_of_an_index_is_removed_and_not_followed(tmp_path):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"ab")
    (tmp_path / "other").mkdir()
    target = make_earlier(tmp_path / "other")
    before = target.read_bytes()
    for suffix in SIDE_FILES:
        (tmp_path / "cache" / f"index-v1.sqlite3{suffix}").symlink_to(f"{target}{suffix}")
    again = open_store(tmp_path / "cache")
    again.maintain()
    assert again.stats().num_blocks == 2 and target.read_bytes() == before
    assert not [*(tmp_path / "cache").glob("index*")]


@pytest.mark.parametrize("obstacle", ["folder", "refusal"])
def test_an_index_that_can_not_be_removed_stays(tmp_path, monkeypatch, obstacle):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"ab")
    index = tmp_path / "cache" / "index-v1.sqlite3"
    if obstacle == "folder":
        index.mkdir()
    else:
        index.touch()
        unlink = os.unlink

        def refuse(path, **options):
            if os.path.basename(path) == index.name:
                raise PermissionError(1, "Operation not permitted")
            unlink(path, **options)

        monkeypatch.setattr(os, "unlink", refuse)
    again = open_store(tmp_path / "cache")
    put(again, "c")
    assert found(again, "abc") == "abc" and again.failure is None and index.exists()


def test_damaged_blocks_do_not_end_the_work(tmp_path):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"abc")
    file_of(store, "b").write_bytes(encode_header(BlockHeader(b"x"), "0" * 32, 0.0, None, b""))
    file_of(store, "c").write_bytes(b"")
    make_earlier(tmp_path / "cache")
    again = open_store(tmp_path / "cache")
    again.maintain()
    assert found(again, "abc") == "a" and again.failure is None
    assert not [*(tmp_path / "cache").glob("index*")]
