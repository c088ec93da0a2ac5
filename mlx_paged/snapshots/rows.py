"""K/V as rows: one array ``[num_kv_heads, num_rows, width]`` for each part of K and V of each
layer, the layout of snapshots and of mlx-lm's prompt caches. They are in host memory, or in a
safetensors file with a checksum, and a tier turns them into blocks and back.

The format of the file is https://huggingface.co/docs/safetensors: the length of the header, the
header as JSON, and the arrays one after the other. The metadata contain the SHA-256 of the file,
computed with zeros in place of the checksum. Any safetensors reader can open it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

import mlx.core as mx
import numpy as np

from mlx_paged.block_store.directory import replaced_file
from mlx_paged.cache import KVCacheConfig
from mlx_paged.core import BlockHash, Retention, group_hashes
from mlx_paged.core.tier import BlockHeader, Payload, Tier, private_key
from mlx_paged.errors import ArgumentError, one_line, shown, system_reason

CHECKSUM = "sha256"
_PLACE = "0" * hashlib.sha256().digest_size * 2
# The names of dtypes in the file.
DTYPES = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "U8": mx.uint8,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 100_000_000  # bytes; limit of the format
_PIECE = 2**22  # bytes read at a time for the checksum
_MAX_WHAT = 1000  # characters of a message


class SnapshotError(ArgumentError):
    """The file can't be read or written, was altered, or contains K/V that don't match; the message
    is one line, whatever the file contains.
    """

    def __init__(self, file: Path | str, what: str):
        super().__init__(f"[snapshot] {file} {one_line(what, _MAX_WHAT)}", "path")


def check_path(path: object) -> Path:
    """The path of a file, which may begin with ``~``.

    Raises:
        ArgumentError: it is not a path.
    """
    if not isinstance(path, str | Path) or not str(path) or "\0" in str(path):
        raise ArgumentError(
            f"[snapshot] path must be the name of a file, got {shown(path)}", "path"
        )
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise SnapshotError(path, f"can't be found: {error}") from error


@contextmanager
def system_errors(file: Path, what: str) -> Iterator[None]:
    """Turn an ``OSError`` into a :class:`SnapshotError`.

    Args:
        what: what failed, such as ``"written"``.
    """
    try:
        yield
    except OSError as error:
        raise SnapshotError(file, f"can't be {what}: {system_reason(error)}") from error


# Blocks from rows, and rows from blocks


@dataclass(frozen=True)
class StoredArray:
    """An array ``[num_heads, num_rows, width]`` of a file or in memory.

    Attributes:
        code: of its dtype, a key of ``DTYPES``.
    """

    code: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.code].size

    @cached_property
    def row_nbytes(self) -> int:
        return self.shape[2] * DTYPES[self.code].size

    def offset(self, head: int, row: int) -> int:
        """Of a row, in bytes."""
        return (head * self.shape[1] + row) * self.row_nbytes


class HostRows:
    """Arrays of rows in host memory, as bytes; filled with zeros."""

    def __init__(self, arrays: Mapping[str, StoredArray]) -> None:
        self.arrays = arrays
        self._bytes = {
            name: np.zeros((*array.shape[:2], array.row_nbytes), np.uint8)
            for name, array in arrays.items()
        }

    def put(self, name: str, array: mx.array) -> None:
        """Set an array to the first rows of another one."""
        shape = self._bytes[name].shape
        rows = mx.contiguous(array[:, : shape[1]])
        self._bytes[name] = np.frombuffer(cast(Any, rows), np.uint8).reshape(shape)

    def get(self, name: str) -> mx.array:
        return mx.array(self._bytes[name]).view(DTYPES[self.arrays[name].code])

    def read(self, name: str, head: int, rows: slice) -> bytes:
        return self._bytes[name][head, rows].tobytes()

    def write(self, name: str, head: int, rows: slice, content: memoryview) -> None:
        target = self._bytes[name][head, rows]
        target[:] = np.frombuffer(content, np.uint8).reshape(target.shape)


class RowTier(Tier):
    """Blocks whose bytes are gathered from arrays of rows, or scattered to them.

    Args:
        config: of the blocks' cache.
        arrays: the rows: for each layer those of all tokens, or those that it keeps.
        headers: of the blocks, for each group in the order of their tokens.
        num_tokens: of the sequence. The last block may be partly filled.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        arrays: HostRows | FileRows,
        headers: Iterable[BlockHeader],
        num_tokens: int,
    ):
        self._arrays, self._num_tokens = arrays, num_tokens
        self._block_size = config.block_size
        self._headers: dict[bytes, BlockHeader] = {}
        self._numbers: dict[bytes, int] = {}  # index of a block within its group
        counts = [0] * len(config.groups)
        for header in headers:
            self._headers[header.block_hash] = header
            self._numbers[header.block_hash] = counts[header.group]
            counts[header.group] += 1
        self._names = [
            [name for layer in group.layers for name in names_of(config, layer)]
            for group in config.groups
        ]

    def has(self, key: bytes) -> bool:
        return key in self._headers

    def load(self, key: bytes) -> bytes | None:
        if key not in self._headers:
            return None
        # Slots after the last token are filled with zeros.
        return b"".join(
            self._arrays.read(name, head, rows).ljust(nbytes, b"\0")
            for name, head, rows, nbytes in self._pieces(self._headers[key])
        )

    def store(self, header: BlockHeader, content: Payload) -> bool:
        view, begin = memoryview(content), 0
        for name, head, rows, nbytes in self._pieces(self._headers[header.block_hash]):
            end = begin + nbytes * (rows.stop - rows.start) // self._block_size
            self._arrays.write(name, head, rows, view[begin:end])
            begin += nbytes
        return True

    def _pieces(self, header: BlockHeader) -> Iterator[tuple[str, int, slice, int]]:
        """The pieces of a block in the order of its bytes: the array and the head, the rows that
        have tokens, and the bytes of a full piece.
        """
        num_rows = min(self._block_size, self._num_tokens - header.first_token)
        number = self._numbers[header.block_hash]
        for name in self._names[header.group]:
            array = self._arrays.arrays[name]
            has_all = array.shape[1] >= self._num_tokens
            begin = header.first_token if has_all else number * self._block_size
            rows, nbytes = slice(begin, begin + num_rows), self._block_size * array.row_nbytes
            for head in range(array.shape[0]):
                yield name, head, rows, nbytes


