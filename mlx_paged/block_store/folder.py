"""``CacheFolder``: access to a folder of blocks for tools, while engines use it."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from mlx_paged.block_store.block_files import BlockFiles, nbytes_on_disk, time_used
from mlx_paged.block_store.catalogue import Catalogue, Written, WrittenBytes
from mlx_paged.block_store.directory import check_is_ours
from mlx_paged.block_store.layout import (
    BadBlockFileError,
    BlockName,
    Fingerprint,
    OtherVersionError,
    block_hash_of,
    file_name_of,
    refusals,
    shard_name_of,
)
from mlx_paged.core.tier import BlockHeader
from mlx_paged.errors import system_reason


@dataclasses.dataclass(frozen=True)
class Entry:
    """A block in the folder, without its token ids (see ``CacheFolder.header``).

    Attributes:
        digest: of its fingerprint.
        block_hash: its chained hash.
        parent_hash: hash of the preceding block, ``None`` for the first one of a sequence.
        first_token: the position of its first token.
        num_tokens: number of its tokens; 0 for a file whose header can't be read, such as one in
            the format of another version.
        group: the group of layers whose rows it contains.
        nbytes: size of its file on disk, a multiple of 4,096 bytes.
        created: when it was written, in seconds since 1970.
        ttl: how many seconds it is kept after its last use; ``None`` for no limit.
        last_used: when it was last written or used, in seconds since 1970.
        is_pinned: whether it or one of its successors was pinned.
    """

    digest: str
    block_hash: bytes
    parent_hash: bytes | None
    first_token: int
    num_tokens: int
    group: int
    nbytes: int
    created: float
    ttl: float | None
    last_used: float
    is_pinned: bool = False

    @property
    def name(self) -> BlockName:
        """The name that methods of ``CacheFolder`` take."""
        return self.digest, self.block_hash

    @property
    def expires(self) -> float | None:
        """When it expires unless it is used again, in seconds since 1970; ``None`` for never.
        Pinned blocks don't expire.
        """
        return None if self.ttl is None or self.is_pinned else self.last_used + self.ttl


@dataclasses.dataclass(frozen=True)
class FolderSize:
    """A number of blocks, and their size on disk, a multiple of 4,096 bytes for each."""

    num_blocks: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Removed(FolderSize):
    """The removed blocks.

    Attributes:
        left: the paths of files that could not be removed, and why.
    """

    left: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class CheckedFile:
    """A file that ``CacheFolder.verify`` has checked.

    Attributes:
        path: of the file, or of a folder that can't be listed.
        digest: of the fingerprint in whose folder it is.
        block_hash: the hash in its name; ``None`` for a folder.
        nbytes: its size.
        problem: what is wrong, in a few words; ``None`` for a block that is complete and
            unaltered, and for one in the format of another version, which can't be checked.
    """

    path: str
    digest: str
    block_hash: bytes | None
    nbytes: int
    problem: str | None


class CacheFolder:
    """An existing folder of blocks. Engines may use it at the same time.

    Its methods raise BlockStoreError for errors of the system.

    Raises:
        BlockStoreError: it doesn't exist, isn't a folder of blocks, or can't be read.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._files = BlockFiles(folder)
        self._folder = self._files.path
        with refusals(self._folder):
            check_is_ours(self._folder)
        self._catalogue = Catalogue(self._files)

    def fingerprints(self) -> dict[str, Fingerprint | None]:
        """By digest; ``None`` if the description next to the blocks is missing or unreadable."""
        return {digest: self._files.fingerprint(digest) for digest in self._files.digests()}

    def entries(self) -> list[Entry]:
        """All blocks, for each fingerprint parents before children. Reads all headers, and skips
        files that are not blocks (see ``verify``).
        """
        self._files.refresh()
        found = [entry for digest in self._files.digests() for entry in self._entries(digest)]
        return sorted(found, key=lambda each: (each.digest, each.first_token, each.block_hash))

    def header(self, digest: str, block_hash: bytes) -> BlockHeader | None:
        """The header of a block, with its token ids; ``None`` if it can't be read."""
        return self._files.block((digest, block_hash))

    def pin(self, digest: str, block_hash: bytes) -> bool:
        """Exempt a block and all its ancestors from eviction; whether the block exists."""
        chain = self._chain(digest, block_hash)
        if not chain:
            return False
        with refusals(self._folder):
            self._files.pin(digest, chain)
            with self._files.blocks().locked(fcntl.LOCK_EX):
                pass  # Evictions that had read the pins before have ended.
            # It may have been evicted just before the pin was written.
            if self.header(digest, block_hash) is not None:
                return True
            self._files.unpin(digest, block_hash)
        return False

    def unpin(self, digest: str, block_hash: bytes) -> bool:
        """Remove a pin. Ancestors without another pin can be evicted again, too.

        Returns:
            Whether this block itself was pinned.
        """
        with refusals(self._folder):
            return self._files.unpin(digest, block_hash)

    def pins(self) -> list[BlockName]:
        """The blocks that were pinned themselves."""
        return [pin for digest in self._files.digests() for pin in self._files.pinned(digest)]

    def remove(self, blocks: Iterable[BlockName]) -> Removed:
        """Remove blocks, including pinned ones and their pins. If some can't be removed, the others
        still are. Successors of removed blocks can't be found until the blocks are written again.
        """
        refused: dict[str, str] = {}
        folders: dict[str, str] = {}
        sizes: list[int] = []
        for name in dict.fromkeys(blocks):
            status, path = self._status(name), self._files.path_of_block(name)
            try:
                self._files.unpin(*name)
                self._catalogue.remove(name)
            except OSError as error:
                refused[path] = f"it can't be removed: {system_reason(error)}"
                continue
            if status is not None and stat.S_ISDIR(status.st_mode):
                folders[path] = "it is a folder"
            elif status is not None:
                sizes.append(nbytes_on_disk(status.st_size))
        return Removed(len(sizes), sum(sizes), refused | folders)

    def verify(self) -> Iterator[CheckedFile]:
        """Read and check all files. Changes nothing; pass bad files to ``remove``."""
        self._files.refresh()
        for digest in self._files.digests():
            try:
                self._files.folder(digest)
            except OSError as error:
                yield _unread_folder(self._files.path_of(digest), digest, error)
                continue
            for first_byte in range(256):
                yield from self._verify_shard(digest, bytes([first_byte]))

    def size(self) -> FolderSize:
        """The number and size of all blocks, of all fingerprints."""
        with refusals(self._folder):
            self._catalogue.list_again()
            self._catalogue.list_files()
            return FolderSize(self._catalogue.num_blocks, self._catalogue.nbytes)

    def written(self) -> Written:
        """What all engines have written to the folder."""
        return WrittenBytes(self._folder).now()

    def shrink(self, max_nbytes: int) -> FolderSize:
        """Evict until the folder takes at most ``max_nbytes``, except for pinned blocks."""
        self.size()
        with refusals(self._folder):
            return FolderSize(*self._catalogue.shrink(max_nbytes))

    def _entries(self, digest: str) -> Iterator[Entry]:
        kept = self._files.kept(digest)
        for name, status in self._files.files(digest):
            used, nbytes = time_used(status) / 1e9, nbytes_on_disk(status.st_size)
            is_pinned = name[1] in kept
            try:
                header = self._files.read_header(name)
            except (BadBlockFileError, FileNotFoundError):
                continue
            except (OtherVersionError, OSError):
                # It takes space, whatever it contains.
                yield Entry(*name, None, 0, 0, 0, nbytes, used, None, used, is_pinned)
                continue
            block = header.block
            yield Entry(
                *name, block.parent_hash, block.first_token, len(block.token_ids), block.group,
                nbytes, header.created, header.ttl, used, is_pinned,
            )  # fmt: skip

    def _chain(self, digest: str, block_hash: bytes) -> list[bytes]:
        """A block and its ancestors, first block first, as far as their files exist."""
        chain: dict[bytes, None] = {}
        header = self.header(digest, block_hash)
        while header is not None and header.block_hash not in chain:
            chain[header.block_hash] = None
            parent = header.parent_hash
            header = None if parent is None else self.header(digest, parent)
        return list(reversed(chain))

    def _status(self, name: BlockName) -> os.stat_result | None:
        """The status of anything that has the name of a block; ``None`` if nothing has."""
        try:
            return self._files.shard(name).status(file_name_of(name[1]))
        except OSError:
            return None

    def _verify_shard(self, digest: str, first_byte: bytes) -> Iterator[CheckedFile]:
        try:
            names = self._files.shard((digest, first_byte)).names()
        except FileNotFoundError:
            return
        except OSError as error:
            path = self._files.path_of(digest) / shard_name_of(first_byte)
            yield _unread_folder(path, digest, error)
            return
        for block_hash in filter(None, map(block_hash_of, names)):
            problem = self._problem((digest, block_hash))
            status = self._status((digest, block_hash))
            # A file that was removed meanwhile is not a bad one.
            if status is not None:
                file = self._files.path_of_block((digest, block_hash))
                yield CheckedFile(file, digest, block_hash, status.st_size, problem)

    def _problem(self, name: BlockName) -> str | None:
        try:
            self._files.read(name)
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
