"""Files and folders that nobody else may read, written aside and renamed."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from mlx_paged.block_store.errors import BlockStoreError
from mlx_paged.block_store.layout import BLOCKS_NAME, TAG_NAME, is_own_name
from mlx_paged.errors import shown, system_reason

FOLDER_MODE = 0o700
FILE_MODE = 0o600

# See https://bford.info/cachedir/: backups leave such folders out.
_TAG = """Signature: 8a477f597d28d172789f06886806bc55
# This folder holds K/V blocks of mlx_paged, which are computed again when they are missing.
"""
_ASIDE_SUFFIX = ".tmp"
_ASIDE = re.compile(r"\..*\.(\d+)-([0-9a-f]+)-\d+" + re.escape(_ASIDE_SUFFIX))
_MOST_SECONDS_OF_A_WRITE = 3600.0
# The ids of processes come again; with this, one is told from an earlier one of the same id.
_THIS_PROCESS = os.urandom(4).hex()
_numbers = itertools.count()


def make_folder(folder: Path) -> None:
    """Make ``folder`` for blocks, or see to it that what is there may be used as one.

    A folder of the user's own that is empty, or is a folder of blocks, loses the rights of others.
    One that holds other things is refused: to take rights away from somebody's home folder, or to
    leave K/V in it for all to read, would both be wrong.

    Raises:
        BlockStoreError: it isn't a folder, belongs to somebody else, holds other things, can't be
            made or written to, or lies where there are no rights.
    """
    try:
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            make_private_folder(folder)
        _check_owner(folder)
        _check_content(folder)
        _tighten(folder)
        make_private_folder(folder / BLOCKS_NAME)
        _tighten(folder / BLOCKS_NAME)
        probe = _name_aside(str(folder / BLOCKS_NAME), "probe")
        os.close(create_file(probe))
        os.unlink(probe)
        if not _has_tag(folder):
            write_aside(str(folder / TAG_NAME), [_TAG.encode()])
    except OSError as error:
        raise BlockStoreError(f"{folder} can't be used: {system_reason(error)}") from error


def _check_owner(folder: Path) -> None:
    if os.geteuid() not in (0, folder.stat().st_uid):
        raise BlockStoreError(f"{folder} belongs to another user, who could alter what is in it")


def check_is_ours(folder: Path) -> None:
    """Raises BlockStoreError if a folder isn't one of blocks, and OSError if it can't be listed."""
    names = os.listdir(folder)
    if not _has_tag(folder) and (BLOCKS_NAME not in names or not all(map(is_own_name, names))):
        raise BlockStoreError(f"{folder} is no folder of K/V blocks")


def _check_content(folder: Path) -> None:
    other = [name for name in os.listdir(folder) if not is_own_name(name)]
    if other and not _has_tag(folder):
        raise BlockStoreError(
            f"{folder} holds other things, such as {shown(min(other))}; name a new folder, or an "
            "empty one"
        )


def _has_tag(folder: Path) -> bool:
    try:
        return (folder / TAG_NAME).read_text(encoding="utf-8") == _TAG
    except (OSError, ValueError):
        return False


def _tighten(folder: Path) -> None:
    if stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0:
        return
    os.chmod(folder, FOLDER_MODE)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        raise BlockStoreError(
            f"{folder} can be read by others, and lies on a volume that knows no rights; name a "
            "folder on another one"
        )


def make_private_folder(folder: str | Path) -> None:
    """Make a folder below the one of blocks, unless it is there. Raises OSError."""
    try:
        os.mkdir(folder, FOLDER_MODE)
    except FileExistsError:
        return
    os.chmod(folder, FOLDER_MODE)  # a umask may take rights from the owner, too


def create_file(path: str) -> int:
    """A new file that nobody else may read, opened for writing. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(path, flags, FILE_MODE)
    try:
        os.fchmod(file, FILE_MODE)
    except OSError:
        os.close(file)
        raise
    return file


def write_aside(path: str, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
    """A file at ``path`` that holds the pieces, whole or not at all; its folder exists.

    It is written beside and renamed. Nothing waits for the disk: a file that is torn when the power
    goes is found out by its checksum.

    Raises:
        OSError: it could not be written; nothing is left of it.
    """
    folder, name = os.path.split(path)
    aside = _name_aside(folder, name)
    file = create_file(aside)
    try:
        try:
            _write(file, pieces)
        finally:
            os.close(file)
        os.rename(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def _name_aside(folder: str, name: str) -> str:
    number = f"{os.getpid()}-{_THIS_PROCESS}-{next(_numbers)}"
    return f"{folder}/.{name[:16]}.{number}{_ASIDE_SUFFIX}"


def _write(file: int, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
    left = [memoryview(piece).cast("B") for piece in pieces]
    while left:
        num_written = os.writev(file, left)
        while left and num_written >= len(left[0]):
            num_written -= len(left.pop(0))
        if left:
            left[0] = left[0][num_written:]


def is_abandoned(name: str, age: float) -> bool:
    """Whether a file is one that ``write_aside`` began in a process that can't finish it any more.

    A process of another machine, or of another container, may look dead from here. Then its write
    fails, and a block is computed again one day.

    Args:
        name: of the file.
        age: seconds since it was last written to.
    """
    match = _ASIDE.fullmatch(name)
    if match is None:
        return False
    process, start = int(match[1]), match[2]
    if process == os.getpid():
        return start != _THIS_PROCESS
    return age > _MOST_SECONDS_OF_A_WRITE or not _is_alive(process)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass  # it is somebody else's, or no number of a process
    return True
