"""``replaced_file``: writes a file atomically. Does not import MLX."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replaced_file(file: Path) -> Iterator[BinaryIO]:
    """A new file to write, which replaces ``file`` when the body ends, unless it raises.

    Only its owner can read it, whatever the mode of the replaced file: these files hold
    conversations. A symbolic link is kept, and its target is replaced.

    Raises:
        OSError: the file can't be written.
        RuntimeError: the name is a loop of symbolic links.
    """
    file = file.resolve()
    aside = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    descriptor = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w+b") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(aside, file)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
