"""The index is only an index: lost, broken, locked or of another version, no block is lost."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers.block_stores import (
    UNIT,
    block_files,
    file_of,
    found,
    make_older,
    named,
    open_store,
    put,
    put_chain,
)

from mlx_paged.block_store import CacheFolder, FolderSize
from mlx_paged.block_store import inventory as inventory_module
from mlx_paged.block_store import reconcile as reconcile_module
from mlx_paged.block_store.index import Index, IndexRow, nbytes_on_disk

DIGEST = "0" * 32


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(inventory_module, "_BUSY_SECONDS", 0.05)
    monkeypatch.setattr(inventory_module, "_BUSY_SECONDS_AT_START", 0.05)


def row(name: str, parent: str | None = None, first_token: int = 0, **fields) -> IndexRow:
    given = {"group": 0, "nbytes": UNIT, "created": 1.0, "ttl": None, "last_used": 1.0}
    given.update(fields)
    parent_hash = None if parent is None else parent.encode()
    return IndexRow(DIGEST, name.encode(), parent_hash, first_token, 16, **given)


def in_order_of_eviction(index: Index, kept: str = "") -> str:
    """The blocks of an index, which is empty then except for those that are kept."""
    order = ""
    while (leaf := index.oldest_leaf(lambda name: name[1].decode() in kept)) is not None:
        index.remove([leaf[0]])
        order += leaf[0][1].decode()
    return order


def test_sums_and_children_follow_rows_in_any_order():
    rng = random.Random(3)
    names = "abcdefghijklmnopqrstuvwxyz"
    parents = {name: rng.choice([None, *names[:at]]) for at, name in enumerate(names)}
    index = Index(None, 0)
    there: set[str] = set()
    for _ in range(300):
        name = rng.choice(names)
        if name in there and rng.random() < 0.5:
            index.remove([(DIGEST, name.encode())])
            there.remove(name)
        else:
            index.add([row(name, parents[name], nbytes=UNIT * names.index(name))])
            there.add(name)
        assert index.totals() == (len(there), sum(UNIT * names.index(each) for each in there))
    order = in_order_of_eviction(index)
    assert set(order) == there
    for at, name in enumerate(order):
        assert name not in {parents[later] for later in order[at:]}, (
            "a parent went before its child"
        )
    index.add([row(name) for name in names])
    index.clear()
    assert index.totals() == (0, 0) and index.rows() == []


def test_blocks_go_in_the_order_of_their_last_use_a_prefix_from_its_end():
    def forest() -> Index:
        index = Index(None, 0)
        # a-b-c was written first, and its end is of use no longer than that of d-e.
        chains = [row("a"), row("b", "a", 16), row("c", "b", 32, last_used=2.0)]
        index.add([*chains, row("d", last_used=3.0), row("e", "d", 16, last_used=4.0)])
        index.add([row("f", first_token=64, last_used=2.0), row("g", last_used=0.5)])
        return index

    assert in_order_of_eviction(forest()) == "gfcbaed"
    assert in_order_of_eviction(forest(), kept="fb") == "gced"
    index = forest()
    index.note_used(DIGEST, [b"a", b"b", b"?"], 5.0)
    index.note_used(DIGEST, [b"a"], 4.5)
    rows = {each.block_hash: each for each in index.rows()}
    assert (rows[b"a"].last_used, rows[b"a"].num_hits, rows[b"b"].num_hits) == (5.0, 2, 1)
    assert in_order_of_eviction(index) == "gfcedba"


def test_a_row_that_is_added_again_keeps_its_hits_and_children():
    index = Index(None, 0)
    index.add([row("b", "a", 16), row("a")])
    index.note_used(DIGEST, [b"a"], 5.0)
    index.add([row("a", nbytes=3 * UNIT, last_used=7.0)])
    assert index.totals() == (2, 4 * UNIT) and in_order_of_eviction(index, kept="a") == "b"
    known = next(each for each in index.rows() if each.block_hash == b"a")
    assert (known.num_hits, known.last_used, known.nbytes) == (1, 7.0, 3 * UNIT)


def test_the_first_byte_of_a_hash_tells_its_shard():
    index = Index(None, 0)
    hashes = [bytes([first]) + rest for first in (0, 1, 254, 255) for rest in (b"", b"\xff" * 63)]
    index.add(
        row("x").__class__(DIGEST, each, None, 0, 1, 0, UNIT, 1.0, None, 1.0) for each in hashes
    )
    for first in (0, 1, 2, 254, 255):
        assert set(index.shard(DIGEST, first)) == {each for each in hashes if each[0] == first}


def test_files_take_whole_units():
    assert [nbytes_on_disk(size) for size in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]


def delete(path: Path) -> None:
    path.unlink()


def delete_all(path: Path) -> None:
    for name in ("", "-journal"):
        Path(f"{path}{name}").unlink(missing_ok=True)


def delete_the_journal(path: Path) -> None:
    Path(f"{path}-journal").unlink(missing_ok=True)


def garbage(path: Path) -> None:
    delete_all(path)
    path.write_bytes(random.Random(1).randbytes(20_000))


def garbage_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(random.Random(1).randbytes(path.stat().st_size))
    Path(f"{path}-journal").write_bytes(random.Random(2).randbytes(20_000))


def nothing(path: Path) -> None:
    delete_all(path)
    path.touch()


def a_folder(path: Path) -> None:
    delete_all(path)
    path.mkdir()


def another_version(path: Path) -> None:
    delete_all(path)
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE blocks (other)")
    database.execute("PRAGMA user_version = 7")
    database.close()


def no_table(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("DROP TABLE blocks")
    database.close()


def no_sums(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM totals")
    database.close()


def wrong_sums(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("UPDATE totals SET nbytes = nbytes / 2")
    database.close()


def wrong_numbers_of_children(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("UPDATE blocks SET num_children = 1")
    database.close()


def no_leaves(path: Path) -> None:
    statements = [
        "UPDATE blocks SET num_children = num_children + 1",
        "CREATE TABLE kept AS SELECT * FROM sqlite_master WHERE name = 'leaves'",
        "DELETE FROM sqlite_master WHERE name = 'leaves'",
        "UPDATE blocks SET num_children = num_children - 1",
        "INSERT INTO sqlite_master SELECT * FROM kept",
        "DROP TABLE kept",
    ]
    for statement in statements:  # a connection for each: what the schema says is read once
        with sqlite3.connect(path) as database:
            database.execute("PRAGMA writable_schema = ON")
            database.execute(statement)
        database.close()


def a_dangerous_row(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute(
            "INSERT INTO blocks VALUES ('../..', x'00', NULL, 0, 0, 0, 4096, 0, NULL, 0, 0, 0)"
        )
    database.close()


HARMS = [
    delete, delete_all, delete_the_journal, garbage, garbage_in_place, nothing, a_folder,
    another_version, no_table, no_sums, a_dangerous_row,
]  # fmt: skip
CONTRADICTIONS = [wrong_sums, wrong_numbers_of_children, no_leaves]


@pytest.mark.parametrize("harm", [*HARMS, *CONTRADICTIONS])
def test_an_index_that_is_harmed_before_a_start_is_made_again(tmp_path, harm):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"abcd")
    if harm is garbage_in_place:
        store.maintain()
    else:
        store.close()
    harm(store.layout.index)
    again = open_store(tmp_path / "cache", num_blocks=4)
    put(again, "e")
    assert found(again, "abcde") == "abce" and again.failure is None
    assert (again.stats().num_blocks, len(block_files(tmp_path))) == (4, 4)


@pytest.mark.parametrize("harm", HARMS)
def test_an_index_that_is_harmed_while_it_is_used_is_made_again(tmp_path, harm):
    store = open_store(tmp_path / "cache", num_blocks=4)
    beside = open_store(tmp_path / "cache", num_blocks=4)
    put_chain(store, *"abcd")
    store.maintain()
    beside.maintain()
    harm(store.layout.index)
    for name in "efghij":
        assert put(store, name) and put(beside, name.upper())
        assert found(store, name) == name and found(beside, name.upper()) == name.upper()
        store.maintain()
        beside.maintain()
    assert store.failure is None and beside.failure is None
    store.close()
    beside.close()
    last = open_store(tmp_path / "cache", num_blocks=4)
    last.maintain()
    assert len(block_files(tmp_path)) == last.stats().num_blocks == 4


def test_an_index_with_any_byte_broken_costs_no_block(tmp_path):
    rng = random.Random(7)
    for number in range(15):
        store = open_store(tmp_path / str(number), num_blocks=6)
        put_chain(store, *"abcd")
        store.close()
        data = bytearray(store.layout.index.read_bytes())
        for _ in range(rng.choice([1, 5, 200])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        store.layout.index.write_bytes(data)
        store = open_store(tmp_path / str(number), num_blocks=6)
        store.maintain()
        assert found(store, "abcd") == "abcd"
        for name in "efghij":
            put(store, name)
        assert store.failure is None or "index" in store.failure or "tended" in store.failure
        assert len(block_files(tmp_path / str(number))) <= 8


def test_an_index_locked_for_ever_is_done_without(tmp_path):
    store = open_store(tmp_path / "cache", num_blocks=4)
    put_chain(store, *"abcd")
    store.close()
    file = store.layout.index.stat().st_ino
    lock = sqlite3.connect(store.layout.index, isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    store = open_store(tmp_path / "cache", num_blocks=4)
    put(store, "e")
    assert found(store, "abcde") == "abce" and store.failure is None
    assert store.stats().num_blocks == len(block_files(tmp_path)) == 4
    lock.close()
    assert store.layout.index.stat().st_ino == file  # it is others', and not broken


def test_an_index_that_is_locked_later_is_done_without(tmp_path):
    store = open_store(tmp_path / "cache", num_blocks=4)
    put_chain(store, *"abcd")
    store.maintain()
    lock = sqlite3.connect(store.layout.index, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    put(store, "e")
    store.maintain()
    assert found(store, "abcde") == "abce" and store.failure is None
    lock.close()


WORKER = """
import sys
sys.path[:0] = {path!r}
from helpers.block_stores import found, open_store, put
store = open_store(sys.argv[1], num_blocks=4)
for name in "abcdefgh":
    assert put(store, name) and found(store, name) == name
    store.maintain()
    print("ready", flush=True)
    sys.stdin.readline()
