"""Folders of blocks: who may read them, which ones are taken, and how files come to be there."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.block_stores import open_store, put_chain

from mlx_paged.block_store import BlockStoreError, BlockWorker, CacheFolder, layout
from mlx_paged.block_store.block_files import BlockFiles
from mlx_paged.block_store.directory import Directory, is_abandoned, make_folder, temporary_name


def rights(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_nobody_else_may_read_anything_whatever_the_umask_says(tmp_path, umask):
    folder = tmp_path / "deep" / "cache"
    folder.parent.mkdir()
    old = os.umask(umask)
    try:
        BlockWorker(open_store(folder), 1 << 20, 1 << 20).close()
        store = open_store(folder)
        put_chain(store, "a", "b")
        store.maintain()
        CacheFolder(folder).pin(*CacheFolder(folder).entries()[1].name)
    finally:
        os.umask(old)
    paths = [folder, *folder.rglob("*")]
    assert {rights(path) for path in paths if path.is_dir()} == {0o700}
    assert {rights(path) for path in paths if path.is_file()} == {0o600}
    assert {path.suffix for path in paths if path.is_file()} >= {".kv", ".pin", ".json"}


def test_names_hold_digests_and_nothing_of_a_text(tmp_path):
    store = open_store(tmp_path / "cache", model="a model")
    put_chain(store, "a", "b")
    digest = store.fingerprint.digest
    for path in (tmp_path / "cache" / "blocks").rglob("*.kv"):
        shard, name = path.relative_to(store.files.path_of(digest)).parts
        assert len(name) == 64 + len(".kv") and name.startswith(shard)
        assert set(name.removesuffix(".kv")) <= set("0123456789abcdef")


def test_a_folder_of_ones_own_that_is_empty_loses_the_rights_of_others(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o755)
    make_folder(folder)
    assert rights(folder) == 0o700
    # And one that is used already, again.
    (folder / "note").touch()
    os.chmod(folder, 0o755)
    os.chmod(folder / "blocks", 0o777)
    make_folder(folder)
    assert (rights(folder), rights(folder / "blocks")) == (0o700, 0o700)


def test_a_folder_that_holds_other_things_is_refused_and_left_as_it_is(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(BlockStoreError, match=r"holds other things, such as 'thesis.tex'") as error:
        open_store(tmp_path)
    assert error.value.argument == "cache_dir"
    assert rights(tmp_path) == 0o755 and [path.name for path in tmp_path.iterdir()] == [
        "thesis.tex"
    ]


def test_a_folder_without_its_tag_is_known_by_what_is_in_it(tmp_path):
    open_store(tmp_path / "cache").maintain()
    tag = tmp_path / "cache" / "CACHEDIR.TAG"
    whole = tag.read_bytes()
    tag.unlink()
    CacheFolder(tmp_path / "cache")
    assert not tag.exists()
    for torn in (None, b"", whole[:20]):
        if torn is not None:
            tag.write_bytes(torn)
        open_store(tmp_path / "cache")
        assert tag.read_bytes() == whole


def test_a_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(BlockStoreError, match="belongs to another user"):
        open_store(folder)


def test_a_volume_without_rights_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    monkeypatch.setattr(os, "chmod", lambda *_, **__: None)
    with pytest.raises(BlockStoreError, match="its volume has no permissions"):
        open_store(folder)


def test_what_can_be_no_folder_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    none = (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "dangling", "/proc/nothing")
    for folder in (*none, "a\0b", 5, None, "", b"cache"):
        with pytest.raises(BlockStoreError) as error:
            open_store(folder)
        assert "\n" not in str(error.value) and error.value.argument == "cache_dir"


def test_a_link_to_a_folder_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    put_chain(open_store(tmp_path / "link"), "a")
    assert list((tmp_path / "real").rglob("*.kv"))


def test_a_folder_that_nobody_may_write_to_is_refused(tmp_path):
    """As another user than root, who may write everywhere."""
    folder = tmp_path / "readable"
    folder.mkdir(mode=0o555)
    script = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from helpers.block_stores import open_store
from mlx_paged.block_store import BlockStoreError
if os.geteuid() == 0:
    os.setuid(65534)
try:
    open_store({str(folder / "cache")!r})
except BlockStoreError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.stdout.strip().endswith("can't be used: Permission denied"), run.stderr


def test_a_file_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    folder, path = Directory.at(tmp_path), tmp_path / "file"
    folder.write_atomically("file", [b"one", b"", bytearray(b"two"), memoryview(b"three")])
    assert path.read_bytes() == b"onetwothree"

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", fail)
    with pytest.raises(OSError, match="No space"):
        folder.write_atomically("file", [b"four"])
    assert path.read_bytes() == b"onetwothree" and os.listdir(tmp_path) == ["file"]


def test_writes_of_a_part_are_continued(tmp_path, monkeypatch):
    writev = os.writev
    monkeypatch.setattr(os, "writev", lambda file, data: writev(file, [bytes(data[0][:3])]))
    Directory.at(tmp_path).write_atomically("file", [b"01234567", b"89", b"abcd"])
    assert (tmp_path / "file").read_bytes() == b"0123456789abcd"


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def test_what_dead_processes_began_to_write_is_told_from_what_is_being_written(tmp_path):
    own = temporary_name("name")
    assert not is_abandoned(own, age=1e9)
    assert is_abandoned(f".name.{os.getpid()}-00000000-1.tmp", age=0.0)  # a process of the same id
    assert is_abandoned(f".name.{dead_process()}-00000000-1.tmp", age=0.0)
    assert is_abandoned(f".name.{dead_process()}.tmp", age=0.0)  # as earlier versions named them
    alive = f".name.{os.getppid()}-00000000-1.tmp"
    assert not is_abandoned(alive, age=3000.0)
    assert is_abandoned(alive, age=4000.0)
    for name in (
        "name.kv",
        ".hidden",
        f"name.{dead_process()}-0-1.tmp",
        ".name.tmp",
        ".n.1-x-1.tmp",
    ):
        assert not is_abandoned(name, age=1e9)


def test_a_new_start_removes_what_dead_processes_began_to_write(tmp_path, store):
    put_chain(store, "a")
    digest = store.fingerprint.digest
    aside = f".name.{dead_process()}-00000000-1.tmp"
    places = [
        store.folder / "blocks",
        store.files.path_of(digest),
        next(store.files.path_of(digest).glob("??")),
    ]
    for place in places:
        (place / aside).write_bytes(b"half a block")
        (place / ".mine").touch()
    open_store(tmp_path / "cache").maintain()
    assert [place for place in places if (place / aside).exists()] == []
    assert all((place / ".mine").exists() for place in places)


def test_other_files_are_no_blocks(tmp_path):
    path = BlockFiles(tmp_path).path_of_block(("0" * 32, b"\x01\xff"))
    assert path == f"{tmp_path}/blocks/{'0' * 32}/01/01ff.kv"
    assert layout.block_hash_of("01ff.kv") == b"\x01\xff"
    for name in ("01FF.kv", "01f.kv", ".kv", "01ff", "01ff.kv.tmp", "x01ff.kv", "01ff.pin"):
        assert layout.block_hash_of(name) is None
