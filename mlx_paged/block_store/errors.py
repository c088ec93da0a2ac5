"""What can be wrong with a folder of blocks when it is opened, and with one of its files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_paged.errors import ArgumentError, system_reason


class BlockStoreError(ArgumentError):
    """The folder can't be used; nothing was changed in it."""

    def __init__(self, message: str, argument: str = "cache_dir"):
        super().__init__(f"[block store] {message}", argument)


class BadBlockFileError(Exception):
    """A file that is no block under the name that it has: torn, altered, copied, or no file."""


class OtherVersionError(Exception):
    """A block in a format of another version: of no use here, and another program's property."""


@contextmanager
def refusals(folder: Path) -> Iterator[None]:
    """Turn what the system refuses into a ``BlockStoreError``."""
    try:
        yield
    except OSError as error:
        raise BlockStoreError(f"{folder} can't be used: {system_reason(error)}") from error
