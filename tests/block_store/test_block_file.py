"""Files of blocks: what is read is what was written, or nothing."""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path

import pytest

from mlx_paged.block_store import layout
from mlx_paged.block_store.directory import Directory
from mlx_paged.block_store.layout import (
    BadBlockFileError,
    FileHeader,
    OtherVersionError,
    encode_header,
    parse_block,
    parse_header,
)
from mlx_paged.core.tier import BlockHeader

DIGEST = "0123456789abcdef0123456789abcdef"
HASH = bytes(range(32))


def write(path: Path, header: BlockHeader, payload: bytes, ttl: float | None = None) -> bytes:
    data = encode_header(header, DIGEST, 1234.5, ttl, payload) + payload
    path.write_bytes(data)
    return data


def read_block(path: Path, digest: str, block_hash: bytes) -> tuple[FileHeader, bytes]:
    with Directory.at(path.parent).opened(path.name) as (file, status):
        return parse_block(file, status.st_size, digest, block_hash)


def read_header(path: Path) -> FileHeader:
    with Directory.at(path.parent).opened(path.name) as (file, status):
        return parse_header(file, status.st_size, DIGEST, HASH)


@pytest.mark.parametrize(
    "header",
    [
        BlockHeader(HASH, None, (), 0),
        BlockHeader(HASH, b"p", (1, -1, 2**63 - 1, -(2**63)), 2**40, 65535),
        BlockHeader(HASH + b"\1\0", bytes(34), tuple(range(100)), 16),
        BlockHeader(b"\xff", bytes(64), tuple(range(16)), 0),
    ],
)
@pytest.mark.parametrize("payload", [b"", b"x", os.urandom(70_000)], ids=len)
def test_header_and_payload_come_back_as_they_were_written(tmp_path, header, payload):
    path = tmp_path / "block"
    data = write(path, header, payload, ttl=7.0)
    found, found_payload = read_block(path, DIGEST, header.block_hash)
    assert (found.block, found_payload) == (header, payload)
    assert (found.digest, found.created, found.ttl) == (DIGEST, 1234.5, 7.0)
    assert found.num_header_bytes + found.num_payload_bytes == len(data)
    with Directory.at(tmp_path).opened(path.name) as (file, _):
        assert parse_header(file, len(data), DIGEST, header.block_hash) == found


def test_a_payload_may_be_any_buffer(tmp_path):
    path = tmp_path / "block"
    words = memoryview(bytearray(b"12345678")).cast("I")
    prefix = encode_header(BlockHeader(HASH, None, (1,), 0), DIGEST, 0.0, None, words)
    path.write_bytes(prefix + bytes(words))
    assert read_block(path, DIGEST, HASH)[1] == b"12345678"


def test_no_bit_of_a_file_can_change(tmp_path):
    path = tmp_path / "block"
    data = bytearray(write(path, BlockHeader(HASH, b"parent", (1, 2, 3), 16), os.urandom(60)))
    with path.open("r+b", buffering=0) as file:
        for place in range(len(data)):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([data[place] ^ 1 << bit]), place)
                with pytest.raises(BadBlockFileError):
                    read_block(path, DIGEST, HASH)
            os.pwrite(file.fileno(), data[place : place + 1], place)
    read_block(path, DIGEST, HASH)


def test_a_header_that_changed_is_found_out_without_its_payload(tmp_path):
    path = tmp_path / "block"
    data = bytearray(write(path, BlockHeader(HASH, b"parent", (1, 2, 3), 16), b"payload"))
    for place in range(len(data) - len(b"payload")):
        if 32 - 4 <= place < 32:  # the payload's checksum
            continue
        data[place] ^= 1
        path.write_bytes(data)
        with pytest.raises(BadBlockFileError):
            read_header(path)
        data[place] ^= 1


def test_a_file_cut_off_anywhere_or_longer_is_bad(tmp_path):
    path = tmp_path / "block"
    data = write(path, BlockHeader(HASH, None, (1, 2, 3), 0), os.urandom(60))
    for length in reversed(range(len(data))):
        os.truncate(path, length)
        with pytest.raises(BadBlockFileError):
            read_block(path, DIGEST, HASH)
    path.write_bytes(data + b"\0")
    with pytest.raises(BadBlockFileError, match="another size"):
        read_block(path, DIGEST, HASH)


def test_garbage_of_any_kind_is_bad(tmp_path):
    path = tmp_path / "block"
    rng = random.Random(5)
    good = write(path, BlockHeader(HASH, None, (1, 2, 3), 0), bytes(60))
    for _ in range(100):
        data = bytearray(good[: rng.randrange(len(good))])
        data += rng.randbytes(rng.randrange(100))
        for _ in range(rng.randrange(4)):
            data[rng.randrange(len(data)) if data else 0 : 0] = rng.randbytes(rng.randrange(9))
        if data != good:
            path.write_bytes(data)
            with pytest.raises(BadBlockFileError):
                read_block(path, DIGEST, HASH)


