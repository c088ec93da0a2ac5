"""Which files a model was just read from, and the digests of models by the versions of their files,
so that the next start need not hash the weights again.

That the arrays of a model are those of its files is known only until something else has had the
model: MLX writes into arrays (``weight[0] = 1``) without leaving a trace. So ``load`` forgets the
files, and an engine takes them from a model that was loaded for it.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx_lm

from mlx_paged.block_store.block_file import BadBlockFileError, BlockStoreError
from mlx_paged.block_store.directory import Directory, make_folder
from mlx_paged.block_store.layout import WEIGHTS_NAME, folder_path

WEIGHT_PATTERN = "model*.safetensors"  # what mlx-lm reads
# A file changed more recently than this may change again without a change of its times: file
# systems have a resolution of up to two seconds, and a write through a mapping updates the times
# when it is written back, on Linux within some 35 seconds.
SETTLING_SECONDS = 60
# Of the digests that a folder keeps, by the versions of files.
MAX_KNOWN = 64
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class WeightFiles:
    """The weight files of a model at one moment, before they are read.

    Attributes:
        folder: that contains them.
        versions: device, inode, size, mtime and ctime in ns of each file, links followed, in the
            order in which mlx-lm reads them: of two tensors with the same name, it takes the later
            one. The content can't change without the ctime, which programs can't set.
        settled: whether any later change would show in the versions.
        config: the model's configuration as it was read.
    """

    folder: Path
    versions: tuple[tuple[int, ...], ...]
    settled: bool
    config: str = ""

    @classmethod
    def at(cls, folder: Path) -> WeightFiles:
        """Raises ``OSError`` if a file is deleted meanwhile."""
        now = time.time()
        found = list(map(os.stat, glob.glob(str(folder / WEIGHT_PATTERN))))
        newest = max((max(each.st_mtime_ns, each.st_ctime_ns) for each in found), default=0)
        versions = tuple(
            (each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns)
            for each in found
        )
        return cls(folder, versions, now - newest / 1e9 > SETTLING_SECONDS)

    def are_unchanged(self) -> bool:
        """Whether everything read since is of these versions."""
        try:
            return self.settled and WeightFiles.at(self.folder).versions == self.versions
        except OSError:
            return False

    def key(self, *described: str) -> str:
        """A digest of everything that the arrays depend on.

        Args:
            described: the model without the contents of its arrays.
        """
        code = [mx.__version__, mlx_lm.__version__, str(mx.default_device())]
        text = json.dumps([code, self.versions, self.config, described])
        return hashlib.sha256(text.encode()).hexdigest()


class WeightCatalogue:
    """The digests of models by the versions of their files, next to the blocks in a folder. Several
    processes may use it at once: files are replaced atomically, and the last one counts. Failures
    are ignored, and any of the files may be deleted.

    Args:
        folder: of blocks; made when something is stored.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = folder_path(folder)

    def load(self, key: str) -> str | None:
        """The digest stored under a key, which is hexadecimal; ``None`` if there is none."""
        with contextlib.suppress(OSError, BadBlockFileError):
            folder = Directory.at(self._folder).folder(WEIGHTS_NAME)
            digest = folder.read(key).decode(errors="replace")
            folder.set_time(key, time.time_ns())
            return digest if _DIGEST.fullmatch(digest) else None
        return None

    def store(self, key: str, digest: str) -> None:
        """Store a digest. The ``MAX_KNOWN`` most recently used ones are kept."""
        with contextlib.suppress(OSError, BlockStoreError):
            make_folder(self._folder)
            folder = Directory.at(self._folder).make_folder(WEIGHTS_NAME)
            folder.write_aside(key, [digest.encode()])
            entries = folder.entries()
            folder.remove_abandoned(entries)
            # Earlier versions kept the digests of tensors there.
            ours = [each for each in entries if _DIGEST.fullmatch(each[0].removesuffix(".json"))]
            for name, _ in sorted(ours, key=lambda each: each[1].st_mtime_ns)[:-MAX_KNOWN]:
                folder.remove(name)
