"""The top folder: who owns it, what it may contain, and who may read it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from mlx_paged.block_store.directory import FOLDER_MODE, Directory, name_aside
from mlx_paged.block_store.errors import BadBlockFileError, BlockStoreError, refusals
from mlx_paged.block_store.layout import BLOCKS_NAME, TAG_NAME, is_own_name
from mlx_paged.errors import shown

# See https://bford.info/cachedir/: backups leave such folders out.
_TAG = b"""Signature: 8a477f597d28d172789f06886806bc55
# This folder holds K/V blocks of mlx_paged, which are computed again when they are missing.
"""


def make_folder(folder: Path) -> None:
    """Make ``folder`` for blocks, or check that an existing one can be used for them.

    Permissions of group and others are removed from the user's own folder if it is empty or already
    a folder of blocks. One that contains anything else is refused: neither removing permissions
    from, say, a home folder nor leaving K/V readable by all is acceptable. An administrator is
    refused another user's folder, too: its owner could not use what is made in it, and could alter
    what is read.

    Raises:
        BlockStoreError: it isn't a folder, belongs to another user, contains anything else, can't
            be made or written to, or is on a volume without permissions.
    """
    with refusals(folder):
        if not folder.exists():
            _make_below(folder)
        top = Directory.at(folder)
        if top.owner != os.geteuid():
            raise _foreign(folder, top.owner, "belongs to", "who could alter what is in it")
        _check_content(top)
        _make_private(top)
        blocks = top.make_folder(BLOCKS_NAME)
        _make_private(blocks)
        probe = name_aside("probe")
        os.close(blocks.create_file(probe))
        blocks.remove(probe)
        if not _has_tag(top):
            with contextlib.suppress(IsADirectoryError):  # Backups then include the folder.
                top.write_aside(TAG_NAME, [_TAG])


def _make_below(folder: Path) -> None:
    above = next(each for each in folder.parents if each.exists())
    owner = above.stat().st_uid
    if os.geteuid() == 0 != owner:
        raise _foreign(folder, owner, "would lie in a folder of", "who could not use it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, FOLDER_MODE)
        os.chmod(folder, FOLDER_MODE)  # a umask may remove permissions of the owner, too


def _foreign(folder: Path, owner: int, what: str, why: str) -> BlockStoreError:
    return BlockStoreError(
        f"{folder} {what} another user (id {owner}), {why}; name a folder of your own, or run as "
        "that user"
    )


def check_is_ours(folder: Path) -> None:
    """Raise BlockStoreError for a folder without blocks, and OSError if it can't be listed."""
    top = Directory.at(folder)
    names = top.names()
    if not _has_tag(top) and (BLOCKS_NAME not in names or not all(map(is_own_name, names))):
        raise BlockStoreError(f"{folder} is not a folder of K/V blocks")


def _check_content(top: Directory) -> None:
    other = [name for name in top.names() if not is_own_name(name)]
    if other and not _has_tag(top):
        raise BlockStoreError(
            f"{top.path} holds other things, such as {shown(min(other))}; name a new folder, or an "
            "empty one"
        )


def _has_tag(top: Directory) -> bool:
    try:
        return top.read(TAG_NAME) == _TAG
    except (OSError, BadBlockFileError):
        return False


def _make_private(folder: Directory) -> None:
    if not folder.make_private():
        raise BlockStoreError(
            f"{folder.path} can be read by other users, since its volume has no permissions; "
            "choose a folder on another volume"
        )
