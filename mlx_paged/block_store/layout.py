"""What a folder of blocks contains, and what the bytes of a block depend on besides its tokens.

    DIR/CACHEDIR.TAG                               marks it as a cache
    DIR/written.json                               how much was written, see catalogue.py
    DIR/weights/<64 hex>                           a model's digest, see models/identity.py
    DIR/blocks/<digest>/fingerprint.json           what the blocks below depend on
    DIR/blocks/<digest>/<2 hex>/<hash hex>.kv      a block, a state or an answer; the first two
                                                   digits of its hash
    DIR/blocks/<digest>/<2 hex>/.<...>.tmp         one that is being written
    DIR/blocks/<digest>/pins/<hash hex>.pin        pins that block and its ancestors

Folders have mode 0700 and files 0600, whatever the umask is (directory.py). Names are digests,
which reveal nothing about the text.

The file of a block is a header that describes it, the payload, and checksums over both. All
integers are little-endian. The prefix is the same in all versions, and contains the version:

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
import functools
import hashlib
import json
import os
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from mlx_paged.core.tier import BlockHeader, Payload
from mlx_paged.errors import ArgumentError, shown, system_reason
from mlx_paged.options.argument_values import is_plain_integer

MAGIC = b"MLXPGKV\n"
VERSION = 1

_PREFIX = struct.Struct("<8sIIQII")
_PREFIX_BEFORE_CRC = _PREFIX.size - 8
_HEADER = struct.Struct("<16sddQIHBB")
_FIRST_READ = 1024  # bytes: prefix and header of a block of up to 96 tokens
_MAX_HEADER_BYTES = 16 << 20

DIGEST_LENGTH = 32
"""Hexadecimal digits of a digest: 128 bits of SHA-256."""

STORED_KV_VERSION = 3
"""The version of what is stored: increase it if the blocks in existing folders may be wrong. They
are not found then, and are evicted first. Until version 2, K/V of files were stored, too.
"""
_VERSION_IN_CODE = re.compile(r"mlx_paged (\d+)\b")

BlockName: TypeAlias = tuple[str, bytes]
"""The digest of a fingerprint and the hash of a block, which name a file."""

BLOCKS_NAME = "blocks"
WEIGHTS_NAME = "weights"
WRITTEN_NAME = "written.json"
TAG_NAME = "CACHEDIR.TAG"
FINGERPRINT_NAME = "fingerprint.json"
PINS_NAME = "pins"
BLOCK_SUFFIX = ".kv"
PIN_SUFFIX = ".pin"

DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_LENGTH}}}")
# The folder of blocks whose hashes share a first byte.
SHARD = re.compile(r"[0-9a-f]{2}")
_HASH = re.compile(r"(?:[0-9a-f]{2})+")
# An index that earlier versions kept.
OLD_INDEX = re.compile(r"index-v\d+\.sqlite3.*")
# What a folder of blocks may contain, in any version; files also while they are written.
OWN_NAMES = re.compile(
    rf"{BLOCKS_NAME}|{WEIGHTS_NAME}|{TAG_NAME}|{re.escape(WRITTEN_NAME)}|"
    rf"\.({TAG_NAME}|{re.escape(WRITTEN_NAME)})\..*\.tmp|{OLD_INDEX.pattern}|\.DS_Store"
)


class BlockStoreError(ArgumentError):
    """The folder can't be used, and was left unchanged."""

    def __init__(self, message: str):
        super().__init__(f"[block store] {message}", "cache_dir")


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
class Fingerprint:
    """Two caches can exchange blocks if their fingerprints have the same digest.

    Attributes:
        model: digest of the model's content.
        model_name: display name. It isn't part of the digest: a model that was moved or renamed has
            the same K/V.
        layers: a description of each layer's K/V: heads, widths, format of its rows.
        kv_format: the K/V format that the user chose.
        block_size: tokens per block.
        code: ``STORED_KV_VERSION``, the version of MLX, its backend and the kind of device.
    """

    model: str
    model_name: str
    layers: tuple[str, ...]
    kv_format: str
    block_size: int
    code: str

    def __post_init__(self) -> None:
        texts = (self.model, self.model_name, self.kv_format, self.code, *self.layers)
        is_valid = type(self.layers) is tuple and all(type(text) is str for text in texts)
        if not is_valid or not is_plain_integer(self.block_size, 1):
            raise BlockStoreError(f"no fingerprint: {shown(dataclasses.astuple(self))}")

    @functools.cached_property
    def digest(self) -> str:
        """The name of the folder: 32 hexadecimal digits, the same in every process."""
        # The version of the file format is included: files of another one have another folder.
        fields = dataclasses.asdict(self)
        del fields["model_name"]
        text = json.dumps(["mlx_paged.fingerprint", VERSION, fields], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]

    @property
    def is_outdated(self) -> bool:
        """Whether the blocks are of an earlier ``STORED_KV_VERSION``, and not used any more."""
        found = _VERSION_IN_CODE.match(self.code)
        return found is not None and int(found[1]) < STORED_KV_VERSION

    def as_json(self) -> str:
        """A readable text, which ``from_json`` reads."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        """The fingerprint whose ``as_json`` this is.

        Raises:
            BlockStoreError: the text is not a fingerprint.
        """
        try:
            fields = json.loads(text)
            return cls(**{**fields, "layers": tuple(fields["layers"])})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise BlockStoreError(f"no fingerprint: {shown(text)}") from error


# Names


def folder_path(given: object) -> Path:
    """The absolute path of a folder as users name it. A leading ``~`` is the user's home.

    Raises:
        BlockStoreError: it is not a path, or in the home of an unknown user.
    """
    path = os.fspath(given) if isinstance(given, (str, os.PathLike)) else b""
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        raise BlockStoreError(f"cache_dir must be a folder, got {shown(given)}")
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise BlockStoreError(f"cache_dir {shown(path)} is in the home of an unknown user")
    # The program may change its working directory later.
    return Path(os.path.abspath(expanded))


def shard_name_of(block_hash: bytes) -> str:
    """The name of a block's folder, by the first byte of its hash."""
    return block_hash[:1].hex()


def file_name_of(block_hash: bytes, suffix: str = BLOCK_SUFFIX) -> str:
    """The name of a block's file, or with ``PIN_SUFFIX`` of the file that pins it."""
    return block_hash.hex() + suffix


def block_hash_of(name: str, suffix: str = BLOCK_SUFFIX) -> bytes | None:
    """The hash in a name of ``file_name_of``; ``None`` for any other name."""
    digits = name.removesuffix(suffix)
    return bytes.fromhex(digits) if digits != name and _HASH.fullmatch(digits) else None


# The file of a block


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
    if num_bytes > _MAX_HEADER_BYTES:
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
