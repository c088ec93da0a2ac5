"""Folders that earlier versions wrote: an SQLite index knew which blocks follow which.

In such a folder, a block may have an earlier time than one that follows it. So the headers of all
blocks are read, each block gets the time of its most recently used successor, and then the index is
removed.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator

from mlx_paged.block_store.directory import Directory
from mlx_paged.block_store.errors import BadBlockFileError, OtherVersionError
from mlx_paged.block_store.layout import is_old_index
from mlx_paged.block_store.shards import Shards, time_used

_FILES_AT_A_TIME = 32


def take_over(top: Directory, shards: Shards) -> Iterator[None]:
    """Take over a folder that has an index. Yields every few files."""
    indexes = [
        name
        for name, status in top.entries()
        if is_old_index(name) and not stat.S_ISDIR(status.st_mode)
    ]
    if not indexes:
        return
    for digest in shards.digests():
        yield from _set_times(shards, digest)
    for name in indexes:
        with contextlib.suppress(OSError):
            top.remove(name)


def _set_times(shards: Shards, digest: str) -> Iterator[None]:
    parents: list[tuple[int, int, bytes, bytes]] = []
    times: dict[bytes, int] = {}
    for number, (name, status) in enumerate(shards.files(digest)):
        with contextlib.suppress(BadBlockFileError, OtherVersionError, OSError):
            block = shards.read_header(name).block
            times[name[1]] = time_used(status)
            if block.parent_hash is not None:
                parents.append((block.first_token, block.group, name[1], block.parent_hash))
        if number % _FILES_AT_A_TIME == 0:
            yield
    later: set[bytes] = set()
    for _, _, block_hash, parent_hash in sorted(parents, reverse=True):
        if times[block_hash] > times.get(parent_hash, times[block_hash]):
            times[parent_hash] = times[block_hash]
            later.add(parent_hash)
    for number, block_hash in enumerate(later):
        shards.note_used((digest, block_hash), times[block_hash])
        if number % _FILES_AT_A_TIME == 0:
            yield
