"""Folders that earlier versions wrote, with an SQLite index. Their blocks are outdated."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from helpers.block_stores import found, open_store, put, put_chain

from mlx_paged.block_store import CacheFolder

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


@pytest.mark.parametrize("opened", ["by an engine", "by the tool"])
def test_the_index_of_an_earlier_version_is_removed_and_not_read(tmp_path, opened, store):
    put_chain(store, *"abc")
    index = make_earlier(tmp_path / "cache")
    if opened == "by an engine":
        again = open_store(tmp_path / "cache")
        again.maintain()
        assert again.stats().num_blocks == 3
    else:
        assert CacheFolder(tmp_path / "cache").size().num_blocks == 3
    assert found(store, "abc") == "abc"
    assert not [*(tmp_path / "cache").glob("index*")] and not index.exists()


def test_a_link_in_the_place_of_an_index_is_removed_and_not_followed(tmp_path, store):
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
def test_an_index_that_can_not_be_removed_stays(tmp_path, monkeypatch, obstacle, store):
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
