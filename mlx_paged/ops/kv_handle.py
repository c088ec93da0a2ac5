"""``KVHandle``: one layer's K and V slabs, which every operation reads or writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_paged.ops.formats import KVFormat, Parts

DENSE = KVFormat.dense()


@dataclass(slots=True, eq=False)
class KVHandle:
    """One layer's K, rows of ``key_dim``, and V, rows of ``value_dim``.

    Each is stored as the parts of its ``format``, slabs
    ``[num_blocks, num_kv_heads, block_size, width of the part]``.

    Writes change the arrays of ``k`` and ``v`` in place. A slab is written without a copy only
    while there is no other reference to it, so read it through the handle and don't keep
    ``handle.k[0]`` across a write.

    Kernels write slabs without MLX's knowledge. ``fence`` is the last link of the chain of kernel
    calls on these slabs: each call binds it and replaces it. It is ``None`` where MLX tracks all
    writes.

    Raises:
        ValueError: the slabs don't match each other or the format.
    """

    k: Parts
    v: Parts
    format: KVFormat
    fence: mx.array | None = None
    key_dim: int = field(init=False)
    value_dim: int = field(init=False)

    def __post_init__(self) -> None:
        leading = self.k[0].shape[:3]
        for parts, rows in ((self.k, self.format.key), (self.v, self.format.value)):
            found = [(part.shape, part.dtype) for part in parts]
            width = rows.width(parts)
            expected = [((*leading, n), dtype) for n, dtype in rows.part_shapes(width)]
            if parts[0].ndim != 4 or found != expected:
                raise ValueError(
                    f"[kv_handle] slabs of {self.format} must be [num_blocks, num_kv_heads, "
                    f"block_size, width] = {_shown(expected)}, got {_shown(found)}"
                )
        self.key_dim = self.format.key.width(self.k)
        self.value_dim = self.format.value.width(self.v)

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        key_dim: int,
        value_dim: int,
        format: KVFormat = DENSE,
    ) -> KVHandle:
        """Evaluated slabs of zeros, ``num_blocks * num_kv_heads * block_size`` rows of K and of
        V.
        """
        rows = (num_blocks, num_kv_heads, block_size)
        k = format.key.zeros((*rows, key_dim))
        handle = cls(k, format.value.zeros((*rows, value_dim)), format)
        mx.eval(handle.arrays)
        return handle

    @property
    def num_blocks(self) -> int:
        return self.k[0].shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.k[0].shape[1]

    @property
    def block_size(self) -> int:
        return self.k[0].shape[2]

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of dense rows and of queries."""
        return self.format.dtype

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs)

    @property
    def slabs(self) -> Parts:
        """All parts of K, then those of V."""
        return self.k + self.v

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays whose evaluation completes all writes so far."""
        return self.slabs if self.fence is None else (*self.slabs, self.fence)

    def grow(self, num_new_blocks: int) -> None:
        """Add ``num_new_blocks`` blocks of zeros at the end. Copies the slabs once; block ids stay
        valid.

        Raises:
            RuntimeError: from MLX, when memory runs out; the slabs are unchanged then.
        """
        self.leave_chain()
        num_blocks = self.num_blocks
        # One slab after the other, so that the peak is one extra slab.
        try:
            self._replace_each(lambda slab: _grown(slab, num_new_blocks))
        except RuntimeError:
            self._replace_each(lambda slab: _cut(slab, num_blocks))
            raise

    def shrink_to(self, num_blocks: int) -> None:
        """Drop the blocks with id >= ``num_blocks``. Copies the others, one slab after the other.

        Raises:
            ValueError: unless 1 <= ``num_blocks`` <= the present number.
        """
        if not 1 <= num_blocks <= self.num_blocks:
            raise ValueError(
                f"[kv_handle] shrink_to: num_blocks must be within 1..{self.num_blocks}, "
                f"got {num_blocks}"
            )
        self.leave_chain()
        self._replace_each(lambda slab: _cut(slab, num_blocks))

    def after_writes(self, out: mx.array) -> mx.array:
        """``out``, made to depend on all writes so far; readers of the slabs do so anyway.

        MLX schedules writes without dependants last, so that the new rows of all layers would stay
        in memory until the end of the step.
        """
        writes = self.slabs if self.fence is None else [self.fence]
        waiting: mx.array = mx.depends([out], list(writes))[0]
        return waiting

    def _replace_each(self, change: Callable[[mx.array], mx.array]) -> None:
        """Replace each slab by ``change`` of it, evaluated, one after the other."""
        for i in range(len(self.k)):
            self.k = (*self.k[:i], evaluated(change(self.k[i])), *self.k[i + 1 :])
        for i in range(len(self.v)):
            self.v = (*self.v[:i], evaluated(change(self.v[i])), *self.v[i + 1 :])

    def leave_chain(self) -> None:
        """Wait for the kernels called so far: MLX's own operations are not ordered by the fence."""
        if self.fence is not None:
            mx.eval(self.fence)
            self.fence = None


def _grown(slab: mx.array, num_new_blocks: int) -> mx.array:
    extra = mx.zeros((num_new_blocks, *slab.shape[1:]), slab.dtype)
    return mx.concatenate([slab, extra])


def _cut(slab: mx.array, num_blocks: int) -> mx.array:
    """The first blocks; the slab itself if it has no others."""
    # A slice alone would be a view that keeps the whole slab. The product is exact and never shares
    # memory.
    return slab if slab.shape[0] == num_blocks else slab[:num_blocks] * 1


def _shown(slabs: Sequence[tuple[tuple[int, ...], mx.Dtype]]) -> str:
    return " and ".join(f"{list(shape)} {str(d).removeprefix('mlx.core.')}" for shape, d in slabs)


def evaluated(array: mx.array) -> mx.array:
    """Evaluate, so that a failure is raised before the array replaces another one."""
    mx.eval(array)
    return array
