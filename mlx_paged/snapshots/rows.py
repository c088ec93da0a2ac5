"""Blocks of a sequence as arrays of rows: one array ``[num_kv_heads, num_rows, width]`` for each
part of K and V of each layer, the layout of snapshots and of mlx-lm's prompt caches.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np

from mlx_paged.cache import KVCacheConfig, RowFormat
from mlx_paged.core import BlockHash, Retention, group_hashes
from mlx_paged.core.tier import BlockHeader, Payload, Tier, private_key
from mlx_paged.ops import Parts
from mlx_paged.snapshots.tensor_file import RowArrays


class HostRows(RowArrays):
    """Arrays of rows in host memory, as bytes ``[num_kv_heads, num_rows, row_nbytes]``."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}

    @classmethod
    def empty(cls, config: KVCacheConfig, num_tokens: int) -> HostRows:
        """Arrays to be written, with the rows that each layer keeps."""
        made = cls()
        for layer, spec in enumerate(config.layers):
            num_rows = num_kept_tokens(config, layer, num_tokens)
            for part in parts_of(config, layer):
                shape = (spec.num_kv_heads, num_rows, part.row_nbytes)
                made._arrays[part.name] = np.zeros(shape, np.uint8)
        return made

    def put(self, name: str, part: mx.array) -> None:
        """Set the array of a name to ``part``, ``[num_kv_heads, num_rows, width]``."""
        data = np.frombuffer(cast(Any, mx.contiguous(part)), np.uint8)
        self._arrays[name] = data.reshape(*part.shape[:2], -1)

    def parts(self, config: KVCacheConfig, layer: int) -> tuple[Parts, Parts]:
        """The parts of K and V of a layer, each ``[num_kv_heads, num_rows, width]``."""
        parts = parts_of(config, layer)
        arrays = tuple(mx.array(self._arrays[part.name]).view(part.dtype) for part in parts)
        num_key_parts = config.layers[layer].format.key.num_parts
        return arrays[:num_key_parts], arrays[num_key_parts:]

    def num_rows(self, name: str) -> int:
        num_rows: int = self._arrays[name].shape[1]
        return num_rows

    def read(self, name: str, head: int, rows: slice) -> bytes:
        return self._arrays[name][head, rows].tobytes()

    def write(self, name: str, head: int, rows: slice, content: memoryview) -> None:
        target = self._arrays[name][head, rows]
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
        arrays: RowArrays,
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
        # For each group: its arrays, their heads, and whether they have the rows of all tokens.
        self._parts = [
            [
                (part, config.layers[layer].num_kv_heads, arrays.num_rows(part.name) >= num_tokens)
                for layer in group.layers
                for part in parts_of(config, layer)
            ]
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
        for part, num_heads, has_all in self._parts[header.group]:
            begin = header.first_token if has_all else number * self._block_size
            rows, nbytes = slice(begin, begin + num_rows), self._block_size * part.row_nbytes
            for head in range(num_heads):
                yield part.name, head, rows, nbytes


class StoredPart(NamedTuple):
    """A part of K or V of a layer."""

    name: str
    width: int
    dtype: mx.Dtype

    @property
    def row_nbytes(self) -> int:
        return self.width * self.dtype.size


def parts_of(config: KVCacheConfig, layer: int) -> list[StoredPart]:
    """The parts of K, then those of V."""
    spec = config.layers[layer]
    sides: tuple[tuple[str, RowFormat, int], ...] = (
        ("keys", spec.format.key, spec.key_dim),
        ("values", spec.format.value, spec.value_dim),
    )
    return [
        StoredPart(f"layers.{layer}.{side}.{name}", *shape)
        for side, rows, width in sides
        for name, shape in zip(rows.part_names, rows.part_shapes(width), strict=True)
    ]


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
