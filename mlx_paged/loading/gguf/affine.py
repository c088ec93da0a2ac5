"""Blocks of ggml's quantised types as rows in MLX's affine layout: ``w = scale * q + bias``.

All types but Q6_K are affine within groups of 32, so they are converted exactly: the integers do
not change, and scales and biases are exact in float32 (products of a float16 and an integer of at
most 8 bits). Q6_K has a scale for every 16 weights, which MLX does not support: its values are
quantised again, to 8 bits in groups of 32. The types are those of ggml's ``ggml-common.h``.

MLX packs the integers of a row into uint32, lowest bits first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mlx_paged.loading.gguf.header import gguf

GROUP_SIZE = 32
_PIECE_BYTES = 2**18
_LOW, _FOUR = np.uint8(0x0F), np.uint8(4)

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"


class AffineRows(NamedTuple):
    """Rows of weights in MLX's affine mode, with groups of 32."""

    packed: np.ndarray[Any, np.dtype[np.uint32]]  # [num_rows, row_length * bits / 32]
    scales: Floats  # [num_rows, row_length / 32]
    biases: Floats  # [num_rows, row_length / 32]


@dataclass(frozen=True)
class AffineType:
    """How one of ggml's types is converted.

    Attributes:
        block_bytes: the size of a block in ggml.
        repack: converts blocks ``[num_blocks, block_bytes]`` to packed integers as bytes, scales
            and biases, each ``[num_blocks, ...]``.
        is_exact: whether no weight changes.
    """

    bits: int
    block_bytes: int
    repack: Callable[[Bytes], tuple[Bytes, Floats, Floats]]
    is_exact: bool = True

    def rows(self, data: Bytes) -> AffineRows:
        """Repack rows of blocks, ``[num_rows, row_bytes]``."""
        # A piece fits into the processor's cache, and several are converted in parallel.
        step = max(1, _PIECE_BYTES // data.shape[1])
        pieces = [data[start : start + step] for start in range(0, len(data), step)]
        if len(pieces) == 1:
            return self._piece(data)
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return AffineRows(
                *map(np.concatenate, zip(*threads.map(self._piece, pieces), strict=True))
            )

    def _piece(self, data: Bytes) -> AffineRows:
        num_rows = data.shape[0]
        packed, scales, biases = self.repack(data.reshape(-1, self.block_bytes))
        integers = np.ascontiguousarray(packed).reshape(num_rows, -1).view(np.uint32)
        return AffineRows(integers, scales.reshape(num_rows, -1), biases.reshape(num_rows, -1))


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at a byte of each block, ``[num_blocks, 1]``."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _adjacent_nibbles(blocks: Bytes) -> Bytes:
    """Repack bytes with the weights ``i`` and ``i + n`` to bytes with ``2 i`` and ``2 i + 1``.

    Args:
        blocks: ``[..., n]``; low nibbles are the first n weights, high nibbles the second n.
    """
    even, odd = blocks[..., 0::2], blocks[..., 1::2]
    low = (even & _LOW) | (odd << _FOUR)
    high = (even >> _FOUR) | (odd & ~_LOW)
    return np.concatenate([low, high], axis=-1)


def _pack_5_bits(low: Bytes, high: Bytes) -> Bytes:
    """Pack weights of 5 bits, 8 of them in 5 bytes.

    Args:
        low: ``[..., 32]``, the lower 4 bits of each.
        high: ``[..., 32]``, 1 or 0.
    """
    # A word has one weight per byte; fields of 8 bits are shortened to 5 and joined in pairs.
    words = (low | (high << 4)).view(np.uint64)
    for width, gap, keep in ((5, 3, 0x001F001F001F001F), (10, 6, 0x3FF000003FF), (20, 12, 0xFFFFF)):
        words = (words & np.uint64(keep)) | ((words >> np.uint64(gap)) & np.uint64(keep << width))
    return words[..., None].view(np.uint8)[..., :5].reshape(*low.shape[:-1], -1)


def _nibbles(blocks: Bytes) -> Bytes:
    """The low nibbles of a block's bytes, and then the high ones."""
    return np.concatenate([blocks & _LOW, blocks >> _FOUR], axis=-1)


def _fifth_bits(blocks: Bytes) -> Bytes:
    """The bits of 4 bytes, one for each of 32 weights."""
    return np.unpackbits(blocks, axis=-1, bitorder="little")


def _q4_0(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    scale = _half(blocks, 0)
    return _adjacent_nibbles(blocks[:, 2:]), scale, -8 * scale


def _q4_1(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    return _adjacent_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    scale = _half(blocks, 0)
    packed = _pack_5_bits(_nibbles(blocks[:, 6:]), _fifth_bits(blocks[:, 2:6]))
    return packed, scale, -16 * scale


def _q5_1(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    packed = _pack_5_bits(_nibbles(blocks[:, 8:]), _fifth_bits(blocks[:, 4:8]))
    return packed, _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    scale = _half(blocks, 0)
    # A signed byte with its highest bit flipped is the byte plus 128.
    return blocks[:, 2:] ^ np.uint8(0x80), scale, -128 * scale


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and biases ``[num_blocks, 8]`` of Q4_K and Q5_K: 6 bits each in 12 bytes."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=-1)
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * minima)


def _q4_k(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    # 32 bytes hold 64 weights: low nibbles are a group, high nibbles the next one.
    packed = _adjacent_nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return packed.reshape(len(blocks), -1), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    # Bit g of byte i is the fifth bit of weight i of group g.
    groups = np.arange(8, dtype=np.uint8)[:, None]
    high = (blocks[:, None, 16:48] >> groups) & np.uint8(1)
    return _pack_5_bits(low, high).reshape(len(blocks), -1), *_k_scales(blocks)


def _q6_k(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    """The nearest of 256 levels between the smallest and the largest weight of a group."""
    quants = gguf().quants
    weights = quants.dequantize(blocks, gguf().constants.GGMLQuantizationType.Q6_K)
    groups = weights.reshape(len(blocks), -1, GROUP_SIZE)
    low, high = groups.min(-1), groups.max(-1)
    scales = (high - low) / np.float32(255)
    steps = np.where(scales == 0, np.float32(1), scales)[..., None]
    packed = np.rint((groups - low[..., None]) / steps).clip(0, 255).astype(np.uint8)
    return packed.reshape(len(blocks), -1), scales, low


AFFINE_TYPES = {
    "Q4_0": AffineType(4, 18, _q4_0),
    "Q4_1": AffineType(4, 20, _q4_1),
    "Q5_0": AffineType(5, 22, _q5_0),
    "Q5_1": AffineType(5, 24, _q5_1),
    "Q8_0": AffineType(8, 34, _q8_0),
    "Q4_K": AffineType(4, 144, _q4_k),
    "Q5_K": AffineType(5, 176, _q5_k),
    "Q6_K": AffineType(8, 210, _q6_k, is_exact=False),
}
