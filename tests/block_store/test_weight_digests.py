"""``WeightDigests``: found again, or hashed again; never wrong, and never an error."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from helpers.block_stores import open_store

from mlx_paged.block_store import CacheFolder, WeightDigests, weight_digests
from mlx_paged.block_store.files import make_folder

KEY, OTHER = "ab" * 32, "cd" * 32
DIGESTS = {"model.norm.weight": b"\1" * 32, "naïve\n": b"\2" * 64, "empty": b""}


def files_in(folder: Path) -> list[str]:
    return sorted(each.name for each in (folder / "weights").iterdir())


def test_digests_are_found_under_their_key_alone(tmp_path):
    known = WeightDigests(tmp_path / "cache")
    assert known.load(KEY) == {}
    assert not (tmp_path / "cache").exists()
    known.store(KEY, DIGESTS)
    assert WeightDigests(tmp_path / "cache").load(KEY) == DIGESTS
    assert known.load(OTHER) == {}
    known.store(KEY, {"other": b"\3"})
    assert known.load(KEY) == {"other": b"\3"}
    assert files_in(tmp_path / "cache") == [f"{KEY}.json"]


def test_only_their_owner_reads_them(tmp_path):
    WeightDigests(tmp_path / "cache").store(KEY, DIGESTS)
    folder = tmp_path / "cache" / "weights"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / f"{KEY}.json").stat().st_mode & 0o777 == 0o600


def test_a_folder_that_has_them_is_still_one_of_blocks(tmp_path):
    WeightDigests(tmp_path / "cache").store(KEY, DIGESTS)
    (tmp_path / "cache" / "CACHEDIR.TAG").unlink()
    open_store(tmp_path / "cache").close()
    assert CacheFolder(tmp_path / "cache").fingerprints() is not None


def damages() -> dict[str, bytes]:
    content = weight_digests._written(DIGESTS)
    flipped = bytearray(content)
    flipped[-20] ^= 1
    return {
        "empty": b"",
        "cut": content[:-1],
        "half": content[: len(content) // 2],
        "altered": bytes(flipped),
        "other": b"[1, 2]",
        "no text": bytes(range(256)),
        "no digits": weight_digests._written({}).replace(b"{}", b'{"a": "zz"}'),
    }


@pytest.mark.parametrize("damage", damages())
def test_a_damaged_file_says_nothing_and_is_written_again(tmp_path, damage):
    known = WeightDigests(tmp_path / "cache")
    known.store(KEY, DIGESTS)
    (tmp_path / "cache" / "weights" / f"{KEY}.json").write_bytes(damages()[damage])
    assert known.load(KEY) == {}
    known.store(KEY, DIGESTS)
    assert known.load(KEY) == DIGESTS


@pytest.mark.parametrize("body", [b"[]", b"1", b'{"a": 1}', b'{"a": "zz"}', b"{" * 100_000])
def test_content_that_is_whole_and_means_nothing_says_nothing(tmp_path, body):
    known = WeightDigests(tmp_path / "cache")
    known.store(KEY, DIGESTS)
    checksum = weight_digests.hashlib.sha256(body).hexdigest().encode()
    file = tmp_path / "cache" / "weights" / f"{KEY}.json"
    file.write_bytes(checksum + b"\n" + body)
    assert known.load(KEY) == {}


def test_a_link_in_the_place_of_a_file_or_of_the_folder_is_not_followed(tmp_path):
    known, elsewhere = WeightDigests(tmp_path / "cache"), WeightDigests(tmp_path / "elsewhere")
    elsewhere.store(KEY, DIGESTS)
    known.store(OTHER, DIGESTS)
    file = tmp_path / "cache" / "weights" / f"{KEY}.json"
    os.symlink(tmp_path / "elsewhere" / "weights" / f"{KEY}.json", file)
    assert known.load(KEY) == {}
    known.store(KEY, {"a": b"1"})
    assert (known.load(KEY), elsewhere.load(KEY)) == ({"a": b"1"}, DIGESTS)
    make_folder(tmp_path / "third")
    os.symlink(tmp_path / "elsewhere" / "weights", tmp_path / "third" / "weights")
    third = WeightDigests(tmp_path / "third")
    third.store(OTHER, DIGESTS)
    assert third.load(KEY) == elsewhere.load(OTHER) == {}


def test_a_folder_that_holds_other_things_gets_nothing(tmp_path):
    (tmp_path / "letter").write_text("Dear")
    WeightDigests(tmp_path).store(KEY, DIGESTS)
    assert [each.name for each in tmp_path.iterdir()] == ["letter"]


def test_what_was_not_used_for_long_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_digests, "MAX_FILES", 3)
    known, keys = WeightDigests(tmp_path / "cache"), [f"{n:02x}" * 32 for n in range(5)]
    for age, key in enumerate(keys[:3]):
        known.store(key, DIGESTS)
        file = tmp_path / "cache" / "weights" / f"{key}.json"
        os.utime(file, (1e9 + age, 1e9 + age))
    known.load(keys[0])  # is used now
    (tmp_path / "cache" / "weights" / ".name.999999999-abc-1.tmp").write_text("begun and left")
    known.store(keys[3], DIGESTS)
    assert files_in(tmp_path / "cache") == [f"{keys[n]}.json" for n in (0, 2, 3)]


def test_writers_and_readers_at_the_same_time_see_whole_files(tmp_path):
    known = WeightDigests(tmp_path / "cache")
    contents = [{f"weight {n}": bytes([n]) * 32 * 50} for n in range(4)]
    known.store(KEY, contents[0])
    seen: list[dict[str, bytes]] = []

    def write(content: dict[str, bytes]) -> None:
        for _ in range(20):
            known.store(KEY, content)

    def look() -> None:
        seen.extend(WeightDigests(tmp_path / "cache").load(KEY) for _ in range(50))

    threads = [threading.Thread(target=write, args=[content]) for content in contents]
    threads += [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 100
    assert all(content in contents for content in seen)
