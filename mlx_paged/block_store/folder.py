"""``CacheFolder``: what a program that looks into a folder of blocks uses, while engines use it."""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mlx_paged.block_store.catalogue import Catalogue
from mlx_paged.block_store.errors import (
    BadBlockFileError,
    OtherVersionError,
    refusals,
)
from mlx_paged.block_store.files import check_is_ours
from mlx_paged.block_store.fingerprint import Fingerprint
from mlx_paged.block_store.layout import (
    FINGERPRINT_NAME,
    BlockLayout,
    BlockName,
    block_hash_of,
    file_name_of,
    shard_name_of,
)
from mlx_paged.block_store.shards import last_use_of, nbytes_on_disk
from mlx_paged.core.tier import BlockHeader
from mlx_paged.errors import system_reason


@dataclasses.dataclass(frozen=True)
class Entry:
    """A block in the folder.

    Attributes:
        digest: of its fingerprint.
        block_hash: its chained hash.
        parent_hash: that of the block before it, ``None`` for the first one of a sequence.
        first_token: the position of its first token.
        num_tokens: how many tokens it has (``CacheFolder.header`` says which); 0 for a file whose
            header can't be read, such as one in the format of another version.
        group: the group of layers whose rows it holds.
        nbytes: what its file takes on disk, in steps of 4,096 bytes.
        created: when it was written, in seconds since 1970.
        ttl: for how many seconds it is kept after it was last used; ``None`` for no limit.
        last_used: when it was last written or used, in seconds since 1970.
        is_pinned: whether it stays, because it was pinned, or a block that comes after it.
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
        """What methods of ``CacheFolder`` take."""
        return self.digest, self.block_hash

    @property
    def expires(self) -> float | None:
        """When its time is over unless it is used again, in seconds since 1970; ``None`` for never.
        A pinned one has none.
        """
        return None if self.ttl is None or self.is_pinned else self.last_used + self.ttl


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
        with refusals(self._layout.folder):
            check_is_ours(self._layout.folder)
        self._catalogue = Catalogue(self._layout)
        self._shards = self._catalogue.shards

    def fingerprints(self) -> dict[str, Fingerprint | None]:
        """By digest; ``None`` where the text beside the blocks is missing or unreadable."""
        return {digest: self._fingerprint(digest) for digest in self._shards.digests()}

    def entries(self) -> list[Entry]:
        """All blocks, of each fingerprint parents before children. Reads the header of each, and
        passes over files that are no blocks (see ``verify``).
        """
        self._shards.refresh()
        found = [entry for digest in self._shards.digests() for entry in self._entries(digest)]
        return sorted(found, key=lambda each: (each.digest, each.first_token, each.block_hash))

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
        with refusals(self._layout.folder):
            self._catalogue.pins.add(digest, chain)
            self._catalogue.wait_for_evictions()
            # It may have been evicted a moment before the pin was there.
            if self.header(digest, block_hash) is not None:
                return True
            self._catalogue.pins.remove(digest, block_hash)
        return False

    def unpin(self, digest: str, block_hash: bytes) -> bool:
        """Take a pin back. Ancestors that no other pin holds are free again, too.

        Returns:
            Whether there was one: on this block, not on one that comes after it.
        """
        with refusals(self._layout.folder):
            return self._catalogue.pins.remove(digest, block_hash)

    def pins(self) -> list[BlockName]:
        """Digest and hash of each block that was pinned itself."""
        return [
            pin for digest in self._shards.digests() for pin in self._catalogue.pins.pinned(digest)
        ]

    def remove(self, blocks: Iterable[BlockName]) -> Removed:
        """Remove blocks, given as digest and hash, pinned ones and their pins, too; what was
        removed. What can't be removed stays, and the rest goes. Blocks that come after them can't
        be found any more until they are there again.
        """
        there = {name: self._status(name) for name in dict.fromkeys(blocks)}
        with refusals(self._layout.folder):
            refused = self._each(there, lambda name: self._catalogue.pins.remove(*name))
            refused |= self._each(there.keys() - refused.keys(), self._catalogue.remove)
        left = {name: f"it can't be removed: {system_reason(why)}" for name, why in refused.items()}
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
        """What the folder contains, of all fingerprints."""
        with refusals(self._layout.folder):
            self._catalogue.list_again()
            self._catalogue.list_files()
            return FolderSize(self._catalogue.num_blocks, self._catalogue.nbytes)

    def shrink(self, max_nbytes: int) -> FolderSize:
        """Evict until the folder takes at most ``max_nbytes``, pinned blocks aside; what went."""
        self.size()
        with refusals(self._layout.folder):
            return FolderSize(*self._catalogue.shrink(max_nbytes))

    def _entries(self, digest: str) -> Iterator[Entry]:
        kept = self._catalogue.pins.kept(digest)
        for name, status in self._shards.files(digest):
            used, nbytes = last_use_of(status), nbytes_on_disk(status.st_size)
            is_pinned = name[1] in kept
            try:
                header = self._shards.read_header(name)
            except (BadBlockFileError, FileNotFoundError):
                continue
            except (OtherVersionError, OSError):
                # It takes its room, whatever it holds.
                yield Entry(*name, None, 0, 0, 0, nbytes, used, None, used, is_pinned)
                continue
            block = header.block
            yield Entry(
                *name, block.parent_hash, block.first_token, len(block.token_ids), block.group,
                nbytes, header.created, header.ttl, used, is_pinned,
            )  # fmt: skip

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

    @staticmethod
    def _each(
        names: Iterable[BlockName], remove: Callable[[BlockName], object]
    ) -> dict[BlockName, OSError]:
        """Call ``remove`` for each; for which blocks the system refuses that, and why."""
        refused: dict[BlockName, OSError] = {}
        for name in names:
            try:
                remove(name)
            except OSError as error:
                refused[name] = error
        return refused

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
