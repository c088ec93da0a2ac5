"""``BlockStore``: blocks of one fingerprint in a folder that several processes use at once."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Iterable

from mlx_paged.block_store.block_file import BlockHeader, Payload, encode_header, read_block
from mlx_paged.block_store.errors import BadBlockFileError, BlockStoreError, OtherVersionError
from mlx_paged.block_store.fingerprint import Fingerprint
from mlx_paged.block_store.layout import (
    FINGERPRINT_NAME,
    BlockLayout,
    make_folder,
    make_private_folder,
    write_aside,
)
from mlx_paged.errors import system_reason


@dataclasses.dataclass(frozen=True)
class BlockStoreStats:
    """What lies in the folder, and what this process has done with it.

    Attributes:
        num_blocks: files, of all fingerprints and all processes, as far as is known here.
        nbytes: what they take, in steps of 4,096 bytes, as file systems give them.
        num_hits: blocks that were read.
        num_written: blocks that were written.
        num_dropped: blocks that were offered and not written: the queue or the disk was full, or
            everything in the folder is pinned.
        num_corrupt: files that were no block, or not the one that their name says. They are gone.
        num_evicted: blocks that were removed to keep the limit, or because their time was over.
    """

    num_blocks: int = 0
    nbytes: int = 0
    num_hits: int = 0
    num_written: int = 0
    num_dropped: int = 0
    num_corrupt: int = 0
    num_evicted: int = 0


class BlockStore:
    """Blocks of one fingerprint in a folder that several processes use at once.

    Any thread may call anything. ``has``, ``get`` and ``note_used`` never wait for a write or for
    the index; ``put`` and ``tend`` may take long, and are the writer's.

    No method raises for what the disk does. When it fails, ``failure`` says why, and from then on
    nothing is found and nothing is written.

    Args:
        folder: made, with the rights 0700, if it isn't there.
        max_nbytes: what all blocks in the folder may take, whatever their fingerprint.
        fingerprint: what the blocks depend on beside their tokens.
        ttl: seconds after its last use at which a block isn't found any more, and is removed. It
            holds for the blocks that are written here, and in this process for all of this
            fingerprint.

    Raises:
        BlockStoreError: the folder can't be used (``cache_dir``), or a limit is no limit
            (``cache_dir_size``, ``cache_dir_ttl``).
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_nbytes: int,
        fingerprint: Fingerprint,
        ttl: float | None = None,
    ) -> None:
        self.layout = BlockLayout(folder)
        self.max_nbytes = max_nbytes
        self.fingerprint = fingerprint
        self.ttl = ttl
        self._digest = fingerprint.digest
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._stats = BlockStoreStats()
        make_folder(self.layout.folder)
        try:
            make_private_folder(self.layout.of(self._digest))
            text = fingerprint.as_json().encode()
            write_aside(str(self.layout.of(self._digest) / FINGERPRINT_NAME), [text])
        except OSError as error:
            why = system_reason(error)
            raise BlockStoreError(f"{self.layout.folder} can't be used: {why}") from error

    def has(self, block_hash: bytes) -> bool:
        """Whether the block lies there, by its name alone; it may still turn out to be unreadable.
        One ``stat``.
        """
        return self._failure is None and os.path.isfile(self._path(block_hash))

    def get(self, block_hash: bytes) -> bytes | None:
        """The payload of a block, checked; ``None`` if it isn't there. A bad file is removed."""
        if self._failure is not None:
            return None
        try:
            _, payload, _ = read_block(self._path(block_hash), self._digest, block_hash)
        except (BadBlockFileError, OtherVersionError, OSError):
            return None
        self.count(num_hits=1)
        return payload

    def put(self, header: BlockHeader, payload: Payload) -> bool:
        """Write a block, and first evict as many as it needs room for.

        Returns:
            Whether it lies in the folder now, written just now or before.
        """
        if self._failure is not None:
            return False
        if self.has(header.block_hash):
            return True
        path = self._path(header.block_hash)
        prefix = encode_header(header, self._digest, time.time(), self.ttl, payload)
        try:
            make_private_folder(os.path.dirname(path))
            write_aside(path, [prefix, payload])
        except OSError as error:
            self.fail(f"a block could not be written: {system_reason(error)}")
            return False
        self.count(num_written=1)
        return True

    def note_used(self, block_hashes: Iterable[bytes]) -> None:
        """Say that blocks were of use: whole prefixes, first block first, whether they were found
        in memory or on disk. They stay longest, and their time starts again. It is remembered here
        and written down by ``tend``.
        """

    def tend(self) -> None:
        """Write down what has happened, and bring the folder within its limits. The writer calls it
        when it has nothing to write.
        """

    def close(self) -> None:
        """Write down what has happened and let go of the index. Nothing is found any more."""
        self._failure = self._failure or "it is closed"

    @property
    def failure(self) -> str | None:
        """Why nothing is found or written any more, in one line; ``None`` while all is well."""
        return self._failure

    def fail(self, why: str) -> None:
        """Give up, for the reason given; the first one stays."""
        with self._lock:
            self._failure = self._failure or f"[block store] {self.layout.folder}: {why}"

    def stats(self) -> BlockStoreStats:
        return self._stats

    def count(self, **counts: int) -> None:
        """Add to counters of ``stats``."""
        with self._lock:
            old = dataclasses.asdict(self._stats)
            added = {name: old[name] + number for name, number in counts.items()}
            self._stats = dataclasses.replace(self._stats, **added)

    def _path(self, block_hash: bytes) -> str:
        return self.layout.block(self._digest, block_hash)
