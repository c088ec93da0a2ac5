"""What else may lie in a folder of blocks: links, folders, and files and folders of other users. It
is never read, and nothing outside of the folder is ever touched.
"""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.block_stores import (
    UNIT,
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

from mlx_paged.block_store import BlockStore, BlockStoreError, CacheFolder
from mlx_paged.block_store.directory import Directory
from mlx_paged.block_store.layout import encode_header

ANOTHER = 54321
"""The id of a user that does not exist."""


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Gives a file or a folder to ``ANOTHER``: really where the tests run as root, and elsewhere in
    what the system says of it.
    """
    if os.geteuid() == 0:
        return lambda path: os.chown(path, ANOTHER, -1, follow_symlinks=False)
    given: set[tuple[int, int]] = set()
    held: list[int] = []  # open, so that no other file gets the number of one that is removed

    def pretend(name: str) -> None:
        function = getattr(os, name)

        def status_of(*arguments: object, **options: object) -> os.stat_result:
            status: os.stat_result = function(*arguments, **options)
            if (status.st_dev, status.st_ino) not in given:
                return status
            values = list(status)
            values[4] = ANOTHER
            times = {each: getattr(status, each) for each in dir(status) if "time" in each}
            return os.stat_result(values, times)

        monkeypatch.setattr(os, name, status_of)

    for name in ("stat", "lstat", "fstat"):
        pretend(name)

    def give(path: Path) -> None:
        status = path.lstat()
        held.append(os.open(path, os.O_RDONLY | os.O_NOFOLLOW))
        given.add((status.st_dev, status.st_ino))

    return give


def plant(store: BlockStore, name: str) -> Path:
    """A block with right checksums and another payload, in the place of one."""
    path = file_of(store, name)
    payload = b"planted" * 100
    block = encode_header(header(name), store.fingerprint.digest, 1.0, None, payload)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(block + payload)
    return path


def tree(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """All that is below a folder: rights, times and contents."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in folder.rglob("*")
    }


# Other users


def test_blocks_of_another_user_are_a_miss_and_are_written_again(tmp_path, give_away, store):
    for name in "abcdefghij":
        give_away(plant(store, name))
    assert found(store, "abcdefghij") == ""
    assert [file.problem for file in CacheFolder(tmp_path / "cache").verify()] == []
    put_chain(store, *"abcdefghij")
    assert found(store, "abcdefghij") == "abcdefghij" and store.failure is None


def test_a_listing_passes_over_blocks_of_another_user(tmp_path, give_away, store):
    put_chain(store, *"abc")
    store.close()
    planted = plant(store, "b")
    give_away(planted)
    store = open_store(tmp_path / "cache")
    store.maintain()
    assert (store.stats().num_corrupt, store.stats().num_blocks) == (0, 2)
    assert store.load(named("b")) is None and not planted.exists()
    assert store.stats().num_corrupt == 1


def test_verify_says_whose_a_block_is(tmp_path, give_away, store):
    put(store, "a")
    tool = CacheFolder(tmp_path / "cache")
    give_away(file_of(store, "a"))
    assert [file.problem for file in tool.verify()] == ["it belongs to another user"]


@pytest.mark.parametrize("name", ["fingerprint.json", "CACHEDIR.TAG"])
def test_other_files_of_another_user_are_replaced(tmp_path, give_away, name, store):
    put_chain(store, *"ab")
    store.close()
    (path,) = (tmp_path / "cache").rglob(name)
    give_away(path)
    store = open_store(tmp_path / "cache")
    store.maintain()
    assert path.stat().st_uid == os.geteuid()
    assert found(store, "ab") == "ab" and store.stats().num_blocks == 2


