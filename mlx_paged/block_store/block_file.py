"""The file of a block: a header that describes it, the payload, and checksums over both.

All integers are little-endian. The prefix is the same in all versions, and contains the version:

    prefix    magic b"MLXPGKV\\n", version (4 bytes), bytes of the header (4), bytes of the payload
              (8), CRC of the prefix so far and the header (4), CRC of the payload (4)
    header    digest of the fingerprint (16 bytes), created (8, seconds since 1970), time to live
              (8, seconds, 0 for none), first token (8), number of tokens (4), group (2), bytes of
              the hash (1) and of the parent's (1, 0 for no parent); then hash, parent's hash, and
              token ids of 8 signed bytes each
    payload   to the end of the file

The checksums are CRC-32 (``zlib.crc32``), and the second continues the first, so that no byte of
the file can change undetected. They detect torn and damaged files, which are rare, with a chance of
one in four billion that one is missed. They don't protect against an attacker who can write into
the folder, and nothing stored in the file could. SHA-256 takes three times as long.
"""

from __future__ import annotations

import dataclasses
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_paged.core.tier import BlockHeader, Payload
from mlx_paged.errors import ArgumentError, system_reason

MAGIC = b"MLXPGKV\n"
VERSION = 1

_PREFIX = struct.Struct("<8sIIQII")
_PREFIX_BEFORE_CRC = _PREFIX.size - 8
_HEADER = struct.Struct("<16sddQIHBB")
_FIRST_READ = 1024  # bytes: prefix and header of a block of up to 96 tokens
_MOST_HEADER_BYTES = 16 << 20


class BlockStoreError(ArgumentError):
    """The folder can't be used, and was left unchanged."""

    def __init__(self, message: str, argument: str = "cache_dir"):
        super().__init__(f"[block store] {message}", argument)


class BadBlockFileError(Exception):
    """A file that is not the block of its name: torn, altered, copied, or not a regular file."""


class OtherVersionError(Exception):
    """A block in the format of another version. It can't be used here, and is left alone."""


@contextmanager
def refusals(folder: Path) -> Iterator[None]:
    """Turn an ``OSError`` into a ``BlockStoreError``."""
    try:
        yield
    except OSError as error:
        raise BlockStoreError(f"{folder} can't be used: {system_reason(error)}") from error


@dataclasses.dataclass(frozen=True)
class FileHeader:
    """The header of a block's file.

    Attributes:
        block: hashes, tokens and position of the block.
        digest: of its fingerprint.
        created: when it was written, in seconds since 1970.
        ttl: how many seconds it is kept after its last use; ``None`` for no limit.
        num_header_bytes: size of prefix and header together.
        num_payload_bytes: size of the payload.
        crc: checksum of prefix and header.
        payload_crc: ``crc`` continued over the payload.
    """

    block: BlockHeader
    digest: str
    created: float
    ttl: float | None
    num_header_bytes: int
    num_payload_bytes: int
    crc: int
    payload_crc: int


def encode_header(
    block: BlockHeader, digest: str, created: float, ttl: float | None, payload: Payload
) -> bytes:
    """The bytes of prefix and header, which precede ``payload`` in the file."""
    parent = block.parent_hash or b""
    header = _HEADER.pack(
        bytes.fromhex(digest),
        created,
        ttl or 0.0,
        block.first_token,
        len(block.token_ids),
        block.group,
        len(block.block_hash),
        len(parent),
    )
    tokens = struct.pack(f"<{len(block.token_ids)}q", *block.token_ids)
    header = b"".join((header, block.block_hash, parent, tokens))
    num_payload_bytes = memoryview(payload).nbytes
    fields = (MAGIC, VERSION, len(header), num_payload_bytes)
    crc = zlib.crc32(header, zlib.crc32(_PREFIX.pack(*fields, 0, 0)[:_PREFIX_BEFORE_CRC]))
    return _PREFIX.pack(*fields, crc, zlib.crc32(payload, crc)) + header


