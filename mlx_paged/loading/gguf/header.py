"""The header of a GGUF file: its metadata and the places of its tensors.

The format is that of ggml's ``docs/gguf.md``, versions 2 and 3. The ``gguf`` package has a reader,
too, but it makes several numpy arrays for each string, which takes seconds and half a gigabyte for
a vocabulary of 150,000 tokens, and it trusts the lengths in a damaged file. Only its names and
block sizes of types are used here.
"""

from __future__ import annotations

import importlib
import os
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mlx_paged.errors import shown, system_reason
from mlx_paged.loading.folder import LoadError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
# Limits for damaged lengths; the largest vocabularies have 2**18 tokens.
MAX_ARRAY_LENGTH = 2**24
MAX_TEXT_BYTES = 2**28

_STRING, _ARRAY = 8, 9
# The number of a metadata type -> numpy's name of it.
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip


@cache
def gguf() -> Any:
    """The package, with its modules ``constants``, ``quants`` and ``tensor_mapping``, imported when
    a GGUF file is read.

    Raises:
        LoadError: it is not installed.
    """
    try:
        # Not with an import statement, so that type checkers do not need the package.
        for module in ("constants", "quants", "tensor_mapping"):
            importlib.import_module(f"gguf.{module}")
        return importlib.import_module("gguf")
    except ImportError as error:
        raise LoadError(
            f"[load] GGUF files are read with the gguf package ({error}); pip install gguf"
        ) from error


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's place in a file.

    Attributes:
        type_name: ``F32``, ``Q4_K`` and so on.
        shape: outermost dimension first, as in numpy; GGUF has the innermost first.
        start: the offset of its bytes in the file.
        row_bytes: the bytes of one row of the innermost dimension.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    file: Path
    start: int
    row_bytes: int

    @property
    def num_rows(self) -> int:
        return int(np.prod(self.shape[:-1]))

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes


@dataclass(frozen=True)
class Header:
    """Metadata by key, and tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(file: Path) -> Header:
    """Read the header of one file.

    Raises:
        LoadError: it is not a GGUF file, has an unsupported version, or is damaged or truncated.
    """
    try:
        with open(file, "rb") as stream:
            return _HeaderReader(file, stream).read()
    except OSError as error:
        raise LoadError(f"[load] {file} can't be read: {system_reason(error)}") from error


class _HeaderReader:
    """Reads a file from its start, and checks every length against the bytes that are there."""

    def __init__(self, file: Path, stream: BinaryIO):
        self.file = file
        self.stream = stream
        self.size = os.fstat(stream.fileno()).st_size

    def read(self) -> Header:
        self._read_version()
        num_tensors, num_keys = self._scalars("<u8", 2).tolist()
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text("a metadata key")
            if key in metadata:
                raise self._damaged(f"it has the metadata key {shown(key)} twice")
            metadata[key] = self._value(self._number("<u4"), key)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        return Header(metadata, self._tensors(infos, metadata))

    def _read_version(self) -> None:
        magic = self.stream.read(4)
        if magic != MAGIC:
            what = "is empty" if not magic else f"begins with {shown(magic)} and not with GGUF"
            raise LoadError(f"[load] {self.file} is not a GGUF file: it {what}")
        version = self._number("<u4")
        if version in VERSIONS:
            return
        if version and version & 0xFFFF == 0:
            raise LoadError(
                f"[load] {self.file} is a big-endian GGUF file; write a little-endian one"
            )
        raise LoadError(
            f"[load] {self.file} is a GGUF file of version {version}; supported: 2 and 3"
        )

    def _tensor_info(self) -> tuple[str, list[int], int, int]:
        name = self._text("a tensor's name")
        num_dimensions = self._number("<u4")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._damaged(f"tensor {shown(name)} has {num_dimensions} dimensions")
        shape = self._scalars("<u8", num_dimensions).tolist()[::-1]
        return name, shape, self._number("<u4"), self._number("<u8")

    def _tensors(
        self, infos: list[tuple[str, list[int], int, int]], metadata: dict[str, Any]
    ) -> dict[str, TensorInfo]:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {shown(alignment)}, not a power of two")
        start = -(-self.stream.tell() // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, type_number, offset in infos:
            if name in tensors:
                raise self._damaged(f"it has the tensor {shown(name)} twice")
            type_name, row_bytes = self._row(name, shape, type_number)
            info = TensorInfo(name, type_name, tuple(shape), self.file, start + offset, row_bytes)
            self._check_place(info)
            tensors[name] = info
        return tensors

    def _row(self, name: str, shape: list[int], type_number: int) -> tuple[str, int]:
        """The name of a tensor's type, and the bytes of one of its rows."""
        constants = gguf().constants
        try:
            kind = constants.GGMLQuantizationType(type_number)
            block_size, block_bytes = constants.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise LoadError(
                f"[load] {self.file}: tensor {shown(name)} has the unknown type {type_number}"
            ) from None
        if min(shape) < 1 or shape[-1] % block_size:
            raise self._damaged(
                f"tensor {shown(name)} has the shape {shown(shape)}, and rows of {kind.name} are "
                f"multiples of {block_size}"
            )
        return kind.name, shape[-1] // block_size * block_bytes

    def _check_place(self, info: TensorInfo) -> None:
        # In Python's integers, since damaged dimensions may have a product of any size.
        num_bytes = info.row_bytes
        for size in info.shape[:-1]:
            num_bytes *= size
        end = info.start + num_bytes
        if end > self.size:
            raise LoadError(
                f"[load] {self.file} is truncated or damaged: tensor {shown(info.name)} ends at "
                f"byte {end:,}, but the file has {self.size:,}"
            )

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._text(key)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._damaged(f"the metadata {shown(key)} has the unknown type {kind}")
        return self._number(_SCALARS[kind])

    def _array(self, key: str) -> list[Any]:
        kind, count = self._number("<u4"), self._number("<u8")
        if count > MAX_ARRAY_LENGTH:
            raise self._damaged(f"the metadata {shown(key)} has {count:,} entries")
        if kind == _STRING:
            return [self._text(key) for _ in range(count)]
        if kind not in _SCALARS:
            raise self._damaged(f"the metadata {shown(key)} is an array of the type {kind}")
        values: list[Any] = self._scalars(_SCALARS[kind], count).tolist()
        return values

    def _number(self, dtype: str) -> Any:
        value = self._scalars(dtype, 1)[0]
        # The shortest decimal of the float32: 1e-06 and not 9.999999974752427e-07.
        return float(str(value)) if dtype == "<f4" else value.item()

    def _scalars(self, dtype: str, count: int) -> np.ndarray[Any, Any]:
        return np.frombuffer(self._take(count * np.dtype(dtype).itemsize), dtype)

    def _text(self, what: str) -> str:
        (length,) = struct.unpack("<Q", self._take(8))
        if length > MAX_TEXT_BYTES:
            raise self._damaged(f"{shown(what)} has {length:,} bytes")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self._damaged(f"{shown(what)} is not UTF-8") from None

    def _take(self, num_bytes: int) -> bytes:
        taken = self.stream.read(num_bytes)
        if len(taken) < num_bytes:
            raise LoadError(
                f"[load] {self.file} is truncated or damaged: it ends within its header"
            )
        return taken

    def _damaged(self, what: str) -> LoadError:
        return LoadError(f"[load] {self.file} is damaged: {what}")
