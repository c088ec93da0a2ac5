"""``BlockFiles``: the files of blocks, in a folder for each fingerprint and first byte of the hash,
and of pins. A pin is a file named after the block that was pinned, and lists the block's ancestors.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mlx_paged.block_store.directory import Directory, temporary_name
from mlx_paged.block_store.layout import (
    BLOCKS_NAME,
    DIGEST,
    FINGERPRINT_NAME,
    PIN_SUFFIX,
    PINS_NAME,
    SHARD,
    BadBlockFileError,
    BlockName,
    FileHeader,
    Fingerprint,
    OtherVersionError,
    block_hash_of,
    file_name_of,
    folder_path,
    parse_block,
    parse_header,
    shard_name_of,
)
from mlx_paged.core.tier import BlockHeader, Payload

ALLOCATION_UNIT = 4096
"""Bytes: file systems allocate files in multiples of this."""

MAX_SECONDS_AHEAD = 60
"""How far another machine's clock, which set a file's time, may be ahead of this one."""

_MAX_OPEN = 8
# Two changes of a folder within one tick of the file system's clock leave the same time.
_TICK_NS = 1_000_000_000


class BlockFiles:
    """Accesses the files below one folder through descriptors, so that no link is followed. Any
    thread may call it.

    Folders of fingerprints stay open, since each access to a block needs one. Pins are read again
    when another process has changed them.

    Attributes:
        path: of the folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = folder_path(folder)
        self._folders: dict[str, Directory] = {}
        self._kept: dict[str, tuple[int, frozenset[bytes]]] = {}

    def path_of(self, digest: str) -> Path:
        """The folder of a fingerprint's blocks."""
        return self.path / BLOCKS_NAME / digest

    def path_of_block(self, name: BlockName) -> str:
        """The file of a block."""
        digest, block_hash = name
        return f"{self.path_of(digest)}/{shard_name_of(block_hash)}/{file_name_of(block_hash)}"

    def refresh(self) -> None:
        """Open all folders again at their next use: some may have been moved."""
        self._folders.clear()

    def blocks(self) -> Directory:
        """The folder that contains those of all fingerprints. Raises OSError."""
        return Directory.at(self.path).folder(BLOCKS_NAME)

    def digests(self) -> list[str]:
        """The digests of all fingerprints with an entry of that name."""
        try:
            return list(filter(DIGEST.fullmatch, self.blocks().names()))
        except OSError:
            return []

    def folder(self, digest: str) -> Directory:
        """The folder of a fingerprint. Raises OSError."""
        folder = self._folders.get(digest)
        if folder is None:
            if not DIGEST.fullmatch(digest):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), digest)
            folder = self.blocks().folder(digest)
            if len(self._folders) >= _MAX_OPEN:
                self._folders.clear()
            self._folders[digest] = folder
        return folder

    def fingerprint(self, digest: str) -> Fingerprint | None:
        """The description next to the blocks; ``None`` if it is missing or unreadable."""
        try:
            text = self.folder(digest).read(FINGERPRINT_NAME).decode()
            fingerprint = Fingerprint.from_json(text)
        except (OSError, ValueError, BadBlockFileError):
            return None
        return fingerprint if fingerprint.digest == digest else None

    def files(self, digest: str) -> Iterator[tuple[BlockName, os.stat_result]]:
        """The blocks of a fingerprint and the status of their files, in any order. Links, folders,
        files of other users and folders that can't be read are skipped. Temporary files of dead
        processes are removed.
        """
        with contextlib.suppress(OSError):
            folder = self.folder(digest)
            folder.remove_abandoned(folder.entries())
            with contextlib.suppress(OSError):
                pins = folder.folder(PINS_NAME)
                pins.remove_abandoned(pins.entries())
            for shard_name in filter(SHARD.fullmatch, folder.names()):
                with contextlib.suppress(OSError):
                    yield from _blocks_in(folder.folder(shard_name), digest)

    def shard(self, name: BlockName) -> Directory:
        """The folder of a block. Raises OSError."""
        digest, block_hash = name
        shard = shard_name_of(block_hash)
        try:
            return self.folder(digest).folder(shard)
        except FileNotFoundError:
            # The folder of the fingerprint may have been removed, and made again.
            self._folders.pop(digest, None)
            return self.folder(digest).folder(shard)

    def status(self, name: BlockName) -> os.stat_result | None:
        """The status of a block's file; ``None`` if there is none that belongs to the owner."""
        try:
            shard = self.shard(name)
            status = shard.status(file_name_of(name[1]))
        except OSError:
            return None
        return status if shard.is_own_file(status) else None

    def read(self, name: BlockName) -> tuple[FileHeader, bytes, float]:
        """The header, the payload and the time of the last use of a block, in seconds since 1970.

        Raises:
            BadBlockFileError: the file isn't this block, complete and unaltered.
            OtherVersionError: it is a block in another version's format.
            OSError: there is no such file, or the system refuses to read it.
        """
        with self.shard(name).opened(file_name_of(name[1])) as (file, status):
            return *parse_block(file, status.st_size, *name), time_used(status) / 1e9

    def read_header(self, name: BlockName) -> FileHeader:
        """The header only, without a check of the payload. Raises as ``read``."""
        with self.shard(name).opened(file_name_of(name[1])) as (file, status):
            return parse_header(file, status.st_size, *name)

    def block(self, name: BlockName) -> BlockHeader | None:
        """Which block a file contains by its header; ``None`` if that can't be read."""
        try:
            return self.read_header(name).block
        except (BadBlockFileError, OtherVersionError, OSError):
            return None

    def parent(self, name: BlockName) -> bytes | None:
        """The hash of a block's parent; ``None`` for a first or an unreadable block."""
        block = self.block(name)
        return None if block is None else block.parent_hash

    def remove(self, name: BlockName) -> bool:
        """Remove a block's file, or anything else of its name but a folder; whether there was one.
        Raises OSError.
        """
        try:
            return self.shard(name).remove(file_name_of(name[1]))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def note_used(self, name: BlockName, used: int) -> None:
        """Set the time of a block's last use, in nanoseconds since 1970, unless it is later
        already. Raises OSError.
        """
        file = file_name_of(name[1])
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            try:
                shard = self.shard(name)
            except PermissionError:
                return
            status = shard.status(file)
            if shard.is_own_file(status) and time_used(status) < used:
                shard.set_time(file, used)

    def make_fingerprint_folder(self, fingerprint: Fingerprint) -> Directory:
        """The folder of a fingerprint, made with its description if necessary. Raises OSError."""
        self.refresh()
        folder = self.blocks().make_folder(fingerprint.digest)
        text = fingerprint.as_json().encode()
        with contextlib.suppress(FileNotFoundError, BadBlockFileError):
            if folder.read(FINGERPRINT_NAME) == text:
                return folder
        with contextlib.suppress(IsADirectoryError):  # It is only for readers of the folder.
            folder.write_atomically(FINGERPRINT_NAME, [text])
        return folder

    def probe(self, fingerprint: Fingerprint, num_bytes: int) -> None:
        """Write a file of this size for a fingerprint, and remove it. Raises OSError."""
        folder, name = self.make_fingerprint_folder(fingerprint), temporary_name("probe")
        folder.write_atomically(name, [bytes(num_bytes)])
        folder.remove(name)

    def is_blocked(self, name: BlockName) -> bool:
        """Whether something else has the name of a block's folder, or a folder that can't be used,
        while the folder of its fingerprint can.
        """
        digest, block_hash = name
        try:
            folder = self.blocks().folder(digest)
        except OSError:
            return False
        try:
            return not folder.folder(shard_name_of(block_hash)).is_writable()
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def write(
        self, fingerprint: Fingerprint, block_hash: bytes, pieces: Sequence[Payload], used: int
    ) -> None:
        """Write the file of a block, and make missing folders. Raises OSError.

        Args:
            used: time of the last use, in nanoseconds since 1970.
        """
        file = file_name_of(block_hash)
        try:
            self.shard((fingerprint.digest, block_hash)).write_atomically(file, pieces, used)
        except FileNotFoundError:
            # This is the first block of its shard, or the folder was removed.
            folder = self.make_fingerprint_folder(fingerprint)
            folder.make_folder(shard_name_of(block_hash)).write_atomically(file, pieces, used)

    # Pins

    def kept(self, digest: str) -> frozenset[bytes]:
        """The pinned blocks of a fingerprint, and all their ancestors."""
        try:
            changed = self.folder(digest).status(PINS_NAME).st_mtime_ns
        except OSError:
            return frozenset()
        known, kept = self._kept.get(digest, (None, frozenset()))
        if changed != known:
            kept = frozenset(
                block_hash for pinned in self.pinned(digest) for block_hash in self._chain(*pinned)
            )
            if abs(time.time_ns() - changed) > _TICK_NS:
                self._kept[digest] = changed, kept
        return kept

    def pinned(self, digest: str) -> list[BlockName]:
        """The blocks of a fingerprint that were pinned themselves."""
        try:
            names = self.folder(digest).folder(PINS_NAME).names()
        except OSError:
            return []
        hashes = (block_hash_of(name, PIN_SUFFIX) for name in names)
        return [(digest, block_hash) for block_hash in hashes if block_hash is not None]

    def pin(self, digest: str, chain: Sequence[bytes]) -> None:
        """Pin the last block of a chain. Raises OSError."""
        text = "".join(f"{block_hash.hex()}\n" for block_hash in chain)
        pins = self.folder(digest).make_folder(PINS_NAME)
        pins.write_atomically(_pin_name_of(chain[-1]), [text.encode()])

    def unpin(self, digest: str, block_hash: bytes) -> bool:
        """Remove a pin; whether there was one. Raises OSError."""
        try:
            return self.folder(digest).folder(PINS_NAME).remove(_pin_name_of(block_hash))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _chain(self, digest: str, block_hash: bytes) -> list[bytes]:
        chain = [block_hash]
        # An unreadable pin still pins the block that it is named after.
        with contextlib.suppress(OSError, ValueError, BadBlockFileError):
            pins = self.folder(digest).folder(PINS_NAME)
            text = pins.read(_pin_name_of(block_hash)).decode("ascii")
            chain += map(bytes.fromhex, text.split())
        return chain


def nbytes_on_disk(num_bytes: int) -> int:
    """What a file of ``num_bytes`` takes on disk."""
    return -(-num_bytes // ALLOCATION_UNIT) * ALLOCATION_UNIT


def time_used(status: os.stat_result) -> int:
    """When a file was last used, in nanoseconds since 1970. A time in the future is wrong, and
    would keep the file forever, so it counts as the oldest.
    """
    latest = time.time_ns() + MAX_SECONDS_AHEAD * 1_000_000_000
    return 0 if status.st_mtime_ns > latest else status.st_mtime_ns


def _blocks_in(shard: Directory, digest: str) -> Iterator[tuple[BlockName, os.stat_result]]:
    entries = shard.entries()
    shard.remove_abandoned(entries)
    for name, status in entries:
        block_hash = block_hash_of(name)
        if block_hash is not None and shard.is_own_file(status):
            yield (digest, block_hash), status


def _pin_name_of(block_hash: bytes) -> str:
    return file_name_of(block_hash, PIN_SUFFIX)
