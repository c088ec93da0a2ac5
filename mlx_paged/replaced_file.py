"""``replaced_file``: writes a file atomically. Does not import MLX."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mlx_paged.block_store.directory import is_abandoned, temporary_name, temporary_prefix


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
