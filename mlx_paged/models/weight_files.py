"""Which arrays equal a tensor of a model's files: recorded when files are read, and looked up when
weights are hashed.

An array is identified by its object, since anything computed from it is another object. But MLX
also writes into arrays (``weight[0] = 1``, ``weight += 1``) without changing the object. So a
second reference to the original buffer is kept: MLX can't reuse that buffer for the written value,
whose address then differs. The reference ends with the array, so it only costs memory for weights
that were written to.
"""

from __future__ import annotations

import copy
import glob
import hashlib
import json
import os
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

PATTERN = "model*.safetensors"  # what mlx-lm reads
# A file changed more recently than this may change again without a change of its times: file
# systems have a resolution of up to two seconds, and a write through a mapping updates the times
# when it is written back, on Linux within some 35 seconds.
SETTLING_SECONDS = 60

Classes: TypeAlias = tuple[type[Module], type]


class FileVersion(NamedTuple):
    """The version of a file, links followed. Its content can't change without its ``ctime``, which
    programs can't set.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: str) -> FileVersion:
        """Raises ``OSError`` if the file does not exist."""
        status = os.stat(path)
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )


@dataclass(frozen=True)
class WeightFiles:
    """The weight files of a model at one moment.

    Attributes:
        folder: that contains them.
        versions: one per file, in the order in which mlx-lm reads them: of two tensors with the
            same name, it takes the later one.
        settled: whether any later change would show in the versions.
    """

    folder: Path
    versions: tuple[FileVersion, ...]
    settled: bool

    @classmethod
    def at(cls, folder: Path) -> WeightFiles:
        """Raises ``OSError`` if a file is deleted meanwhile."""
        now = time.time()
        versions = tuple(map(FileVersion.of, glob.glob(str(folder / PATTERN))))
        newest = max((max(each.mtime_ns, each.ctime_ns) for each in versions), default=0)
        return cls(folder, versions, now - newest / 1e9 > SETTLING_SECONDS)

    @property
    def key(self) -> str:
        """A digest of the versions of the files and of MLX, which decodes them."""
        text = json.dumps([version("mlx"), self.versions])
        return hashlib.sha256(text.encode()).hexdigest()

    def are_unchanged(self) -> bool:
        """Whether everything read since is of these versions."""
        try:
            return self.settled and WeightFiles.at(self.folder).versions == self.versions
        except OSError:
            return False


@dataclass(frozen=True)
class _Origin:
    files: WeightFiles
    name: str  # of the tensor
    value: mx.array  # as it was read
    holder: weakref.ref[mx.array]  # removes the entry with the array


# By the id of an array, for as long as it lives.
_origins: dict[int, _Origin] = {}


def noting_classes(
    folder: Path, get_classes: Callable[[dict[str, Any]], Classes]
) -> Callable[[dict[str, Any]], Classes]:
    """A ``get_model_classes`` for ``mlx_lm.utils.load_model`` that records the arrays it reads from
    a folder. mlx-lm passes the unmodified arrays of all files to the model's ``sanitize``.

    Args:
        folder: must be read after this call.
        get_classes: returns the classes of the model and of its arguments.

    Raises:
        OSError: a file is deleted meanwhile.
    """
    files = WeightFiles.at(folder)

    def make(model_class: Any, args: Any) -> Module:
        model: Module = model_class(args)
        sanitize = getattr(model, "sanitize", None)

        def note_and_sanitize(weights: dict[str, mx.array]) -> dict[str, mx.array]:
            del model.sanitize
            note_origins(files, weights)
            return weights if sanitize is None else sanitize(weights)

        model.sanitize = note_and_sanitize
        return model

    def get_noting_classes(config: dict[str, Any]) -> Classes:
        model_class, args_class = get_classes(config)
        # mlx-lm only calls it.
        return cast(type[Module], partial(make, model_class)), args_class

    return get_noting_classes


def note_origins(files: WeightFiles, weights: Mapping[str, mx.array]) -> None:
    """Record arrays that were read from ``files``, by the names of their tensors."""
    for name, array in weights.items():
        holder = weakref.ref(array, partial(_forget, id(array)))
        _origins[id(array)] = _Origin(files, name, copy.copy(array), holder)


def _forget(ident: int, holder: weakref.ref[mx.array]) -> None:
    _origins.pop(ident, None)


def untouched(arrays: Collection[mx.array]) -> dict[int, tuple[WeightFiles, str]]:
    """The files and the tensor's name of each array that equals a tensor of a file, by the id of
    the array. Recorded arrays are evaluated.

    Writes through a NumPy view are not noticed, neither here nor by MLX.
    """
    noted = [(array, _origins[id(array)]) for array in arrays if id(array) in _origins]
    views = [(_bytes(array), _bytes(origin.value)) for array, origin in noted]
    mx.eval(views)
    return {
        id(array): (origin.files, origin.name)
        for (array, origin), (found, read) in zip(noted, views, strict=True)
        if array.dtype == origin.value.dtype and _place(found) == _place(read)
    }


def _bytes(array: mx.array) -> mx.array:
    # Without a copy, whatever the layout; contiguous() would copy out of a larger buffer.
    return array[None].view(mx.uint8)


def _place(view: mx.array) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    found = np.array(view, copy=False)
    return found.ctypes.data, found.shape, found.strides
