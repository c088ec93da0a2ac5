"""Bring an index in line with the files: what was written or removed while nobody noted it down.

A process that is killed between a rename and the row for it leaves a file that the index doesn't
know; a lost index knows none. So the folders are listed once when an index is opened. Only of files
that it doesn't know is the header read. What processes that died left half written is removed.
"""

from __future__ import annotations

import contextlib
import stat
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from mlx_paged.block_store.directory import Directory
from mlx_paged.block_store.errors import BadBlockFileError, OtherVersionError
from mlx_paged.block_store.index import Index, IndexRow, nbytes_on_disk
from mlx_paged.block_store.layout import PINS_NAME, BlockName, block_hash_of
from mlx_paged.block_store.shards import Shards, last_use_of

_HEADERS_AT_A_TIME = 32
_SAME_TIME = 1.0  # seconds


def reconcile(index: Index, shards: Shards, bad_files: list[BlockName]) -> Iterator[None]:
    """Make the rows say what lies there. Stops for a breath every few milliseconds of work, outside
    of transactions.

    Files in another version's format are kept and counted: they go when nobody has used them for
    longest. Files that are no blocks are removed.

    Args:
        bad_files: gets the names of those.

    Raises:
        sqlite3.Error: the index failed, or contradicts itself.
    """
    index.check()
    shards.refresh()
    _sweep_abandoned(shards.blocks)
    digests = shards.digests()
    for digest in digests:
        _sweep_abandoned(lambda: shards.folder(digest))  # noqa: B023
        _sweep_abandoned(lambda: shards.folder(digest).folder(PINS_NAME))  # noqa: B023
        for first_byte in range(256):
            yield from _reconcile_shard(index, shards, digest, first_byte, bad_files)
    for digest in index.digests() - set(digests):
        if not shards.may_exist(digest):
            index.remove_digest(digest)
        yield


def _sweep_abandoned(find_folder: Callable[[], Directory]) -> None:
    """Remove what dead processes began to write in a folder."""
    with contextlib.suppress(OSError):
        folder = find_folder()
        for name in folder.names():
            folder.remove_abandoned(name, time.time())


class _File(NamedTuple):
    """Bytes on disk, last use, and whether it may be a block: a regular file of the owner's."""

    nbytes: int
    last_used: float
    is_own: bool


def _reconcile_shard(
    index: Index, shards: Shards, digest: str, first_byte: int, bad_files: list[BlockName]
) -> Iterator[None]:
    files = _list_shard(shards, digest, first_byte)
    if files is None:
        return
    known = index.shard(digest, first_byte)
    moved = [
        ((digest, block_hash), file.last_used)
        for block_hash, file in files.items()
        if block_hash in known and abs(known[block_hash][1] - file.last_used) > _SAME_TIME
    ]
    # Written since the listing, perhaps.
    gone = [
        (digest, block_hash)
        for block_hash in known.keys() - files.keys()
        if shards.status((digest, block_hash)) is None
    ]
    if moved or gone:
        with index.transaction():
            index.set_last_used(moved)
            index.remove(gone)
    new = [
        ((digest, block_hash), file)
        for block_hash, file in files.items()
        if not file.is_own or block_hash not in known or known[block_hash][0] != file.nbytes
    ]
    for start in range(0, len(new), _HEADERS_AT_A_TIME):
        rows = {
            name: _row_of_file(shards, name, file, bad_files)
            for name, file in new[start : start + _HEADERS_AT_A_TIME]
        }
        with index.transaction():
            index.add(row for row in rows.values() if row is not None)
            index.remove(name for name, row in rows.items() if row is None)
        yield
    yield


def _list_shard(shards: Shards, digest: str, first_byte: int) -> dict[bytes, _File] | None:
    """What is there, by hash, folders aside; ``None`` if the folder can't be read."""
    blocks = {}
    try:
        shard = shards.shard((digest, bytes([first_byte])))
        for name in shard.names():
            block_hash = block_hash_of(name)
            if block_hash is None:
                shard.remove_abandoned(name, time.time())
                continue
            with contextlib.suppress(FileNotFoundError):
                status = shard.status(name)
                if not stat.S_ISDIR(status.st_mode):
                    blocks[block_hash] = _File(
                        nbytes_on_disk(status.st_size),
                        last_use_of(status),
                        shard.is_own_file(status),
                    )
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError:
        return None
    return blocks


def _row_of_file(
    shards: Shards, name: BlockName, file: _File, bad_files: list[BlockName]
) -> IndexRow | None:
    """``None`` for a file that is no block, which is removed, or that has gone."""
    digest, block_hash = name
    try:
        header = shards.read_header(name)
    except BadBlockFileError:
        bad_files.append(name)
        with contextlib.suppress(OSError):
            shards.remove(name)
        return None
    except FileNotFoundError:
        return None
    except (OtherVersionError, OSError):
        # It takes its room, whatever it holds.
        return IndexRow(
            digest,
            block_hash,
            parent_hash=None,
            first_token=0,
            num_tokens=0,
            group=0,
            nbytes=file.nbytes,
            created=file.last_used,
            ttl=None,
            last_used=file.last_used,
        )
    return IndexRow.of_block(
        digest,
        header.block,
        nbytes=file.nbytes,
        created=header.created,
        ttl=header.ttl,
        last_used=file.last_used,
    )
