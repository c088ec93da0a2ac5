"""How rows of K and V are stored, and which kernels read them. No other module depends on it.

A row is one head of one token, ``[..., width]``. A format stores rows as *parts*: arrays that are
alike in all axes but the last one. Dense rows have one part. Affine rows have three, as
``mx.quantize`` makes them: packed integers, and a scale and a bias per group of numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple, TypeAlias

import mlx.core as mx

from mlx_paged.errors import ArgumentError
from mlx_paged.ops import device
from mlx_paged.options.config import KV_BITS, KVBits

DENSE_DTYPES = ("float32", "float16", "bfloat16")
GROUP_SIZES = (64, 32)  # the first one that divides a width is taken

Parts: TypeAlias = tuple[mx.array, ...]


class BlockPairs(NamedTuple):
    """Which rows to multiply with which blocks: ``num_pairs`` pairs, each for all heads."""

    # Indices of the rows' leading axis, [num_pairs]; None if its length is num_pairs or 1.
    row_ids: mx.array | None
    block_ids: mx.array  # [num_pairs]
    # The same as indices of the matrices of single heads, [num_pairs, num_kv_heads]
    row_matrices: mx.array
    block_matrices: mx.array


@dataclass(frozen=True)
class FormatKernels:
    """The Metal kernels for a format, by their names in ``kernels``."""

    attention: str
    # Encodes rows into their slots and rotates queries; None for dense rows, which the attention
    # kernel writes.
    encode: str | None = None
    # Gathers blocks and decodes them; None for dense rows, which are copied.
    dequantize: str | None = None
    # Template parameters of all, besides the dtype and the width of a row.
    template: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class RowFormat(ABC):
    """How rows of K, or of V, are stored.

    Args:
        dtype: of the activations, ``"float32"``, ``"float16"`` or ``"bfloat16"``: the dtype of
            dense rows, of scales, and of what :meth:`decode` returns.

    Raises:
        ValueError: another dtype.
    """

    dtype: str = "float32"

    part_names: ClassVar[tuple[str, ...]]
    # A bound on the sum of the terms' magnitudes in a decoded value, for encoded values within
    # -1..1.
    num_terms: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.dtype not in DENSE_DTYPES:
            raise ValueError(f"[kv cache] dtype must be one of {DENSE_DTYPES}, got {self.dtype!r}")

    @property
    def num_parts(self) -> int:
        return len(self.part_names)

    @cached_property
    def mx_dtype(self) -> mx.Dtype:
        dtype: mx.Dtype = getattr(mx, self.dtype)
        return dtype

    @abstractmethod
    def part_shapes(self, width: int) -> tuple[tuple[int, mx.Dtype], ...]:
        """The width and the dtype of each part of a row of ``width`` numbers.

        Raises:
            ValueError: rows of this width can't be stored.
        """

    def row_nbytes(self, width: int) -> int:
        """Bytes of a row of ``width`` numbers."""
        return sum(part_width * dtype.size for part_width, dtype in self.part_shapes(width))

    def zeros(self, shape: tuple[int, ...]) -> Parts:
        """Storage for rows of zeros, ``[..., width]``."""
        *leading, width = shape
        return tuple(
            mx.zeros((*leading, part_width), dtype) for part_width, dtype in self.part_shapes(width)
        )

    @abstractmethod
    def width(self, parts: Parts) -> int:
        """The width of the rows stored in these parts."""

    @abstractmethod
    def encode(self, rows: mx.array) -> Parts:
        """Encode rows of any floating dtype, ``[..., width]``. On a CPU the result has the bits
        that the format's kernel writes.
        """

    @abstractmethod
    def decode(self, parts: Parts) -> mx.array:
        """Decode stored rows to ``[..., width]`` in :attr:`dtype`."""

    @abstractmethod
    def multiply_blocks(
        self, rows: mx.array, slabs: Parts, pairs: BlockPairs, transpose: bool
    ) -> mx.array:
        """Multiply rows by blocks, in place in the slab if MLX supports it.

        Args:
            rows: ``[n, num_kv_heads, group, width]``, or ``block_size`` in place of ``width``.
            slabs: the parts, ``[num_blocks, num_kv_heads, block_size, width of the part]`` each.
            pairs: which of the ``n`` rows is multiplied by which block.
            transpose: whether each block is transposed: True for scores, False for values.

        Returns:
            ``[num_pairs, num_kv_heads, group, block_size]``, or ``width`` in place of
            ``block_size``, in float32.
        """

    @property
    def rotates_keys(self) -> bool:
        """Whether keys in this format are rotated before they are encoded."""
        return False

    def kernels(self, values: RowFormat) -> FormatKernels:
        """The kernels for K in this format and V in the format ``values``.

        Raises:
            ValueError: there are none; the message has the reason.
        """
        raise ValueError("only plain MLX reads it")

    def stock_quantisation(self, values: RowFormat) -> dict[str, int] | None:
        """The arguments of mlx-lm's ``QuantizedKVCache`` for K in this format and V in the format
        ``values``; ``None`` for rows that its other caches store.

        Raises:
            ValueError: mlx-lm has no cache for them; the message has the reason.
        """
        raise ValueError("mlx-lm has no such format")


@dataclass(frozen=True)
class DenseFormat(RowFormat):
    """One number per element, in :attr:`dtype`."""

    part_names = ("rows",)

    def __str__(self) -> str:
        return self.dtype

    def part_shapes(self, width: int) -> tuple[tuple[int, mx.Dtype], ...]:
        return ((width, self.mx_dtype),)

    def width(self, parts: Parts) -> int:
        return parts[0].shape[-1]

    def kernels(self, values: RowFormat) -> FormatKernels:
        if not isinstance(values, DenseFormat):
            raise ValueError("the kernels need K and V to be both dense or both quantised")
        return FormatKernels("paged_attention")

    def stock_quantisation(self, values: RowFormat) -> dict[str, int] | None:
        if not isinstance(values, DenseFormat):
            raise ValueError("mlx-lm quantises both or none")
        return None

    def encode(self, rows: mx.array) -> Parts:
        return (rows.astype(self.mx_dtype),)

    def decode(self, parts: Parts) -> mx.array:
        return parts[0]

    def multiply_blocks(
        self, rows: mx.array, slabs: Parts, pairs: BlockPairs, transpose: bool
    ) -> mx.array:
        (slab,), rows = slabs, rows.astype(self.mx_dtype)
        # On a CPU, MLX's gather_mm is for float32 only.
        if self.dtype == "float32" or not device.is_cpu():
            matrices = slab.swapaxes(-1, -2) if transpose else slab
            out = mx.gather_mm(rows, matrices, pairs.row_matrices, pairs.block_matrices)
        else:
            blocks = slab[pairs.block_ids]
            rows = rows if pairs.row_ids is None else rows[pairs.row_ids]
            out = rows @ (blocks.swapaxes(-1, -2) if transpose else blocks)
        return out.astype(mx.float32)


@dataclass(frozen=True)
class AffineFormat(RowFormat):
    """``scale * n + bias``, with ``bits`` bits per ``n`` and a scale and a bias for each group of
    ``group_size`` numbers, packed as by ``mx.quantize``.

    Parts, for rows of ``width``: integers packed in uint32, ``[..., width * bits / 32]``; scales
    and biases, ``[..., width / group_size]`` in :attr:`dtype`.

    Raises:
        ValueError: unsupported bits, group size or dtype.
    """

    bits: int = 8
    group_size: int = GROUP_SIZES[0]

    part_names = ("values", "scales", "biases")
    num_terms = 3  # scale * n is within -2..2, the bias within -1..1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("bits", KV_BITS), ("group_size", GROUP_SIZES)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"[kv cache] {name} of K/V must be one of {known}, got {getattr(self, name)!r}"
                )

    @classmethod
    def for_width(cls, width: int, bits: int, dtype: str) -> AffineFormat:
        """With the largest groups that divide a row of ``width``.

        Raises:
            ArgumentError: no group does.
        """
        for group_size in GROUP_SIZES:
            if width % group_size == 0:
                return cls(dtype, bits, group_size)
        raise ArgumentError(
            f"[kv cache] kv_format can't be {bits} bits for this model: its rows of K/V have "
            f"{width} numbers, and no group size ({' or '.join(map(str, GROUP_SIZES))}) divides "
            f"{width}; leave it out",
            "kv_format",
        )

    def __str__(self) -> str:
        return affine_name(self.bits, self.group_size)

    @property
    def rotates_keys(self) -> bool:
        return self.bits == 4

    def kernels(self, values: RowFormat) -> FormatKernels:
        if not isinstance(values, AffineFormat):
            raise ValueError("the kernels need K and V to be both dense or both quantised")
        bits = ("KEY_BITS", self.bits), ("VALUE_BITS", values.bits)
        groups = ("KEY_GROUP", self.group_size), ("VALUE_GROUP", values.group_size)
        template = (*bits, *groups)
        return FormatKernels(
            "paged_attention_affine", "encode_and_cache", "dequantize_blocks", template
        )

    def stock_quantisation(self, values: RowFormat) -> dict[str, int] | None:
        if not isinstance(values, AffineFormat):
            raise ValueError("mlx-lm quantises both or none")
        if self.rotates_keys:
            raise ValueError("keys of 4 bits are rotated here, and mlx-lm would not rotate back")
        if (self.bits, self.group_size) != (values.bits, values.group_size):
            raise ValueError("mlx-lm has the same bits and groups for K and V")
        return {"group_size": self.group_size, "bits": self.bits}

    def part_shapes(self, width: int) -> tuple[tuple[int, mx.Dtype], ...]:
        if width % self.group_size:
            raise ValueError(
                f"[kv cache] rows of {width} numbers can't be divided into groups of "
                f"{self.group_size}"
            )
        groups = (width // self.group_size, self.mx_dtype)
        return ((width * self.bits // 32, mx.uint32), groups, groups)

    def width(self, parts: Parts) -> int:
        return parts[0].shape[-1] * 32 // self.bits

    def encode(self, rows: mx.array) -> Parts:
        rows = rows.astype(mx.float32)
        if self.bits > 4:
            values, scales, biases = mx.quantize(rows, self.group_size, self.bits)
        else:
            # MLX shifts the range of a group by up to a step, so that zero is one of its steps.
            # With 15 steps that costs much precision (see the benchmark `kv_formats`), so here the
            # range is that of the numbers, in steps down from its upper end.
            groups = rows.reshape(*rows.shape[:-1], -1, self.group_size)
            high = groups.max(-1, keepdims=True)
            scale = (groups.min(-1, keepdims=True) - high) / 15
            numbers = mx.round((groups - high) / mx.where(scale == 0, 1, scale))
            # Quantising these integers, counted down from 15, returns them packed.
            values, *_ = mx.quantize((15 - numbers).reshape(rows.shape), self.group_size, self.bits)
            scales, biases = scale.squeeze(-1), high.squeeze(-1)
        return values, scales.astype(self.mx_dtype), biases.astype(self.mx_dtype)

    def decode(self, parts: Parts) -> mx.array:
        values, scales, biases = parts
        return mx.dequantize(values, scales, biases, group_size=self.group_size, bits=self.bits)

    def multiply_blocks(
        self, rows: mx.array, slabs: Parts, pairs: BlockPairs, transpose: bool
    ) -> mx.array:
        values, scales, biases = slabs
        if self.dtype == "float32" or not device.is_cpu():
            out = mx.gather_qmm(
                rows.astype(self.mx_dtype),
                values,
                scales,
                biases,
                pairs.row_matrices,
                pairs.block_matrices,
                transpose=transpose,
                group_size=self.group_size,
                bits=self.bits,
            )
            return out.astype(mx.float32)
        # On a CPU, MLX accumulates in the dtype of the scales. Converting all scales of a slab
        # would cost time in proportion to the pool, so gather the needed blocks first.
        values, scales, biases = (part[pairs.block_ids] for part in slabs)
        rows = rows if pairs.row_ids is None else rows[pairs.row_ids]
        return mx.quantized_matmul(
            rows.astype(mx.float32),
            values,
            scales.astype(mx.float32),
            biases.astype(mx.float32),
            transpose=transpose,
            group_size=self.group_size,
            bits=self.bits,
        )


def dtype_name(dtype: str | mx.Dtype) -> str:
    """The name of a dtype as in numpy, such as ``"float16"``."""
    return str(dtype).removeprefix("mlx.core.")


def affine_name(bits: int, group_size: int) -> str:
    """The name of an affine format in messages and files."""
    return f"{bits} bits in groups of {group_size}"


@dataclass(frozen=True)
class KVFormat:
    """How a layer stores K and V.

    Where K has 4 bits, queries and keys are rotated by the same orthogonal matrix, which changes no
    score and spreads outliers over all channels (QuaRot, Ashkboos et al. 2024).
    """

    key: RowFormat
    value: RowFormat

    @classmethod
    def dense(cls, dtype: str | mx.Dtype = "float32") -> KVFormat:
        """Unquantised K and V; raises ``ValueError`` for an unsupported dtype."""
        rows = DenseFormat(dtype_name(dtype))
        return cls(rows, rows)

    @classmethod
    def quantised(cls, bits: KVBits, key_dim: int, value_dim: int, dtype: str) -> KVFormat:
        """For rows of these widths and activations of this dtype.

        Raises:
            ArgumentError: no group size divides a width, or there is no rotation for it.
        """
        key = AffineFormat.for_width(key_dim, bits.key, dtype)
        made = cls(key, AffineFormat.for_width(value_dim, bits.value, dtype))
        if made.rotates_keys and not _has_hadamard_matrix(key_dim):
            raise ArgumentError(
                f"[kv cache] kv_format can't be 4 bits of K for this model: MLX has no Hadamard "
                f"matrix for rows of {key_dim} numbers; use 8 bits of K",
                "kv_format",
            )
        return made

    def __post_init__(self) -> None:
        if self.key.dtype != self.value.dtype:
            raise ValueError(
                f"[kv cache] K and V must both have the dtype of the activations, got "
                f"{self.key.dtype} and {self.value.dtype}"
            )

    def __str__(self) -> str:
        return str(self.key) if self.key == self.value else f"K {self.key}, V {self.value}"

    def __hash__(self) -> int:
        return self._hash  # used by each layer in each step

    @cached_property
    def _hash(self) -> int:
        return hash((self.key, self.value))

    @cached_property
    def is_as_computed(self) -> bool:
        """Whether rows are stored as the model computes them, in :attr:`dtype`."""
        return self == KVFormat.dense(self.dtype)

    @property
    def description(self) -> str:
        """The name, with whatever else the stored bytes depend on."""
        if self.is_as_computed:
            return str(self)
        return f"stored as {self}, with {self.key.dtype} scales"

    @cached_property
    def rotates_keys(self) -> bool:
        return self.key.rotates_keys

    @cached_property
    def kernels(self) -> FormatKernels:
        """The Metal kernels for it; raises ``ValueError`` with the reason where there are none."""
        return self.key.kernels(self.value)

    @property
    def stock_quantisation(self) -> dict[str, int] | None:
        """See :meth:`RowFormat.stock_quantisation`."""
        return self.key.stock_quantisation(self.value)

    @property
    def num_terms(self) -> int:
        """The larger :attr:`RowFormat.num_terms` of K and V."""
        return max(self.key.num_terms, self.value.num_terms)

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of the activations, which are encoded and decoded."""
        return self.key.mx_dtype

    def encode(self, k: mx.array, v: mx.array) -> tuple[Parts, Parts]:
        """Encode rows of K, ``[..., key_dim]``, and V, of any floating dtype."""
        k, v = k.astype(self.dtype), v.astype(self.dtype)
        if self.rotates_keys:
            # Not rounded before they are encoded.
            k = self.rotated(k.astype(mx.float32))
        return self.key.encode(k), self.value.encode(v)

    def decode(self, k: Parts, v: Parts) -> tuple[mx.array, mx.array]:
        """Decode stored rows to :attr:`dtype`; K stays rotated where :attr:`rotates_keys`."""
        return self.key.decode(k), self.value.decode(v)

    def rotated(self, rows: mx.array) -> mx.array:
        """Queries or keys, ``[..., key_dim]``, times the normalised Hadamard matrix, in float32 and
        rounded once; unchanged where K is not rotated.
        """
        if not self.rotates_keys:
            return rows
        wide = rows.astype(mx.float32)
        return mx.hadamard_transform(wide, scale=rows.shape[-1] ** -0.5).astype(rows.dtype)

    def unrotated(self, keys: mx.array) -> mx.array:
        """The inverse of :meth:`rotated`."""
        if not self.rotates_keys:
            return keys
        identity = mx.eye(keys.shape[-1])
        # The inverse of an orthogonal matrix. Not all of MLX's Hadamard matrices are symmetric.
        inverse = mx.hadamard_transform(identity, scale=keys.shape[-1] ** -0.5).T
        return (keys.astype(mx.float32) @ inverse).astype(keys.dtype)


def _has_hadamard_matrix(width: int) -> bool:
    """Whether MLX has one: of 1, 12, 20 or 28 times a power of two."""
    odd = width // (width & -width)
    return odd == 1 or (odd in (3, 5, 7) and width % 4 == 0)