def names_of(config: KVCacheConfig, layer: int) -> list[str]:
    """The names of the parts of K of a layer, then those of V."""
    form = config.layers[layer].format
    sides = (("keys", form.key), ("values", form.value))
    return [f"layers.{layer}.{side}.{name}" for side, rows in sides for name in rows.part_names]


def arrays_of(
    config: KVCacheConfig, num_tokens: int, has_all: bool = False
) -> dict[str, StoredArray]:
    """The arrays of a sequence.

    Args:
        has_all: whether they have the rows of all tokens, and not only those that layers keep.
    """
    arrays = {}
    for layer, spec in enumerate(config.layers):
        num_rows = num_tokens if has_all else num_kept_tokens(config, layer, num_tokens)
        parts = spec.format.key.part_shapes(spec.key_dim)
        parts += spec.format.value.part_shapes(spec.value_dim)
        for name, (width, dtype) in zip(names_of(config, layer), parts, strict=True):
            arrays[name] = StoredArray(_CODES[dtype], (spec.num_kv_heads, num_rows, width))
    return arrays


def sequence_headers(config: KVCacheConfig, num_tokens: int) -> list[BlockHeader]:
    """Headers of all blocks of a sequence without dropped tokens, under private keys."""
    owner, block_size = os.urandom(16), config.block_size
    return [
        BlockHeader(private_key(owner, group, index), first_token=index * block_size, group=group)
        for group in range(len(config.groups))
        for index in range(-(-num_tokens // block_size))
    ]


def prefix_headers(
    config: KVCacheConfig, token_ids: Sequence[int], block_hashes: Sequence[BlockHash]
) -> list[BlockHeader]:
    """Headers of the blocks of a prefix that each group of layers keeps, under their hashes.

    Args:
        block_hashes: of the full blocks of the prefix, which are the beginning of ``token_ids``.
    """
    block_size, headers = config.block_size, []
    for group, retention in enumerate(config.retentions):
        hashes = group_hashes(block_hashes, group)
        for index in retention.kept_blocks(len(hashes), block_size):
            begin = index * block_size
            tokens = tuple(token_ids[begin : begin + block_size])
            parent = hashes[index - 1] if index else None
            headers.append(BlockHeader(hashes[index], parent, tokens, begin, group))
    return headers


# Which tokens of a sequence are kept


def retention_of(config: KVCacheConfig, layer: int) -> Retention:
    """Which tokens a layer keeps."""
    return config.groups[config.group_of(layer)].retention


def num_kept_tokens(config: KVCacheConfig, layer: int, num_tokens: int) -> int:
    """How many of ``num_tokens`` tokens a layer keeps; full blocks if some have left the window."""
    retention, block_size = retention_of(config, layer), config.block_size
    if not retention.num_evicted(num_tokens):
        return num_tokens
    return len(retention.kept_blocks(num_tokens // block_size, block_size)) * block_size


# The file


class FileRows:
    """The arrays of an open file.

    Args:
        file: for messages.
        descriptor: rows are read and written in any order. A stream's buffer would be flushed by
            each seek.
        arrays: one after the other.
        begin: of the first one.
    """

    def __init__(self, file: Path, descriptor: int, arrays: Mapping[str, StoredArray], begin: int):
        self.file, self.arrays = file, arrays
        self._descriptor = descriptor
        *begins, self.end = _ends(arrays, begin)
        self._begins = dict(zip(arrays, begins, strict=True))

    def read(self, name: str, head: int, rows: slice) -> bytes:
        """The bytes of some rows of an array.

        Raises:
            SnapshotError: they can't be read.
        """
        nbytes = (rows.stop - rows.start) * self.arrays[name].row_nbytes
        with system_errors(self.file, "read"):
            content = os.pread(self._descriptor, nbytes, self._place(name, head, rows))
        if len(content) != nbytes:
            raise SnapshotError(self.file, "was truncated while it was read")
        return content

    def write(self, name: str, head: int, rows: slice, content: memoryview) -> None:
        begin = self._place(name, head, rows)
        while content:
            num_written = os.pwrite(self._descriptor, content, begin)
            content, begin = content[num_written:], begin + num_written

    def _place(self, name: str, head: int, rows: slice) -> int:
        return self._begins[name] + self.arrays[name].offset(head, rows.start)


@contextmanager
def written_tensor_file(
    file: Path, metadata: Mapping[str, str], arrays: Mapping[str, StoredArray]
) -> Iterator[FileRows]:
    """Write a file atomically: it replaces an existing one when the body has written all rows.

    Raises:
        SnapshotError: the file can't be written; nothing was changed.
    """
    header = _header(metadata, arrays)
    with system_errors(file, "written"), replaced_file(file) as stream:
        stream.write(header)
        stream.flush()
        yield (written := FileRows(file, stream.fileno(), arrays, len(header)))
        stream.truncate(written.end)
        stream.seek(0)
        digest = _digest_of(stream, hashlib.sha256())
        stream.seek(_place_of_checksum(header))
        stream.write(digest.encode())


def _header(metadata: Mapping[str, str], arrays: Mapping[str, StoredArray]) -> bytes:
    # It comes first, so that no other metadata can be mistaken for it.
    header: dict[str, Any] = {"__metadata__": {CHECKSUM: _PLACE, **metadata}}
    offsets = itertools.pairwise(_ends(arrays, 0))
    for (name, array), place in zip(arrays.items(), offsets, strict=True):
        header[name] = {"dtype": array.code, "shape": array.shape, "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH.size)  # the arrays are aligned
    return _LENGTH.pack(len(text)) + text


def _ends(arrays: Mapping[str, StoredArray], begin: int) -> Iterator[int]:
    """The beginnings of the arrays, one after the other, and the end of the last one."""
    return itertools.accumulate((array.nbytes for array in arrays.values()), initial=begin)


def _digest_of(stream: BinaryIO, digest: hashlib._Hash) -> str:
    """The digest after the rest of a stream."""
    while piece := stream.read(_PIECE):
        digest.update(piece)
    return digest.hexdigest()


def _place_of_checksum(header: bytes) -> int:
    mark = f'"{CHECKSUM}": "'.encode()
    return header.index(mark) + len(mark)


class TensorFile(FileRows):
    """A file of :func:`written_tensor_file`, to read.

    Attributes:
        metadata: without the checksum.
        arrays: the arrays in it.

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
            arrays = {name: _array_of(entry) for name, entry in header.items()}
            offsets = [tuple(entry["data_offsets"]) for entry in header.values()]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self._no_snapshot(one_line(error)) from error
        self._checksum = str(metadata.pop(CHECKSUM, ""))
        self.metadata: dict[str, str] = metadata
        for name, place, found in zip(
            arrays, itertools.pairwise(_ends(arrays, 0)), offsets, strict=True
        ):
            if place != found:
                raise self._no_snapshot(f"{name} is not where the header says")
        super().__init__(self.file, stream.fileno(), arrays, len(self._header))
        if nbytes != self.end:
            what = "truncated" if nbytes < self.end else "altered"
            raise SnapshotError(self.file, f"was {what}: it has {nbytes} bytes, and had {self.end}")

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


def _array_of(entry: Mapping[str, Any]) -> StoredArray:
    shape: Sequence[Any] = entry["shape"]
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"it has an array of {entry['dtype']}")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"it has an array of shape {shape}")
    return StoredArray(entry["dtype"], tuple(shape))