def parse_block(
    file: int, num_bytes: int, digest: str, block_hash: bytes
) -> tuple[FileHeader, bytes]:
    """Read and check the header and the payload of a block.

    Args:
        file: descriptor, open for reading.
        num_bytes: size of the file.
        digest: expected digest of the fingerprint.
        block_hash: expected hash.

    Raises:
        BadBlockFileError: the file isn't this block, complete and unaltered.
        OtherVersionError: it is a block in another version's format.
        OSError: the system refuses to read it.
    """
    header = parse_header(file, num_bytes, digest, block_hash)
    payload = _read(file, header.num_payload_bytes, header.num_header_bytes)
    if zlib.crc32(payload, header.crc) != header.payload_crc:
        raise BadBlockFileError("the checksum of its payload is wrong")
    return header, payload


def parse_header(file: int, num_bytes: int, digest: str, block_hash: bytes) -> FileHeader:
    """Read and check the header only. Raises as ``parse_block``."""
    header = _parse(file)
    if header.num_header_bytes + header.num_payload_bytes != num_bytes:
        raise BadBlockFileError("it has another size than its header says")
    if header.digest != digest or header.block.block_hash != block_hash:
        raise BadBlockFileError("it is another block than its name says")
    return header


def _parse(file: int) -> FileHeader:
    data = os.pread(file, _FIRST_READ, 0)
    if len(data) < _PREFIX.size or not data.startswith(MAGIC):
        raise BadBlockFileError("it doesn't begin like a block")
    _, version, num_bytes, num_payload_bytes, crc, payload_crc = _PREFIX.unpack_from(data)
    end = _PREFIX.size + num_bytes
    if num_bytes > _MOST_HEADER_BYTES:
        raise BadBlockFileError("the length of its header is wrong")
    if len(data) < end:
        data += _read(file, end - len(data), len(data))
    header = data[_PREFIX.size : end]
    if zlib.crc32(header, zlib.crc32(data[:_PREFIX_BEFORE_CRC])) != crc:
        raise BadBlockFileError("the checksum of its header is wrong")
    if version != VERSION:
        raise OtherVersionError(f"it has the format of version {version}, not {VERSION}")
    return _file_header(header, num_payload_bytes, crc, payload_crc)


def _file_header(data: bytes, num_payload_bytes: int, crc: int, payload_crc: int) -> FileHeader:
    if len(data) < _HEADER.size:
        raise BadBlockFileError("its header is too short")
    digest, created, ttl, first_token, num_tokens, group, len_hash, len_parent = (
        _HEADER.unpack_from(data)
    )
    hash_end = _HEADER.size + len_hash
    parent_end = hash_end + len_parent
    if len(data) != parent_end + 8 * num_tokens:
        raise BadBlockFileError("the lengths in its header contradict each other")
    try:
        block = BlockHeader(
            block_hash=data[_HEADER.size : hash_end],
            parent_hash=data[hash_end:parent_end] or None,
            token_ids=struct.unpack_from(f"<{num_tokens}q", data, parent_end),
            first_token=first_token,
            group=group,
        )
    except ValueError as error:
        raise BadBlockFileError("the hashes in its header are invalid") from error
    num_header_bytes = _PREFIX.size + len(data)
    return FileHeader(
        block, digest.hex(), created, ttl or None, num_header_bytes, num_payload_bytes, crc,
        payload_crc,
    )  # fmt: skip


def _read(file: int, num_bytes: int, offset: int) -> bytes:
    data = os.pread(file, num_bytes, offset)
    if len(data) == num_bytes:
        return data
    # A read may return fewer bytes: when it is interrupted by a signal, or very large.
    pieces = [data]
    missing = num_bytes - len(data)
    while missing and pieces[-1]:
        pieces.append(os.pread(file, missing, offset + num_bytes - missing))
        missing -= len(pieces[-1])
    if missing:
        raise BadBlockFileError("it ends too early")
    return b"".join(pieces)
