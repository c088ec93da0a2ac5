"""Bring an index in line with the files: what was written or removed while nobody noted it down.

A process that is killed between a rename and the row for it leaves a file that the index doesn't
know; a lost index knows none. So the folders are listed once when an index is opened. Only of files
that it doesn't know is the header read. What processes that died left half written is removed.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from mlx_paged.block_store.block_file import read_file_header
from mlx_paged.block_store.errors import BadBlockFileError, OtherVersionError
from mlx_paged.block_store.files import is_abandoned
from mlx_paged.block_store.index import BlockName, Index, IndexRow, nbytes_on_disk
from mlx_paged.block_store.layout import BlockLayout, block_hash_of

_HEADERS_AT_A_TIME = 32
_SAME_TIME = 1.0  # seconds


def reconcile(index: Index, layout: BlockLayout, bad_files: list[BlockName]) -> Iterator[None]:
    """Make the rows say what lies there. Stops for a breath every few milliseconds of work, outside
    of transactions.

    Files in another version's format are kept and counted: they go when nobody has used them for
    longest. Files that are no blocks are removed.

    Args:
        bad_files: gets the names of those.

    Raises:
        sqlite3.Error: the index failed.
    """
    sweep_abandoned(layout.blocks)
    digests = layout.digests()
    for digest in digests:
        sweep_abandoned(layout.of(digest))
        sweep_abandoned(layout.pins(digest))
        for first_byte in range(256):
            yield from _reconcile_shard(index, layout, digest, first_byte, bad_files)
    for digest in index.digests() - set(digests):
        if not layout.of(digest).exists():
            index.remove_digest(digest)
        yield


def sweep_abandoned(folder: Path) -> None:
    """Remove what dead processes began to write in a folder."""
    with contextlib.suppress(OSError), os.scandir(folder) as files:
        for file in files:
            _remove_if_abandoned(file)


def last_use(path: str) -> float | None:
    """When a block's file was last used; ``None`` if there is none."""
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return None


def _reconcile_shard(
    index: Index, layout: BlockLayout, digest: str, first_byte: int, bad_files: list[BlockName]
) -> Iterator[None]:
    files = _list_shard(layout.shard(digest, first_byte))
    if files is None:
        return
    known = index.shard(digest, first_byte)
    moved = [
        ((digest, block_hash), last_used)
        for block_hash, (_, last_used) in files.items()
        if block_hash in known and abs(known[block_hash][1] - last_used) > _SAME_TIME
    ]
    # Written since the listing, perhaps.
    gone = [
        (digest, block_hash)
        for block_hash in known.keys() - files.keys()
        if last_use(layout.block(digest, block_hash)) is None
    ]
    if moved or gone:
        with index.transaction():
            index.set_last_used(moved)
            index.remove(gone)
    new = [
        (block_hash, nbytes, last_used)
        for block_hash, (nbytes, last_used) in files.items()
        if block_hash not in known or known[block_hash][0] != nbytes
    ]
    for start in range(0, len(new), _HEADERS_AT_A_TIME):
        rows = {
            (digest, block_hash): _row_of_file(
                layout, (digest, block_hash), nbytes, last_used, bad_files
            )
            for block_hash, nbytes, last_used in new[start : start + _HEADERS_AT_A_TIME]
        }
        with index.transaction():
            index.add(row for row in rows.values() if row is not None)
            index.remove(name for name, row in rows.items() if row is None)
        yield
    yield


def _list_shard(folder: Path) -> dict[bytes, tuple[int, float]] | None:
    """Hash, bytes on disk and last use of each block; ``None`` if the folder can't be read."""
    blocks = {}
    try:
        with os.scandir(folder) as files:
            for file in files:
                block_hash = block_hash_of(file.name)
                if block_hash is None:
                    _remove_if_abandoned(file)
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = file.stat(follow_symlinks=False)
                    if not stat.S_ISDIR(status.st_mode):
                        blocks[block_hash] = nbytes_on_disk(status.st_size), status.st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError:
        return None
    return blocks


def _remove_if_abandoned(file: os.DirEntry[str]) -> None:
    if not file.name.startswith("."):
        return
    with contextlib.suppress(OSError):
        age = time.time() - file.stat(follow_symlinks=False).st_mtime
        if is_abandoned(file.name, age):
            os.unlink(file.path)


def _row_of_file(
    layout: BlockLayout,
    name: BlockName,
    nbytes: int,
    last_used: float,
    bad_files: list[BlockName],
) -> IndexRow | None:
    """``None`` for a file that is no block, which is removed, or that has gone."""
    path = layout.block(*name)
    digest, block_hash = name
    try:
        header = read_file_header(path, digest, block_hash)
    except BadBlockFileError:
        bad_files.append(name)
        with contextlib.suppress(OSError):
            os.unlink(path)
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
            nbytes=nbytes,
            created=last_used,
            ttl=None,
            last_used=last_used,
        )
    block = header.block
    return IndexRow(
        digest,
        block_hash,
        parent_hash=block.parent_hash,
        first_token=block.first_token,
        num_tokens=len(block.token_ids),
        group=block.group,
        nbytes=nbytes,
        created=header.created,
        ttl=header.ttl,
        last_used=last_used,
    )
