"""A model's GGUF file, which may be split into parts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_paged.errors import shown, system_reason
from mlx_paged.loading.folder import LoadError
from mlx_paged.loading.gguf.header import Header, TensorInfo, read_header
from mlx_paged.loading.gguf.metadata import Metadata

# llama.cpp's names of parts, by which it finds them.
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class GGUFFile:
    """All of a model's metadata and tensors.

    Attributes:
        path: the file, or its first part.
    """

    path: Path
    metadata: Metadata
    tensors: dict[str, TensorInfo]

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Read the header of a file, or of all parts of a split one, any of which may be named.

        Raises:
            LoadError: a part is missing, or does not belong to the others.
        """
        parts = _parts_of(path)
        headers = [read_header(part) for part in parts]
        _check_parts(parts, headers)
        tensors: dict[str, TensorInfo] = {}
        for part, header in zip(parts, headers, strict=True):
            twice = tensors.keys() & header.tensors.keys()
            if twice:
                raise LoadError(
                    f"[load] {part} has the tensor {shown(min(twice))}, which an earlier part has"
                )
            tensors.update(header.tensors)
        expected = headers[0].metadata.get("split.tensors.count", len(tensors))
        if len(tensors) != expected:
            raise LoadError(
                f"[load] {parts[0]} and its parts have {len(tensors)} tensors, and "
                f"split.tensors.count says {shown(expected)}"
            )
        return cls(parts[0], Metadata(parts[0], headers[0].metadata), tensors)

    def read(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of a tensor: ``[num_rows, row_bytes]``.

        The file is read and not mapped: with a mapping, a file that is truncated meanwhile would
        crash the process.
        """
        info = self.tensors[name]
        try:
            data = np.fromfile(info.file, np.uint8, info.num_bytes, offset=info.start)
        except OSError as error:
            raise LoadError(f"[load] {info.file} can't be read: {system_reason(error)}") from error
        if data.size < info.num_bytes:
            raise LoadError(f"[load] {info.file} was truncated while it was read")
        return data.reshape(info.num_rows, info.row_bytes)


def is_later_part(path: Path) -> bool:
    """Whether a file is a part of a split one other than the first."""
    match = _PART.fullmatch(path.name)
    return match is not None and int(match["number"]) > 1


def _parts_of(path: Path) -> list[Path]:
    match = _PART.fullmatch(path.name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return [path]
    count = int(match["count"])
    parts = [
        path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    ]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise LoadError(
            f"[load] {path.parent} lacks {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + f"; the model is split into {count} parts, which are read together"
        )
    return parts


def _check_parts(parts: list[Path], headers: list[Header]) -> None:
    for index, (part, header) in enumerate(zip(parts, headers, strict=True)):
        count = header.metadata.get("split.count", 0)
        if len(parts) == 1 and count in (0, 1):
            continue
        number = header.metadata.get("split.no")
        if count != len(parts) or number != index:
            raise LoadError(
                f"[load] {part} is part {shown(number)} of {shown(count)} by its metadata "
                "(split.no, counted from 0, and split.count); parts must be named "
                f"NAME-{index + 1:05}-of-{len(parts):05}.gguf, in one folder"
            )
