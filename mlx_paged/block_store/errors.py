"""Errors of a folder of blocks and of its files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_paged.errors import ArgumentError, system_reason


class BlockStoreError(ArgumentError):
    """The folder can't be used, and was left unchanged."""

    def __init__(self, message: str, argument: str = "cache_dir"):
        super().__init__(f"[block store] {message}", argument)


class BadBlockFileError(Exception):
    """A file that is not the block of its name: torn, altered, copied, or not a regular file."""


class OtherVersionError(Exception):
    """A block in the format of another version. It can't be used here, and is left alone."""


@contextmanager
def refusals(folder: Path) -> Iterator[None]:
    """Turn an ``OSError`` into a ``BlockStoreError``."""
    try:
        yield
    except OSError as error:
        raise BlockStoreError(f"{folder} can't be used: {system_reason(error)}") from error
