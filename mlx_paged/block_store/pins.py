"""``Pins``: the blocks of a folder that stay, whatever its limits are.

A pin is a file named after the block that was pinned, and lists the block's ancestors, so it says
all without an index and survives the loss of one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from mlx_paged.block_store.files import make_private_folder, write_aside
from mlx_paged.block_store.index import BlockName
from mlx_paged.block_store.layout import BlockLayout, pinned_hash_of

# Two changes of a folder within a tick of the clock leave it with the same time.
_TICK_NS = 1_000_000_000


class Pins:
    """The pins of one folder, read again when other processes change them."""

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout
        self._read: dict[str, tuple[int, frozenset[bytes]]] = {}

    def keeps(self, name: BlockName) -> bool:
        """Whether a block stays: it is pinned, or one that comes after it."""
        digest, block_hash = name
        return block_hash in self.kept(digest)

    def kept(self, digest: str) -> frozenset[bytes]:
        """The pinned blocks of a fingerprint, and all their ancestors."""
        try:
            changed = os.stat(self._layout.pins(digest)).st_mtime_ns
        except OSError:
            return frozenset()
        known, kept = self._read.get(digest, (None, frozenset()))
        if changed != known:
            kept = frozenset(
                block_hash for pinned in self.pinned(digest) for block_hash in self._chain(*pinned)
            )
            if time.time_ns() - changed > _TICK_NS:
                self._read[digest] = changed, kept
        return kept

    def pinned(self, digest: str) -> list[tuple[str, bytes]]:
        """Digest and hash of each block of a fingerprint that was pinned itself."""
        try:
            names = sorted(os.listdir(self._layout.pins(digest)))
        except OSError:
            return []
        hashes = map(pinned_hash_of, names)
        return [(digest, block_hash) for block_hash in hashes if block_hash is not None]

    def add(self, digest: str, chain: Sequence[bytes]) -> None:
        """Pin the last block of a chain. Raises OSError."""
        text = "".join(f"{block_hash.hex()}\n" for block_hash in chain)
        make_private_folder(self._layout.pins(digest))
        write_aside(self._layout.pin(digest, chain[-1]), [text.encode()])

    def remove(self, digest: str, block_hash: bytes) -> bool:
        """Take a pin back; whether there was one. Raises OSError."""
        try:
            os.unlink(self._layout.pin(digest, block_hash))
        except FileNotFoundError:
            return False
        return True

    def _chain(self, digest: str, block_hash: bytes) -> list[bytes]:
        chain = [block_hash]
        # What is unreadable still pins the block that it is named after.
        with contextlib.suppress(OSError, ValueError):
            text = Path(self._layout.pin(digest, block_hash)).read_text(encoding="ascii")
            chain += map(bytes.fromhex, text.split())
        return chain
