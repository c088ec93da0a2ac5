"""Errors of files that can't be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_paged.errors import ArgumentError, one_line, shown, system_reason

_MAX_WHAT = 1000  # characters


class SnapshotError(ArgumentError):
    """The file can't be read or written, was altered, or contains K/V that don't match; the message
    is one line, whatever the file contains.
    """

    def __init__(self, file: Path | str, what: str):
        super().__init__(f"[snapshot] {file} {one_line(what, _MAX_WHAT)}", "path")


def check_path(path: object) -> Path:
    """The path of a file, which may begin with ``~``.

    Raises:
        ArgumentError: it is not a path.
    """
    if not isinstance(path, str | Path) or not str(path) or "\0" in str(path):
        raise ArgumentError(
            f"[snapshot] path must be the name of a file, got {shown(path)}", "path"
        )
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise SnapshotError(path, f"can't be found: {error}") from error


@contextmanager
def system_errors(file: Path, what: str) -> Iterator[None]:
    """Turn an ``OSError`` into a :class:`SnapshotError`.

    Args:
        what: what failed, such as ``"written"``.
    """
    try:
        yield
    except OSError as error:
        raise SnapshotError(file, f"can't be {what}: {system_reason(error)}") from error