def test_a_file_under_the_name_of_another_block_is_bad(tmp_path):
    path = tmp_path / "block"
    write(path, BlockHeader(HASH, None, (1, 2, 3), 0), b"payload")
    with pytest.raises(BadBlockFileError, match="another block"):
        read_block(path, DIGEST, HASH[::-1])
    with pytest.raises(BadBlockFileError, match="another block"):
        read_block(path, DIGEST[::-1], HASH)


def test_links_folders_pipes_and_sockets_are_no_blocks(tmp_path):
    good = tmp_path / "good"
    write(good, BlockHeader(HASH, None, (1, 2, 3), 0), b"payload")
    link, folder, pipe = tmp_path / "link", tmp_path / "folder", tmp_path / "pipe"
    link.symlink_to(good)
    folder.mkdir()
    os.mkfifo(pipe)
    for path in (link, folder, pipe):
        with pytest.raises(BadBlockFileError, match="not a regular file"):
            read_block(path, DIGEST, HASH)


def test_a_block_of_another_version_is_told_from_garbage(tmp_path, monkeypatch):
    path = tmp_path / "block"
    with monkeypatch.context() as later:
        later.setattr(layout, "VERSION", 2)
        write(path, BlockHeader(HASH, None, (1, 2, 3), 0), b"payload")
    with pytest.raises(OtherVersionError, match="version 2, not 1"):
        read_block(path, DIGEST, HASH)


def write_raw(path: Path, header: bytes) -> None:
    """A file without a payload, whose checksums are right."""
    fields = (layout.MAGIC, 1, len(header), 0)
    start = layout._PREFIX.pack(*fields, 0, 0)[: layout._PREFIX_BEFORE_CRC]
    crc = zlib.crc32(header, zlib.crc32(start))
    path.write_bytes(layout._PREFIX.pack(*fields, crc, crc) + header)


def test_a_header_that_is_too_short_is_bad_under_a_right_checksum(tmp_path):
    path = tmp_path / "block"
    for length in range(layout._HEADER.size):
        write_raw(path, bytes(length))
        with pytest.raises(BadBlockFileError, match="too short"):
            read_block(path, DIGEST, HASH)
    write_raw(path, bytes(layout._HEADER.size))
    with pytest.raises(BadBlockFileError, match="are invalid"):
        read_block(path, DIGEST, HASH)


def test_a_header_may_have_so_many_bytes_and_no_more(tmp_path, monkeypatch):
    path = tmp_path / "block"
    block = BlockHeader(HASH, None, tuple(range(300)), 0)
    write(path, block, b"payload")
    num_bytes = layout._HEADER.size + len(HASH) + 8 * 300
    monkeypatch.setattr(layout, "_MAX_HEADER_BYTES", num_bytes)
    assert read_block(path, DIGEST, HASH)[1] == b"payload"
    monkeypatch.setattr(layout, "_MAX_HEADER_BYTES", num_bytes - 1)
    with pytest.raises(BadBlockFileError, match="the length of its header"):
        read_block(path, DIGEST, HASH)


def test_no_more_is_read_than_a_header_may_have(tmp_path, monkeypatch):
    path = tmp_path / "block"
    data = bytearray(write(path, BlockHeader(HASH, None, (1, 2, 3), 0), b"payload"))
    data[12:16] = (2**32 - 1).to_bytes(4, "little")
    path.write_bytes(data)
    sizes = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, n, at: sizes.append(n) or pread(file, n, at))
    with pytest.raises(BadBlockFileError, match="the length of its header"):
        read_block(path, DIGEST, HASH)
    assert sizes == [layout._FIRST_READ]


def test_reads_that_give_less_than_asked_for_are_continued(tmp_path, monkeypatch):
    path = tmp_path / "block"
    header = BlockHeader(HASH, None, tuple(range(300)), 0)
    write(path, header, b"payload" * 99)
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, n, at: pread(file, min(n, 100), at))
    found, payload = read_block(path, DIGEST, HASH)
    assert (found.block, payload) == (header, b"payload" * 99)


@pytest.mark.parametrize(
    ("block_hash", "parent_hash"), [(b"", None), (bytes(65), None), (b"a", bytes(65)), (b"a", b"a")]
)
def test_hashes_that_cannot_be_are_refused(block_hash, parent_hash):
    with pytest.raises(ValueError, match=r"\[tier\]"):
        BlockHeader(block_hash, parent_hash, (), 0)
