"""``CacheFolder``: what a program that looks into a folder of blocks uses, while engines use it."""

from __future__ import annotations

import dataclasses
import os
import sqlite3
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_paged.block_store.errors import (
    BadBlockFileError,
    BlockStoreError,
    OtherVersionError,
    refusals,
)
from mlx_paged.block_store.files import check_is_ours
from mlx_paged.block_store.fingerprint import Fingerprint
from mlx_paged.block_store.index import Index, IndexRow, nbytes_on_disk
from mlx_paged.block_store.inventory import Inventory
from mlx_paged.block_store.layout import (
    FINGERPRINT_NAME,
    BlockLayout,
    BlockName,
    block_hash_of,
    file_name_of,
    shard_name_of,
)
from mlx_paged.core.tier import BlockHeader
from mlx_paged.errors import system_reason


@dataclasses.dataclass(frozen=True)
class Entry(IndexRow):
    """A block in the folder.

    Attributes:
        is_pinned: whether it stays, because it was pinned, or a block that comes after it.
        expires: when its time is over unless it is used again, in seconds since 1970; ``None`` for
            never. A pinned one has none.
    """

    is_pinned: bool = False
    expires: float | None = None


@dataclasses.dataclass(frozen=True)
class FolderSize:
    """How many blocks there are, and what they take, in steps of 4,096 bytes as file systems give
    them.
    """

    num_blocks: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Removed(FolderSize):
    """What was removed.

    Attributes:
        left: the paths of what was to be removed as well, and why it is still there.
    """

    left: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class CheckedFile:
    """What ``CacheFolder.verify`` says of a file.

    Attributes:
        path: the file, or a folder of files that can't be looked into.
        digest: of the fingerprint in whose folder it lies.
        block_hash: that its name stands for; ``None`` for a folder of files.
        nbytes: its size.
        problem: what is wrong, in a few words; ``None`` for a block that is whole and unaltered,
            and for one in the format of another version, which can't be checked here.
    """

    path: str
    digest: str
    block_hash: bytes | None
    nbytes: int
    problem: str | None