@pytest.mark.parametrize("place", ["fingerprint", "shard"])
def test_a_closed_folder_of_another_user_is_named_with_its_owner(
    tmp_path, give_away, monkeypatch, place, store
):
    put(store, "a")
    folder = file_of(store, "a").parent if place == "shard" else file_of(store, "a").parents[1]
    give_away(folder)
    open_file = os.open

    def open_own(path, *arguments, **options):
        if path == folder.name:  # root may open it
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(os, "open", open_own)
    said = f"Permission denied: {folder} (it belongs to the user with the id {ANOTHER})"
    if place == "fingerprint":
        with pytest.raises(BlockStoreError) as error:
            open_store(tmp_path / "cache")
        assert str(error.value).endswith(f"{tmp_path / 'cache'} can't be used: {said}")
    store.maintain()
    if place == "fingerprint":
        assert not store.has(named("a")) and not put(store, "a")
        assert str(store.failure).endswith(f"a block could not be written: {said}")
        return
    with pytest.warns(UserWarning, match="the blocks that belong there are not kept") as caught:
        assert not store.has(named("a")) and not put(store, "a")
    assert said in str(caught[0].message) and store.failure is None


def test_an_administrator_is_refused_a_folder_of_another_user(tmp_path, give_away, monkeypatch):
    folder = tmp_path / "cache"
    folder.mkdir()
    give_away(folder)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(BlockStoreError, match=f"belongs to another user .id {ANOTHER}.") as error:
        open_store(folder)
    assert "run as that user" in str(error.value) and error.value.argument == "cache_dir"
    assert os.listdir(folder) == []


def test_an_administrator_makes_no_folder_within_one_of_another_user(
    tmp_path, give_away, monkeypatch
):
    (tmp_path / "home").mkdir()
    give_away(tmp_path / "home")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(BlockStoreError, match="would lie in a folder of another user") as error:
        open_store(tmp_path / "home" / ".cache" / "mlx-paged")
    assert "run as that user" in str(error.value)
    assert os.listdir(tmp_path / "home") == []


def test_what_an_administrator_does_with_the_tool_leaves_nothing_of_his(
    tmp_path, give_away, monkeypatch, store
):
    put_chain(store, *"abcd")
    store.close()
    given: list[int] = []
    if os.geteuid() == 0:
        for path in (tmp_path / "cache", *(tmp_path / "cache").rglob("*")):
            give_away(path)
    else:  # Nothing is his who runs this, if he is somebody else.
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(os, "fchown", lambda fd, user, group: given.append(user))
    before = {path.name for path in (tmp_path / "cache").rglob("*")}
    tool, digest = CacheFolder(tmp_path / "cache"), store.fingerprint.digest
    assert tool.pin(digest, named("b"))
    tool.remove([(digest, named("d"))])
    assert tool.size().num_blocks == 3
    assert tool.shrink(2 * UNIT).num_blocks == 1 and [*tool.verify()] != []
    made = [path for path in (tmp_path / "cache").rglob("*") if path.name not in before]
    assert sorted(path.name for path in made) == [f"{named('b').hex()}.pin", "pins"]
    if given:
        assert given == [os.stat(tmp_path).st_uid] * 2
    else:
        assert {path.stat().st_uid for path in made} == {ANOTHER}


# Links


def outside(tmp_path: Path, store: BlockStore) -> Path:
    """A folder like one of blocks, and with what a listing removes from one."""
    other = tmp_path / "outside"
    shutil.copytree(tmp_path / "cache", other, symlinks=True)
    for folder in [path for path in (other, *other.rglob("*")) if path.is_dir()]:
        (folder / ".name.1-00000000-1.tmp").write_bytes(b"half a block")
        os.utime(folder / ".name.1-00000000-1.tmp", (1, 1))
        (folder / f"{'ff' * 32}.kv").write_bytes(b"no block")
        (folder / f"{'ee' * 32}.pin").write_text("mine")
    return other


def place_of_blocks(store: BlockStore) -> Path:
    return store.folder / "blocks"


def place_of_the_fingerprint(store: BlockStore) -> Path:
    return store.files.path_of(store.fingerprint.digest)


def place_of_a_shard(store: BlockStore) -> Path:
    return file_of(store, "b").parent


def place_of_the_pins(store: BlockStore) -> Path:
    return place_of_the_fingerprint(store) / "pins"


