"""A safetensors file that is written one array after the other, and knows whether it was altered.

The format is that of https://huggingface.co/docs/safetensors: the length of a header, the header as
JSON, and the arrays one after the other. Its metadata hold the SHA-256 of the whole file, taken
while zeros stand in the checksum's own place. Any reader of safetensors opens it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mlx_paged.errors import one_line
from mlx_paged.replaced_file import replaced_file
from mlx_paged.snapshots.errors import SnapshotError, system_errors

CHECKSUM = "sha256"
_PLACE = "0" * hashlib.sha256().digest_size * 2
# Names of dtypes in the file, with their numpy dtype: it has no bfloat16.
DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
}
_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 100_000_000  # bytes; as the format says
_PIECE = 2**22  # bytes read at a time for the checksum


@dataclass(frozen=True)
class TensorInfo:
    """One array of a file."""

    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


def write_tensor_file(
    file: Path,
    metadata: Mapping[str, str],
    tensors: Mapping[str, TensorInfo],
    contents: Iterable[np.ndarray],
) -> int:
    """Write a file aside, then in its place; returns its bytes.

    Args:
        tensors: in the order of ``contents``.
        contents: of each tensor the array, contiguous. Each is taken when the one before was
            written, so that not all of them have to be there at a time.

    Raises:
        SnapshotError: the system refuses, or the disk is full; nothing was changed.
    """
    header = _header(metadata, tensors)
    digest = hashlib.sha256(header)
    with system_errors(file, "written"), replaced_file(file) as stream:
        stream.write(header)
        num_written = len(header)
        for info, content in zip(tensors.values(), contents, strict=True):
            assert content.shape == info.shape and content.nbytes == info.nbytes, "as announced"
            data = np.ascontiguousarray(content).reshape(-1).view(np.uint8).data
            digest.update(data)
            stream.write(data)
            num_written += info.nbytes
        stream.seek(_place_of_checksum(header))
        stream.write(digest.hexdigest().encode())
        return num_written


def _header(metadata: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> bytes:
    # First in the file, so that nothing in the metadata is taken for it.
    header: dict[str, Any] = {"__metadata__": {CHECKSUM: _PLACE, **metadata}}
    end = 0
    for name, info in tensors.items():
        begin, end = end, end + info.nbytes
        header[name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH.size)  # the arrays are aligned
    return _LENGTH.pack(len(text)) + text


def _place_of_checksum(header: bytes) -> int:
    mark = f'"{CHECKSUM}": "'.encode()
    return header.index(mark) + len(mark)


class TensorFile:
    """A file that :func:`write_tensor_file` wrote, to read.

    Attributes:
        metadata: without the checksum.
        tensors: the arrays in it.

    Raises:
        SnapshotError: it can't be read, is no such file, or is not as long as it says.
    """

    def __init__(self, file: Path):
        self.file = file
        with system_errors(file, "read"), file.open("rb") as stream:
            self._read_header(stream)

    def _read_header(self, stream: BinaryIO) -> None:
        nbytes = stream.seek(0, 2)
        stream.seek(0)
        first = stream.read(_LENGTH.size)
        length = _LENGTH.unpack(first)[0] if len(first) == _LENGTH.size else 0
        if not 2 <= length <= min(_MAX_HEADER, nbytes - _LENGTH.size):
            raise self._no_snapshot("its beginning is not that of a safetensors file")
        self._header = first + stream.read(length)
        try:
            header = json.loads(self._header[_LENGTH.size :])
            metadata = dict(header.pop("__metadata__", {}))
            self.tensors = {name: _info_of(entry) for name, entry in header.items()}
            offsets = [tuple(entry["data_offsets"]) for entry in header.values()]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self._no_snapshot(one_line(error)) from error
        self._checksum = str(metadata.pop(CHECKSUM, ""))
        self.metadata: dict[str, str] = metadata
        self._begins: dict[str, int] = {}
        end = len(self._header)
        for (name, info), (begin, stop) in zip(self.tensors.items(), offsets, strict=True):
            self._begins[name] = end
            if (begin, stop) != (end - len(self._header), end - len(self._header) + info.nbytes):
                raise self._no_snapshot(f"{name} does not lie where its header says")
            end += info.nbytes
        if nbytes != end:
            what = "truncated" if nbytes < end else "altered"
            raise SnapshotError(self.file, f"was {what}: it has {nbytes} bytes, and had {end}")

    def _no_snapshot(self, why: str) -> SnapshotError:
        return SnapshotError(self.file, f"is no snapshot: {why}")

    def verify(self) -> None:
        """Read the whole file.

        Raises:
            SnapshotError: a byte of it was altered since it was written, or it can't be read.
        """
        expected = self._checksum.encode()
        try:
            place = _place_of_checksum(self._header)
        except ValueError:
            raise self._no_snapshot("it has no checksum") from None
        if self._header[place : place + len(_PLACE)] != expected or len(expected) != len(_PLACE):
            raise self._altered()
        with system_errors(self.file, "read"), self.file.open("rb") as stream:
            header = stream.read(len(self._header))
            zeroed = header[:place] + _PLACE.encode() + header[place + len(_PLACE) :]
            digest = hashlib.sha256(zeroed)
            while piece := stream.read(_PIECE):
                digest.update(piece)
        if header != self._header or digest.hexdigest().encode() != expected:
            raise self._altered()

    def _altered(self) -> SnapshotError:
        return SnapshotError(self.file, "was altered since it was written: its checksum differs")

    def read(self, name: str) -> np.ndarray:
        """A copy of one array; bfloat16 as the uint16 of its bits.

        Raises:
            SnapshotError: it can't be read.
        """
        info = self.tensors[name]
        with system_errors(self.file, "read"):
            content = np.fromfile(
                self.file, DTYPES[info.dtype], prod(info.shape), offset=self._begins[name]
            )
        if content.nbytes != info.nbytes:
            raise SnapshotError(self.file, "was truncated while it was read")
        return content.reshape(info.shape)


def _info_of(entry: Mapping[str, Any]) -> TensorInfo:
    shape: Sequence[Any] = entry["shape"]
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"it has an array of {entry['dtype']}")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"it has an array of shape {shape}")
    return TensorInfo(entry["dtype"], tuple(shape))
