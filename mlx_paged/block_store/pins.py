"""``Pins``: the blocks of a folder that are never evicted.

A pin is a file named after the block that was pinned, and lists the block's ancestors.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence

from mlx_paged.block_store.errors import BadBlockFileError
from mlx_paged.block_store.layout import (
    PIN_SUFFIX,
    PINS_NAME,
    BlockName,
    block_hash_of,
    file_name_of,
)
from mlx_paged.block_store.shards import Shards

# Two changes of a folder within one tick of the file system's clock leave the same time.
_TICK_NS = 1_000_000_000


class Pins:
    """The pins of one folder, which are read again when another process has changed them."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._read: dict[str, tuple[int, frozenset[bytes]]] = {}

    def keeps(self, name: BlockName) -> bool:
        """Whether a block or one of its successors is pinned."""
        return self.now()(name)

    def now(self) -> Callable[[BlockName], bool]:
        """``keeps`` as of now, for many blocks: the pins of each fingerprint are read once."""
        kept = functools.cache(self.kept)
        return lambda name: name[1] in kept(name[0])

    def kept(self, digest: str) -> frozenset[bytes]:
        """The pinned blocks of a fingerprint, and all their ancestors."""
        try:
            changed = self._shards.folder(digest).status(PINS_NAME).st_mtime_ns
        except OSError:
            return frozenset()
        known, kept = self._read.get(digest, (None, frozenset()))
        if changed != known:
            kept = frozenset(
                block_hash for pinned in self.pinned(digest) for block_hash in self._chain(*pinned)
            )
            if abs(time.time_ns() - changed) > _TICK_NS:
                self._read[digest] = changed, kept
        return kept

    def pinned(self, digest: str) -> list[BlockName]:
        """The blocks of a fingerprint that were pinned themselves."""
        try:
            names = self._shards.folder(digest).folder(PINS_NAME).names()
        except OSError:
            return []
        hashes = (block_hash_of(name, PIN_SUFFIX) for name in names)
        return [(digest, block_hash) for block_hash in hashes if block_hash is not None]

    def add(self, digest: str, chain: Sequence[bytes]) -> None:
        """Pin the last block of a chain. Raises OSError."""
        text = "".join(f"{block_hash.hex()}\n" for block_hash in chain)
        pins = self._shards.folder(digest).make_folder(PINS_NAME)
        pins.write_aside(_name_of(chain[-1]), [text.encode()])

    def remove(self, digest: str, block_hash: bytes) -> bool:
        """Remove a pin; whether there was one. Raises OSError."""
        try:
            return self._shards.folder(digest).folder(PINS_NAME).remove(_name_of(block_hash))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _chain(self, digest: str, block_hash: bytes) -> list[bytes]:
        chain = [block_hash]
        # An unreadable pin still pins the block that it is named after.
        with contextlib.suppress(OSError, ValueError, BadBlockFileError):
            pins = self._shards.folder(digest).folder(PINS_NAME)
            text = pins.read(_name_of(block_hash)).decode("ascii")
            chain += map(bytes.fromhex, text.split())
        return chain


def _name_of(block_hash: bytes) -> str:
    return file_name_of(block_hash, PIN_SUFFIX)