def do_all(store: BlockStore) -> None:
    """Everything that a store and the tool do, whether it succeeds or not."""
    digest = store.fingerprint.digest
    for name in "abcd":
        store.load(named(name))
        store.has(named(name))
    store.note_used([named(name) for name in "abc"])
    store.maintain()
    for name in "efghijkb":
        put(store, name)
    store.maintain()
    tool = CacheFolder(store.folder)
    for work in (
        lambda: [*tool.verify()],
        tool.entries,
        tool.fingerprints,
        tool.pins,
        lambda: [tool.header(digest, named(name)) for name in "abc"],
        lambda: [tool.pin(digest, named(name)) for name in "abc"],
        lambda: tool.unpin(digest, named("a")),
        lambda: tool.remove([(digest, named(name)) for name in "bcf"]),
        tool.size,
        lambda: tool.shrink(0),
    ):
        try:
            work()
        except BlockStoreError as error:
            assert "\n" not in str(error)


PLACES = [place_of_blocks, place_of_the_fingerprint, place_of_a_shard, place_of_the_pins]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("is_late", [False, True], ids=["before a start", "while it is used"])
def test_no_link_in_the_place_of_a_folder_is_followed(tmp_path, place, is_late):
    first = open_store(tmp_path / "cache")
    put_chain(first, *"abcd")
    CacheFolder(tmp_path / "cache").pin(first.fingerprint.digest, named("d"))
    first.close()
    other = outside(tmp_path, first)
    store = open_store(tmp_path / "cache", num_blocks=5, ttl=60.0) if is_late else None
    if store is not None:
        store.maintain()
        assert found(store, "abcd") == "abcd"
    link = place(first)
    shutil.move(link, tmp_path / "moved")
    link.symlink_to(other / link.relative_to(tmp_path / "cache"), target_is_directory=True)
    for path in block_files(other):
        make_older(path, 100)  # its time is over
    before = tree(other)
    if store is None:
        try:
            store = open_store(tmp_path / "cache", num_blocks=5, ttl=60.0)
        except BlockStoreError as error:
            assert place in PLACES[:2]
            assert f"{link} (links are not followed)" in str(error)
    if store is not None:
        assert "b" not in found(store, "abcd") or place is place_of_the_pins or is_late
        with warnings.catch_warnings(record=True) as caught:
            do_all(store)
        said = [str(store.failure), *(str(each.message) for each in caught)]
        assert place is place_of_the_pins or f"{link} (links are not" in "".join(said)
    assert tree(other) == before


def test_no_link_in_the_place_of_a_file_is_followed(tmp_path):
    store = open_store(tmp_path / "cache", num_blocks=4)
    put_chain(store, *"abcd")
    store.close()
    other = outside(tmp_path, store)
    replaced = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    for path in replaced:
        path.unlink()
        path.symlink_to(other / path.relative_to(tmp_path / "cache"))
    before = tree(other)
    store = open_store(tmp_path / "cache", num_blocks=4)
    do_all(store)
    assert tree(other) == before and store.failure is None
    store.close()
    # Blocks that are links are no blocks; all else was made again.
    assert not any(path.is_symlink() for path in (tmp_path / "cache").rglob("*"))


# Folders, and what can't be removed


def test_a_folder_in_the_place_of_a_block_is_not_the_end_of_eviction(tmp_path):
    store = open_store(tmp_path / "cache", num_blocks=4)
    for name in "abcd":
        put(store, name)
    store.maintain()
    for name in "ab":  # the next ones to go
        file_of(store, name).unlink()
        file_of(store, name).mkdir()
    for name in "efgh":
        assert put(store, name)
    assert found(store, "abcdefgh") == "efgh" and store.failure is None
    store.maintain()
    assert (store.stats().num_blocks, store.stats().num_evicted) == (4, 2)
    assert file_of(store, "a").is_dir()