class CacheFolder:
    """A folder of blocks, looked at from outside, while engines use it. Makes no folder.

    Its methods raise BlockStoreError if the system refuses something.

    Raises:
        BlockStoreError: it isn't there, or no folder of blocks, or can't be read.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._layout = BlockLayout(folder)
        with _refusals(self._layout):
            check_is_ours(self._layout.folder)
        self._inventory = Inventory(self._layout)
        self._shards = self._inventory.shards

    def __enter__(self) -> CacheFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the index; a later call opens it again."""
        self._inventory.close()

    def fingerprints(self) -> dict[str, Fingerprint | None]:
        """By digest; ``None`` where the text beside the blocks is missing or unreadable."""
        return {digest: self._fingerprint(digest) for digest in self._shards.digests()}

    def entries(self) -> list[Entry]:
        """All blocks, of each fingerprint parents before children. Files that the index doesn't
        know are found, too.
        """
        with _refusals(self._layout):
            rows = self._inventory.act(Index.rows)
        kept = {
            digest: self._inventory.pins.kept(digest) for digest in {row.digest for row in rows}
        }
        return [_entry(row, is_pinned=row.block_hash in kept[row.digest]) for row in rows]

    def header(self, digest: str, block_hash: bytes) -> BlockHeader | None:
        """What a block's file says of it, with its token ids; ``None`` if it can't be read."""
        try:
            return self._shards.read_header((digest, block_hash)).block
        except (BadBlockFileError, OtherVersionError, OSError):
            return None

    def pin(self, digest: str, block_hash: bytes) -> bool:
        """Let a block and all its ancestors stay, whatever the limits are. Whether it was there."""
        chain = self._chain(digest, block_hash)
        if not chain:
            return False
        with _refusals(self._layout):
            self._inventory.pins.add(digest, chain)
            self._inventory.wait_for_evictions()
            # It may have been evicted a moment before the pin was there.
            if self.header(digest, block_hash) is not None:
                return True
            self._inventory.pins.remove(digest, block_hash)
        return False

    def unpin(self, digest: str, block_hash: bytes) -> bool:
        """Take a pin back. Ancestors that no other pin holds are free again, too.

        Returns:
            Whether there was one: on this block, not on one that comes after it.
        """
        with _refusals(self._layout):
            return self._inventory.pins.remove(digest, block_hash)

    def pins(self) -> list[BlockName]:
        """Digest and hash of each block that was pinned itself."""
        return [
            pin for digest in self._shards.digests() for pin in self._inventory.pins.pinned(digest)
        ]

    def remove(self, blocks: Iterable[BlockName]) -> Removed:
        """Remove blocks, given as digest and hash, pinned ones and their pins, too; what was
        removed. What can't be removed stays, and the rest goes. Blocks that come after them can't
        be found any more until they are there again.
        """
        there = {name: self._status(name) for name in dict.fromkeys(blocks)}
        with _refusals(self._layout):
            refusals = self._unpin_all(there)
            refusals |= self._inventory.remove(name for name in there if name not in refusals)
        left = {name: f"it can't be removed: {system_reason(refusals[name])}" for name in refusals}
        sizes: list[int] = []
        for name, status in there.items():
            if status is not None and stat.S_ISDIR(status.st_mode):
                left[name] = "it is a folder"
            elif status is not None and name not in left:
                sizes.append(nbytes_on_disk(status.st_size))
        paths = {self._layout.block(*name): why for name, why in left.items()}
        return Removed(len(sizes), sum(sizes), paths)

    def verify(self) -> Iterator[CheckedFile]:
        """Read and check all files. Changes nothing; hand what is bad to ``remove``."""
        self._shards.refresh()
        for digest in self._shards.digests():
            try:
                self._shards.folder(digest)
            except OSError as error:
                yield _unread_folder(self._layout.of(digest), digest, error)
                continue
            for first_byte in range(256):
                yield from self._verify_shard(digest, bytes([first_byte]))

    def size(self) -> FolderSize:
        """What lies there, of all fingerprints."""
        with _refusals(self._layout):
            return FolderSize(*self._inventory.act(Index.totals))

    def shrink(self, max_nbytes: int) -> FolderSize:
        """Evict until the folder takes at most ``max_nbytes``, pinned blocks aside; what went."""
        with _refusals(self._layout):
            return FolderSize(*self._inventory.evict(self.size().nbytes - max_nbytes))

    def rebuild(self) -> FolderSize:
        """Throw away what the index says and make it from the files; what is there then."""
        with _refusals(self._layout):
            self._inventory.act(Index.clear)
            self._inventory.list_again()
            return self.size()

    def _fingerprint(self, digest: str) -> Fingerprint | None:
        try:
            text = self._shards.folder(digest).read(FINGERPRINT_NAME).decode()
            fingerprint = Fingerprint.from_json(text)
        except (OSError, ValueError, BadBlockFileError):
            return None
        return fingerprint if fingerprint.digest == digest else None

    def _chain(self, digest: str, block_hash: bytes) -> list[bytes]:
        """A block and its ancestors, the first one first; as far as their files are there."""
        chain: list[bytes] = []
        seen: set[bytes] = set()
        following: bytes | None = block_hash
        while following is not None and following not in seen:
            header = self.header(digest, following)
            if header is None:
                break
            seen.add(following)
            chain.append(following)
            following = header.parent_hash
        return chain[::-1]

    def _status(self, name: BlockName) -> os.stat_result | None:
        """Of whatever has the name of a block; ``None`` if there is nothing."""
        try:
            return self._shards.shard(name).status(file_name_of(name[1]))
        except OSError:
            return None

    def _unpin_all(self, names: Iterable[BlockName]) -> dict[BlockName, OSError]:
        """Take all pins back; for which blocks the system refuses that, and why."""
        refusals: dict[BlockName, OSError] = {}
        for name in names:
            try:
                self._inventory.pins.remove(*name)
            except OSError as error:
                refusals[name] = error
        return refusals

    def _verify_shard(self, digest: str, first_byte: bytes) -> Iterator[CheckedFile]:
        try:
            names = self._shards.shard((digest, first_byte)).names()
        except FileNotFoundError:
            return
        except OSError as error:
            path = self._layout.of(digest) / shard_name_of(first_byte)
            yield _unread_folder(path, digest, error)
            return
        for block_hash in filter(None, map(block_hash_of, names)):
            problem = self._problem((digest, block_hash))
            status = self._status((digest, block_hash))
            # One that went meanwhile is no longer there to be bad.
            if status is not None:
                file = self._layout.block(digest, block_hash)
                yield CheckedFile(file, digest, block_hash, status.st_size, problem)

    def _problem(self, name: BlockName) -> str | None:
        try:
            self._shards.read(name)
        except BadBlockFileError as error:
            return str(error)
        except OtherVersionError:
            return None
        except OSError as error:
            return _unreadable(error)
        return None


def _unreadable(error: OSError) -> str:
    return f"it can't be read: {system_reason(error)}"


def _unread_folder(path: Path, digest: str, error: OSError) -> CheckedFile:
    return CheckedFile(str(path), digest, None, 0, _unreadable(error))


def _entry(row: IndexRow, is_pinned: bool) -> Entry:
    expires = None if row.ttl is None or is_pinned else row.last_used + row.ttl
    return Entry(**vars(row), is_pinned=is_pinned, expires=expires)


@contextmanager
def _refusals(layout: BlockLayout) -> Iterator[None]:
    try:
        with refusals(layout.folder):
            yield
    except sqlite3.Error as error:
        raise BlockStoreError(f"{layout.folder}: no index can be made: {error}") from error
