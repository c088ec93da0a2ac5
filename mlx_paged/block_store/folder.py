"""``CacheFolder``: what a program that looks into a folder of blocks uses, while engines use it."""

from __future__ import annotations

import dataclasses
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from mlx_paged.block_store.block_file import BlockHeader, read_block, read_file_header
from mlx_paged.block_store.errors import BadBlockFileError, BlockStoreError, OtherVersionError
from mlx_paged.block_store.files import check_is_ours
from mlx_paged.block_store.fingerprint import Fingerprint
from mlx_paged.block_store.index import BlockName, Index, IndexRow, nbytes_on_disk
from mlx_paged.block_store.inventory import Inventory
from mlx_paged.block_store.layout import FINGERPRINT_NAME, BlockLayout, block_hash_of
from mlx_paged.errors import system_reason


@dataclasses.dataclass(frozen=True)
class Entry:
    """A block in the folder.

    Attributes:
        digest: of its fingerprint.
        block_hash: its chained hash.
        parent_hash: that of the block before it, ``None`` for the first one of a sequence.
        first_token: the position of its first token.
        num_tokens: how many tokens it has (``CacheFolder.header`` says which); 0 for a file in the
            format of another version, of which nothing more is known.
        group: the group of layers whose rows it holds.
        nbytes: what its file takes, in steps of 4,096 bytes.
        created: when it was written, in seconds since 1970.
        last_used: when it was last written or used, in seconds since 1970.
        num_hits: how often it was used, as far as the index knows: a rebuilt one starts at 0.
        is_pinned: whether it stays, because it was pinned, or a block that comes after it.
        expires: when its time is over unless it is used again, in seconds since 1970; ``None`` for
            never. A pinned one has none.
    """

    digest: str
    block_hash: bytes
    parent_hash: bytes | None
    first_token: int
    num_tokens: int
    group: int
    nbytes: int
    created: float
    last_used: float
    num_hits: int
    is_pinned: bool
    expires: float | None

    @property
    def name(self) -> BlockName:
        """What methods of ``CacheFolder`` take."""
        return self.digest, self.block_hash


@dataclasses.dataclass(frozen=True)
class FolderSize:
    """How many blocks there are, and what they take (see ``BlockStoreStats.nbytes``)."""

    num_blocks: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class CheckedFile:
    """What ``CacheFolder.verify`` says of a file.

    Attributes:
        path: the file.
        digest: of the fingerprint in whose folder it lies.
        block_hash: that its name stands for.
        nbytes: its size.
        problem: what is wrong, in a few words; ``None`` for a block that is whole and unaltered,
            and for one in the format of another version, which can't be checked here.
    """

    path: str
    digest: str
    block_hash: bytes
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

    def __enter__(self) -> CacheFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the index; a later call opens it again."""
        self._inventory.close()

    def fingerprints(self) -> dict[str, Fingerprint | None]:
        """By digest; ``None`` where the text beside the blocks is missing or unreadable."""
        return {digest: self._fingerprint(digest) for digest in self._layout.digests()}

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
            path = self._layout.block(digest, block_hash)
            return read_file_header(path, digest, block_hash).block
        except (BadBlockFileError, OtherVersionError, OSError):
            return None

    def pin(self, digest: str, block_hash: bytes) -> bool:
        """Let a block and all its ancestors stay, whatever the limits are. Whether it was there."""
        chain = self._chain(digest, block_hash)
        if not chain:
            return False
        with _refusals(self._layout):
            self._inventory.pins.add(digest, chain)
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
            pin for digest in self._layout.digests() for pin in self._inventory.pins.pinned(digest)
        ]

    def remove(self, blocks: Iterable[BlockName]) -> FolderSize:
        """Remove blocks, given as digest and hash, pinned ones and their pins, too; what was
        removed. Blocks that come after them can't be found any more until they are there again.
        """
        names = list(dict.fromkeys(blocks))
        sizes = [size for name in names if (size := self._nbytes(name)) is not None]
        with _refusals(self._layout):
            for digest, block_hash in names:
                self._inventory.pins.remove(digest, block_hash)
            self._inventory.remove(names)
        return FolderSize(len(sizes), sum(map(nbytes_on_disk, sizes)))

    def verify(self) -> Iterator[CheckedFile]:
        """Read and check all files. Changes nothing; hand what is bad to ``remove``."""
        for digest in self._layout.digests():
            for first_byte in range(256):
                yield from self._verify_shard(digest, first_byte)

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
            text = (self._layout.of(digest) / FINGERPRINT_NAME).read_text(encoding="utf-8")
            fingerprint = Fingerprint.from_json(text)
        except (OSError, ValueError):
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

    def _nbytes(self, name: BlockName) -> int | None:
        try:
            return os.lstat(self._layout.block(*name)).st_size
        except OSError:
            return None

    def _verify_shard(self, digest: str, first_byte: int) -> Iterator[CheckedFile]:
        with _refusals(self._layout):
            try:
                names = sorted(os.listdir(self._layout.shard(digest, first_byte)))
            except FileNotFoundError:
                return
        for block_hash in filter(None, map(block_hash_of, names)):
            path = self._layout.block(digest, block_hash)
            problem = _problem(path, digest, block_hash)
            nbytes = self._nbytes((digest, block_hash))
            # One that went meanwhile is no longer there to be bad.
            if nbytes is not None:
                yield CheckedFile(path, digest, block_hash, nbytes, problem)


def _problem(path: str, digest: str, block_hash: bytes) -> str | None:
    try:
        read_block(path, digest, block_hash)
    except BadBlockFileError as error:
        return str(error)
    except OtherVersionError:
        return None
    except OSError as error:
        return f"it can't be read: {system_reason(error)}"
    return None


def _entry(row: IndexRow, is_pinned: bool) -> Entry:
    expires = None if row.ttl is None or is_pinned else row.last_used + row.ttl
    return Entry(
        digest=row.digest,
        block_hash=row.block_hash,
        parent_hash=row.parent_hash,
        first_token=row.first_token,
        num_tokens=row.num_tokens,
        group=row.group,
        nbytes=row.nbytes,
        created=row.created,
        last_used=row.last_used,
        num_hits=row.num_hits,
        is_pinned=is_pinned,
        expires=expires,
    )


@contextmanager
def _refusals(layout: BlockLayout) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = system_reason(error)
        raise BlockStoreError(f"{layout.folder} can't be used: {why}") from error
    except sqlite3.Error as error:
        raise BlockStoreError(f"{layout.folder}: no index can be made: {error}") from error
