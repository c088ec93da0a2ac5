"""A file that is not whole is refused with one line, and one that can't be written leaves the old
one.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from helpers.cache_helpers import stored_parts
from helpers.snapshot_helpers import assert_same_bits, config_of, fill

from mlx_paged.cache import PagedKVCache, Sequences
from mlx_paged.core.tier import BlockHeader
from mlx_paged.models import qwen3
from mlx_paged.models.identity import identities_of
from mlx_paged.snapshots import KVFacts, SnapshotError, load_snapshot, save_snapshot
from mlx_paged.snapshots.rows import RowTier

AssertRefused = Callable[[Path], str]
CONFIG = config_of("different", "float16", "8 bits", 8)


@pytest.fixture
def seqs() -> Sequences:
    seqs = Sequences(PagedKVCache(CONFIG))
    fill(seqs, "a", 11)
    return seqs


@pytest.fixture
def file(seqs: Sequences, model: qwen3.Model, tmp_path: Path) -> Path:
    path = tmp_path / "a.safetensors"
    save_snapshot(path, model, seqs, "a", range(11))
    return path


@pytest.fixture
def assert_refused(model: qwen3.Model) -> AssertRefused:
    """Loading raises one line that names the file, and the cache is as it was."""
    seqs = Sequences(PagedKVCache(CONFIG))
    fill(seqs, "b", 9, seed=4)
    before = stored_parts(seqs, "b")
    facts = KVFacts.of(identities_of(model), seqs.cache)

    def refused(file: Path) -> str:
        with pytest.raises(SnapshotError) as caught:
            load_snapshot(file, model, seqs, "b")
        line = str(caught.value)
        assert line.startswith(f"[snapshot] {file} ") and "\n" not in line
        assert_same_bits(stored_parts(seqs, "b"), before)
        return line

    with patch.object(KVFacts, "of", lambda *_: facts):  # the weights are read once
        yield refused


def test_a_file_with_any_byte_altered_is_refused(
    model: qwen3.Model, file: Path, assert_refused: AssertRefused
):
    content = file.read_bytes()
    header_end = 8 + struct.unpack("<Q", content[:8])[0]
    rng = np.random.default_rng(0)
    # All of the length, a sample of the header, of each array, and the ends of all of them.
    header = json.loads(content[8:header_end])
    places = {*range(8), 8, header_end - 1, len(content) - 1}
    places |= set(map(int, rng.integers(8, header_end, 40)))
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (header_end + offset for offset in entry["data_offsets"])
            places |= {begin, end - 1, int(rng.integers(begin, end))}
    for value in header["__metadata__"].values():  # a byte of each value
        if value:
            places.add(content.index(json.dumps(value).encode()) + 1)
    for place in sorted(places):
        altered = bytearray(content)
        altered[place] ^= int(rng.integers(1, 256))
        file.write_bytes(altered)
        assert_refused(file)
    file.write_bytes(content)
    assert load_snapshot(file, model, Sequences(PagedKVCache(CONFIG)), "b") == list(range(11))


def test_a_truncated_or_longer_file_is_refused(
    model: qwen3.Model, file: Path, assert_refused: AssertRefused
):
    content = file.read_bytes()
    header_end = 8 + struct.unpack("<Q", content[:8])[0]
    lengths = {0, 1, 7, 8, 9, 100, header_end - 1, header_end, header_end + 1, len(content) - 1}
    for length in sorted(lengths | set(range(0, len(content), len(content) // 12))):
        file.write_bytes(content[:length])
        line = assert_refused(file)
        if length >= header_end:
            assert f"was truncated: it has {length} bytes, and had {len(content)}" in line
    file.write_bytes(content + b"\0")
    assert "was altered" in assert_refused(file)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it doesn't begin like a safetensors file"),
        (b"\xff" * 100, "it doesn't begin like a safetensors file"),
        (struct.pack("<Q", 2) + b"[]", "is not a snapshot"),
        (struct.pack("<Q", 2) + b"{}", "is not a snapshot of mlx_paged"),
        (struct.pack("<Q", 40) + b"[" * 40, "is not a snapshot"),
        (struct.pack("<Q", 14) + b'{"a": {"b": 1}', "is not a snapshot"),
        (struct.pack("<Q", 13) + b'{"a":{"b":1}}', "is not a snapshot"),
    ],
)
def test_what_is_no_snapshot_is_refused(
    tmp_path: Path, assert_refused: AssertRefused, content: bytes, why: str
):
    file = tmp_path / "a"
    file.write_bytes(content)
    assert why in assert_refused(file)


def test_other_safetensors_a_folder_and_nothing_are_refused(
    tmp_path: Path, assert_refused: AssertRefused
):
    weights = tmp_path / "weights.safetensors"
    mx.save_safetensors(str(weights), {"a": mx.zeros(3)}, {"format": "mlx"})
    assert "is not a snapshot of mlx_paged" in assert_refused(weights)
    assert "can't be read: Is a directory" in assert_refused(tmp_path)
    assert "can't be read: No such file" in assert_refused(tmp_path / "none")


def test_only_a_snapshot_is_overwritten(
    model: qwen3.Model, seqs: Sequences, file: Path, tmp_path: Path
):
    notes = tmp_path / "notes.txt"
    notes.write_text("keep me")
    with pytest.raises(SnapshotError, match=r"notes\.txt exists and is not a snapshot; choose"):
        save_snapshot(notes, model, seqs, "a", range(11))
    assert notes.read_text() == "keep me"
    # A snapshot that was truncated may be overwritten.
    file.write_bytes(file.read_bytes()[:3000])
    save_snapshot(file, model, seqs, "a", range(11))
    assert load_snapshot(file, model, Sequences(PagedKVCache(CONFIG)), "b") == list(range(11))


def test_only_its_owner_can_read_a_snapshot_whatever_the_one_that_it_replaces_was(
    model: qwen3.Model, seqs: Sequences, file: Path
):
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    save_snapshot(file, model, seqs, "a", range(11))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("fail", "error"), [(no_space, SnapshotError), (interrupt, KeyboardInterrupt)]
)
@pytest.mark.parametrize("num_blocks", [0, 1, 2])
def test_a_save_that_is_cut_short_leaves_the_old_file(
    model: qwen3.Model,
    seqs: Sequences,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    fail: Callable[[], None],
    error: type[BaseException],
    num_blocks: int,
):
    before = file.read_bytes()
    fill(seqs, "c", 20, seed=5)

    store, num_stored = RowTier.store, itertools.count()

    def cut_short(tier: RowTier, header: BlockHeader, content: bytes) -> bool:
        if next(num_stored) == num_blocks:
            fail()
        return store(tier, header, content)

    monkeypatch.setattr(RowTier, "store", cut_short)
    with pytest.raises(error) as caught:
        save_snapshot(file, model, seqs, "c", range(20))
    if error is SnapshotError:
        assert str(caught.value) == (f"[snapshot] {file} can't be written: No space left on device")
    assert file.read_bytes() == before
    assert [each.name for each in file.parent.iterdir()] == [file.name]
    monkeypatch.undo()
    save_snapshot(file, model, seqs, "c", range(20))
    assert len(load_snapshot(file, model, seqs, "d")) == 20


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_disk_that_is_full_is_said_in_a_line(
    model: qwen3.Model, seqs: Sequences, file: Path, monkeypatch: pytest.MonkeyPatch
):
    before, real_open = file.read_bytes(), os.open

    def open_full(path: str | Path, *args: int) -> int:
        real_open(path, *args)
        return real_open("/dev/full", os.O_RDWR)

    monkeypatch.setattr(os, "open", open_full)
    with pytest.raises(SnapshotError, match="can't be written: No space left on device"):
        save_snapshot(file, model, seqs, "a", range(11))
    assert file.read_bytes() == before
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_a_folder_that_is_not_there_is_named(model: qwen3.Model, seqs: Sequences, tmp_path: Path):
    with pytest.raises(SnapshotError, match=r"none/a can't be written: No such file or directory"):
        save_snapshot(tmp_path / "none" / "a", model, seqs, "a", range(11))
