"""Which arrays are what the files of a model hold: found when they are read, and asked for when
weights are hashed.

An array of a file is known by its object, since whatever mlx-lm or a user computes from it is
another one. MLX also writes into arrays (``weight[0] = 1``, ``weight += 1``), and the object stays.
So the value that was read is kept beside it, as a second reference to the same buffer: MLX then
can't reuse that buffer for what is written, and the address tells. The reference goes with the
array, so it keeps no memory in use but that of weights which were written into.
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
# A file that was changed more recently may be changed again, and not show it: file systems count
# time in steps of up to two seconds, and a write through a mapping sets the times when it is
# written back, on Linux within some 35 seconds.
SETTLING_SECONDS = 60

Classes: TypeAlias = tuple[type[Module], type]


class FileVersion(NamedTuple):
    """Of a file, links followed. Its content can't change without its ``ctime``, which no program
    can set.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: str) -> FileVersion:
        """Raises OSError: there is no such file."""
        status = os.stat(path)
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )


@dataclass(frozen=True)
class WeightFiles:
    """The files with the weights of a model, as they are at one moment.

    Attributes:
        folder: with all of them.
        versions: of each file, in the order in which mlx-lm reads them: of two tensors of the same
            name, it takes the later one.
        settled: whether any change after that moment shows in the versions.
    """

    folder: Path
    versions: tuple[FileVersion, ...]
    settled: bool

    @classmethod
    def at(cls, folder: Path) -> WeightFiles:
        """Raises OSError: a file goes away meanwhile."""
        now = time.time()
        versions = tuple(map(FileVersion.of, glob.glob(str(folder / PATTERN))))
        newest = max((max(each.mtime_ns, each.ctime_ns) for each in versions), default=0)
        return cls(folder, versions, now - newest / 1e9 > SETTLING_SECONDS)

    @property
    def key(self) -> str:
        """A digest of the versions; MLX decides what becomes of the bytes of a file."""
        text = json.dumps([version("mlx"), self.versions])
        return hashlib.sha256(text.encode()).hexdigest()

    def are_unchanged(self) -> bool:
        """Whether what was read since is what the versions stand for."""
        try:
            return self.settled and WeightFiles.at(self.folder).versions == self.versions
        except OSError:
            return False


@dataclass(frozen=True)
class _Origin:
    files: WeightFiles
    name: str  # of the tensor
    value: mx.array  # as it was read
    holder: weakref.ref[mx.array]  # ends the entry with the array


# By the id of an array, for as long as it lives.
_origins: dict[int, _Origin] = {}


def noting_classes(
    folder: Path, get_classes: Callable[[dict[str, Any]], Classes]
) -> Callable[[dict[str, Any]], Classes]:
    """What ``mlx_lm.utils.load_model`` takes as ``get_model_classes``, so that the arrays which it
    reads from the files in a folder are noted. It hands those of all files, untouched, to the
    ``sanitize`` of the model that it makes.

    Args:
        folder: is read after this.
        get_classes: gives the classes of the model and of its arguments.

    Raises:
        OSError: a file goes away meanwhile.
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
        # Which is called, and nothing else.
        return cast(type[Module], partial(make, model_class)), args_class

    return get_noting_classes


def note_origins(files: WeightFiles, weights: Mapping[str, mx.array]) -> None:
    """Remember arrays that were read from ``files``, by the names of their tensors."""
    for name, array in weights.items():
        holder = weakref.ref(array, partial(_forget, id(array)))
        _origins[id(array)] = _Origin(files, name, copy.copy(array), holder)


def _forget(ident: int, holder: weakref.ref[mx.array]) -> None:
    _origins.pop(ident, None)


def untouched(arrays: Collection[mx.array]) -> dict[int, tuple[WeightFiles, str]]:
    """Those of ``arrays`` that are what a file holds: their files and the name of their tensor, by
    the id of the array. They are evaluated.

    What is written through a view of NumPy is not noticed, as MLX does not notice it.
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
    # Where it lies, whatever its layout; contiguous() copies out of a larger buffer.
    return array[None].view(mx.uint8)


def _place(view: mx.array) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    found = np.array(view, copy=False)
    return found.ctypes.data, found.shape, found.strides