def refuse_to_remove(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """As of files that are marked as immutable."""
    remove, names = os.unlink, {path.name for path in paths}

    def unlink(path, **options):
        if os.path.basename(path) in names:
            raise PermissionError(1, "Operation not permitted")
        remove(path, **options)

    monkeypatch.setattr(os, "unlink", unlink)


def test_a_block_that_cannot_be_removed_is_passed_over_by_evictions(tmp_path, monkeypatch):
    store = open_store(tmp_path / "cache", num_blocks=4)
    for name in "abcd":
        put(store, name)
    refuse_to_remove(monkeypatch, file_of(store, "a"))
    for name in "efg":
        assert put(store, name)
    assert found(store, "abcdefg") == "aefg" and store.failure is None
    for name in "efg":
        make_older(file_of(store, name), 100)
    assert CacheFolder(tmp_path / "cache").shrink(UNIT).num_blocks == 3
    with pytest.raises(BlockStoreError, match="Operation not permitted"):
        CacheFolder(tmp_path / "cache").shrink(0)


def test_an_eviction_that_removes_nothing_does_not_try_every_file(tmp_path, monkeypatch):
    store = open_store(tmp_path / "cache", num_blocks=60)
    for number in range(60):
        put(store, f"block {number}")
    store.maintain()
    refuse_to_remove(monkeypatch, *block_files(tmp_path))
    unlink, tries = os.unlink, []
    monkeypatch.setattr(os, "unlink", lambda *a, **o: (tries.append(a), unlink(*a, **o)))
    assert not put(store, "one more")
    assert "Operation not permitted" in store.failure and len(tries) == 17


def test_a_block_that_cannot_be_removed_does_not_end_a_sweep(tmp_path, monkeypatch):
    store = open_store(tmp_path / "cache", ttl=60.0)
    put_chain(store, *"abc")
    for name in "abc":
        make_older(file_of(store, name), 100)
    store.close()
    refuse_to_remove(monkeypatch, file_of(store, "a"))
    store = open_store(tmp_path / "cache", ttl=60.0)
    store.maintain()
    assert block_files(tmp_path) == [file_of(store, "a")] and store.failure is None
    assert found(store, "b") == "" and not store.has(named("a"))


def test_remove_goes_on_after_what_can_not_be_removed_and_says_so(tmp_path, monkeypatch, store):
    put_chain(store, *"abcd")
    store.close()
    tool, digest = CacheFolder(tmp_path / "cache"), store.fingerprint.digest
    tool.pin(digest, named("c"))
    tool.entries()
    file_of(store, "a").unlink()
    file_of(store, "a").mkdir()
    pin = Path(store.files.path_of(digest), "pins", f"{named('c').hex()}.pin")
    refuse_to_remove(monkeypatch, file_of(store, "b"), pin)
    removed = tool.remove([(digest, named(name)) for name in "xabcd"])
    assert (removed.num_blocks, removed.nbytes) == (1, UNIT)
    refused = "it can't be removed: Operation not permitted"
    assert removed.left == {
        str(file_of(store, "a")): "it is a folder",
        str(file_of(store, "b")): refused,
        str(file_of(store, "c")): refused,
    }
    assert tool.size().num_blocks == 2 and sorted(block_files(tmp_path)) == sorted(
        file_of(store, name) for name in "abc"
    )


# Directory itself


def test_a_folder_that_is_moved_while_it_is_open_stays_the_same_one(tmp_path):
    (tmp_path / "one" / "below").mkdir(parents=True)
    folder = Directory.at(tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "two")
    (tmp_path / "one").mkdir()
    folder.folder("below").write_atomically("file", [b"content"])
    assert (tmp_path / "two" / "below" / "file").read_bytes() == b"content"
    assert os.listdir(tmp_path / "one") == []


def test_folders_are_closed_when_they_are_not_used_any_more(tmp_path, store):
    tool = CacheFolder(tmp_path / "cache")
    for number in range(12):
        other = open_store(tmp_path / "cache", model=f"model {number}")
        put_chain(other, *"ab")
        other.close()
    descriptors = Path("/dev/fd")
    before = len(os.listdir(descriptors))
    for number in range(50):
        put(store, f"block {number}")
        assert store.load(named(f"block {number}")) == payload_of(named(f"block {number}"))
        assert not store.has(named("missing"))
    assert [file.problem for file in tool.verify() if file.problem] == []
    store.maintain()
    store.close()
    # Those of fingerprints stay open, eight at most for each of the two.
    assert len(os.listdir(descriptors)) <= before + 16
