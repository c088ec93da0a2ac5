"""What the disk may do to a ``BlockStore``: it goes on if it can, and else says why and tries again
later.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from helpers.block_stores import (
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

from mlx_paged.block_store import BlockWorker, CacheFolder, layout
from mlx_paged.block_store import store as store_module
from mlx_paged.block_store import worker as worker_module


class Refusal:
    """Makes a function of ``os`` raise, for paths that end in a text, the next few times."""

    def __init__(self, monkeypatch, name: str, number: int, times: int = 1000, end: str = ""):
        self.times = times
        function = getattr(os, name)

        def refuse(*arguments, **options):
            if self.times > 0 and str(arguments[0]).endswith(end):
                self.times -= 1
                raise OSError(number, os.strerror(number))
            return function(*arguments, **options)

        monkeypatch.setattr(os, name, refuse)


def is_off(store) -> bool:
    """A store that has failed finds nothing, writes nothing and raises nothing."""
    assert store.load(named("a")) is None and not store.has(named("a")) and not put(store, "z")
    store.note_used([named("a")])
    store.maintain()
    failure = store.failure
    assert failure is not None and "\n" not in failure and str(store.folder) in failure
    worker = BlockWorker(store, 1 << 20, 1 << 20)
    assert worker.flush(10) and worker.close(10)
    return store.failure == failure


def garbage(path: Path) -> None:
    path.write_bytes(b"garbage" * 200)


def nothing(path: Path) -> None:
    path.write_bytes(b"")


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def another_block(path: Path) -> None:
    other = next(each for each in block_files(path.parents[2]) if each != path)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [garbage, nothing, half, link, pipe, another_block])
def test_a_file_that_is_no_good_is_removed_counted_and_computed_again(damage, store):
    put_chain(store, *"abc")
    damage(file_of(store, "b"))
    assert store.load(named("b")) is None and store.load(named("b")) is None
    assert not os.path.lexists(file_of(store, "b"))
    store.maintain()
    assert (store.stats().num_corrupt, store.stats().num_blocks) == (1, 2)
    put_chain(store, *"abc")
    assert found(store, "abc") == "abc" and store.failure is None
    assert store.stats().num_blocks == 3


@pytest.mark.parametrize("damage", [garbage, nothing, half, link, pipe, another_block])
def test_a_file_that_was_no_good_before_a_start_is_a_miss_too(tmp_path, damage, store):
    put_chain(store, *"abc")
    store.close()
    damage(file_of(store, "b"))
    is_block = damage not in (link, pipe)  # by its directory entry
    store = open_store(tmp_path / "cache")
    store.maintain()
    assert (store.stats().num_corrupt, store.stats().num_blocks) == (0, 2 + is_block)
    assert found(store, "abc") == "ac" and not os.path.lexists(file_of(store, "b"))
    store.maintain()
    assert (store.stats().num_corrupt, store.stats().num_blocks) == (1, 2)


def test_damaged_files_are_evicted_like_others(tmp_path, store):
    for name in "abcd":
        put(store, name)
    garbage(file_of(store, "b"))
    for name in "bdac":
        make_older(file_of(store, name), 100)
    store = open_store(tmp_path / "cache", num_blocks=2)
    store.maintain()
    assert found(store, "abcd") == "ac" and store.failure is None


def test_a_folder_in_the_place_of_a_block_is_a_miss(tmp_path, store):
    put_chain(store, *"ab")
    file_of(store, "b").unlink()
    (file_of(store, "b") / "below").mkdir(parents=True)
    assert found(store, "ab") == "a" and not put(store, "b")
    assert put(store, "c") and store.failure is None
    store.close()
    store = open_store(tmp_path / "cache")
    store.maintain()
    assert found(store, "abc") == "ac" and store.failure is None


def test_a_block_of_another_version_is_a_miss_that_ages_like_others(tmp_path, monkeypatch, store):
    with monkeypatch.context() as later:
        later.setattr(layout, "VERSION", 2)
        put_chain(store, *"ab")
    store.close()
    store = open_store(tmp_path / "cache", num_blocks=3)
    store.maintain()
    assert store.load(named("a")) is None and store.load(named("b")) is None
    assert (store.stats().num_blocks, store.stats().num_corrupt) == (2, 0)
    put_chain(store, *"cde")
    assert found(store, "cde") == "cde" and len(block_files(tmp_path)) == 3


def test_blocks_of_many_fingerprints_are_not_thrown_away_at_a_start(tmp_path):
    for number in range(5):
        store = open_store(tmp_path / "cache", model=f"model {number}")
        put_chain(store, *"ab")
        store.close()
    store = open_store(tmp_path / "cache", num_blocks=10, model="a new one")
    store.maintain()
    assert store.stats().num_blocks == 10
    assert put(store, "a") and len(block_files(tmp_path)) == 10


def test_a_full_disk_evicts_first(tmp_path, monkeypatch, store):
    put_chain(store, *"abcdef")
    Refusal(monkeypatch, "writev", errno.ENOSPC, times=1)
    assert put(store, "g")
    assert found(store, "abcdefg") == "abcdg" and store.failure is None
    assert [path.name for path in (tmp_path / "cache").rglob(".*")] == []


@pytest.mark.parametrize("missing", ["shard", "fingerprint"])
def test_a_full_disk_that_has_no_room_for_a_folder_evicts_first(
    tmp_path, monkeypatch, missing, store
):
    put_chain(open_store(tmp_path / "cache", model="another model"), *"abcdef")
    store.maintain()
    if missing == "fingerprint":
        shutil.rmtree(store.files.path_of(store.fingerprint.digest))
    Refusal(monkeypatch, "mkdir", errno.ENOSPC, times=1)
    assert put(store, "g")
    assert found(store, "g") == "g" and store.failure is None
    assert store.stats().num_evicted == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_stays_full_is_given_up(tmp_path, monkeypatch, number, store):
    put_chain(store, *"abcdef")
    Refusal(monkeypatch, "writev", number)
    assert not put(store, "g")
    assert os.strerror(number) in store.failure and store.stats().num_dropped == 1
    assert is_off(store)
    assert [path.name for path in (tmp_path / "cache").rglob(".*")] == []
    monkeypatch.undo()
    assert found(open_store(tmp_path / "cache"), "abcdefg") == "abcd"


@pytest.mark.parametrize("function", ["open", "writev", "rename"])
@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EIO])
def test_a_disk_that_refuses_writes_is_given_up(monkeypatch, function, number, store):
    put_chain(store, "a")
    store.maintain()
    end = "" if function == "writev" else ".tmp"
    Refusal(monkeypatch, function, number, end=end)
    assert not put(store, "b")
    expected = f"a block could not be written: {os.strerror(number)} ({file_of(store, 'b')})"
    assert store.failure.endswith(expected)
    assert is_off(store)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_shortage_of_the_process_drops_blocks_and_passes(monkeypatch, number, store):
    put_chain(store, *"ab")
    with monkeypatch.context() as short:
        Refusal(short, "open", number)
        assert store.load(named("a")) is None and not put(store, "c")
    assert store.failure is None and store.stats().num_corrupt == 0
    assert put(store, "c") and found(store, "abc") == "abc"


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_block_that_cannot_be_read_is_removed(monkeypatch, number, store):
    put_chain(store, *"ab")
    Refusal(monkeypatch, "open", number, times=1)
    assert store.load(named("a")) is None
    assert found(store, "ab") == "b" and store.stats().num_corrupt == 1


def test_a_bad_block_that_cannot_be_removed_is_given_up_with_the_disk(monkeypatch, store):
    put_chain(store, *"ab")
    garbage(file_of(store, "a"))
    Refusal(monkeypatch, "unlink", errno.EROFS)
    assert store.load(named("a")) is None
    assert "a bad block could not be removed: Read-only file system" in store.failure
    assert is_off(store)


def test_blocks_that_cannot_be_evicted_are_given_up_with_the_disk(tmp_path, monkeypatch):
    store = open_store(tmp_path / "cache", num_blocks=2)
    put_chain(store, *"ab")
    Refusal(monkeypatch, "unlink", errno.EACCES, end=".kv")
    assert not put(store, "c")
    assert "Permission denied" in store.failure and is_off(store)


def remove_all(folder: Path) -> None:
    shutil.rmtree(folder)


def remove_blocks(folder: Path) -> None:
    shutil.rmtree(folder / "blocks")


def replace_all_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


def replace_blocks_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder / "blocks")
    (folder / "blocks").touch()


@pytest.mark.parametrize(
    "harm", [remove_all, remove_blocks, replace_all_by_a_file, replace_blocks_by_a_file]
)
def test_a_folder_that_goes_while_it_is_used_is_given_up(tmp_path, harm, store):
    put_chain(store, *"ab")
    store.maintain()
    harm(tmp_path / "cache")
    assert found(store, "ab") == ""
    store.note_used([named("a")])
    store.maintain()
    assert not put(store, "c")
    assert is_off(store)
    assert block_files(tmp_path) == []


def a_file(path: Path) -> None:
    path.touch()


def a_link(path: Path) -> None:
    path.symlink_to(path.parents[2])


def unreadable(path: Path) -> None:
    path.mkdir(mode=0o000)


@pytest.mark.parametrize("harm", [a_file, a_link, unreadable])
def test_a_shard_that_cannot_be_used_costs_only_its_own_blocks(tmp_path, monkeypatch, harm, store):
    shard = file_of(store, "a").parent
    harm(shard)
    if harm is unreadable and os.geteuid() == 0:  # Nothing is unreadable for root.
        open_file, refuse = os.open, raising(errno.EACCES)
        monkeypatch.setattr(
            os,
            "open",
            lambda name, *a, **b: (refuse if name == shard.name else open_file)(name, *a, **b),
        )
    with pytest.warns(UserWarning, match=f"{shard}.*are not kept") as caught:
        for _ in range(2):
            assert found(store, "a") == "" and not put(store, "a")
        store.note_used([named("a")])
        store.maintain()
    assert len(caught) == 1
    put_chain(store, *"bcd")
    assert store.failure is None and store.stats().num_dropped == 2
    assert found(store, "abcd") == "bcd"
    store = open_store(tmp_path / "cache")
    store.maintain()
    assert found(store, "abcd") == "bcd" and store.stats().num_blocks == 3


def test_a_folder_in_the_place_of_the_description_costs_only_the_description(tmp_path, store):
    put_chain(store, *"ab")
    digest = store.fingerprint.digest
    description = store.files.path_of(digest) / "fingerprint.json"
    description.unlink()
    (description / "below").mkdir(parents=True)
    store = open_store(tmp_path / "cache")
    put_chain(store, *"abcd")
    assert found(store, "abcd") == "abcd" and store.failure is None
    assert CacheFolder(tmp_path / "cache").fingerprints() == {digest: None}
    assert len(CacheFolder(tmp_path / "cache").entries()) == 4


def test_a_folder_that_cannot_be_made_is_named(monkeypatch, store):
    shard = file_of(store, "a").parent
    Refusal(monkeypatch, "mkdir", errno.EROFS, end=shard.name)
    assert not put(store, "a")
    assert store.failure.endswith(f"could not be written: Read-only file system ({shard})")


def test_a_folder_in_the_place_of_the_tag_costs_only_the_tag(tmp_path, store):
    put_chain(store, "a")
    (tmp_path / "cache" / "CACHEDIR.TAG").unlink()
    (tmp_path / "cache" / "CACHEDIR.TAG").mkdir()
    assert found(open_store(tmp_path / "cache"), "a") == "a"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EROFS])
def test_a_disk_that_failed_is_used_again_when_it_works(tmp_path, monkeypatch, number, store):
    put_chain(store, *"abcdef")
    with monkeypatch.context() as failing:
        failing.setattr(store_module, "_FIRST_RETRY_SECONDS", 0.0)
        Refusal(failing, "writev", number)
        assert not put(store, "g")
        assert os.strerror(number) in store.failure
        assert str(file_of(store, "g")) in store.failure
        store.maintain()  # It still fails.
        assert store.failure is not None and not store.has(named("a"))
    store._retry_at = 0.0
    store.maintain()
    assert store.failure is None and put(store, "g")
    assert found(store, "abcdefg") == ("abcdg" if number == errno.ENOSPC else "abcdefg")
    assert [path.name for path in (tmp_path / "cache").rglob(".*")] == []


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENXIO])
def test_a_disk_that_is_away_while_blocks_are_read_loses_none(monkeypatch, number, store):
    put_chain(store, *"ab")
    with monkeypatch.context() as failing:
        failing.setattr(os, "pread", raising(number))
        assert store.load(named("a")) is None and os.strerror(number) in store.failure
    store._retry_at = 0.0
    store.maintain()
    assert found(store, "ab") == "ab" and store.stats().num_corrupt == 0


def raising(number: int):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    return refuse


def test_a_failed_disk_is_tried_again_after_longer_and_longer_times(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(store_module.time, "monotonic", lambda: now[0])
    store = open_store(tmp_path / "cache")
    put_chain(store, "a")
    probes: list[float] = []
    monkeypatch.setattr(store.files, "probe", lambda *_: probes.append(now[0]) or raising(5)())
    store.fail("the cable is out")
    began = now[0]
    while now[0] < began + 200:
        now[0] += 0.5
        store.maintain()
    assert [probe - began for probe in probes] == [1, 3, 7, 15, 31, 63, 123, 183]
    assert store.failure.endswith("the cable is out")
    monkeypatch.setattr(store.files, "probe", lambda *_: None)
    now[0] += 60
    store.maintain()
    assert store.failure is None
    # A disk that fails again at once is not tried every second.
    store.fail("the cable is loose")
    now[0] += 30
    store.maintain()
    assert store.failure is not None
    now[0] += 30
    store.maintain()
    assert store.failure is None


def test_a_folder_that_was_removed_is_not_made_again_and_one_that_returns_is_used(tmp_path, store):
    put_chain(store, "a")
    (tmp_path / "cache").rename(tmp_path / "away")
    assert not put(store, "b") and store.failure is not None
    store._retry_at = 0.0
    store.maintain()
    assert store.failure is not None and not (tmp_path / "cache").exists()
    (tmp_path / "away").rename(tmp_path / "cache")
    store._retry_at = 0.0
    store.maintain()
    assert store.failure is None and put(store, "b") and found(store, "ab") == "ab"


def test_a_writer_goes_on_without_the_disk(tmp_path, store):
    worker = BlockWorker(store, 1 << 20, 1 << 20)
    assert worker.flush(10)
    shutil.rmtree(tmp_path / "cache")
    assert worker.offer(header("a"), payload_of(named("a"))) and worker.flush(10)
    assert store.failure is not None
    assert not worker.offer(header("b"), payload_of(named("b")))
    assert store.stats().num_dropped == 2
    assert worker.close(10)


def test_an_idle_writer_tries_a_failed_disk_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_module, "_SECONDS_BETWEEN_MAINTENANCE", 0.01)
    monkeypatch.setattr(store_module, "_FIRST_RETRY_SECONDS", 0.01)
    store = open_store(tmp_path / "cache")
    worker = BlockWorker(store, 1 << 20, 1 << 20)
    with monkeypatch.context() as failing:
        Refusal(failing, "writev", errno.EIO)
        assert worker.offer(header("a"), payload_of(named("a"))) and worker.flush(10)
        assert store.failure is not None
    deadline = time.monotonic() + 60
    while store.failure is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert worker.offer(header("b"), payload_of(named("b"))) and worker.close(10)
    assert found(open_store(tmp_path / "cache"), "ab") == "b"


def test_a_tool_that_finds_no_folder_says_so(tmp_path, store):
    put_chain(store, *"ab")
    store.maintain()
    folder = CacheFolder(tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache")
    assert folder.entries() == [] and list(folder.verify()) == []
    assert not folder.pin(store.fingerprint.digest, named("a"))


def test_closing_does_not_wait_for_a_disk_that_hangs(tmp_path, monkeypatch, store):
    hangs, may_go_on = threading.Event(), threading.Event()
    writev = os.writev

    def hang(*arguments):
        hangs.set()
        assert may_go_on.wait(10)
        return writev(*arguments)

    monkeypatch.setattr(os, "writev", hang)
    thread = threading.Thread(target=put, args=(store, "a"))
    thread.start()
    assert hangs.wait(10)
    store.close(timeout=0.01)
    assert thread.is_alive() and found(store, "a") == ""
    may_go_on.set()
    thread.join(10)
    again = open_store(tmp_path / "cache")
    again.maintain()
    assert found(again, "a") == "a" and again.stats().num_blocks == 1
