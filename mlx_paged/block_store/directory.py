"""``Directory``: a folder that is held by its descriptor, so that no link leads out of it."""

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

from mlx_paged.block_store.errors import BadBlockFileError

FOLDER_MODE = 0o700
FILE_MODE = 0o600

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# A pipe of that name would block forever without O_NONBLOCK.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_A_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EOPNOTSUPP})

_ASIDE_SUFFIX = ".tmp"
_ASIDE = re.compile(r"\..*\.(\d+)-([0-9a-f]+)-\d+" + re.escape(_ASIDE_SUFFIX))
_MOST_SECONDS_OF_A_WRITE = 3600.0
_MOST_SECONDS_FOR_A_LOCK = 5.0
# The ids of processes come again; with this, one is told from an earlier one of the same id.
_THIS_PROCESS = os.urandom(4).hex()
_numbers = itertools.count()


class Directory:
    """A folder that is open. Names in it are looked up from its descriptor, and no link is
    followed, whether it stands for a file or for a folder.

    It is closed when nothing refers to it any more, so that a thread never uses a descriptor that
    has become another file's.

    Attributes:
        path: for messages.
        owner: the user id that the topmost folder belongs to. Files of other users are not read,
            and what is made here belongs to the owner, even if an administrator makes it.
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
        """The topmost folder, by the path that the user gave, which may lead over links."""
        fd = os.open(path, _FOLDER)
        return cls(fd, os.fspath(path), os.fstat(fd).st_uid)

    def folder(self, name: str) -> Directory:
        """A folder in this one.

        Raises:
            NotADirectoryError: it is a link, or something else that isn't a folder.
            OSError: it isn't there, or may not be read.
        """
        path = f"{self.path}/{name}"
        try:
            fd = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=self._fd)
        except FileNotFoundError:
            raise
        except OSError as error:
            # macOS says ELOOP of a link.
            number = errno.ENOTDIR if error.errno == errno.ELOOP else error.errno or 0
            hint = ""
            if number == errno.ENOTDIR:
                hint = " (links are not followed)"
            elif number == errno.EACCES:
                hint = f" (it belongs to the user with the id {self.status(name).st_uid})"
            raise OSError(number, f"{os.strerror(number)}: {path}{hint}") from error
        return Directory(fd, path, self.owner)

    def make_folder(self, name: str) -> Directory:
        """A folder in this one, made with the rights 0700 unless it is there. Raises as
        ``folder``.
        """
        try:
            os.mkdir(name, FOLDER_MODE, dir_fd=self._fd)
        except FileExistsError:
            return self.folder(name)
        os.chmod(name, FOLDER_MODE, dir_fd=self._fd)  # a umask may take rights from the owner, too
        made = self.folder(name)
        made._give_to_owner(made._fd)
        return made

    def set_mode(self, mode: int) -> int:
        """Set the rights of the folder itself; those that it has then."""
        os.chmod(self._fd, mode)
        return self.mode()

    def mode(self) -> int:
        """The rights of the folder itself."""
        return stat.S_IMODE(os.fstat(self._fd).st_mode)

    def names(self) -> list[str]:
        """Of all that is in the folder, sorted."""
        # A descriptor of its own: the place in a listing belongs to the descriptor.
        fd = os.open(".", _FOLDER, dir_fd=self._fd)
        try:
            return sorted(os.listdir(fd))
        finally:
            os.close(fd)

    def entries(self) -> list[tuple[str, os.stat_result]]:
        """Name and status of all that is in the folder, in any order; of links themselves."""
        found = []
        fd = os.open(".", _FOLDER, dir_fd=self._fd)
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    try:
                        found.append((entry.name, entry.stat(follow_symlinks=False)))
                    except FileNotFoundError:
                        continue
        finally:
            os.close(fd)
        return found

    def status(self, name: str) -> os.stat_result:
        """Of whatever has the name; of a link, and not of what it leads to."""
        return os.stat(name, dir_fd=self._fd, follow_symlinks=False)

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
        """Of a file or a link, in nanoseconds since 1970."""
        os.utime(name, ns=(mtime, mtime), dir_fd=self._fd, follow_symlinks=False)

    @contextmanager
    def locked(self, kind: int) -> Iterator[None]:
        """Hold the lock of the folder, which other processes and threads may want, too.
        Continues without it after some seconds, and on file systems that have no locks.

        Args:
            kind: ``fcntl.LOCK_SH`` or ``fcntl.LOCK_EX``.
        """
        # A descriptor of its own: the lock belongs to that.
        fd = os.open(".", _FOLDER, dir_fd=self._fd)
        try:
            deadline = time.monotonic() + _MOST_SECONDS_FOR_A_LOCK
            with contextlib.suppress(OSError):
                while not _lock(fd, kind) and time.monotonic() < deadline:
                    time.sleep(0.001)
            yield
        finally:
            os.close(fd)

    @contextmanager
    def opened(self, name: str) -> Iterator[tuple[int, os.stat_result]]:
        """The descriptor of a file, for reading, and its status.

        Raises:
            BadBlockFileError: it is no regular file, or another user's.
            OSError: there is no such file, or the system refuses to read it.
        """
        try:
            file = os.open(name, _READ, dir_fd=self._fd)
        except OSError as error:
            if error.errno in _NOT_A_FILE:
                raise BadBlockFileError("it is no regular file") from error
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
        """A new file that no other user may read, opened for writing. Raises OSError."""
        file = os.open(name, _NEW, FILE_MODE, dir_fd=self._fd)
        try:
            os.fchmod(file, FILE_MODE)
            self._give_to_owner(file)
        except OSError:
            os.close(file)
            raise
        return file

    def write_aside(
        self,
        name: str,
        pieces: Sequence[bytes | bytearray | memoryview],
        mtime: int | None = None,
    ) -> None:
        """A file that holds the pieces, whole or not at all.

        It is written beside and renamed. Nothing waits for the disk: a file that is torn when the
        power goes is found out by its checksum.

        Args:
            mtime: the time that it gets, in nanoseconds since 1970; by default now.

        Raises:
            OSError: it could not be written; nothing is left of it.
        """
        aside = name_aside(name)
        file = self.create_file(aside)
        try:
            try:
                _write(file, pieces)
                if mtime is not None:
                    os.utime(file, ns=(mtime, mtime))
            finally:
                os.close(file)
            os.rename(aside, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(aside, dir_fd=self._fd)
            raise

    def remove_abandoned(self, entries: Iterable[tuple[str, os.stat_result]]) -> None:
        """Remove what processes began to write here that are dead by now.

        Args:
            entries: of this folder.
        """
        now = time.time()
        for name, status in entries:
            if name.endswith(_ASIDE_SUFFIX) and is_abandoned(name, now - status.st_mtime):
                with contextlib.suppress(OSError):
                    self.remove(name)

    def _check_file(self, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise BadBlockFileError("it is no regular file")
        if status.st_uid != self.owner:
            raise BadBlockFileError("it belongs to another user")

    def _give_to_owner(self, fd: int) -> None:
        if os.geteuid() != self.owner:
            os.fchown(fd, self.owner, -1)


def name_aside(name: str) -> str:
    """The name under which a file is written before it is renamed."""
    number = f"{os.getpid()}-{_THIS_PROCESS}-{next(_numbers)}"
    return f".{name[:16]}.{number}{_ASIDE_SUFFIX}"


def is_abandoned(name: str, age: float) -> bool:
    """Whether a file is one that ``write_aside`` began in a process that can't finish it any more.

    A process of another machine, or of another container, may look dead from here. Then its write
    fails, and a block is computed again one day.

    Args:
        name: of the file.
        age: seconds since it was last written to; negative for a time that is still to come.
    """
    match = _ASIDE.fullmatch(name)
    if match is None:
        return False
    process, start = int(match[1]), match[2]
    if process == os.getpid():
        return start != _THIS_PROCESS
    return abs(age) > _MOST_SECONDS_OF_A_WRITE or not _is_alive(process)


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
        pass  # it belongs to another user, or is not the number of a process
    return True
