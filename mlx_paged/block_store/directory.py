"""``Directory``: a folder that is accessed by its descriptor, so that no link leads out of it; the
top folder of a store: who owns it, what it may contain, and who may read it; and files that are
replaced atomically.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mlx_paged.block_store.layout import (
    BLOCKS_NAME,
    OWN_NAMES,
    TAG_NAME,
    BadBlockFileError,
    BlockStoreError,
    refusals,
)
from mlx_paged.errors import shown

FOLDER_MODE = 0o700
FILE_MODE = 0o600

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK, opening a pipe of that name would block forever.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_REGULAR = "it is not a regular file"
_NOT_A_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EOPNOTSUPP})

_ASIDE_SUFFIX = ".tmp"
# Saves of earlier versions left names with the number of the process alone.
_ASIDE = re.compile(r"\..*\.(\d+)(?:-([0-9a-f]+)-\d+)?" + re.escape(_ASIDE_SUFFIX))
_MAX_SECONDS_OF_A_WRITE = 3600.0
_MAX_SECONDS_FOR_A_LOCK = 5.0
# Process ids are reused; this distinguishes processes with the same id.
_THIS_PROCESS = os.urandom(4).hex()
_numbers = itertools.count()
# See https://bford.info/cachedir/: backups leave such folders out.
_TAG = b"""Signature: 8a477f597d28d172789f06886806bc55
# This folder holds K/V blocks of mlx_paged, which are computed again when they are missing.
"""


class Directory:
    """An open folder. Names in it are looked up relative to its descriptor, and links are not
    followed, neither to files nor to folders.

    It is closed when it is no longer referenced, so that no thread ever uses a descriptor that
    the system has reused for another file.

    Attributes:
        path: for messages.
        owner: user id of the topmost folder's owner. Files of other users are not read, and files
            and folders made here belong to the owner, even if an administrator makes them.
    """

    __slots__ = ("_fd", "owner", "path")

    def __init__(self, fd: int, path: str, owner: int) -> None:
        self._fd = fd
        self.path = path
        self.owner = owner

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self._fd)

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Directory:
        """The topmost folder, by the path that the user gave, which may contain links."""
        fd = os.open(path, _FOLDER)
        return cls(fd, os.fspath(path), os.fstat(fd).st_uid)

    def folder(self, name: str) -> Directory:
        """A folder in this one.

        Raises:
            NotADirectoryError: it is a link, or something else that isn't a folder.
            OSError: it doesn't exist, or may not be read.
        """
        path = f"{self.path}/{name}"
        try:
            fd = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=self._fd)
        except FileNotFoundError:
            raise
        except OSError as error:
            # macOS reports ELOOP for a link.
            number = errno.ENOTDIR if error.errno == errno.ELOOP else error.errno or 0
            hint = ""
            if number == errno.ENOTDIR:
                hint = " (links are not followed)"
            elif number == errno.EACCES:
                hint = f" (it belongs to the user with the id {self.status(name).st_uid})"
            raise OSError(number, f"{os.strerror(number)}: {path}{hint}") from error
        return Directory(fd, path, self.owner)

    def make_folder(self, name: str) -> Directory:
        """A folder in this one, made with mode 0700 if it doesn't exist. Raises as ``folder``, or
        OSError with its path as ``filename`` if it can't be made.
        """
        try:
            os.mkdir(name, FOLDER_MODE, dir_fd=self._fd)
        except FileExistsError:
            return self.folder(name)
        except OSError as error:
            error.filename = f"{self.path}/{name}"
            raise
        # A umask may remove permissions of the owner, too.
        os.chmod(name, FOLDER_MODE, dir_fd=self._fd)
        made = self.folder(name)
        made._give_to_owner(made._fd)
        return made

    def make_private(self) -> None:
        """Remove the permissions of other users. Raises BlockStoreError if the volume has none."""
        if os.fstat(self._fd).st_mode & 0o077:
            os.chmod(self._fd, FOLDER_MODE)
        if os.fstat(self._fd).st_mode & 0o077:
            raise BlockStoreError(
                f"{self.path} can be read by other users, since its volume has no permissions; "
                "choose a folder on another volume"
            )

    def names(self) -> list[str]:
        """The names of all entries, sorted."""
        with self._opened_again() as fd:
            return sorted(os.listdir(fd))

    def entries(self) -> list[tuple[str, os.stat_result]]:
        """Name and status of all entries, in any order; of links themselves."""
        found = []
        with self._opened_again() as fd, os.scandir(fd) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    found.append((entry.name, entry.stat(follow_symlinks=False)))
        return found

    def status(self, name: str) -> os.stat_result:
        """Of whatever has the name; of a link, and not of what it leads to."""
        return os.stat(name, dir_fd=self._fd, follow_symlinks=False)

    def is_writable(self) -> bool:
        """Whether this process may make files in it."""
        return os.access(".", os.W_OK | os.X_OK, dir_fd=self._fd)

    def is_own_file(self, status: os.stat_result) -> bool:
        """Whether something is a regular file of the owner's."""
        return stat.S_ISREG(status.st_mode) and status.st_uid == self.owner

    def remove(self, name: str) -> bool:
        """Remove a file, or a link. A folder of that name stays.

        Returns:
            Whether there was one.

        Raises:
            OSError: it can't be removed.
        """
        try:
            os.unlink(name, dir_fd=self._fd)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (IsADirectoryError, PermissionError):
            # macOS says the second of a folder.
            if stat.S_ISDIR(self.status(name).st_mode):
                return False
            raise
        return True

    def set_time(self, name: str, mtime: int) -> None:
        """Set the time of a file or a link, in nanoseconds since 1970."""
        os.utime(name, ns=(mtime, mtime), dir_fd=self._fd, follow_symlinks=False)

    @contextmanager
    def locked(self, kind: int) -> Iterator[None]:
        """Hold the folder's advisory lock, which other processes and threads take, too. Continues
        without it after some seconds, and on file systems without locks.

        Args:
            kind: ``fcntl.LOCK_SH`` or ``fcntl.LOCK_EX``.
        """
        with self._opened_again() as fd:
            deadline = time.monotonic() + _MAX_SECONDS_FOR_A_LOCK
            with contextlib.suppress(OSError):
                while not _lock(fd, kind) and time.monotonic() < deadline:
                    time.sleep(0.001)
            yield

    @contextmanager
    def opened(self, name: str) -> Iterator[tuple[int, os.stat_result]]:
        """The descriptor of a file, for reading, and its status.

        Raises:
            BadBlockFileError: it is not a regular file, or belongs to another user.
            OSError: there is no such file, or the system refuses to read it.
        """
        try:
            file = os.open(name, _READ, dir_fd=self._fd)
        except OSError as error:
            if error.errno in _NOT_A_FILE:
                raise BadBlockFileError(_NOT_REGULAR) from error
            if isinstance(error, PermissionError):
                self._check_file(self.status(name))
            raise
        try:
            status = os.fstat(file)
            self._check_file(status)
            yield file, status
        finally:
            os.close(file)

    def read(self, name: str) -> bytes:
        """The content of a small file. Raises as ``opened``."""
        with self.opened(name) as (file, status):
            return os.pread(file, status.st_size, 0)

    def create_file(self, name: str) -> int:
        """Make a file that no other user may read, open for writing. Raises OSError."""
        file = os.open(name, _NEW, FILE_MODE, dir_fd=self._fd)
        try:
            os.fchmod(file, FILE_MODE)
            self._give_to_owner(file)
        except OSError:
            os.close(file)
            raise
        return file

    def write_atomically(
        self,
        name: str,
        pieces: Sequence[bytes | bytearray | memoryview],
        mtime: int | None = None,
    ) -> None:
        """Write a file that consists of the pieces, atomically: under a temporary name, which is
        then renamed. It isn't synced: a file torn by a power cut is detected by its checksum.

        Args:
            mtime: the file's time, in nanoseconds since 1970; now by default.

        Raises:
            OSError: it could not be written; the temporary file was removed. Its ``filename`` is
                the path of the file.
        """
        temporary = temporary_name(name)
        try:
            file = self.create_file(temporary)
            try:
                try:
                    _write(file, pieces)
                    if mtime is not None:
                        os.utime(file, ns=(mtime, mtime))
                finally:
                    os.close(file)
                os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=self._fd)
                raise
        except OSError as error:
            error.filename = f"{self.path}/{name}"
            raise

    def remove_abandoned(self, entries: Iterable[tuple[str, os.stat_result]]) -> None:
        """Remove the temporary files of processes that have died.

        Args:
            entries: of this folder.
        """
        now = time.time()
        for name, status in entries:
            if name.endswith(_ASIDE_SUFFIX) and is_abandoned(name, now - status.st_mtime):
                with contextlib.suppress(OSError):
                    self.remove(name)

    @contextmanager
    def _opened_again(self) -> Iterator[int]:
        """Another descriptor, to which the position of a listing, or a lock, belongs."""
        fd = os.open(".", _FOLDER, dir_fd=self._fd)
        try:
            yield fd
        finally:
            os.close(fd)

    def _check_file(self, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise BadBlockFileError(_NOT_REGULAR)
        if status.st_uid != self.owner:
            raise BadBlockFileError("it belongs to another user")

    def _give_to_owner(self, fd: int) -> None:
        if os.geteuid() != self.owner:
            os.fchown(fd, self.owner, -1)


def user_cache_folder() -> Path:
    """The folder of the user's caches. Raises RuntimeError without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # Relative paths are ignored, as the XDG specification demands.
    return Path(given) if os.path.isabs(given) else Path.home() / ".cache"


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
        other = [name for name in top.names() if not OWN_NAMES.fullmatch(name)]
        if other and not _has_tag(top):
            raise BlockStoreError(
                f"{folder} holds other things, such as {shown(min(other))}; name a new folder, or "
                "an empty one"
            )
        top.make_private()
        blocks = top.make_folder(BLOCKS_NAME)
        blocks.make_private()
        probe = temporary_name("probe")
        os.close(blocks.create_file(probe))
        blocks.remove(probe)
        if not _has_tag(top):
            with contextlib.suppress(IsADirectoryError):  # Backups then include the folder.
                top.write_atomically(TAG_NAME, [_TAG])


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
    if not _has_tag(top) and (BLOCKS_NAME not in names or not all(map(OWN_NAMES.fullmatch, names))):
        raise BlockStoreError(f"{folder} is not a folder of K/V blocks")


def _has_tag(top: Directory) -> bool:
    try:
        return top.read(TAG_NAME) == _TAG
    except (OSError, BadBlockFileError):
        return False


# Temporary files


@contextmanager
def replaced_file(file: Path) -> Iterator[BinaryIO]:
    """A new file to write, which replaces ``file`` when the body ends, unless it raises.

    Only its owner can read it, whatever the mode of the replaced file: these files hold
    conversations. A symbolic link is kept, and its target is replaced. What killed processes have
    left of it is removed.

    Raises:
        OSError: the file can't be written.
        RuntimeError: the name is a loop of symbolic links.
    """
    file = file.resolve()
    _remove_abandoned(file)
    temporary = file.with_name(temporary_name(file.name))
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w+b") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _remove_abandoned(file: Path) -> None:
    """Remove the temporary files that killed processes have left for a file."""
    now, beginning = time.time(), temporary_prefix(file.name)
    with contextlib.suppress(OSError), os.scandir(file.parent) as entries:
        for entry in entries:
            if not entry.name.startswith(beginning):
                continue
            with contextlib.suppress(OSError):
                age = now - entry.stat(follow_symlinks=False).st_mtime
                if is_abandoned(entry.name, age):
                    os.unlink(entry.path)


def temporary_name(name: str) -> str:
    """A temporary name, under which a file is written before it is renamed."""
    number = f"{os.getpid()}-{_THIS_PROCESS}-{next(_numbers)}"
    return f"{temporary_prefix(name)}.{number}{_ASIDE_SUFFIX}"


def temporary_prefix(name: str) -> str:
    """How all temporary names for a file begin."""
    return f".{name[:16]}"


def is_abandoned(name: str, age: float) -> bool:
    """Whether a file is a temporary one of a process that can't finish it any more.

    A process of another machine or container may seem dead. Then its write fails, and the block is
    computed again later.

    Args:
        name: of the file.
        age: seconds since it was last written to; negative for a time in the future.
    """
    match = _ASIDE.fullmatch(name)
    if match is None:
        return False
    process, start = int(match[1]), match[2]
    if process == os.getpid():
        return start != _THIS_PROCESS
    return abs(age) > _MAX_SECONDS_OF_A_WRITE or not _is_alive(process)


def _write(file: int, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
    left = [memoryview(piece).cast("B") for piece in pieces]
    while left:
        num_written = os.writev(file, left)
        while left and num_written >= len(left[0]):
            num_written -= len(left.pop(0))
        if left:
            left[0] = left[0][num_written:]


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass  # it belongs to another user, or is not a valid id
    return True
