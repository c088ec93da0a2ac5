"""``replaced_file``: a file that is written aside, and so is never half there. Imports no MLX: the
chat writes its transcripts so, and snapshots their tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replaced_file(file: Path) -> Iterator[BinaryIO]:
    """A new file to write, which takes the place of ``file`` when the body ends. If the body
    raises, nothing has changed.

    Its owner alone can read it, whatever the mode of the file in whose place it is put: these files
    hold conversations.

    A link stays one, and what it leads to is replaced.

    Raises:
        OSError: the system refuses, or the disk is full.
        RuntimeError: the name leads into a circle of links.
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