print(store.failure, store.stats().num_blocks, flush=True)
store.close()
"""


def test_no_file_of_the_index_that_is_truncated_in_place_ends_a_process(tmp_path):
    command = [sys.executable, "-c", WORKER.format(path=sys.path), str(tmp_path / "cache")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as worker:
        beside = None
        while (line := worker.stdout.readline()) == "ready\n":
            beside = beside or open_store(tmp_path / "cache", num_blocks=4)
            beside.maintain()
            for path in (tmp_path / "cache").glob("index*"):
                os.truncate(path, 0)
            worker.stdin.write("go on\n")
        assert line == "None 4\n"
    assert worker.returncode == 0
    beside.maintain()
    assert beside.stats().num_blocks == len(block_files(tmp_path)) == 4


def test_without_an_index_on_disk_the_work_of_others_is_seen_now_and_then(tmp_path, monkeypatch):
    alone = open_store(tmp_path / "cache", num_blocks=4)
    monkeypatch.setattr(alone._inventory, "_must_be_private", True)
    alone._inventory.close()
    put_chain(open_store(tmp_path / "cache", num_blocks=4), *"abcd")
    alone.maintain()
    assert alone.stats().num_blocks == 4
    other = open_store(tmp_path / "cache", num_blocks=100, model="another model")
    put_chain(other, *"xyz")
    alone.maintain()
    assert alone.stats().num_blocks == 4
    monkeypatch.setattr(inventory_module, "_SECONDS_BETWEEN_LISTINGS", 0.0)
    alone.maintain()
    alone.maintain()
    assert len(block_files(tmp_path)) == alone.stats().num_blocks == 4


def test_an_index_that_could_not_be_used_is_shared_again_later(tmp_path, monkeypatch):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"ab")
    store.maintain()
    lock = sqlite3.connect(store.layout.index, isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    put(store, "c")
    store.maintain()
    assert not store._inventory._index.is_shared
    lock.close()
    store.maintain()
    assert not store._inventory._index.is_shared
    monkeypatch.setattr(inventory_module, "_SECONDS_BETWEEN_LISTINGS", 0.0)
    store.maintain()
    store.maintain()
    assert store._inventory._index.is_shared and store.stats().num_blocks == 3
    assert store.failure is None


def test_an_administrator_leaves_no_index_of_his_own(tmp_path, monkeypatch):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"abcd")
    store.close()
    store.layout.index.unlink()
    monkeypatch.setattr(os, "geteuid", lambda: 0 if os.getuid() else 12345)
    assert CacheFolder(tmp_path / "cache").size().num_blocks == 4
    assert not store.layout.index.exists()


def test_files_that_no_process_has_noted_down_count_after_the_next_start(tmp_path):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"ab")
    store.maintain()
    put_chain(store, *"cd")  # and the process is killed: c and d are not in the index
    file_of(store, "a").unlink()  # nor that a has gone
    make_older(file_of(store, "b"), 100)
    store = open_store(tmp_path / "cache", num_blocks=3)
    assert store._inventory.glance()[0] == 2
    store.maintain()
    assert store.stats().num_blocks == 3
    put(store, "e")
    assert found(store, "abcde") == "cde"


def test_the_rows_of_files_that_have_vanished_go_at_the_next_start(tmp_path):
    store, other = (open_store(tmp_path / "cache", model=model) for model in ("one", "another"))
    put_chain(store, *"abc")
    put_chain(other, *"de")
    store.close()
    other.close()
    file_of(store, "c").unlink()
    shutil.rmtree(file_of(store, "b").parent)
    shutil.rmtree(store.layout.of(other.fingerprint.digest))
    tool = CacheFolder(tmp_path / "cache")
    assert [entry.name for entry in tool.entries()] == [(store.fingerprint.digest, named("a"))]
    assert tool.size() == FolderSize(1, UNIT)


def test_the_times_of_files_count_more_than_those_of_the_index(tmp_path):
    store = open_store(tmp_path / "cache")
    for age, name in enumerate("abc"):
        put(store, name)
        make_older(file_of(store, name), 100 - age)
    store.close()
    make_older(file_of(store, "a"), 10)  # used by a process that had no index on disk
    store = open_store(tmp_path / "cache", num_blocks=2)
    store.maintain()
    assert found(store, "abc") == "ac"


def test_a_file_that_has_another_size_than_the_index_says_is_read_again(tmp_path):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"abc")
    store.close()
    os.truncate(file_of(store, "c"), 0)
    file_of(store, "b").write_bytes(b"garbage" * 1000)
    store = open_store(tmp_path / "cache")
    store.maintain()
    assert store.stats().num_corrupt == 2 and store.stats().nbytes == UNIT
    assert block_files(tmp_path) == [file_of(store, "a")]


def test_a_block_that_is_written_during_a_listing_stays_in_the_index(tmp_path, monkeypatch):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"abc")
    store.maintain()
    # As if all had been written after the folders were listed.
    monkeypatch.setattr(reconcile_module, "_list_shard", lambda *_: {})
    other = open_store(tmp_path / "cache")
    other.maintain()
    assert other.stats().num_blocks == 3


def test_a_process_that_notes_late_does_not_undo_what_others_know(tmp_path):
    store, other = open_store(tmp_path / "cache"), open_store(tmp_path / "cache")
    put_chain(store, *"ab")
    other.maintain()  # has found both before they were noted down
    store.maintain()
    file_of(store, "a").write_bytes(b"garbage")
    assert store.load(named("a")) is None  # lost, and written again before that is noted down
    put(other, "a")
    other.maintain()
    store.maintain()
    assert store.stats().num_blocks == 2 == CacheFolder(tmp_path / "cache").size().num_blocks


def test_reads_never_wait_for_the_index(tmp_path):
    store = open_store(tmp_path / "cache")
    put_chain(store, *"abcd")
    with store._inventory._lock, store._writing:
        done = []
        thread = threading.Thread(target=lambda: done.append(found(store, "abcde")))
        thread.start()
        thread.join(10)
        store.note_used([named("a")])
        assert done == ["abcd"]
