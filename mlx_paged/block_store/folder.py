"""``CacheFolder``: what a program that looks into a folder of blocks uses, while engines use it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator

from mlx_paged.block_store.block_file import BlockHeader
from mlx_paged.block_store.fingerprint import Fingerprint


@dataclasses.dataclass(frozen=True)
class Entry:
    """A block in the folder.

    Attributes:
        digest: of its fingerprint.
        block_hash: its chained hash.
        parent_hash: that of the block before it, ``None`` for the first one of a sequence.
        first_token: the position of its first token.
        num_tokens: how many tokens it has (``CacheFolder.header`` says which); 0 for a block in the
            format of another version, of which nothing more is known.
        group: the group of layers whose rows it holds.
        nbytes: the size of its file.
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
        problem: what is wrong, in a few words; ``None`` for a block that is whole and unaltered.
    """

    path: str
    digest: str
    block_hash: bytes
    nbytes: int
    problem: str | None


class CacheFolder:
    """A folder of blocks, looked at from outside. Makes no folder.

    Raises:
        BlockStoreError: it isn't there, or no folder of blocks, or can't be read.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        raise NotImplementedError

    def fingerprints(self) -> dict[str, Fingerprint | None]:
        """By digest; ``None`` where the text beside the blocks is missing or unreadable."""
        raise NotImplementedError

    def entries(self) -> list[Entry]:
        """All blocks, of each fingerprint parents before children. Files that the index doesn't
        know are found, too.
        """
        raise NotImplementedError

    def header(self, digest: str, block_hash: bytes) -> BlockHeader | None:
        """What a block's file says of it, with its token ids; ``None`` if it can't be read."""
        raise NotImplementedError

    def pin(self, digest: str, block_hash: bytes) -> bool:
        """Let a block and all its ancestors stay, whatever the limits are. Whether it was there."""
        raise NotImplementedError

    def unpin(self, digest: str, block_hash: bytes) -> bool:
        """Take a pin back. Ancestors that no other pin holds are free again, too.

        Returns:
            Whether there was one: on this block, not on one that comes after it.
        """
        raise NotImplementedError

    def pins(self) -> list[tuple[str, bytes]]:
        """Digest and hash of each block that was pinned itself."""
        raise NotImplementedError

    def remove(self, blocks: Iterable[tuple[str, bytes]]) -> FolderSize:
        """Remove blocks, given as digest and hash, pinned ones and their pins, too; what was
        removed. Blocks that come after them can't be found any more until they are there again.
        """
        raise NotImplementedError

    def verify(self) -> Iterator[CheckedFile]:
        """Read and check all files. Changes nothing; hand what is bad to ``remove``."""
        raise NotImplementedError

    def size(self) -> FolderSize:
        """What lies there, of all fingerprints."""
        raise NotImplementedError

    def shrink(self, max_nbytes: int) -> FolderSize:
        """Evict until the folder takes at most ``max_nbytes``, pinned blocks aside; what went."""
        raise NotImplementedError

    def rebuild(self) -> FolderSize:
        """Throw the index away and make it from the files; what is there then."""
        raise NotImplementedError
