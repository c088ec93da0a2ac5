"""The layout of a folder of blocks, and what their bytes depend on besides tokens.

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
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
from pathlib import Path
from typing import TypeAlias

from mlx_paged.argument_values import is_plain_integer
from mlx_paged.block_store.block_file import VERSION, BlockStoreError
from mlx_paged.errors import shown

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

_DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_LENGTH}}}")
_HASH = re.compile(r"(?:[0-9a-f]{2})+")
_SHARD = re.compile(r"[0-9a-f]{2}")
_OLD_INDEX = re.compile(r"index-v\d+\.sqlite3.*")
# What a folder of blocks may contain, in any version; files also while they are written.
_OWN_NAMES = re.compile(
    rf"{BLOCKS_NAME}|{WEIGHTS_NAME}|{TAG_NAME}|{re.escape(WRITTEN_NAME)}|"
    rf"\.({TAG_NAME}|{re.escape(WRITTEN_NAME)})\..*\.tmp|{_OLD_INDEX.pattern}|\.DS_Store"
)


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
        is_right = type(self.layers) is tuple and all(type(text) is str for text in texts)
        if not is_right or not is_plain_integer(self.block_size, 1):
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


class BlockLayout:
    """The paths below one folder. Files are accessed by ``Shards``."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = folder_path(folder)
        self.blocks = self.folder / BLOCKS_NAME

    def of(self, digest: str) -> Path:
        """The folder of a fingerprint's blocks."""
        return self.blocks / digest

    def block(self, digest: str, block_hash: bytes) -> str:
        """The file of a block."""
        return f"{self.blocks}/{digest}/{shard_name_of(block_hash)}/{file_name_of(block_hash)}"


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


def is_digest(name: str) -> bool:
    """Whether a name is that of a fingerprint's folder."""
    return _DIGEST.fullmatch(name) is not None


def is_shard_name(name: str) -> bool:
    """Whether a name is that of a shard: the folder of blocks whose hashes share a first byte."""
    return _SHARD.fullmatch(name) is not None


def is_old_index(name: str) -> bool:
    """Whether a name is that of the SQLite index that earlier versions kept."""
    return _OLD_INDEX.fullmatch(name) is not None


def is_own_name(name: str) -> bool:
    """Whether a name may occur in a folder of blocks."""
    return _OWN_NAMES.fullmatch(name) is not None


def block_hash_of(name: str, suffix: str = BLOCK_SUFFIX) -> bytes | None:
    """The hash in a name of ``file_name_of``; ``None`` for any other name."""
    digits = name.removesuffix(suffix)
    return bytes.fromhex(digits) if digits != name and _HASH.fullmatch(digits) else None
