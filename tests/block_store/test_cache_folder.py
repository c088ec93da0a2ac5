"""``CacheFolder``: what a folder holds, seen and changed from outside while engines use it."""

from __future__ import annotations

import os
import time

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
    put,
    put_chain,
)

from mlx_paged.block_store import BlockStoreError, CacheFolder, FolderSize, Removed, layout


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "cache")


@pytest.fixture
def folder(store, tmp_path):
    return CacheFolder(tmp_path / "cache")


def names(entries, letters="abcdefgh") -> str:
    known = {named(letter): letter for letter in letters}
    return "".join(known[entry.block_hash] for entry in entries)


def test_entries_say_what_lies_there_parents_first(store, folder):
    put_chain(store, "a", "b", "c")
    other = open_store(store.folder, model="another model", ttl=100.0)
    put(other, "d")
    store.note_used([named("a"), named("b")])
    store.maintain()
    before = time.time()
    entries = folder.entries()
    by_model = sorted([store.fingerprint.digest, other.fingerprint.digest])
    expected = {store.fingerprint.digest: "abc", other.fingerprint.digest: "d"}
    assert names(entries) == "".join(expected[digest] for digest in by_model)
    known = {names([entry]): entry for entry in entries}
    b, c, d = known["b"], known["c"], known["d"]
    assert b.name == (store.fingerprint.digest, named("b"))
    assert (b.parent_hash, b.first_token, b.num_tokens, b.group) == (named("a"), 16, 16, 0)
    assert (b.nbytes, b.expires, b.is_pinned) == (UNIT, None, False)
    assert b.created < b.last_used <= before and c.last_used < b.last_used
    assert d.expires == pytest.approx(d.last_used + 100, abs=1e-3)


def test_fingerprints_are_read_and_unreadable_ones_named(store, folder):
    other = open_store(store.folder, model="another model")
    swapped = open_store(store.folder, model="a third model")
    texts = [each.files.path_of(each.fingerprint.digest) for each in (other, swapped)]
    (texts[0] / "fingerprint.json").write_text("garbage")
    (texts[1] / "fingerprint.json").write_text(fingerprint().as_json())
    assert folder.fingerprints() == {
        store.fingerprint.digest: store.fingerprint,
        other.fingerprint.digest: None,
        swapped.fingerprint.digest: None,
    }
    # The next start of an engine mends it.
    open_store(store.folder, model="another model")
    assert folder.fingerprints()[other.fingerprint.digest] == other.fingerprint


def test_a_header_gives_the_token_ids(store, folder):
    put_chain(store, "a", "b")
    digest = store.fingerprint.digest
    assert folder.header(digest, named("b")) == header("b", "a", 16)
    assert folder.header(digest, named("c")) is None
    file_of(store, "b").write_bytes(b"garbage")
    assert folder.header(digest, named("b")) is None


def test_pins_show_on_the_block_and_its_ancestors(store, folder):
    put_chain(store, "a", "b", "c")
    put(store, "d", "a", 16)
    digest = store.fingerprint.digest
    assert folder.pin(digest, named("b")) and not folder.pin(digest, named("x"))
    assert folder.pins() == [(digest, named("b"))]
    assert names(entry for entry in folder.entries() if entry.is_pinned) == "ab"
    assert not folder.unpin(digest, named("a"))
    assert folder.unpin(digest, named("b"))
    assert folder.pins() == [] and not any(entry.is_pinned for entry in folder.entries())


def test_a_pin_holds_what_is_left_of_its_ancestors(store, folder):
    put_chain(store, *"abcd")
    file_of(store, "b").unlink()
    assert folder.pin(store.fingerprint.digest, named("d"))
    assert names(entry for entry in folder.entries() if entry.is_pinned) == "cd"


def test_an_unreadable_pin_still_holds_its_block(store, folder):
    put_chain(store, *"abc")
    folder.pin(store.fingerprint.digest, named("b"))
    pins = store.files.path_of(store.fingerprint.digest) / "pins"
    (pins / f"{named('b').hex()}.pin").write_bytes(b"\xff not hexadecimal")
    small = open_store(store.folder, num_blocks=1)
    small.maintain()
    assert found(small, "abc") == "b"
    assert names(entry for entry in folder.entries() if entry.is_pinned) == "b"


