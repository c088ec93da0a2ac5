"""``WeightDigests``: digests of the weights in a model's files, stored next to the blocks, so that
a start need not hash the weights again. Any of these files can be deleted, and is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping

from mlx_paged.block_store.directory import Directory
from mlx_paged.block_store.errors import BadBlockFileError, BlockStoreError
from mlx_paged.block_store.files import make_folder
from mlx_paged.block_store.layout import WEIGHTS_NAME, BlockLayout

# One file for each version of a model, with some 100 bytes per tensor.
MAX_FILES = 64
MAX_FILE_NBYTES = 64 * 2**20


class WeightDigests:
    """Digests by key and by the names of tensors, in a folder of blocks. Several processes may use
    it at once: files are replaced atomically, and the last one counts. Failures are ignored.

    Args:
        folder: made when something is stored.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._layout = BlockLayout(folder)

    def load(self, key: str) -> dict[str, bytes]:
        """The digests stored under a key, which is hexadecimal; empty if there are none, or the
        file is damaged.
        """
        with contextlib.suppress(OSError, BadBlockFileError, ValueError):
            folder = Directory.at(self._layout.folder).folder(WEIGHTS_NAME)
            name = _file_name_of(key)
            with folder.opened(name) as (file, status):
                content = os.pread(file, min(status.st_size, MAX_FILE_NBYTES), 0)
            digests = _parsed(content)
            folder.set_time(name, time.time_ns())
            return digests
        return {}

    def store(self, key: str, digests: Mapping[str, bytes]) -> None:
        """Store digests under a key. The ``MAX_FILES`` most recently used keys are kept."""
        with contextlib.suppress(OSError, BlockStoreError):
            make_folder(self._layout.folder)
            folder = Directory.at(self._layout.folder).make_folder(WEIGHTS_NAME)
            folder.write_aside(_file_name_of(key), [_written(digests)])
            _tidy(folder)


def _file_name_of(key: str) -> str:
    return f"{key}.json"


def _written(digests: Mapping[str, bytes]) -> bytes:
    body = json.dumps({name: digest.hex() for name, digest in digests.items()}).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _parsed(content: bytes) -> dict[str, bytes]:
    """Raises ValueError if the content is incomplete, was altered or was not written here."""
    checksum, _, body = content.partition(b"\n")
    if checksum != hashlib.sha256(body).hexdigest().encode():
        raise ValueError("another checksum")
    try:
        return {name: bytes.fromhex(digits) for name, digits in json.loads(body).items()}
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError("no digests by names") from error


def _tidy(folder: Directory) -> None:
    entries = folder.entries()
    folder.remove_abandoned(entries)
    files = [(status.st_mtime_ns, name) for name, status in entries if name.endswith(".json")]
    for _, name in sorted(files)[:-MAX_FILES]:
        folder.remove(name)
