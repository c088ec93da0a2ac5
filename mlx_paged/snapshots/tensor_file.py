"""A safetensors file of rows that are written in any order, with a checksum of the whole file.

The format is https://huggingface.co/docs/safetensors: the length of the header, the header as JSON,
and the arrays one after the other. The metadata contain the SHA-256 of the file, computed with
zeros in place of the checksum. Any safetensors reader can open it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from mlx_paged.errors import one_line
from mlx_paged.replaced_file import replaced_file
from mlx_paged.snapshots.errors import SnapshotError, system_errors

CHECKSUM = "sha256"
_PLACE = "0" * hashlib.sha256().digest_size * 2
# Names of dtypes in the file, with the bytes of an element.
ITEMSIZES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "U8": 1}
_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 100_000_000  # bytes; limit of the format
_PIECE = 2**22  # bytes read at a time for the checksum


@dataclass(frozen=True)
class TensorInfo:
    """One array of a file."""

    dtype: str  # a key of ITEMSIZES
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEMSIZES[self.dtype]

    def offset(self, head: int, row: int) -> int:
        """Of a row of an array ``[num_heads, num_rows, width]``, in bytes."""
        return (head * self.shape[1] + row) * self.row_nbytes

    @cached_property
    def row_nbytes(self) -> int:
        return self.shape[2] * ITEMSIZES[self.dtype]


class RowArrays:
    """Named arrays ``[num_heads, num_rows, width]`` whose rows are read or written."""

    def num_rows(self, name: str) -> int:
        raise NotImplementedError

    def read(self, name: str, head: int, rows: slice) -> bytes:
        raise NotImplementedError

    def write(self, name: str, head: int, rows: slice, content: memoryview) -> None:
        raise NotImplementedError


class TensorWriter(RowArrays):
    """The arrays of a new file, whose rows are written in any order."""

    def __init__(
        self, descriptor: int, tensors: Mapping[str, TensorInfo], begins: Mapping[str, int]
    ):
        self._descriptor, self._tensors, self._begins = descriptor, tensors, begins

    def num_rows(self, name: str) -> int:
        return self._tensors[name].shape[1]

    def write(self, name: str, head: int, rows: slice, content: memoryview) -> None:
        begin = self._begins[name] + self._tensors[name].offset(head, rows.start)
        # Rows of one block are far apart. Without the stream's buffer, which each seek would flush.
        while content:
            num_written = os.pwrite(self._descriptor, content, begin)
            content, begin = content[num_written:], begin + num_written


@contextmanager
def written_tensor_file(
    file: Path, metadata: Mapping[str, str], tensors: Mapping[str, TensorInfo]
) -> Iterator[TensorWriter]:
    """Write a file atomically: it replaces an existing one when the body has written all rows.

    Raises:
        SnapshotError: the file can't be written; nothing was changed.
    """
    header = _header(metadata, tensors)
    *begins, end = _ends(tensors, len(header))
    with system_errors(file, "written"), replaced_file(file) as stream:
        stream.write(header)
        stream.flush()
        yield TensorWriter(stream.fileno(), tensors, dict(zip(tensors, begins, strict=True)))
        stream.truncate(end)
        stream.seek(0)
        digest = _digest_of(stream, hashlib.sha256())
        stream.seek(_place_of_checksum(header))
        stream.write(digest.encode())


def _header(metadata: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> bytes:
    # It comes first, so that no other metadata can be mistaken for it.
    header: dict[str, Any] = {"__metadata__": {CHECKSUM: _PLACE, **metadata}}
    offsets = itertools.pairwise(_ends(tensors, 0))
    for (name, info), place in zip(tensors.items(), offsets, strict=True):
        header[name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH.size)  # the arrays are aligned
    return _LENGTH.pack(len(text)) + text


def _ends(tensors: Mapping[str, TensorInfo], begin: int) -> Iterator[int]:
    """The beginnings of the arrays, one after the other, and the end of the last one."""
    return itertools.accumulate((info.nbytes for info in tensors.values()), initial=begin)


def _digest_of(stream: BinaryIO, digest: hashlib._Hash) -> str:
    """The digest after the rest of a stream."""
    while piece := stream.read(_PIECE):
        digest.update(piece)
    return digest.hexdigest()


def _place_of_checksum(header: bytes) -> int:
    mark = f'"{CHECKSUM}": "'.encode()
    return header.index(mark) + len(mark)


class TensorFile(RowArrays):
    """A file of :func:`written_tensor_file`, to read.

    Attributes:
        metadata: without the checksum.
        tensors: the arrays in it.

    Raises:
        SnapshotError: it can't be read, is not such a file, or its length does not match its
            header.
    """

    def __init__(self, file: Path):
        self.file = file
        with system_errors(file, "read"):
            # It stays open, so that the verified file is read even if another takes its name.
            self._stream = file.open("rb")
            self._read_header(self._stream)

    def _read_header(self, stream: BinaryIO) -> None:
        nbytes = stream.seek(0, 2)
        stream.seek(0)
        first = stream.read(_LENGTH.size)
        length = _LENGTH.unpack(first)[0] if len(first) == _LENGTH.size else 0
        if not 2 <= length <= min(_MAX_HEADER, nbytes - _LENGTH.size):
            raise self._no_snapshot("it doesn't begin like a safetensors file")
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
                raise self._no_snapshot(f"{name} is not where the header says")
            end += info.nbytes
        if nbytes != end:
            what = "truncated" if nbytes < end else "altered"
            raise SnapshotError(self.file, f"was {what}: it has {nbytes} bytes, and had {end}")

    def _no_snapshot(self, why: str) -> SnapshotError:
        return SnapshotError(self.file, f"is not a snapshot: {why}")

    def verify(self) -> None:
        """Read the whole file and compare its checksum.

        Raises:
            SnapshotError: it was altered since it was written, or can't be read.
        """
        expected = self._checksum.encode()
        try:
            place = _place_of_checksum(self._header)
        except ValueError:
            raise self._no_snapshot("it has no checksum") from None
        if self._header[place : place + len(_PLACE)] != expected or len(expected) != len(_PLACE):
            raise self._altered()
        with system_errors(self.file, "read"):
            self._stream.seek(0)
            header = self._stream.read(len(self._header))
            zeroed = header[:place] + _PLACE.encode() + header[place + len(_PLACE) :]
            digest = _digest_of(self._stream, hashlib.sha256(zeroed))
        if header != self._header or digest.encode() != expected:
            raise self._altered()

    def _altered(self) -> SnapshotError:
        return SnapshotError(self.file, "was altered since it was written: its checksum differs")

    def num_rows(self, name: str) -> int:
        return self.tensors[name].shape[1]

    def read(self, name: str, head: int, rows: slice) -> bytes:
        """The bytes of some rows of an array.

        Raises:
            SnapshotError: they can't be read.
        """
        info = self.tensors[name]
        nbytes = (rows.stop - rows.start) * info.row_nbytes
        begin = self._begins[name] + info.offset(head, rows.start)
        with system_errors(self.file, "read"):
            content = os.pread(self._stream.fileno(), nbytes, begin)
        if len(content) != nbytes:
            raise SnapshotError(self.file, "was truncated while it was read")
        return content


def _info_of(entry: Mapping[str, Any]) -> TensorInfo:
    shape: Sequence[Any] = entry["shape"]
    if entry["dtype"] not in ITEMSIZES:
        raise ValueError(f"it has an array of {entry['dtype']}")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"it has an array of shape {shape}")
    return TensorInfo(entry["dtype"], tuple(shape))