def test_pinned_blocks_never_expire(tmp_path):
    store = open_store(tmp_path / "cache", ttl=60.0)
    put_chain(store, *"ab")
    folder = CacheFolder(tmp_path / "cache")
    assert folder.pin(store.fingerprint.digest, named("a"))
    assert [entry.expires is None for entry in folder.entries()] == [True, False]


def test_removed_blocks_are_gone_with_their_pins(store, folder):
    put_chain(store, *"abcd")
    digest = store.fingerprint.digest
    folder.pin(digest, named("c"))
    gone = folder.remove([(digest, named(name)) for name in "cdxc"])
    assert gone == Removed(2, 2 * UNIT)
    assert found(store, "abcd") == "ab" and folder.pins() == []
    assert folder.size() == FolderSize(2, 2 * UNIT)
    assert put(store, "c", "b", 32)
    assert folder.size().num_blocks == 3


def test_verify_reads_everything_and_changes_nothing(store, folder, monkeypatch):
    put_chain(store, *"abcdefg")
    file_of(store, "b").write_bytes(b"garbage")
    os.truncate(file_of(store, "c"), 500)
    data = bytearray(file_of(store, "d").read_bytes())
    data[-1] ^= 1
    file_of(store, "d").write_bytes(data)
    file_of(store, "e").write_bytes(file_of(store, "a").read_bytes())
    with monkeypatch.context() as later:
        later.setattr(layout, "VERSION", 2)
        put(store, "h")
    checked = list(folder.verify())
    problems = {names([file]): file.problem for file in checked}
    assert problems == dict.fromkeys("afgh") | {
        "b": "it doesn't begin like a block",
        "c": "it has another size than its header says",
        "d": "the checksum of its payload is wrong",
        "e": "it is another block than its name says",
    }
    assert {file.path for file in checked} == {str(path) for path in block_files(folder_of(store))}
    bad = [(file.digest, file.block_hash) for file in checked if file.problem is not None]
    assert folder.remove(bad).num_blocks == 4
    assert all(file.problem is None for file in folder.verify())


def folder_of(store):
    return store.folder


def test_a_folder_shrinks_to_a_size_least_recently_used_first(store, folder):
    for age, name in enumerate("abcde"):
        put(store, name)
        make_older(file_of(store, name), 100 - age)
    store.close()
    assert CacheFolder(folder_of(store)).shrink(3 * UNIT) == FolderSize(2, 2 * UNIT)
    assert sorted(names(CacheFolder(folder_of(store)).entries())) == ["c", "d", "e"]
    assert folder.shrink(10 * UNIT) == FolderSize(0, 0)
    assert folder.shrink(0) == FolderSize(3, 3 * UNIT) and folder.size() == FolderSize(0, 0)


def test_a_folder_that_is_none_is_named_in_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").touch()
    (tmp_path / "foreign" / "blocks").mkdir()
    (tmp_path / "file").touch()
    for name, why in {
        "missing": "No such file or directory",
        "file": "Not a directory",
        "empty": "is not a folder of K/V blocks",
        "foreign": "is not a folder of K/V blocks",
    }.items():
        with pytest.raises(BlockStoreError, match=why) as error:
            CacheFolder(tmp_path / name)
        assert "\n" not in str(error.value) and str(tmp_path / name) in str(error.value)
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "foreign"]
    assert os.listdir(tmp_path / "empty") == []
    assert sorted(os.listdir(tmp_path / "foreign")) == ["blocks", "thesis.tex"]


def test_a_folder_in_the_place_of_a_block_can_be_seen_past(store, folder):
    put_chain(store, *"ab")
    file_of(store, "c").mkdir(parents=True)
    assert names(folder.entries()) == "ab" and folder.size().num_blocks == 2
    problems = [file.problem for file in folder.verify() if file.problem]
    assert problems == ["it is not a regular file"]
